"""All steps launched at once: where a plan may be, and what becomes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import analysis, cost, moves, whole
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith import digest
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200_MEASURED
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, task_pb2, timing_pb2

LAUNCH = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group="*", choice="cuda_graph")


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x.softmax(-1)) @ x
        return x


class Alone(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


class Given(nn.Module):
    """Gives its input back beside a result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.tanh().relu(), x.view(-1)


class Twice(nn.Module):
    """Gives two views of one result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.tanh().relu()
        return y, y.view(-1)


class Expanded(nn.Module):
    """Gives each of its elements several times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().sum(-1, keepdim=True).expand(8, 4)


def zero(module: nn.Module, target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA) -> Plan:
    return plan_zero(GraphIndex(capture(module, (torch.zeros(8, 8),))), target)


def legal(plan: Plan) -> list[analysis_pb2.LegalMove]:
    return [each for each in moves.legal(plan) if each.move.kind == analysis_pb2.MOVE_KIND_LAUNCH]


def test_a_plan_is_launched_as_a_graph_whatever_moves_come_after() -> None:
    before = zero(Chain())
    plan = moves.apply_all(before, [LAUNCH, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")])
    made, plain = generate(plan), generate(whole.authored(before, ""))
    assert (made.cuda_graph, plain.cuda_graph) == (True, False)
    assert list(made.steps) == list(plain.steps), "only how they are launched differs"
    made.cuda_graph = False
    assert digest.of_program(made) != made.digest
    assert analysis.describe(moves.apply(before, LAUNCH), with_legal_moves=False).plan_digest != (
        analysis.describe(before, with_legal_moves=False).plan_digest
    )
    assert "launch:cuda_graph" in analysis.describe(plan, with_legal_moves=False).features


def test_it_is_told_with_the_launches_that_it_saves_and_the_copies_that_it_takes() -> None:
    (told,) = legal(zero(Chain()))
    assert (told.move, told.effect) == (LAUNCH, "launches all steps at once, as a CUDA graph")
    assert (told.before.launch_count, told.after.launch_count) == (12, 1)
    assert told.after.read_bytes == told.after.write_bytes == 8 * 8 * 4


@pytest.mark.parametrize("is_batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_is_many_launches_and_a_graph_of_it_is_worth_a_trial(
    kind: type[nn.Module], is_batch_first: bool
) -> None:
    module = kind(8, 8, 3, bidirectional=True, batch_first=is_batch_first)
    plan = plan_zero(GraphIndex(capture(module, (torch.randn(7, 5, 8),))), task_pb2.TARGET_CUDA)
    (told,) = legal(plan)
    assert told.before.launch_count == (5 if is_batch_first else 7) * 3 * 2 * 2  # first states of zeros are made once
    assert generate(moves.apply(plan, LAUNCH)).cuda_graph


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (zero(Chain(), task_pb2.TARGET_CPU), "only a GPU"),
        (zero(Alone()), "fewer than 2 launches"),
        (zero(Given()), "gives x itself or several views of it"),
        (zero(Twice()), "itself or several views of it"),
        (zero(Expanded()), "elements of expand share memory"),
        (moves.apply(zero(Chain()), LAUNCH), "already"),
    ],
    ids=["processor", "one launch", "an input", "one memory", "one element", "twice"],
)
def test_where_a_graph_is_of_no_use_or_would_change_the_results_it_is_refused(plan: Plan, reason: str) -> None:
    with pytest.raises(IllegalMove, match=reason):
        moves.apply(plan, LAUNCH)
    assert not legal(plan)


def test_another_choice_is_refused_by_its_name() -> None:
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group="*", choice="stream")
    with pytest.raises(IllegalMove, match=r"\* cuda_graph, not as \* stream"):
        moves.apply(zero(Chain()), move)


class Contraction(nn.Module):
    """An einsum of three with a mask between, and what surrounds it."""

    def forward(self, c: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask = (c.sum(-1, keepdim=True) - b.sum(-1).unsqueeze(-2)).exp().tril()
        y = torch.einsum("hln,hsn,hls,hsp->hlp", c, b, mask, x)
        return torch.sigmoid(y * 2) * y.tanh() + x.softmax(-1)


def test_algebra_comes_before_the_kernels_of_a_whole_plan_and_leaves_them_less_to_store() -> None:
    args = (torch.randn(64, 256, 16), torch.randn(64, 256, 16), torch.randn(64, 256, 64))
    plan = plan_zero(GraphIndex(capture(Contraction(), args)), task_pb2.TARGET_CUDA)
    described = analysis.describe(plan, with_legal_moves=True)
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA), device=H200_MEASURED, analysis=described, limit=4
    )
    request.reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=4_000_000)
    found = RooflineReasoner().propose(request).hypotheses
    whole_plans = [each for each in found if any(move.group == "*" for move in each.moves)]
    first = whole_plans[0]
    assert first.moves[0].choice == "einsum_pairs"
    assert first.rationale.startswith("all rewrites, of einsum; then ")
    made = moves.apply_all(plan, first.moves)
    plain = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*"))
    stored = [cost.total(cost.of_group(each, group) for group in each.groups).write_bytes for each in (made, plain)]
    assert stored[0] < stored[1]


def test_of_a_module_of_small_steps_a_whole_plan_in_a_graph_is_tried_first() -> None:
    described = analysis.describe(zero(Chain()), with_legal_moves=True)
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA), device=H200_MEASURED, analysis=described, limit=3
    )
    request.reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=60_000)
    first = RooflineReasoner().propose(request).hypotheses[0]
    assert [(move.kind, move.group) for move in first.moves] == [
        (analysis_pb2.MOVE_KIND_AUTHOR, "*"), (analysis_pb2.MOVE_KIND_LAUNCH, "*"),
    ]  # fmt: skip
