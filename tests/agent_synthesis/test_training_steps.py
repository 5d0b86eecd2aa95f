"""Training steps: what their graphs mean, that derivatives become kernels, what the forward keeps for the backward."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_steps import CALLS, KERNELS, Case, Function, Rotary, Tried, of, rms_norm

from agent_synthesis.graphs import decompositions
from agent_synthesis.lowering import groups
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import cost, moves, saving
from agent_synthesis.plans.plan import Plan
from warpsmith.errors import BadInput, IllegalMove
from warpsmith.graphs import training_step
from warpsmith.v1 import analysis_pb2, task_pb2

AUTHOR, FUSE = analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE
SORTING = {"aten.sort.stable", "aten.searchsorted.Tensor", "aten.arange.default"}
"""Of what is added up by an index."""
WHOLE = analysis_pb2.Move(kind=AUTHOR, group="*")


def all_authored(plan: Plan) -> Plan:
    """The plan with every group that can be a kernel authored by itself."""
    for group in plan.groups:
        with contextlib.suppress(IllegalMove):
            plan = moves.apply(plan, analysis_pb2.Move(kind=AUTHOR, group=group.name))
    return plan


@pytest.mark.parametrize("name", [*KERNELS, *CALLS])
def test_a_step_means_the_forward_and_its_gradients(name: str) -> None:
    tried = Tried.of({**KERNELS, **CALLS}[name])
    tried.check(tried.plan)
    tried.check(all_authored(tried.plan))
    with contextlib.suppress(IllegalMove):  # a step with no kernel of ours
        tried.check(moves.apply(tried.plan, WHOLE))


@pytest.mark.parametrize("name", KERNELS)
def test_derivatives_are_kernels_of_ours(name: str) -> None:
    plan = all_authored(Tried.of(KERNELS[name]).plan)
    left = [plan.index.nodes[group.name] for group in plan.groups if group.engine == "library"]
    found = [node for node in left if not (name.startswith("rows added up") and node.target in SORTING)]
    assert {node.target for node in found} <= {"aten.convolution_backward.default"}
    for node in found:
        assert [bool(each.name) for each in node.results] == [False, True, False], "the gradient of the weights alone"


# ---- the forward's results come before a gradient is given ---------------------------------------------


def test_no_kernel_gives_what_the_forward_gives_and_needs_a_gradient() -> None:
    plan = moves.apply(Tried.of(KERNELS["gate"]).plan, WHOLE)
    forward, backward = plan.groups
    with pytest.raises(IllegalMove, match="the forward gives its results before"):
        moves.apply(plan, analysis_pb2.Move(kind=FUSE, group=backward.name, choice=forward.name))
    assert all(not (plan.index.of_backward & {*g.nodes} and plan.index.of_forward & {*g.nodes}) for g in plan.groups)


def test_a_step_is_not_launched_at_once() -> None:
    plan = moves.apply(Tried.of(KERNELS["gate"], task_pb2.TARGET_CUDA).plan, WHOLE)
    at_once = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group="*", choice="cuda_graph")
    with pytest.raises(IllegalMove, match="is wanted before its backward begins"):
        moves.apply(plan, at_once)


def test_what_changes_a_buffer_is_of_the_forward() -> None:
    index = Tried.of(KERNELS["batch norm"]).plan.index
    written = {name for name, node in index.nodes.items() if node.mutates}
    assert written
    assert written <= index.of_forward
    assert not written & index.of_backward


# ---- what is kept ----------------------------------------------------------------------------------------


def test_a_row_of_a_softmax_is_not_kept_but_its_sum() -> None:
    plan = Tried.of(KERNELS["cross-entropy"]).plan
    assert saving.saved_bytes(plan.index) >= 4 * 5 * 33
    made = moves.apply(plan, WHOLE)
    assert saving.saved_bytes(made.index) <= 4 * (5 + 5 + 1), "the greatest of each row, the log of its sum, the count"


def test_an_activation_is_computed_again_and_a_product_is_kept() -> None:
    plan = Tried.of(CALLS["gated layers"]).plan
    names = saving.saved(saving.with_least_traffic(plan).index)
    assert names == ["mm", "mm_1", "mul"], "two products, and what the third one reads, whose derivative reads it too"


def test_a_plan_of_kernels_and_a_forward_alone_are_left_as_they_are() -> None:
    plan = all_authored(Tried.of(KERNELS["gate"]).plan)
    assert saving.with_least_traffic(plan) is plan


# ---- bytes that whole plans move on a GPU ----------------------------------------------------------------

B16 = torch.bfloat16


def large(*shape: int, dtype: torch.dtype = B16) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype).expand(shape)


def meta(module: nn.Module, dtype: torch.dtype = B16) -> nn.Module:
    return module.to(dtype)


PIECES: dict[str, tuple[Case, float]] = {
    "RMSNorm": ((lambda: Function(rms_norm, (512,), dtype=B16), lambda: [x16(8192, 512)]), 5.1),
    "residual and RMSNorm": (
        (
            lambda: Function(lambda a, b, w: (rms_norm(a + b, w), a + b), (512,), dtype=B16),
            lambda: [x16(8192, 512), x16(8192, 512)],
        ),
        10.1,
    ),
    "layer norm": ((lambda: nn.LayerNorm(512).to(B16), lambda: [x16(8192, 512)]), 5.1),
    "scale of channels": ((lambda: Function(lambda a, w: a * w, (512,), dtype=B16), lambda: [x16(8192, 512)]), 5.1),
    "bias and activation": (
        (lambda: Function(lambda a, w: F.gelu(a + w), (512,), dtype=B16), lambda: [x16(8, 1024, 512)]),
        5.1,
    ),
    "SiLU and gate": ((of(lambda a, b: F.silu(a) * b), lambda: [x16(1024, 512), x16(1024, 512)]), 8.1),
    "rotary embedding": (
        (lambda: Rotary(128, 64).to(B16), lambda: [x16(2, 8, 128, 64)]),
        6.6,
    ),
    "cross-entropy": ((of(F.cross_entropy), lambda: [x16(128, 4096), torch.zeros(128, dtype=torch.long)]), 4.1),
    "cross-entropy of what comes next": (
        (
            of(lambda a, t: F.cross_entropy(a[:, :-1].reshape(-1, 4096).float(), t[:, 1:].reshape(-1))),
            lambda: [x16(2, 64, 4096), torch.zeros(2, 64, dtype=torch.long)],
        ),
        4.1,
    ),
    "softmax": ((of(lambda a: a.softmax(-1)), lambda: [x16(256, 2048)]), 5.1),
    "group norm and SiLU": (
        (lambda: nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU()).to(B16), lambda: [x16(16, 32, 16, 16)]),
        7.1,
    ),
}
"""With the most that may be moved, in multiples of the first input."""


def x16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(B16)


@pytest.mark.parametrize("name", PIECES)
def test_a_whole_plan_of_a_piece_moves_little_more_than_it_has_to(name: str) -> None:
    case, most = PIECES[name]
    tried = Tried.of(case, task_pb2.TARGET_CUDA)
    plan = all_authored(tried.plan) if name == "softmax" else moves.apply(tried.plan, WHOLE)
    costs = [cost.of_group(plan, group) for group in plan.groups]
    moved = sum(each.read_bytes + each.write_bytes for each in costs)
    assert moved <= most * tried.args[0].nbytes, f"{moved / tried.args[0].nbytes:.2f} times its first input"


# ---- sums over rows ----------------------------------------------------------------------------------------


def test_a_norm_and_its_weight_have_their_gradients_of_one_kernel_on_a_gpu() -> None:
    for name in ("layer norm", "layer norm of sequences without bias", "root mean square norm", "the same by hand"):
        tried = Tried.of(KERNELS[name], task_pb2.TARGET_CUDA)
        plan = moves.apply(tried.plan, WHOLE)
        tried.check(plan)
    tried = Tried.of((lambda: nn.LayerNorm(64), lambda: [torch.randn(4096, 64)]), task_pb2.TARGET_CUDA)
    plan = moves.apply(tried.plan, WHOLE)
    assert [group.schedule for group in plan.groups] == ["cuda_row_reduction", "cuda_rows_and_columns"]
    tried.check(plan)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a.softmax(-1), b.sum((0, 1))),
        lambda a, b: (a.softmax(-1), (a + b).amax((0, 1))),
        lambda a, b: (a.softmax(-1), (a + b).sum(0)),
        lambda a, _: (a.softmax(-1), a[:1].sum((0, 1))),  # some of the rows
    ],
)
def test_sums_of_other_rows_are_kernels_of_their_own(function: Callable[..., object]) -> None:
    tried = Tried.of((lambda: Function(function), lambda: [torch.randn(2, 3, 48), torch.randn(2, 3, 48)]))
    index = tried.plan.index
    nodes = [node.name for node in index.graph.nodes if node.name in index.of_forward and not index.is_view(node.name)]
    refusal = groups.lower(index, nodes, index.graph.outputs[:2])
    assert isinstance(refusal, groups.Refusal)
    assert "one loop" in refusal.reason


@pytest.mark.parametrize("name", ["cross-entropy", "cross-entropy of each sample", "cross-entropy of images"])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_an_infinite_gradient_of_a_loss_is_one_at_the_targets_alone(name: str, special: float) -> None:
    tried = Tried.of(KERNELS[name], task_pb2.TARGET_CUDA)
    given = tried.args[-1].clone()
    given.view(-1)[0] = special
    tried = dataclasses.replace(tried, args=(*tried.args[:-1], given))
    *_, gradient = interpreter.run_plan(moves.apply(tried.plan, WHOLE), tried.sources())
    wanted = tried.truth()[-1]
    assert torch.equal(gradient.isnan(), wanted.isnan())
    assert torch.equal(gradient.isinf(), wanted.isinf())


# ---- bad input, and calls that are taken apart -----------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["y"], "--grad y: names no input or parameter that can have a gradient; there are x, weight, bias"),
        (["x", "nor*"], r"--grad nor\*: names no input"),
    ],
)
def test_a_name_that_takes_nothing_is_refused_with_those_that_there_are(wanted: list[str], said: str) -> None:
    class Scaled(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    with pytest.raises(BadInput, match=said):
        training_step.described(task_pb2.TrainingStep(wanted=wanted), Scaled(8), (torch.randn(2, 8),))


def test_a_forward_without_gradients_is_refused() -> None:
    with pytest.raises(BadInput, match="no output of the forward depends on"):
        training_step.described(task_pb2.TrainingStep(), Function(lambda a: a.argmax(-1)), (torch.randn(2, 8),))


def test_patterns_choose_inputs_and_parameters() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor], places: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(more["y"])[places]

    args = (torch.randn(2, 8), {"y": torch.randn(2, 8)}, torch.tensor([1, 0]))
    step = training_step.described(task_pb2.TrainingStep(wanted=["more*", "second.*"]), Norms(), args)
    assert list(step.inputs) == [1]
    assert list(step.parameters) == ["second.weight", "second.bias"]
    every = training_step.described(task_pb2.TrainingStep(), Norms(), args)
    assert list(every.inputs) == [0, 1]
    assert len(every.parameters) == 4


def test_a_call_that_pytorch_does_not_take_apart_stays_whole() -> None:
    index = Tried.of(CALLS["sorted"]).plan.index
    assert decompositions.taken_apart(index, next(iter(index.nodes))) is None
