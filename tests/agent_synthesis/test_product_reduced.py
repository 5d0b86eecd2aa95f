"""Row reductions whose elements are a matrix product: one nest, one schedule, and nothing of the product in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from agent_synthesis import generator
from agent_synthesis.emit.cuda.products import tensor_core_product
from agent_synthesis.emit.cuda.products.reduced_product import CudaReducedProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import elements_and_rows
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero, schedules_for
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

R = torch.randn
Function = Callable[..., torch.Tensor]
Compile = Callable[[Emission], str]


def planned(function: Function, *args: torch.Tensor) -> Plan:
    """Everything in one group, by moves that a search finds."""
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    last = plan.groups[-1].name
    if len(plan.groups) > 2:
        plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice="*"))
    for group in plan.groups[:-1]:
        plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice=group.name))
    return plan


def nest_of(plan: Plan) -> Nest:
    nest = plan.nest(plan.groups[-1])
    assert isinstance(nest, Nest), nest
    return nest


def _case(name: str) -> tuple[Function, *tuple[torch.Tensor, ...]]:
    function, args = ENDS[name]
    return (function, *args)


def sharp_and_flat(y: torch.Tensor) -> torch.Tensor:
    return y.amax(1, keepdim=True) + torch.sigmoid(y).sum(1, keepdim=True)


ENDS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "logsumexp behind a clamp": (
        lambda a, b: torch.logsumexp(torch.clamp(a @ b.T * 2, -10, 10), 1, keepdim=True), (R(72, 40), R(136, 40))),
    "a mean of a sum with a row": (lambda a, b, c: (a @ b + c).mean(1) * 3, (R(65, 33), R(33, 68), R(68))),
    "two at once": (lambda a, b: sharp_and_flat(a @ b.T), (R(70, 64), R(132, 64))),
    "a batch": (lambda a, b: torch.relu(torch.bmm(a, b)).amin(2), (R(3, 66, 32), R(3, 32, 68))),
    "columns, which are rows of the transpose": (lambda a, b: torch.tanh(a @ b).sum(0), (R(72, 40), R(40, 136))),
    "sixteen bits": (lambda a, b: (a @ b.T).amax(1), (R(64, 64).bfloat16(), R(128, 64).bfloat16())),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_reduction_of_a_product_means_what_the_module_does(name: str) -> None:
    function, args = ENDS[name]
    plan = planned(function, *args)
    assert [group.schedule for group in plan.groups] == ["cuda_product_reduced"]
    sources = {source.name: args[source.input_index] for source in plan.index.graph.sources}
    (made,) = interpreter.run_plan(plan, sources)
    wanted = function(*args)
    close = 1e-2 if wanted.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(made, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("name", ["logsumexp behind a clamp", "a mean of a sum with a row", "sixteen bits"])
def test_a_reduction_of_a_product_compiles_without_spilling(name: str, compile_cuda: Compile) -> None:
    function, args = ENDS[name]
    plan = planned(function, *args)
    report = compile_cuda(CudaReducedProduct(H200).emit(nest_of(plan), plan.groups[-1].settings))
    assert "0 bytes spill stores" in report
    assert "serializ" not in report


def test_nothing_of_the_product_is_written() -> None:
    program = generator.generate(planned(*_case("logsumexp behind a clamp")))
    spaces = {each.name: each.spec.shape for each in program.buffers if each.role == candidate_pb2.ROLE_WORKSPACE}
    # A state of eight bytes for each of 72 rows and two tiles of columns, where the product has 72 by 136 floats.
    assert spaces["ws_logsumexp_partials"] == [144]
    assert "ws_logsumexp_slices" not in spaces
    assert [step.launch.entry.rsplit("_", 1)[1] for step in program.steps] == ["split", "product", "repair", "rows"]


def test_the_product_counts_as_work_and_the_rows_as_bytes() -> None:
    plan = planned(*_case("two at once"))
    (group,) = plan.groups
    counted = cost.of_nest(nest_of(plan))
    assert counted.product_flop_count == 2 * 70 * 132 * 64
    assert counted.write_bytes == 4 * 70
    assert cost.of_group(plan, group).tensor_flop_count == 3 * counted.product_flop_count


def test_all_that_fuses_leaves_the_product_apart_from_what_reduces_it() -> None:
    function, args = ENDS["logsumexp behind a clamp"]
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="logsumexp", choice="*"))
    assert [group.name for group in plan.groups] == ["matmul", "logsumexp"]
    chosen = [legal.move.choice for legal in moves.legal(plan) if legal.move.kind == analysis_pb2.MOVE_KIND_FUSE]
    assert "matmul" in chosen


REFUSED: dict[str, Function] = {
    "a softmax, which needs the elements again": lambda a, b: torch.softmax(a @ b, 1),
    "a variance, whose second visit needs the mean": lambda a, b: (a @ b).var(1),
    "a scan": lambda a, b: torch.cumsum(a @ b, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_visit_of_the_rows_does_not_make_is_refused(name: str) -> None:
    with pytest.raises(IllegalMove):
        planned(REFUSED[name], R(72, 40), R(40, 136))


def test_other_schedules_leave_it_alone_and_the_cpu_has_none() -> None:
    nest = nest_of(planned(*_case("two at once")))
    assert [schedule.name for schedule in schedules_for(task_pb2.TARGET_CUDA, nest)] == ["cuda_product_reduced"]
    assert not schedules_for(task_pb2.TARGET_CPU, nest)


def test_settings_that_would_share_a_row_are_no_alternatives() -> None:
    plan = planned(*_case("sixteen bits"))
    (group,) = plan.groups
    found = CudaReducedProduct(H200).alternatives(nest_of(plan), group.settings)
    assert found
    assert all((each.split_k, each.warpgroups) == (1, 2) for each in found)


def test_few_rows_of_a_long_operand_are_not_reduced_on_the_way() -> None:
    function: Function = lambda a, b: (a @ b.T).amax(1)  # noqa: E731
    with pytest.raises(IllegalMove):
        planned(function, R(64, 64), R(15361, 64))


def test_a_product_and_its_reduction_are_two_nests_that_share_the_sums() -> None:
    parts = elements_and_rows(nest_of(planned(*_case("two at once"))))
    assert parts is not None
    elements, rows = parts
    assert [axis.extent for axis in (*elements.parallel, *elements.reduced)] == [70, 132, 64]
    assert [reduction.operation for reduction in rows.reductions] == ["max", "sum"]
    assert rows.buffer("r0_sums").element_count == elements.buffer("r0_sums").element_count == 70 * 132


class Layer(nn.Module):
    """A linear layer of a sequence, and the greatest of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).amax(-1)


def test_a_sequence_is_reduced_as_its_rows() -> None:
    plan = plan_zero(GraphIndex(capture(Layer(), (R(2, 40, 48),))), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="amax", choice="linear"))
    (group,) = plan.groups
    emission = CudaReducedProduct(H200).emit(nest_of(plan), group.settings)
    assert ".batch = 1, .m = 80, .n = 80, .k = 48" in emission.text


def test_tiles_are_as_wide_as_those_of_their_repair() -> None:
    plan = planned(lambda a, b: (a @ b.T).amax(1), R(256, 64), R(2048, 64))
    nest, settled = nest_of(plan), plan.groups[-1].settings
    parts = elements_and_rows(nest)
    assert parts is not None
    wide = replace(settled, columns=192, stages=2)
    tensor_core_product.require_fits(H200, parts[0], wide)
    with pytest.raises(IllegalMove, match="repairs"):
        CudaReducedProduct(H200).emit(nest, wide)
