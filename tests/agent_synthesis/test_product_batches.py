"""Products of a batch with several axes: of one operand or of both, in any order, as they lie in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.emit.cuda.products.product_engine import EngineName
from agent_synthesis.emit.cuda.products.small_product import MOST_FLOPS, CudaSmallProduct
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests import interpreter, iteration_space
from agent_synthesis.nests.analysis.products.product_end import three_axes
from agent_synthesis.nests.ir import BufferRef, Load, Nest, Type
from agent_synthesis.nests.product import MOST_LAYER_AXES, LayerAxis, MatrixProduct, Operand, matrix_product
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero, schedules_for
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied, at, batched_product
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

SEEDS = range(16)
SIXTEEN_BITS = [seed for seed in SEEDS if seed != 5]
"""One has more axes than a map walks."""
R = torch.randn
Compile = Callable[[Emission], str]


def nest_of(function: Callable[..., torch.Tensor], *args: torch.Tensor, allows_tf32: bool = False) -> Nest:
    return lowered(GraphIndex(capture(Applied(function), args), allows_tf32=allows_tf32))


def large(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Nest:
    """Of operands of which nothing is made."""
    with FakeTensorMode():
        index = GraphIndex(capture(Applied(function), tuple(torch.empty(shape) for shape in shapes)))
    return lowered(index)


def heads(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product for each head, which lie beside each other in both operands."""
    return a.transpose(1, 2) @ b.transpose(1, 2)


def lowered(index: GraphIndex) -> Nest:
    calls = tuple(node for group in plan_zero(index, task_pb2.TARGET_CUDA).groups for node in group.nodes)
    nest = lower(index, calls, tuple(index.results(calls[-1])[:1]))
    assert isinstance(nest, Nest), nest
    return nest


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> Nest:
    function, args = batched_product(seed, 64, 72, 32, dtype)
    return nest_of(function, *args)


def product_of(nest: Nest) -> MatrixProduct:
    product = matrix_product(iteration_space.simplified(nest))
    assert product is not None, nest
    return product


def names_of(nest: Nest) -> list[str]:
    return [schedule.name for schedule in schedules_for(task_pb2.TARGET_CUDA, nest)]


def matrices(operand: Operand, memory: torch.Tensor, batch: int, rows: int, depth: int) -> torch.Tensor:
    """The operand as [batch, rows, depth]."""
    strides = (operand.row_stride, operand.depth_stride)
    found = [
        memory.flatten().as_strided((rows, depth), strides, operand.offset + operand.layer_at(layer))
        for layer in range(batch)
    ]
    return torch.stack(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_of_both_operands_multiply_to_the_modules_result(seed: int) -> None:
    function, args = batched_product(seed, 5, 7, 6)
    nest = nest_of(function, *args)
    product = product_of(nest)
    batch, m, n, k = product.extents
    memory = dict(zip((buffer.name for buffer in nest.buffers if not buffer.written), args, strict=True))
    left = matrices(product.left, memory[product.left.buffer], batch, m, k)
    right = matrices(product.right, memory[product.right.buffer], batch, n, k)
    end = three_axes(iteration_space.simplified(nest), product)
    (store,) = end.stores
    sums = Load("sums", at(batch=m * n, m=n, n=1), Type.F32)
    buffers = (*end.buffers, BufferRef("sums", Type.F32, batch * m * n))
    end = replace(end, reduced=(), reductions=(), stores=(replace(store, value=sums),), buffers=buffers)
    made = torch.full((batch * m * n,), torch.nan)
    given = {name: tensor.flatten() for name, tensor in memory.items()}
    interpreter.run(end, {**given, "sums": (left @ right.mT).flatten(), store.buffer: made})
    torch.testing.assert_close(made.view(function(*args).shape), function(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_they_are_products_of_ours_and_mean_what_the_module_does(seed: int) -> None:
    function, args = batched_product(seed, 64, 72, 32)
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    group = plan.groups[-1].name
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group))
    assert plan.group(group).schedule == "cuda_product"
    sources = {source.name: args[source.input_index] for source in plan.index.graph.sources}
    (made,) = interpreter.run_plan(plan, sources)
    torch.testing.assert_close(made, function(*args), rtol=1e-4, atol=1e-4)


def test_a_matrix_that_an_axis_shares_has_no_layers_along_it() -> None:
    shared = product_of(nest_of(lambda x, w: x @ w, R(4, 3, 8, 16), R(3, 16, 5)))
    assert shared.extents == (12, 8, 5, 16)
    assert shared.left.layers == (LayerAxis(1, 12, 128),)
    assert shared.right.layers == (LayerAxis(1, 3, 80),)
    assert (shared.left.layer_count, shared.right.layer_count) == (12, 3)
    inside = product_of(nest_of(lambda x, w: x.transpose(0, 1) @ w, R(4, 3, 8, 16), R(3, 1, 16, 5)))
    assert inside.left.layers == (LayerAxis(1, 4, 384), LayerAxis(4, 3, 128))
    assert inside.right.layers == (LayerAxis(4, 3, 80),)


# ---- tensor maps -------------------------------------------------------------------------------------------


def walks(text: str) -> list[list[tuple[int, int]]]:
    """Of both operands, layers inside of and extents along the third and further coordinates of a box."""
    (line,) = (line for line in text.splitlines() if "ws::Directions{" in line)
    sides = re.findall(r"\{((?:\{\d+, \d+\}(?:, )?)*)\}", line)
    return [[(int(a), int(b)) for a, b in re.findall(r"\{(\d+), (\d+)\}", side)] for side in sides]


def maps_of(emission: Emission) -> list[candidate_pb2.TensorMap]:
    launch = next(launch for launch in emission.launches if launch.entry.endswith("_product"))
    return [argument.tensor_map for argument in launch.arguments if argument.HasField("tensor_map")]


def assert_walked(operand: Operand, batch: int, seen: candidate_pb2.TensorMap, walk: Sequence[tuple[int, int]]) -> None:
    """The box of every layer begins where the layer does, and inside of the map."""
    size = 4 if operand.type is Type.F32 else 2
    assert len(seen.extents) == len(seen.box) == 2 + len(walk) == 1 + len(seen.byte_strides) <= 5
    assert [extent for _, extent in walk] == list(seen.extents[2:])
    assert all(stride > 0 and stride % 16 == 0 for stride in seen.byte_strides)
    for layer in range(batch):
        place = [layer // inside % extent for inside, extent in walk]
        steps = zip(place, seen.byte_strides[1:], strict=True)
        assert sum(number * stride for number, stride in steps) == size * operand.layer_at(layer)


@pytest.mark.parametrize("seed", SIXTEEN_BITS)
def test_the_copy_engine_finds_every_layer_of_sixteen_bits(seed: int) -> None:
    nest = drawn(seed, torch.bfloat16)
    product, schedule = product_of(nest), CudaProduct(H200)
    assert names_of(nest)[0] == "cuda_product"
    emission = schedule.emit(nest, schedule.defaults(nest))
    sides = zip((product.left, product.right), maps_of(emission), walks(emission.text), strict=True)
    for operand, seen, walk in sides:
        assert_walked(operand, product.extents[0], seen, walk)


def converted() -> Nest:
    """The left along the depth, the right across."""
    return large(heads, (64, 128, 4, 64), (64, 64, 4, 128))


def test_the_copy_engine_finds_every_layer_of_floats_that_are_split_on_the_way() -> None:
    nest = converted()
    product, schedule = product_of(nest), CudaConvertedProduct(H200)
    assert names_of(nest)[:2] == ["cuda_product_converted", "cuda_product"]
    emission = schedule.emit(nest, schedule.defaults(nest))
    (seen,), (left, right) = maps_of(emission), walks(emission.text)
    assert not left
    assert_walked(product.right, 256, seen, right)


def test_a_map_has_three_axes_of_a_batch_at_most() -> None:
    assert names_of(drawn(5, torch.bfloat16)) == ["cuda_product_simt", "cuda_product_decoded"]  # which have no maps
    assert names_of(drawn(5))[0] == "cuda_product"  # halves lie in a workspace


def test_layers_backwards_are_for_plain_kernels_and_too_many_axes_for_none() -> None:
    backwards = nest_of(lambda a, b: a.flip(0).transpose(0, 1) @ b, R(2, 3, 64, 32), R(3, 2, 32, 64))
    assert product_of(backwards).left.layers == (LayerAxis(1, 2, -6144), LayerAxis(2, 3, 2048))
    assert names_of(backwards) == ["cuda_product_simt"]

    def turned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rank = a.dim() - 2
        return a.permute(*reversed(range(rank)), rank, rank + 1) @ b

    most = [R(*[2] * MOST_LAYER_AXES, *matrix) for matrix in ((4, 8), (8, 4))]
    assert len(product_of(nest_of(turned, *most)).left.layers) == MOST_LAYER_AXES
    more = [tensor.expand(2, *tensor.shape).contiguous() for tensor in most]
    assert matrix_product(iteration_space.simplified(nest_of(turned, *more))) is None


# ---- small matrices of large batches -----------------------------------------------------------------------


def test_a_large_batch_of_small_matrices_has_tiles_of_their_size() -> None:
    schedule = CudaSmallProduct(H200)
    square = large(heads, (4096, 64, 8, 16), (4096, 16, 8, 64))
    narrow = large(heads, (4096, 64, 8, 16), (4096, 16, 8, 16))
    beyond = large(heads, (4096, 256, 8, 16), (4096, 16, 8, 256))
    assert product_of(square).flop_count > MOST_FLOPS
    for nest, rows, columns in ((square, 64, 64), (narrow, 64, 16)):
        assert names_of(nest) == ["cuda_product_simt"]
        made = schedule.defaults(nest)
        assert (made.rows, made.columns, made.split_k) == (rows, columns, 1)
    assert not schedule.accepts(beyond)


def test_plain_floats_lead_where_splitting_would_move_more_than_the_product_does() -> None:
    schedule = CudaSmallProduct(H200)
    many = large(lambda a, b: a @ b.mT, (32768, 64, 64), (32768, 64, 64))
    few = large(lambda a, b: a @ b.mT, (8, 64, 64), (8, 64, 64))
    deep = large(lambda a, b: a @ b.mT, (64, 512, 512), (64, 512, 512))
    assert [schedule.leads(nest) for nest in (many, few, deep)] == [True, False, False]
    assert schedule.leads(replace(many, allows_tf32=True)) is False  # operands are not split
    names = [each.name for each in schedules_for(task_pb2.TARGET_CUDA, many)]
    assert names[0] == "cuda_product_simt"
    assert "cuda_product" in names


def test_few_rows_have_narrow_tiles_where_blocks_are_scarce() -> None:
    schedule = CudaSmallProduct(H200)
    for rows, columns, depth in ((4, 256, 512), (4, 1000, 4096), (2, 40, 2048)):
        made = schedule.defaults(large(lambda a, b: a @ b, (rows, depth), (depth, columns)))
        assert (made.rows, made.columns) == (16, 32)


# ---- compiled ----------------------------------------------------------------------------------------------


def assert_compiles_well(report: str) -> None:
    assert "error" not in report
    assert "spill" not in report.replace("0 bytes spill stores, 0 bytes spill loads", "")
    assert "serializ" not in report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [4, 10, 13])
def test_every_schedule_compiles_without_spilling(seed: int, dtype: torch.dtype, compile_cuda: Compile) -> None:
    nest = drawn(seed, dtype)
    for schedule in schedules_for(task_pb2.TARGET_CUDA, nest):
        assert_compiles_well(compile_cuda(schedule.emit(nest, schedule.defaults(nest))))


def test_blocks_of_a_cluster_share_columns_of_three_axes(compile_cuda: Compile) -> None:
    nest, schedule = drawn(13, torch.float16), CudaProduct(H200)
    settled: Any = replace(schedule.defaults(nest), cluster=2)
    emission = schedule.emit(nest, settled)
    assert [len(seen.extents) for seen in maps_of(emission)] == [5, 5]
    assert_compiles_well(compile_cuda(emission))


def test_floats_that_may_be_rounded_are_copied_as_they_lie(compile_cuda: Compile) -> None:
    args = R(2, 64, 3, 32), R(2, 72, 3, 32)
    nest = nest_of(lambda a, b: a.transpose(1, 2) @ b.permute(0, 2, 3, 1), *args, allows_tf32=True)
    schedule = CudaProduct(H200)
    settled = schedule.defaults(nest)
    assert settled.engine is EngineName.TF32
    emission, product = schedule.emit(nest, settled), product_of(nest)
    for operand, seen, walk in zip((product.left, product.right), maps_of(emission), walks(emission.text), strict=True):
        assert_walked(operand, 6, seen, walk)
    assert_compiles_well(compile_cuda(emission))


def test_operands_split_on_the_way_compile_without_spilling(compile_cuda: Compile) -> None:
    nest, schedule = converted(), CudaConvertedProduct(H200)
    assert_compiles_well(compile_cuda(schedule.emit(nest, schedule.defaults(nest))))
