"""Matrix products: recognised among nests, taken by their own schedule only, and compiled for sm_90a without a GPU."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.product_tiling import Epilogue
from agent_synthesis.emit.cuda.products.small_product import CudaSmallProduct
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct, require_fits
from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import LayerAxis, MatrixProduct, matrix_product, multiplies_matrices
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero, schedules_for
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Settings
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

GOLDEN = Path(__file__).parent.parent / "golden"
Compile = Callable[[Emission], str]


class Ended(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, inputs: int, outputs: int, end: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self._end = end

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return self._end(self.linear(x), *rest)


def planned(module: nn.Module, *args: torch.Tensor) -> Plan:
    return plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CUDA)


def as_one_kernel(module: nn.Module, *args: torch.Tensor) -> Plan:
    """The plan with everything in its last group, which must be a product."""
    plan = planned(module, *args)
    last = plan.groups[-1].name
    many = len(plan.groups) > 1
    kind, choice = (analysis_pb2.MOVE_KIND_FUSE, "*") if many else (analysis_pb2.MOVE_KIND_AUTHOR, "")
    plan = moves.apply(plan, analysis_pb2.Move(kind=kind, group=last, choice=choice))
    assert [group.schedule for group in plan.groups] == ["cuda_product"]
    return plan


def nest_of(plan: Plan) -> Nest:
    nest = plan.nest(plan.groups[-1])
    assert isinstance(nest, Nest), nest
    return nest


def product_of(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> MatrixProduct | None:
    return matrix_product(nest_of(planned(Applied(function), *args)))


def settings(plan: Plan) -> Settings:
    return plan.groups[-1].settings


R = torch.randn
EVERY_LAYOUT: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "weights by rows, a residual": (Ended(64, 96, lambda y, r: F.gelu(y) * 2 + r), (R(80, 64), R(80, 96))),
    "odd sizes": (Ended(51, 77, torch.relu), (R(67, 51),)),
    "second by columns": (Applied(lambda a, b: a @ b), (R(72, 40), R(40, 64))),
    "first by columns": (Applied(lambda a, b: a.T @ b.T), (R(33, 65), R(66, 33))),
    "a batch": (Applied(torch.bmm), (R(2, 64, 32), R(2, 32, 66))),
    "a batch of odd depth": (Applied(lambda a, b: torch.relu(a @ b.transpose(1, 2))), (R(3, 64, 37), R(3, 65, 37))),
    "a sequence": (Ended(40, 64, lambda y: torch.sigmoid(y) * y), (R(2, 35, 40),)),
    "the upper triangle": (Applied(lambda a, b: torch.triu(a @ b, 3)), (R(160, 40), R(40, 96))),
    "too few tiles for its depth": (Applied(lambda a, b: torch.relu(a @ b)), (R(65, 4100), R(4100, 70))),
    "a batch of one matrix": (Applied(lambda a, b: a.transpose(1, 2) @ b), (R(2, 40, 66), R(40, 64))),
    "scaled, with a row added": (
        Applied(lambda c, a, b: torch.addmm(c, a, b, alpha=0.5)),
        (R(64), R(65, 32), R(32, 64)),
    ),
}


@pytest.mark.parametrize("name", EVERY_LAYOUT)
def test_products_with_their_ends_mean_what_the_module_does(name: str) -> None:
    module, args = EVERY_LAYOUT[name]
    plan = as_one_kernel(module, *args)
    sources = dict(zip((source.name for source in plan.index.graph.sources), [], strict=False))
    held = dict(module.named_parameters())
    for source in plan.index.graph.sources:
        found = held[source.qualified_name].detach() if source.qualified_name else args[source.input_index]
        sources[source.name] = found
    (made,) = interpreter.run_plan(plan, sources)
    with torch.no_grad():
        torch.testing.assert_close(made, module(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EVERY_LAYOUT)
def test_every_layout_compiles_without_spilling(name: str, compile_cuda: Compile) -> None:
    module, args = EVERY_LAYOUT[name]
    plan = as_one_kernel(module, *args)
    assert_compiles_well(compile_cuda(CudaProduct(H200).emit(nest_of(plan), settings(plan))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_products_compile_without_spilling(dtype: torch.dtype, compile_cuda: Compile) -> None:
    plan = as_one_kernel(Ended(64, 136, torch.relu).to(dtype), R(130, 64, dtype=dtype))
    nest = nest_of(plan)
    for parameters in [settings(plan), *CudaProduct(H200).alternatives(nest, settings(plan))]:
        assert_compiles_well(compile_cuda(CudaProduct(H200).emit(nest, parameters)))


SIXTEEN_BIT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "along, across": lambda a, b: a @ b,
    "across, across": lambda a, b: a.T @ b,
    "across, along": lambda a, b: a.T @ b.T,
}


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_sixteen_bit_operands_are_taken_as_they_lie(name: str, compile_cuda: Compile) -> None:
    left = R(72, 64) if name.startswith("along") else R(64, 72)
    right = R(136, 64) if name.endswith("along") else R(64, 136)
    plan = as_one_kernel(Applied(SIXTEEN_BIT[name]), left.bfloat16(), right.bfloat16())
    emission = CudaProduct(H200).emit(nest_of(plan), settings(plan))
    assert [launch.entry for launch in emission.launches] == ["ws_matmul_product"]
    assert not emission.workspaces
    directions = ", ".join(f"ws::kA{word[1:]}" for word in name.split(", "))
    assert f"ws::Directions{{{directions}}}" in emission.text
    assert_compiles_well(compile_cuda(emission))


def held(parameters: Settings) -> Settings:
    return dataclasses.replace(parameters, epilogue=Epilogue.OVERLAPPED, columns=128, stages=4)


def test_the_end_of_a_tile_may_wait_for_the_next_one(compile_cuda: Compile) -> None:
    plan = as_one_kernel(Applied(lambda a, b: F.gelu(a @ b.T)), R(1024, 1024).bfloat16(), R(2048, 1024).bfloat16())
    nest, settled = nest_of(plan), settings(plan)
    assert settled.epilogue == "direct"
    assert CudaProduct(H200).alternatives(nest, settled)[0].epilogue == "overlapped"
    emission = CudaProduct(H200).emit(nest, held(settled))
    assert "ws::multiply_holding<" in emission.text
    assert_compiles_well(compile_cuda(emission))


@pytest.mark.parametrize(
    ("function", "width"),
    [
        (lambda a, b, r: F.gelu(a @ b.T + r), 2048),  # a library adds a bias to floats, before it rounds
        (lambda a, b, _: F.gelu(a @ b.T), 2044),  # no vectors of eight
        (lambda a, b, _: torch.triu(a @ b.T), 2048),
    ],
)
def test_an_end_that_rounding_would_change_does_not_wait(function: Callable[..., torch.Tensor], width: int) -> None:
    args = (R(1024, 1024).bfloat16(), R(width, 1024).bfloat16(), R(width).bfloat16())
    plan = as_one_kernel(Applied(function), *args)
    with pytest.raises(IllegalMove, match="epilogue"):
        require_fits(H200, nest_of(plan), held(settings(plan)))


def test_a_tile_too_short_for_the_ends_of_another_holds_none() -> None:
    plan = as_one_kernel(Applied(lambda a, b: torch.relu(a @ b.T)), R(1024, 512).half(), R(2048, 512).half())
    with pytest.raises(IllegalMove, match="epilogue"):
        require_fits(H200, nest_of(plan), held(settings(plan)))


def test_a_gelu_is_short_where_its_result_is_rounded_to_sixteen_bits() -> None:
    for dtype, is_short in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True)):
        args = (R(128, 64, dtype=dtype), R(136, 64, dtype=dtype))
        plan = as_one_kernel(Applied(lambda a, b: F.gelu(a @ b.T)), *args)
        text = CudaProduct(H200).emit(nest_of(plan), settings(plan)).text
        assert ("ws::short_erfc(" in text, "ws::erf(" in text) == (is_short, not is_short)
        plan = as_one_kernel(Applied(lambda a, b: torch.erfc(a @ b.T) * torch.erf(a @ b.T)), *args)
        assert "short" not in CudaProduct(H200).emit(nest_of(plan), settings(plan)).text


def test_the_short_erfc_is_as_close_as_it_says() -> None:
    header = (INCLUDE_DIRECTORY / "ws_math.cuh").read_text().partition("short_erfc(float x) {")[2].partition("}")[0]
    factors = [float(found) for found in re.findall(r"(-?\d\S*?)f[,)]", header)]
    size = torch.linspace(0, 12, 200001)
    power = torch.zeros_like(size)
    for factor in factors:
        power = size * power + factor
    made, truth = torch.exp2((size * power).double()), torch.special.erfc(size.double())
    error = (made / truth - 1).abs()
    assert error[size < 3].max() < 5e-6
    assert error[size < 3.95].max() < 3e-4
    assert made[size >= 3.95].max() < 3e-8
    assert made[-1] < 1e-30


HGMMA, LOCAL_LOAD, LOCAL_STORE = 0x9F0, 0x983, 0x387
"""Low twelve bits of machine instructions of sm_90, as nvdisasm prints them."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_machine_code_multiplies_on_tensor_cores_and_keeps_sums_in_registers(
    dtype: torch.dtype, build_cubin: Callable[[Emission], tuple[str, bytes]]
) -> None:
    plan = as_one_kernel(Ended(4096, 8192, F.gelu).to(dtype), R(1024, 4096, dtype=dtype))
    _, cubin = build_cubin(CudaProduct(H200).emit(nest_of(plan), settings(plan)))
    found = operations(cubin, "ws_gelu_product")
    # A stage is four times 16 deep; halves make three products of it, in code for whole and for promoted stages.
    assert found.count(HGMMA) >= (12 if dtype is torch.float32 else 4)
    assert LOCAL_LOAD not in found
    assert LOCAL_STORE not in found


@pytest.mark.parametrize(("engine", "products"), [("tf32x3", 12), ("tf32", 4)])
def test_tf32_multiplies_on_tensor_cores_and_keeps_sums_in_registers(
    engine: str, products: int, build_cubin: Callable[[Emission], tuple[str, bytes]]
) -> None:
    nest = dataclasses.replace(nest_of(as_one_kernel(Ended(4096, 8192, F.gelu), R(1024, 4096))), allows_tf32=True)
    report, cubin = build_cubin(CudaProduct(H200).emit(nest, with_engine(nest, engine)))
    assert_compiles_well(report)
    assert operations(cubin, "ws_gelu_product").count(HGMMA) >= products


def with_engine(nest: Nest, engine: str) -> Settings:
    """What is one change away from the defaults, or these themselves."""
    settled = CudaProduct(H200).defaults(nest)
    around = (settled, *CudaProduct(H200).alternatives(nest, settled))
    return next(each for each in around if each.engine == engine)


def test_tf32_alone_is_for_whoever_allows_it_and_for_operands_along_their_depth() -> None:
    args = (R(1024, 512), R(2048, 512))
    graph = capture(Applied(lambda a, b: a @ b.T), args)
    for allows, expected in ((False, "fp16x3"), (True, "tf32")):
        index = GraphIndex(graph, allows_tf32=allows)
        nest = lower(index, [node.name for node in graph.nodes], [graph.outputs[0]])
        assert isinstance(nest, Nest)
        assert nest.allows_tf32 is allows
        settled = CudaProduct(H200).defaults(nest)
        assert settled.engine == expected
        launches = CudaProduct(H200).emit(nest, settled).launches
        maps = [each.tensor_map for launch in launches for each in launch.arguments if each.HasField("tensor_map")]
        assert [each.rounds_to_tf32 for each in maps] == [allows, allows]  # tensor cores would cut
        others = {each.engine for each in CudaProduct(H200).alternatives(nest, settled)} - {expected}
        assert others == {"tf32x3", "fp16x3"} - {expected}
    across = dataclasses.replace(
        nest_of(planned(Applied(lambda a, b: a @ b), R(1024, 512), R(512, 2048))), allows_tf32=True
    )
    schedule = CudaProduct(H200)
    assert {e.engine for e in schedule.alternatives(across, schedule.defaults(across))} == {"fp16x3"}


def operations(cubin: bytes, entry: str) -> list[int]:
    """The operations of a kernel's instructions, 16 bytes each, from the sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * number) for number in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if cubin[start : cubin.index(b"\0", start)].decode() == f".text.{entry}":
            return [struct.unpack_from("<H", cubin, offset + at)[0] & 0xFFF for at in range(0, length, 16)]
    raise AssertionError(f"no code of {entry}")


def assert_compiles_well(report: str) -> None:
    assert "0 bytes spill stores" in report
    assert "bytes spill stores" not in report.replace(" 0 bytes spill stores", "")
    assert "serializ" not in report  # what ptxas says of products that it cannot keep in flight
    assert "setmaxnreg ignored" not in report


def test_golden_source() -> None:
    plan = as_one_kernel(Ended(4096, 8192, F.gelu), R(1024, 4096))
    text = CudaProduct(H200).emit(nest_of(plan), settings(plan)).text
    golden = GOLDEN / "linear_gelu.cu"
    assert text == golden.read_text()


def test_operands_are_described_by_their_strides() -> None:
    made = product_of(lambda a, b: torch.bmm(a[:, :, 3:].transpose(1, 2), b), R(2, 32, 70), R(2, 32, 65))
    assert made is not None
    assert made.extents == (2, 67, 65, 32)
    assert (made.left.offset, made.left.layers) == (3, (LayerAxis(1, 2, 2240),))
    assert (made.left.row_stride, made.left.depth_stride) == (1, 70)
    assert (made.right.layers, made.right.row_stride, made.right.depth_stride) == ((LayerAxis(1, 2, 2080),), 1, 65)
    assert made.flop_count == 2 * 2 * 67 * 65 * 32


def test_only_schedules_of_products_take_one_and_small_ones_get_small_tiles() -> None:
    large = nest_of(planned(Applied(lambda a, b: a @ b.T), R(2048, 512), R(2048, 512)))
    small = nest_of(planned(Applied(lambda a, b: a @ b.T), R(64, 32), R(8, 32)))
    skewed = nest_of(planned(Applied(lambda a, b: a[:, ::2] @ b), R(2048, 1024), R(512, 2048)))
    vector = nest_of(planned(Applied(lambda a, b: a @ b), R(64, 32), R(32)))
    assert [schedule.name for schedule in schedules_for(task_pb2.TARGET_CUDA, large)] == ["cuda_product"]
    assert [schedule.name for schedule in schedules_for(task_pb2.TARGET_CUDA, small)] == ["cuda_product_simt"]
    assert multiplies_matrices(skewed)
    assert not schedules_for(task_pb2.TARGET_CUDA, skewed)
    assert not schedules_for(task_pb2.TARGET_CPU, large)
    assert not multiplies_matrices(vector)
    assert schedules_for(task_pb2.TARGET_CUDA, vector)


def test_a_processors_product_is_the_librarys_and_what_follows_is_one_kernel() -> None:
    args = (R(80, 64), R(80, 96))
    plan = plan_zero(GraphIndex(capture(Ended(64, 96, lambda y, r: F.gelu(y) * 2 + r), args)), task_pb2.TARGET_CPU)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="add", choice="*"))
    assert [(group.nodes, group.schedule) for group in plan.groups] == [
        (("linear",), ""),
        (("gelu", "mul", "add"), "cpu_pointwise"),
    ]


def test_small_products_of_every_type_and_tile_compile(compile_cuda: Compile) -> None:
    schedule = CudaSmallProduct(H200)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        left, right = R(20, 600, dtype=dtype), R(600, 33, dtype=dtype)
        nest = nest_of(planned(Applied(lambda a, b: torch.bmm(a[None], b[None])), left, right))
        default = schedule.defaults(nest)
        assert default.split_k > 1
        for parameters in [default, *schedule.alternatives(nest, default)]:
            assert "error" not in compile_cuda(schedule.emit(nest, parameters))


@pytest.mark.parametrize(("dtype", "is_taken"), [(torch.float32, False), (torch.bfloat16, True)])
def test_what_adds_to_its_own_memory_is_not_computed_again_tile_by_tile(dtype: torch.dtype, is_taken: bool) -> None:
    shapes = ((2048, 2048), (2048, 512), (512, 2048))
    added, left, right = (R(*shape, dtype=dtype) for shape in shapes)
    nest = nest_of(as_one_kernel(Applied(lambda c, a, b: c + a @ b), added, left, right))
    in_place = dataclasses.replace(nest, stores=(dataclasses.replace(nest.stores[0], buffer="args_0"),))
    assert CudaProduct(H200).accepts(nest)
    assert CudaProduct(H200).accepts(in_place) is is_taken


def test_an_end_may_look_into_a_table(compile_cuda: Compile) -> None:
    ids = torch.arange(2048) % 7
    plan = as_one_kernel(
        Applied(lambda x, w, ids, t: F.linear(x, w) + F.embedding(ids, t)), R(2048, 512), R(1024, 512), ids, R(7, 1024)
    )
    assert "error" not in compile_cuda(CudaProduct(H200).emit(nest_of(plan), settings(plan)))


def test_a_sum_whose_terms_are_stored_too_is_no_product() -> None:
    def centred(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        terms = a[:, None, :] * b[None]
        return terms - terms.sum(-1, keepdim=True)

    plan = planned(Applied(centred), R(64, 64), R(64, 64))
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="sub", choice="*"))
    assert plan.groups[-1].schedule == "cuda_row_reduction"


def test_buffers_may_have_the_names_of_a_kernels_own_parameters(compile_cuda: Compile) -> None:
    class Named(nn.Module):
        def forward(
            self, x: torch.Tensor, w: torch.Tensor, batch: torch.Tensor, left_ranges: torch.Tensor
        ) -> torch.Tensor:
            return x.T @ w + batch * left_ranges

    plan = as_one_kernel(Named(), R(512, 2048), R(512, 1024), R(1024), R(1024))
    assert "error" not in compile_cuda(CudaProduct(H200).emit(nest_of(plan), settings(plan)))


def test_a_product_is_not_computed_twice() -> None:
    plan = planned(Ended(64, 64, lambda y: torch.cat([y.softmax(-1), y])), R(64, 64))
    with pytest.raises(IllegalMove, match=r"product|reduce|no schedule"):
        moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="softmax", choice="linear"))


def test_what_a_thread_or_a_block_cannot_hold_is_refused() -> None:
    nest = nest_of(planned(Applied(lambda a, b: a @ b.T), R(256, 128), R(256, 128)))
    default = CudaProduct(H200).defaults(nest)
    for key, value in (("columns", 256), ("stages", 4)):
        with pytest.raises(IllegalMove, match=r"registers|shared memory"):
            require_fits(H200, nest, default.changed({key: value}))


def test_few_deep_tiles_are_sliced_and_many_are_not() -> None:
    deep = nest_of(planned(Applied(lambda a, b: a @ b), R(256, 65536), R(65536, 256)))
    default = CudaProduct(H200).defaults(deep)
    assert default.split_k == 32
    emission = CudaProduct(H200).emit(deep, default)
    assert emission.launches[-1].entry == "ws_matmul_add"
    assert CudaProduct(H200).footprint(deep, default).parallel_count == 128
    with pytest.raises(IllegalMove, match="empty"):
        require_fits(H200, deep, dataclasses.replace(default, split_k=1100))
    broad = nest_of(planned(Applied(lambda a, b: a @ b.T), R(2048, 2048), R(2048, 2048)))
    assert CudaProduct(H200).defaults(broad).split_k == 1


def test_sixteen_bit_operands_are_sliced_into_whole_stages_only() -> None:
    whole = nest_of(planned(Applied(lambda a, b: a @ b), R(128, 8192).half(), R(8192, 128).half()))
    ragged = nest_of(planned(Applied(lambda a, b: a @ b), R(128, 8200).half(), R(8200, 128).half()))
    assert CudaProduct(H200).defaults(whole).split_k > 1
    assert CudaProduct(H200).defaults(ragged).split_k == 1


@pytest.mark.parametrize(
    ("function", "band"),
    [
        (torch.triu, "first = 0, .last = 1073741824"),
        (lambda y: torch.relu(torch.tril(y, -2)) + 1, "first = -1073741824, .last = -2"),
        (lambda y: torch.triu(torch.tril(y, 5), -4), "first = -4, .last = 5"),
        (lambda y: torch.triu(y) + y, ""),
        (lambda y: torch.where(y > 0, y, 0.0), ""),
    ],
)
def test_only_the_triangle_that_the_end_uses_is_multiplied(
    function: Callable[[torch.Tensor], torch.Tensor], band: str
) -> None:
    plan = as_one_kernel(Applied(lambda a, b: function(a @ b)), R(128, 64), R(64, 128))
    text = CudaProduct(H200).emit(nest_of(plan), settings(plan)).text
    assert ("ws::Band" in text) == bool(band)
    assert band in text


def test_maps_lie_inside_the_halves_and_boxes_fill_a_stage() -> None:
    for name, (module, args) in EVERY_LAYOUT.items():
        program = generator.generate(as_one_kernel(module, *args))
        buffers = {buffer.name: buffer.spec for buffer in program.buffers}
        product = next(step.launch for step in program.steps if step.launch.entry.endswith("_product"))
        maps = [argument.tensor_map for argument in product.arguments if argument.HasField("tensor_map")]
        assert len(maps) == 2, name
        for seen in maps:
            steps = zip(seen.extents, [2, *seen.byte_strides], strict=True)
            reach = sum((extent - 1) * stride for extent, stride in steps) + 2
            assert reach <= 2 * torch.Size(buffers[seen.buffer].shape).numel()
            assert all(stride % 16 == 0 for stride in seen.byte_strides)


def test_the_model_counts_a_products_work_at_its_engines_rate() -> None:
    plan = planned(Applied(lambda a, b: a @ b.T), R(256, 128), R(512, 128))
    (before,) = (cost.of_group(plan, group) for group in plan.groups)
    after = cost.of_group(*_authored(plan))
    assert before.product_flop_count == 2 * 256 * 512 * 128
    assert (after.product_flop_count, after.tensor_flop_count) == (0, 3 * before.product_flop_count)
    assert after.extra_bytes == 8 * 128 * (256 + 512)


def _authored(plan: Plan) -> tuple[Plan, Any]:
    made = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=plan.groups[-1].name))
    return made, made.groups[-1]


# ---- a host's model of the split ---------------------------------------------------------------------------


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(high, low, scale) as `ws_split.cuh` makes them of the rows of x, in f64; x = (high + low / 2048) / scale."""
    exponent = torch.floor(torch.log2(x.abs().amax(1).double()))
    even = 2 * torch.floor((exponent + 1) / 2)
    scale = torch.pow(2.0, 14 - even)[:, None]
    scaled = x.double() * scale
    high = scaled.half().double()
    low = ((scaled - high) * 2048).half().double()
    return high, low, scale


def test_two_halves_keep_the_bits_of_a_float_down_to_the_range_test() -> None:
    rows = torch.randn(64, 512) * torch.pow(2.0, torch.randint(-100, 100, (64, 1)).float())
    rows[:, 7] = rows.abs().amax(1) * 2.0**-31
    high, low, scale = halves(rows)
    assert high.isfinite().all()
    error = ((high + low / 2048) / scale - rows.double()).abs() / rows.double().abs()
    assert error[:, :7].max() < 2.0**-18
    assert error[:, 7].max() < 2.0**-17


def test_three_products_of_halves_are_as_accurate_as_floats() -> None:
    a, b = torch.rand(32, 2048), torch.rand(48, 2048)
    (ah, al, a_scale), (bh, bl, b_scale) = halves(a), halves(b)
    made = (ah @ bh.T + (ah @ bl.T + al @ bh.T) / 2048) / a_scale / b_scale.T
    truth = a.double() @ b.double().T
    eager = (a @ b.T).double()
    assert (made - truth).pow(2).mean() < 0.05 * (eager - truth).pow(2).mean()


def test_headers_of_a_product_are_among_the_emitters_own() -> None:
    module, args = EVERY_LAYOUT["odd sizes"]
    plan = as_one_kernel(module, *args)
    emission = CudaProduct(H200).emit(nest_of(plan), settings(plan))
    assert all((INCLUDE_DIRECTORY / header).is_file() for header in emission.headers)
    assert [launch.entry.rsplit("_", 1)[1] for launch in emission.launches] == ["split", "product", "repair"]
    assert {buffer.role for buffer in emission.workspaces} == {candidate_pb2.ROLE_WORKSPACE}
    product = matrix_product(nest_of(plan))
    assert product is not None
    assert product.left.type is Type.F32
