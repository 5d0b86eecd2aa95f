"""Plans of many calls: what a move leaves alone is not asked again, and equal blocks are one problem."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering import forms, groups
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import analysis, fusion, moves
from agent_synthesis.plans.partition import Partition, touched
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2


class Block(nn.Module):
    """Norm, product, activation, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x))) * 0.5


class InPlace(nn.Module):
    """Memory written in place ties calls to each other: a running mean, `relu_`, and a view that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).relu_()
        assert isinstance(self.mean, torch.Tensor)
        self.mean.mul_(0.9).add_(y.mean(0))
        z = y * 2
        z[:, 0].add_(1.0)
        return z.exp() + self.mean + y.sigmoid() * x


def plan_of(module: nn.Module, target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA) -> Plan:
    return plan_zero(GraphIndex(capture(module, (torch.zeros(16, 32),))), target)


def blocks(count: int) -> nn.Module:
    return nn.Sequential(*(Block(32) for _ in range(count)))


def walked(plan: Plan, seed: int, steps: int) -> Iterator[Plan]:
    """Plans that drawn legal moves lead to, one after the other."""
    draw = random.Random(seed)
    for _ in range(steps):
        legal = [each.move for each in moves.legal(plan)]
        plan = moves.apply(plan, draw.choice([m for m in legal if m.kind != analysis_pb2.MOVE_KIND_SET] or legal))
        yield plan


@pytest.mark.parametrize("module", [blocks(3), InPlace().train(), InPlace().eval()])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_over_is_what_follows_from_the_groups(module: nn.Module, seed: int) -> None:
    """Order, owners and readers, of plans that walks lead to."""
    for plan in walked(plan_of(module), seed, 12):
        anew = Partition(plan.index, plan.groups[::-1], is_ordered=False).ordered()
        assert plan.partition.groups == anew.groups
        assert plan.partition.owner == anew.owner
        theirs = {tensor: names for tensor, names in plan.partition.readers.items() if names}
        assert theirs == dict(anew.readers)


def test_a_move_touches_its_groups_and_those_whose_results_it_reads_otherwise() -> None:
    """Of forty groups, three."""
    plan = plan_of(blocks(10))
    last = plan.groups[-1].name
    after = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice="mul_9"))
    assert [group.name for group in touched(plan.partition, after.partition)] == ["mul_9", last]
    assert [group.name for group in touched(after.partition, plan.partition)] == [last]


def test_an_order_that_does_not_exist_is_refused() -> None:
    """A residual cannot be taken into a kernel that needs what was made of it."""
    plan = plan_of(blocks(2))
    partition = plan.partition
    first, last = partition.by_name["add"], partition.by_name["add_1"]
    joined = partition.replaced(["add", "add_1"], [forms.replace(last, nodes=(*first.nodes, *last.nodes))])
    with pytest.raises(IllegalMove, match="both before and after"):
        joined.ordered()


def test_equal_blocks_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen blocks ask for as many nests as eight."""
    counts = []
    for count in (8, 16):
        monkeypatch.setattr(groups, "_LOWERED", forms.FormMemory[Any](4096))
        traced: list[Any] = []
        with monkeypatch.context() as counting:
            real = groups._traced
            counting.setattr(groups, "_traced", lambda *asked, real=real, to=traced: to.append(asked) or real(*asked))
            moves.legal(plan_of(blocks(count)))
        counts.append(len(traced))
    assert 0 < counts[0] == counts[1]


class Recurrence(nn.Module):
    """A loop that is written out, whose steps are read by one another and by the results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, results = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = torch.tanh(state * 0.5 + x[:, step]) - state
            results.append(state.exp() * x[:, step])
        return torch.stack(results, 1)


class Chain(nn.Module):
    """Sixty elements in a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(60):
            x = x.sin() if number % 2 else x + number
        return x


@pytest.mark.parametrize(("module", "shape"), [(Recurrence(), (4, 16, 8)), (Chain(), (4, 8))])
def test_a_long_kernel_is_thought_through_a_few_times(
    module: nn.Module, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many calls that fuse, several are taken in at once, and no more than a kernel is to have."""
    monkeypatch.setattr(groups, "_LOWERED", forms.FormMemory[Any](4096))
    monkeypatch.setattr(fusion, "_MOST_CALLS", 64 if isinstance(module, Chain) else 16)
    real, traced = groups._traced, list[int]()

    def counted(index: GraphIndex, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Nest:
        traced.append(len(nodes))
        return real(index, nodes, outputs)

    monkeypatch.setattr(groups, "_traced", counted)
    plan = plan_zero(GraphIndex(capture(module, (torch.zeros(shape),))), task_pb2.TARGET_CUDA)
    made = fusion.fused_with_all(plan, plan.groups[-1].name, ["moved"])
    if isinstance(module, Chain):
        assert len(made.groups) == 1
        assert sum(count > 1 for count in traced) < 20
    else:
        assert max(traced) == 16


@pytest.mark.parametrize("module", [blocks(3), InPlace().train(), nn.Sequential(nn.Softmax(1), nn.Softmax(1))])
def test_a_nest_of_an_equal_group_is_the_groups_own(module: nn.Module) -> None:
    """But for names, which are its own too: nests and texts are those of a group that is lowered by itself."""
    plan = plan_of(module)
    moves.legal(plan)
    plan = moves.apply_all(plan, [legal.move for legal in _authors(plan)])
    shared = [plan.nest(group) for group in plan.groups]
    texts = generator.generate(plan)
    for group, nest in zip(plan.groups, shared, strict=True):
        if isinstance(nest, Nest):
            assert groups._lower(plan.index, plan.all_nodes(group), tuple(plan.outputs(group))) == nest
    for nest in shared:
        if isinstance(nest, Nest):
            nest.memo.clear()
    assert generator.generate(plan) == texts


def _authors(plan: Plan) -> list[analysis_pb2.LegalMove]:
    """One author move for each group that has some."""
    by_group = {m.move.group: m for m in reversed(moves.legal(plan)) if m.move.kind == analysis_pb2.MOVE_KIND_AUTHOR}
    return [legal for name, legal in by_group.items() if name in plan.partition.by_name]


def test_groups_that_differ_in_more_than_names_have_forms_of_their_own() -> None:
    """By an operation, a number, a shape, a stride, and which operand is which."""

    class Alike(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y, t = x[:, :16], x.t()
            return x + 1.0, x + 2.0, x * 1.0, y + 1.0, t + 1.0, x - y.sum(), y.sum() - x, x + 1.0

    plan = plan_of(Alike())
    made = forms.Forms(plan.index)

    def key(name: str) -> Any:
        order = groups._with_views(plan.index, (name,), {*plan.index.results(name)})
        return made.of(order, (name,), (name,)).key

    named = {group.name: key(group.name) for group in plan.groups if not group.name.startswith("sum")}
    last = plan.groups[-1].name
    assert len({*named.values()}) == len(named) - 1
    assert named[last] == named["add"]


def test_fusing_with_all_producers_does_not_follow_residuals_to_the_first_block() -> None:
    """A sum that is stored anyway is read, and not made again of all sums before it."""
    plan = plan_of(blocks(8))
    last = plan.groups[-1].name
    fused = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice="*"))
    assert {*fused.reads(fused.group(last))} == {"add_6", "layer_norm_7", "p_7_up_weight", "p_7_up_bias"}


@pytest.mark.parametrize("work", [moves.legal, lambda plan: analysis.describe(plan, with_legal_moves=False)])
def test_the_work_on_a_plan_grows_about_as_its_calls(work: Callable[[Plan], Any]) -> None:
    """Twice the blocks take at most 2.6 times the calls of Python functions, once equal groups are known."""
    moves.legal(plan_of(blocks(2)))
    counts = []
    for count in (16, 32):
        plan, seen = plan_of(blocks(count)), Counter[str]()
        sys.setprofile(lambda _frame, event, _argument, seen=seen: seen.update([event]))
        try:
            work(plan)
        finally:
            sys.setprofile(None)
        counts.append(seen["call"])
    assert counts[1] <= 2.6 * counts[0], counts
