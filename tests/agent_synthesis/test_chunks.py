"""Products in chunks of their rows: what they come to, how much lies in memory, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from training_steps import Case, Function, Tried, integers

from agent_synthesis.graphs import chunks
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import chunking, moves, saving
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

CPU, CUDA = task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA
ROWS, COLUMNS, WORDS = 8, 12, 33
B16 = torch.bfloat16


def step(
    function: Callable[..., torch.Tensor], *rest: Callable[[], torch.Tensor], dtype: torch.dtype = torch.float32,
    bias: bool = False, rows: tuple[int, ...] = (ROWS,),
) -> Case:  # fmt: skip
    """A loss of rows, of a matrix of weights and perhaps of a bias."""
    shapes = [(WORDS, COLUMNS), *([(WORDS,)] if bias else [])]
    return (
        lambda: Function(function, *shapes, dtype=dtype),
        lambda: [torch.randn(*rows, COLUMNS).to(dtype), *(each() for each in rest)],
    )


def targets(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: integers(WORDS, *(shape or (ROWS,)))


def some_ignored() -> torch.Tensor:
    found = integers(WORDS, ROWS)
    found[2] = -100
    return found


gates = (lambda: torch.randn(COLUMNS, WORDS), lambda: torch.randn(WORDS, 3))
STEPS: dict[str, Case] = {
    "cross-entropy": step(lambda x, t, w: F.cross_entropy(x @ w.T, t), targets()),
    "summed, of some": step(lambda x, t, w: F.cross_entropy(F.linear(x, w), t, reduction="sum"), some_ignored),
    "of each row": step(lambda x, t, w: F.cross_entropy(F.linear(x, w), t, reduction="none"), targets()),
    "smoothed": step(lambda x, t, w: F.cross_entropy(x @ w.T, t, label_smoothing=0.1), targets()),
    "weighted": step(
        lambda x, t, c, w: F.cross_entropy(x @ w.T, t, weight=c.detach()), some_ignored, lambda: torch.rand(WORDS)
    ),
    "likelihood": step(lambda x, t, w: F.nll_loss((x @ w.T).log_softmax(-1), t), targets()),
    "with a bias, scaled, capped": step(
        lambda x, t, w, b: F.cross_entropy(torch.tanh(F.linear(x, w, b) / 3) * 3, t), targets(), bias=True
    ),
    "log of a sum": step(lambda x, w, b: F.linear(x, w, b).logsumexp(-1).square().mean(), bias=True),
    "distance": step(lambda x, p, w: (x @ w.T - p.detach()).square().mean(-1).sum(), lambda: torch.rand(ROWS, WORDS)),
    "divergence": step(
        lambda x, p, w: F.kl_div((x @ w.T).log_softmax(-1), p.detach(), reduction="none").sum(-1).mean(),
        lambda: torch.rand(ROWS, WORDS).softmax(-1),
    ),
    "ReLU, then a sum": step(lambda x, w: F.relu(x @ w.T).sum(-1)),
    "ReLU, then a product": step(lambda x, v, w: F.relu(x @ w.T) @ v, lambda: torch.randn(WORDS, 3)),
    "gated layers": step(lambda x, v, u, w: (F.silu(x @ w.T) * (x @ v)) @ u, *gates),
    "sequences": step(
        lambda x, t, w: F.cross_entropy(F.linear(x, w).view(-1, WORDS), t.view(-1)), targets(2, 4), rows=(2, 4)
    ),
}
NARROW: dict[str, Case] = {
    "cross-entropy": step(lambda x, t, w: F.cross_entropy(F.linear(x, w), t), targets(), dtype=B16),
    "of floats": step(
        lambda x, t, w: F.cross_entropy(F.linear(x, w).float().view(-1, WORDS), t.view(-1)),
        targets(2, 4), dtype=B16, rows=(2, 4),
    ),
}  # fmt: skip


def over_greatest(y: torch.Tensor) -> torch.Tensor:
    return y / y.amax()


def first_product(plan: Plan) -> str:
    return next(group.name for group in plan.groups if chunks.rows_of(plan.index, group.name))


def in_chunks(plan: Plan, count: int, product: str = "") -> Plan:
    kind, product = analysis_pb2.MOVE_KIND_REWRITE, product or first_product(plan)
    return moves.apply(plan, analysis_pb2.Move(kind=kind, group=product, choice="chunks", arguments={"chunks": count}))


def whole(plan: Plan, choice: str = "") -> Plan:
    return moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice=choice))


def largest(plan: Plan) -> int:
    """Elements of the largest tensor that is made and not given back."""
    index, given_back = plan.index, {*plan.index.base_tensors(plan.index.graph.outputs)[0]}
    made = (tensor for group in plan.groups for tensor in plan.outputs(group) if tensor not in given_back)
    return max(math.prod(index.spec(tensor).shape) for tensor in made)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("target", [CPU, CUDA])
def test_a_step_in_chunks_means_what_it_did_and_has_no_rows_of_two_chunks(
    name: str, target: task_pb2.Target.ValueType
) -> None:
    tried = Tried.of(STEPS[name], target)
    plan = in_chunks(tried.plan, 3)
    tried.check(plan)
    tried.check(whole(plan, "beside_products"))
    tried.check(whole(plan))
    rows = [shape for shape in map(list, _shapes(plan)) if WORDS in shape and COLUMNS not in shape and len(shape) > 1]
    assert rows
    assert all(math.prod(shape) <= 3 * WORDS for shape in rows)


def _shapes(plan: Plan) -> list[tuple[int, ...]]:
    index = plan.index
    made = [tensor for group in plan.groups for tensor in plan.outputs(group)]
    return [tuple(index.spec(tensor).shape) for tensor in made]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("count", [2, 8])
def test_steps_of_16_bits_are_no_farther_from_the_truth_than_eager(name: str, count: int) -> None:
    tried = Tried.of(NARROW[name])
    plan = in_chunks(tried.plan, count)
    eager = pytree.tree_leaves(tried.module(*tried.args))
    for tried_plan in (plan, whole(plan)):
        made = interpreter.run_plan(tried_plan, tried.sources())
        for one, other, truth in zip(made, eager, tried.truth(), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert (one.double() - truth).abs().max() <= 1.25 * (other.double() - truth).abs().max()


def test_sums_of_16_bit_chunks_are_of_32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    call = aten.call

    def of_2_11(target: str, *rest: Any) -> list[torch.Tensor | None]:
        if target == "aten.addmm.dtype_out":
            raise TypeError("PyTorch 2.11 takes the type for beta where there are no data")
        return call(target, *rest)

    monkeypatch.setattr(aten, "call", of_2_11)
    plan = in_chunks(Tried.of(NARROW["cross-entropy"], CUDA).plan, 4)
    sums = [node for node in plan.index.graph.nodes if node.target in ("aten.mm.dtype", "aten.addmm.dtype_out")]
    assert [node.target for node in sums] == ["aten.mm.dtype", *["aten.addmm.dtype_out"] * 3]
    assert all(list(node.results[0].spec.shape) == [WORDS, COLUMNS] for node in sums)
    whole(plan)


def test_a_forward_alone_is_made_in_chunks_too() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w), t)

    args = torch.randn(2 * ROWS, COLUMNS), torch.randn(WORDS, COLUMNS), integers(WORDS, 2 * ROWS)
    plan = in_chunks(plan_zero(GraphIndex(capture(Applied(loss), args)), CPU), 4)  # type: ignore[arg-type]
    names = dict(zip(plan.index.sources, args, strict=False))
    for each in (plan, whole(plan)):
        (made,) = interpreter.run_plan(each, names)
        torch.testing.assert_close(made.double(), F.cross_entropy(F.linear(args[0], args[1]).double(), args[2]))
    assert largest(plan) == 4 * WORDS


def large() -> Plan:
    """A loss over a vocabulary on a GPU, of tensors without memory."""

    def loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w), t)

    zero = torch.zeros(1, dtype=B16)
    args = zero.expand(4096, 256), zero.expand(32000, 256), torch.zeros(4096, dtype=torch.long)
    return plan_zero(GraphIndex(capture(Applied(loss), args, "cuda")), CUDA)  # type: ignore[arg-type]


def test_chunks_of_large_results_are_offered_with_what_they_hold() -> None:
    plan = large()
    offered = {move.arguments["chunks"]: effect for move, effect in chunking.candidates(plan)}
    assert list(offered) == [4, 8, 16]
    logits = 4096 * 32000 * 2
    assert all(move.arguments for move in (legal.move for legal in moves.legal(plan)) if move.choice == "chunks")
    assert f"instead of {chunking.held_bytes(plan) / 1e6:,.0f}" in offered[8]
    for count in (4, 16):
        made = in_chunks(plan, count)
        assert chunking.held_bytes(made) <= 2.1 * logits / count
        assert chunking.held_bytes(whole(made)) <= chunking.held_bytes(made)
    small = Tried.of(STEPS["cross-entropy"], CUDA).plan
    assert not list(chunking.candidates(small))
    assert not list(chunking.candidates(whole(in_chunks(plan, 2))))


def test_a_step_keeps_no_rows_of_the_product() -> None:
    tried = Tried.of(STEPS["cross-entropy"], CUDA)
    plan = whole(in_chunks(tried.plan, 4))
    assert saving.saved_bytes(tried.plan.index) >= 4 * ROWS * WORDS
    assert chunking._kept_bytes(plan) < 4 * ROWS * WORDS / 4


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, w: x @ w.T, "given back"),
        (lambda x, w: (x @ w.T).softmax(0).sum(-1), "mixes rows"),
        (lambda x, w: over_greatest(x @ w.T).sum(-1), "mixes rows"),
        (lambda x, w: (x @ w.T).cumsum(0).sum(-1), "mixes rows"),
        (lambda x, w: (x @ w.T).flip(0).sum(-1), "mixes rows"),
        (lambda x, w: (x @ w.T)[1:].sum(-1), "mixes rows"),
    ],
)
def test_rows_that_are_mixed_or_given_back_are_refused(function: Callable[..., torch.Tensor], why: str) -> None:
    args = torch.randn(ROWS, COLUMNS), torch.randn(WORDS, COLUMNS)
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), CPU)
    product = next(group.name for group in plan.groups if plan.index.nodes[group.name].target.startswith("aten.m"))
    with pytest.raises(IllegalMove, match=why):
        in_chunks(plan, 2, product)


def test_other_numbers_and_other_calls_are_refused() -> None:
    plan = Tried.of(STEPS["cross-entropy"]).plan
    for count in (0, 1, ROWS + 1):
        with pytest.raises(IllegalMove, match=f"not made in {count} chunks"):
            in_chunks(plan, count)
    with pytest.raises(IllegalMove, match="no product of matrices"):
        in_chunks(plan, 2, "_log_softmax")
    with pytest.raises(IllegalMove, match="while all groups are library calls"):
        in_chunks(whole(plan), 2, "mm")


def test_a_chunk_for_each_row_and_ragged_ones() -> None:
    tried = Tried.of(STEPS["smoothed"])
    for count in (5, ROWS):
        tried.check(in_chunks(tried.plan, count))


def test_two_products_are_made_in_chunks_one_after_the_other() -> None:
    layers: Case = (lambda: nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 5)), lambda: [torch.randn(8, 6)])
    tried = Tried.of(layers)
    plan = in_chunks(tried.plan, 2)
    tried.check(plan)
    assert (4, 40) in _shapes(plan)
    assert (8, 40) not in _shapes(plan)
