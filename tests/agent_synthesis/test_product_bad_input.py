"""Matrix products of unusual operands: empty, of depth one, repeated, backwards, beyond 32-bit offsets."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import matrix_product
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero, schedules_for
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

R = torch.randn
attention = nn.functional.scaled_dot_product_attention
Function = Callable[..., torch.Tensor]
Compile = Callable[[Emission], str]
GRID_LIMIT = 2**31 - 1


def planned(module: nn.Module, *args: torch.Tensor, target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA) -> Plan:
    return plan_zero(GraphIndex(capture(module, args)), target)


def authored(function: Function, *args: torch.Tensor) -> Plan:
    """Everything in one kernel of ours."""
    plan = planned(Applied(function), *args)
    many = len(plan.groups) > 1
    move = analysis_pb2.Move(
        kind=analysis_pb2.MOVE_KIND_FUSE if many else analysis_pb2.MOVE_KIND_AUTHOR,
        group=plan.groups[-1].name,
        choice="*" if many else "",
    )
    plan = moves.apply(plan, move)
    assert len(plan.groups) == 1
    return plan


def nest_of(plan: Plan) -> Nest:
    nest = plan.nest(plan.groups[-1])
    assert isinstance(nest, Nest), nest
    return nest


EMPTY: dict[str, tuple[Function, torch.Tensor, torch.Tensor]] = {
    "no rows": (lambda a, b: a @ b, R(0, 64), R(64, 72)),
    "no columns": (lambda a, b: a @ b, R(64, 64), R(64, 0)),
    "no depth": (lambda a, b: torch.relu(a @ b) + 1, R(64, 0), R(0, 72)),
    "no batch": (torch.bmm, R(0, 64, 64), R(0, 64, 72)),
    "no rows of 16 bits": (lambda a, b: a @ b, R(0, 64).bfloat16(), R(64, 72).bfloat16()),
    "no queries": (lambda q, k: attention(q, k, k), R(2, 0, 64), R(2, 64, 64)),
    "no keys": (lambda q, k: attention(q, k, k).nan_to_num(), R(2, 64, 64), R(2, 0, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("target", [task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU])
def test_what_is_empty_stays_in_the_library(name: str, target: task_pb2.Target.ValueType) -> None:
    function, *args = EMPTY[name]
    plan = planned(Applied(function), *args, target=target)
    product = plan.groups[0]
    for kind, choice in ((analysis_pb2.MOVE_KIND_AUTHOR, ""), (analysis_pb2.MOVE_KIND_FUSE, "*")):
        with pytest.raises(IllegalMove):
            moves.apply(plan, analysis_pb2.Move(kind=kind, group=product.name, choice=choice))
    assert not [
        each
        for each in moves.legal(plan)
        if each.move.group == product.name and each.move.kind != analysis_pb2.MOVE_KIND_WRITE
    ]
    assert all(step.HasField("library") for step in generator.generate(plan).steps)


ODD: dict[str, tuple[Function, tuple[torch.Tensor, ...], str]] = {
    "a depth of one": (lambda a, b: torch.relu(a @ b), (R(128, 1), R(1, 96)), "cuda_pointwise"),
    "a depth of one in a batch": (torch.bmm, (R(3, 128, 1), R(3, 1, 96)), "cuda_pointwise"),
    "a depth of one in 16 bits": (lambda a, b: a @ b, (R(128, 1).half(), R(1, 96).half()), "cuda_pointwise"),
    "one row": (lambda a, b: a @ b, (R(1, 64), R(64, 96)), "cuda_column_reduction"),
    "one row in every place": (lambda a, b: a.expand(128, 64) @ b, (R(1, 64), R(64, 96)), "cuda_column_reduction"),
    "one column in every place": (lambda a, b: a @ b.expand(64, 96), (R(128, 64), R(64, 1)), "cuda_row_reduction"),
    "one element for a whole depth": (lambda a, b: a.expand(128, 64) @ b, (R(128, 1), R(64, 96)), "cuda_product_simt"),
    "one matrix for a whole batch": (
        lambda a, b: torch.bmm(a.expand(3, 128, 64), b), (R(1, 128, 64), R(3, 64, 96)), "cuda_product"),
    "a last row first": (lambda a, b: a.flip(0) @ b, (R(128, 64), R(64, 96)), "cuda_product_simt"),
    "a depth backwards": (lambda a, b: a.flip(1) @ b.flip(0), (R(128, 64), R(64, 96)), "cuda_product_simt"),
    "columns backwards": (lambda a, b: a @ b.flip(1), (R(128, 64), R(64, 96)), "cuda_product_simt"),
    "16 bits backwards": (
        lambda a, b: a @ b.flip(0, 1), (R(128, 64).bfloat16(), R(64, 96).bfloat16()), "cuda_product_simt"),
    "a result backwards": (lambda a, b: (a @ b).flip(0, 1), (R(128, 64), R(64, 96)), "cuda_product_simt"),
    "a result stored across": (
        lambda a, b: torch.relu(a @ b).T.contiguous(), (R(128, 64), R(64, 96)), "cuda_product"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_operands_mean_what_the_module_does(name: str) -> None:
    function, args, schedule = ODD[name]
    plan = authored(function, *args)
    assert plan.groups[-1].schedule == schedule
    sources = {source.name: args[source.input_index] for source in plan.index.graph.sources}
    (made,) = interpreter.run_plan(plan, sources)
    close = 1e-4 if args[0].dtype is torch.float32 else 1e-2
    torch.testing.assert_close(made, function(*args), rtol=close, atol=close)


@pytest.mark.parametrize("name", ODD)
def test_odd_operands_compile(name: str, compile_cuda: Compile) -> None:
    function, args, _ = ODD[name]
    plan = authored(function, *args)
    nest = nest_of(plan)
    for schedule in schedules_for(task_pb2.TARGET_CUDA, nest):
        assert "error" not in compile_cuda(schedule.emit(nest, schedule.defaults(nest)))


def test_steps_back_are_strides_below_zero_that_only_plain_kernels_walk() -> None:
    product = matrix_product(nest_of(authored(*_case("a depth backwards"))))
    assert product is not None
    assert (product.left.offset, product.left.row_stride, product.left.depth_stride) == (63, 64, -1)
    assert (product.right.offset, product.right.row_stride, product.right.depth_stride) == (63 * 96, 1, -96)
    large = planned_large(lambda a, b: a.flip(1) @ b, (4096, 4096), (4096, 4096))
    with pytest.raises(IllegalMove, match="no schedule"):  # the tensor cores multiply a copy
        moves.apply(large, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="matmul", choice="flip"))
    assert CudaProduct(H200).accepts(nest_of(large))


def _case(name: str) -> tuple[Function, *tuple[torch.Tensor, ...]]:
    function, args, _ = ODD[name]
    return (function, *args)


def planned_large(function: Function, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Plan:
    """Plan zero of operands of which nothing is made."""
    with FakeTensorMode():
        return planned(Applied(function), *(torch.empty(shape, dtype=dtype) for shape in shapes))


LARGE: dict[str, tuple[Function, tuple[tuple[int, ...], ...], torch.dtype, str]] = {
    "a result": (lambda a, b: a @ b.T, ((65600, 64), (32832, 64)), torch.float32, "cuda_product"),
    "a result of 16 bits": (lambda a, b: a @ b.T, ((65600, 64), (32832, 64)), torch.bfloat16, "cuda_product"),
    "many results": (torch.bmm, ((140000, 128, 64), (140000, 64, 128)), torch.float32, "cuda_product_converted"),
    "rows": (lambda a, b: a @ b.T, ((2**25, 128), (64, 128)), torch.float32, "cuda_product"),
    "rows read as they are": (lambda a, b: a @ b, ((2**25, 128), (128, 64)), torch.float32, "cuda_product_converted"),
    "a depth": (lambda a, b: a @ b, ((128, 2**25), (2**25, 128)), torch.float32, "cuda_product_converted"),
    "a depth across": (lambda a, b: a.T @ b.T, ((2**25, 128), (128, 2**25)), torch.float32, "cuda_product"),
    "a depth of 16 bits": (lambda a, b: a @ b, ((128, 2**25), (2**25, 128)), torch.bfloat16, "cuda_product"),
    "few rows": (lambda a, b: a @ b.T, ((128, 65536), (65536, 65536)), torch.float32, "cuda_product_streamed"),
    "few rows whose least is kept": (
        lambda a, b: (a @ b.T).amin(1), ((2**25, 128), (128, 128)), torch.float32, "cuda_product_reduced"),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_beyond_two_to_the_31_elements_offsets_are_long_and_grids_are_not(name: str, compile_cuda: Compile) -> None:
    function, shapes, dtype, schedule = LARGE[name]
    plan = planned_large(function, *shapes, dtype=dtype)
    last = plan.groups[-1].name
    if len(plan.groups) > 1:
        for group in plan.groups[-2::-1]:
            plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice=group.name))
    else:
        plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=last))
    (group,) = plan.groups
    assert group.schedule == schedule
    nest = nest_of(plan)
    assert max(buffer.element_count for buffer in nest.buffers) >= 2**31
    emission = plan.schedule(group).emit(nest, group.settings)
    assert "error" not in compile_cuda(emission)
    assert "warning" not in compile_cuda(emission)
    assert all(0 < launch.grid.x <= GRID_LIMIT for launch in emission.launches)
    stored = next(buffer.element_count for buffer in nest.buffers if buffer.written)
    ended = nest.row_count * nest.column_count if "_rows(" in emission.text else stored  # a row's elements, or its sums
    (end,) = re.findall(r"_end \{.*?\) const \{", emission.text, re.DOTALL)
    assert ("ws::int64 m" in end) == (ended >= 2**31)
