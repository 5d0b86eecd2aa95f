"""Sums over rows and columns at once in whole plans: of which elements they are taken apart, and what that spares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from training_steps import Case, Function, Tried, of, x

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows.row_reduction import CudaRowReduction
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.row_loads import looked_up_by_vectors, values_again
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import cost, moves, row_totals
from agent_synthesis.plans.plan import Plan
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
SUMS: dict[str, Case] = {
    "divergence": (
        of(lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")),
        lambda: [x(6, 64), x(6, 64)],
    ),
    "targets that are distributions": (
        of(lambda a, b: F.cross_entropy(a, b.softmax(-1))),
        lambda: [x(6, 64), x(6, 64)],
    ),
    "a temperature that learns": (of(lambda a, t: (a * t).softmax(-1), (1,)), lambda: [x(6, 64)]),
    "one scale of a norm": (of(lambda a, g: g * a / a.norm(dim=-1, keepdim=True), (1,)), lambda: [x(2, 3, 64)]),
    "a scale of each head": (of(lambda a, g: F.normalize(a, dim=-1) * g, (4, 1, 1)), lambda: [x(2, 4, 6, 64)]),
    "mean of what was normed": (of(lambda a: F.rms_norm(a, (64,)).abs().mean()), lambda: [x(6, 64)]),
}


def moved(plan: Plan) -> int:
    costs = [cost.of_group(plan, group) for group in plan.groups]
    return sum(each.read_bytes + each.write_bytes for each in costs)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_what_needs_its_row_is_made_by_the_kernel_that_has_the_row(name: str) -> None:
    tried = Tried.of(SUMS[name], task_pb2.TARGET_CUDA)
    assert row_totals.apart(tried.plan) is not tried.plan
    plan = moves.apply(tried.plan, WHOLE)
    tried.check(plan)
    rows = sum(each.nbytes for each in tried.args if each.dim() > 1 and each.shape[-1] == 64)
    assert moved(plan) <= 5.2 * rows


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.exp().sum(),  # nothing of a row
        lambda a: a.softmax(-1).sum(0),  # of columns alone
        lambda a: a.softmax(0).square().sum(),  # of what needs its column
        lambda a: a.softmax(-1).square().sum(-1),
    ],
)
def test_other_sums_stay_whole(function: Callable[..., object]) -> None:
    tried = Tried.of((lambda: Function(function), lambda: [x(6, 64)]))
    assert row_totals.apart(tried.plan) is tried.plan


def test_half_floats_are_added_up_as_floats_between() -> None:
    case: Case = (of(lambda a: a.softmax(-1).sqrt().sum()), lambda: [x(512, 64).bfloat16()])
    index = row_totals.apart(Tried.of(case).plan).index
    made = [index.spec(node.name).dtype for node in index.graph.nodes if node.name.endswith(("_rows", "_total"))]
    assert made == [index.spec("sum_1_rows").dtype] * 2 != [index.spec("sum_1").dtype] * 2


def test_what_a_norm_writes_in_place_is_not_kept() -> None:
    tried = Tried.of((of(lambda a: a / (a.norm(dim=-1, keepdim=True) + 1e-6)), lambda: [x(6, 64)]))
    plan = moves.apply(tried.plan, WHOLE)
    tried.check(plan)
    assert not any(node.mutates for node in plan.index.graph.nodes)
    assert moved(plan) <= 5.2 * tried.args[0].nbytes


# ---- registers for what is needed again -----------------------------------------------------------------


def nest_of(case: Case, place: int) -> Nest:
    """The loops of a kernel of the step, as schedules of rows see them."""
    plan = moves.apply(Tried.of(case, task_pb2.TARGET_CUDA).plan, WHOLE)
    rows = [group for group in plan.groups if group.schedule == CudaRowReduction.name]
    nest = plan.nest(rows[place])
    assert isinstance(nest, Nest)
    return iteration_space.canonical(nest)


def test_what_elements_need_again_is_counted() -> None:
    assert values_again(nest_of((of(lambda a: a.softmax(-1)), lambda: [x(6, 64)]), 0)) == 1, "an exponential"
    assert values_again(nest_of((of(lambda a: F.layer_norm(a, (64,))), lambda: [x(6, 64)]), 1)) == 2, "both operands"
    channels = nest_of((lambda: torch.nn.GroupNorm(2, 8), lambda: [x(2, 8, 8, 8)]), 0)
    assert (values_again(channels), looked_up_by_vectors(channels)) == (1, 2), "a weight and a bias of each channel"


def test_a_row_is_held_by_so_many_threads_that_what_is_needed_again_fits() -> None:
    nest = nest_of((of(lambda a: F.layer_norm(a, (2048,))), lambda: [x(512, 2048).bfloat16()]), 1)
    settings = CudaRowReduction(H200).defaults(nest)
    held = settings.vectors * settings.vector_width * values_again(nest)
    assert held + geometry.KERNEL_OVERHEAD_REGISTERS <= H200.register_limit(settings.threads, settings.min_blocks)
