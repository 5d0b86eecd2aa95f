"""Rules of algebra hold under their conditions, keep the value, and are not offered elsewhere."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis.graphs.einsum import Einsum
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import RULES
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

X = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
Y = torch.randn(6, 1, generator=torch.Generator().manual_seed(4))


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.narrow = nn.Linear(10, 4)
        self.training = False

    def forward(self, *args: Any) -> Any:
        return self.function(self.narrow, *args)


def planned(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Plan, nn.Module]:
    module = Function(function).eval()
    return plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CPU), module


def offered(plan: Plan) -> list[analysis_pb2.Move]:
    return [legal.move for legal in moves.legal(plan) if legal.move.kind == analysis_pb2.MOVE_KIND_REWRITE]


def results(plan: Plan, module: nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    held = dict(module.named_parameters())
    sources = {}
    for source in plan.index.graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            sources[source.name] = args[source.input_index]
        elif source.origin != graph_pb2.ORIGIN_CONSTANT:
            sources[source.name] = held[source.qualified_name].detach()
    return interpreter.run_plan(plan, sources)


def _scaled_beside_itself(_: Any, x: torch.Tensor) -> Any:
    raised = x.exp()
    return raised * 1, raised


def _sum_beside_its_sum(_: Any, x: torch.Tensor) -> Any:
    total = x.sum(1)
    return total, total.sum()


EXTENTS = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "f": 7, "u": 1}
EINSUMS = [
    "ab,bc->ac", "ab,cb->ca", "ab,ab->ab", "ab,ab->a", "ab,ab->", "a,b->ab", "ab,c->b", "abc,acd->abd", "abc,abd->acd",
    "abcd,abed->abce", "acbd,aebd->abce", "ab,bc,cd->ad", "ab,cb,cd,de->ae", "abc,bd,ce->ade", "abcd,cd->ab",
    "au,ub->ba", "bclhn,bcshn,bhcls,bcshp->bclhp", "ab,ab,ab->b", "abcd,bcef->adef", "abe,ef,b->fa",
]  # fmt: skip


def _operands(equation: str) -> tuple[torch.Tensor, ...]:
    terms = equation.partition("->")[0].split(",")
    generator = torch.Generator().manual_seed(len(equation))
    return tuple(
        torch.randn([EXTENTS.get(letter, 2 + ord(letter) % 4) for letter in term], generator=generator)
        for term in terms
    )


def _einsum(equation: str, _: Any, *operands: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, *operands)


def _attended(mask: Callable[..., Any], _: Any, x: torch.Tensor) -> Any:
    return nn.functional.scaled_dot_product_attention(x[..., :5, :], x, x + 1, mask(x), scale=0.3)


def _hidden(x: torch.Tensor, at: int) -> torch.Tensor:
    return torch.arange(7, device=x.device) < at


def _triangle(x: torch.Tensor) -> torch.Tensor:
    rows, keys = torch.arange(5, device=x.device), torch.arange(7, device=x.device)
    return (keys <= rows.unsqueeze(1)).expand(2, 1, 5, 7)


def _written_out(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.softmax((q @ k.mT) / 3, -1) @ v


def _written_out_under(mask: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Attention as models write it, with dropout of nothing; `mask`: what it makes of scores."""

    def attended(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        weights = mask((q @ k.mT) * 0.3).softmax(-1)
        return nn.functional.dropout(weights, 0.0, True) @ v

    return attended


def _later(scores: torch.Tensor) -> torch.Tensor:
    """Bools: which keys come after a query."""
    return torch.ones(scores.shape[-2:]).triu(1) == 1


def _with_weights_never_read(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    weights = torch.softmax(torch.bmm(q * 0.3, k.transpose(1, 2)), -1)
    weights.view(2, 1, 5, 7).mean(1)
    return torch.bmm(weights, v)


MASKED = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(5))

HOLDS: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("linear_row_sum", lambda line, x: line(x).mean(1), (X,)),
    ("linear_row_sum", lambda line, x: line(x).sum(1), (X,)),
    ("linear_row_sum", lambda line, x: line(x).sum(1, keepdim=True), (X,)),
    ("linear_row_sum", lambda _, x, w: torch.sum(torch.matmul(x, w.T) / 2, 1, keepdim=True), (X, torch.randn(4, 10))),
    ("linear_row_sum", lambda _, x, w: torch.mm(x, w).mul(3).sum(1), (X, torch.randn(10, 4))),
    ("linear_row_sum", lambda line, x, v: (line(x) - v).mean(1, keepdim=True), (X, torch.randn(4))),
    ("linear_row_sum", lambda line, x, v: (v + (line(x) - v) * 2).sum(1), (X, torch.randn(1, 4))),
    ("linear_row_sum", lambda line, x, r: (line(x) + r).sum(1), (X, torch.randn(6, 4))),
    ("linear_row_sum", lambda line, x: (line(x) + 2).sum(1), (X,)),
    ("linear_row_sum", lambda line, x: (line(x) - 2).mean(1), (X,)),
    ("linear_row_sum", lambda line, x: line(x).sum(-1), (torch.randn(2, 3, 10),)),
    ("linear_pool", lambda line, x: nn.functional.avg_pool1d(line(x).unsqueeze(1), 2).squeeze(1).exp(), (X,)),
    ("linear_pool", lambda line, x: nn.functional.avg_pool1d(line(x), 4), (torch.randn(2, 3, 10),)),
    ("scale_into_weights", lambda line, x: line(x) * 0.5, (torch.randn(40, 10),)),
    ("scale_into_weights", lambda line, x: line(x) / 3, (torch.randn(40, 10),)),
    *[("einsum_pairs", functools.partial(_einsum, equation), _operands(equation)) for equation in EINSUMS],
    ("identity", lambda _, x: (x * 1).exp(), (X,)),
    ("identity", lambda _, x: (x / 1).exp(), (X,)),
    ("identity", lambda _, x: (x - 0).exp(), (X,)),
    ("identity", lambda _, x: (x**1).exp(), (X,)),
    ("identity", lambda _, x: torch.constant_pad_nd(x, [0, 0]).exp(), (X,)),
    ("identity", lambda _, x: x.exp() * 1, (X,)),
    ("involution", lambda _, x: x.neg().neg().exp(), (X,)),
    ("involution", lambda _, x: x.relu().relu(), (X,)),
    ("reduction_of_one", lambda _, x: x.exp().sum(1, keepdim=True).logsumexp(1, keepdim=True), (X,)),
    ("reduction_of_one", lambda _, y: y.exp().mean(1).exp(), (Y,)),
    ("reduction_of_one", lambda _, y: y.max(1).values.exp(), (Y,)),
    ("nested_reduction", lambda _, x: x.exp().sum(1).sum(0), (X,)),
    ("nested_reduction", lambda _, x: x.view(6, 2, 5).mean(2, keepdim=True).mean(1), (X,)),
    ("nested_reduction", lambda _, x: x.view(6, 2, 5).amax(1).amax(1, keepdim=True), (X,)),
    ("nested_reduction", lambda _, x: x.view(6, 2, 5).amin(-1, keepdim=True).amin(0, keepdim=True), (X,)),
    ("reduction_of_broadcast", lambda _, y: y.expand(6, 7).sum(1), (Y,)),
    ("reduction_of_broadcast", lambda _, y: y.expand(6, 7).mean(1, keepdim=True), (Y,)),
    ("softmax_shift", lambda _, x: (x + 3).softmax(1), (X,)),
    ("softmax_shift", lambda _, x: (x - 3).log_softmax(0), (X,)),
    ("whole_attention", _written_out, (MASKED[:, :, :5].clone(), MASKED, MASKED + 1)),
    (
        "whole_attention",
        _with_weights_never_read,
        (MASKED[:, 0, :5].clone(), MASKED[:, 1].clone(), MASKED[:, 2].clone()),
    ),
    *(
        ("whole_attention", _written_out_under(mask), (MASKED[:, :, :5].clone(), MASKED, MASKED + 1))
        for mask in (
            lambda scores: scores.masked_fill(_later(scores), -math.inf),
            lambda scores: torch.where(_later(scores), -math.inf, scores),
            lambda scores: torch.where(~_later(scores)[None, None], scores, -math.inf),
            lambda scores: scores + torch.arange(7.0).neg()[None],
            lambda scores: torch.arange(5.0)[:, None].expand(5, 7) + scores,
        )
    ),
    ("constant_mask", functools.partial(_attended, _triangle), (MASKED,)),
    ("constant_mask", functools.partial(_attended, lambda x: _hidden(x, 7).expand(2, 1, 5, 7)), (MASKED,)),
    ("constant_mask", functools.partial(_attended, lambda _: torch.ones(5, 7).tril().log()), (MASKED,)),
    ("constant_mask", functools.partial(_attended, lambda _: torch.zeros(1, 7)), (MASKED,)),
]


@pytest.mark.parametrize(("rule", "function", "args"), HOLDS)
def test_a_rule_that_holds_keeps_the_value(
    rule: str, function: Callable[..., Any], args: tuple[torch.Tensor, ...]
) -> None:
    plan, module = planned(function, *args)
    move = next(move for move in offered(plan) if move.choice == rule)
    after = moves.apply(plan, move)
    assert after.rewrites == (rule,)
    with torch.no_grad():
        expected = module(*args)
    (result,) = results(after, module, args)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert result.stride() == expected.stride() or result.numel() == 1


@pytest.mark.parametrize("seed", range(60))
def test_an_einsum_of_any_operands_is_what_its_pairs_are(seed: int) -> None:
    draw = random.Random(seed)
    letters = draw.sample("abcdef", draw.randint(2, 6))
    terms = ["".join(draw.sample(letters, draw.randint(1, min(4, len(letters))))) for _ in range(draw.randint(2, 4))]
    present = sorted({*"".join(terms)})
    output = "".join(draw.sample(present, draw.randint(0, len(present))))
    equation = f"{','.join(terms)}->{output}"
    args = _operands(equation)
    plan, module = planned(functools.partial(_einsum, equation), *args)
    found = [move for move in offered(plan) if move.choice == "einsum_pairs"]
    with torch.no_grad():
        expected = module(*args)
    for move in found:
        (result,) = results(moves.apply(plan, move), module, args)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, msg=equation)
        assert result.stride() == expected.stride() or result.numel() <= 1, equation
    assert found or not expected.is_contiguous(), equation


def test_the_order_is_that_with_the_least_between() -> None:
    def order(equation: str, extents: dict[str, int]) -> list[tuple[int, int]]:
        shapes = [[extents[letter] for letter in term] for term in equation.partition("->")[0].split(",")]
        found = Einsum.of(equation, shapes)
        assert found is not None
        return list(found.best_order())

    extents = {"a": 10, "b": 1000, "c": 10, "d": 1000}
    assert order("ab,bc,cd->ad", extents) == [(0, 1), (0, 1)]
    assert order("ab,cd,bc->ad", extents) == [(0, 2), (0, 1)]
    # Mamba-2: C with B, then the mask, then X.
    sizes = {"b": 64, "c": 2, "l": 64, "h": 8, "n": 16, "s": 64, "p": 64}
    assert order("bclhn,bcshn,bhcls,bcshp->bclhp", sizes) == [(0, 1), (0, 2), (0, 1)]


def test_what_a_library_stores_between_counts_so_that_another_order_is_worth_a_trial() -> None:
    equation = "bclhn,bcshn,bhcls,bcshp->bclhp"
    sizes = {"b": 64, "c": 2, "l": 64, "h": 8, "n": 16, "s": 64, "p": 64}
    args = [torch.empty([sizes[letter] for letter in term]) for term in equation.partition("->")[0].split(",")]
    plan, _ = planned(functools.partial(_einsum, equation), *args)
    (told,) = (each for each in moves.legal(plan) if each.move.choice == "einsum_pairs")
    between = 4 * 64 * 2 * 8 * 64 * 64
    assert told.before.write_bytes > 2 * between  # C with B, and that with the mask
    assert told.before.product_flop_count == told.after.product_flop_count == 2 * 64 * 2 * 8 * 64 * 64 * (16 + 64)
    assert told.before.launch_count == 3


def test_a_mask_goes_with_all_that_is_made_for_it_and_a_triangle_spares_products() -> None:
    plan, module = planned(functools.partial(_attended, _triangle), MASKED)
    (told,) = (each for each in moves.legal(plan) if each.move.choice == "constant_mask")
    assert told.before.product_flop_count == 2 * 2 * 3 * 5 * 7 * (8 + 8)
    assert told.after.product_flop_count == 2 * 2 * 3 * (1 + 2 + 3 + 4 + 5) * (8 + 8)
    after = moves.apply(plan, told.move)
    assert [group.name for group in after.groups] == ["add", "scaled_dot_product_attention"]
    assert not after.index.constant_calls

    def twice(_: Any, x: torch.Tensor) -> torch.Tensor:
        mask = _triangle(x)
        first = nn.functional.scaled_dot_product_attention(x[..., :5, :], x, x, mask)
        return nn.functional.scaled_dot_product_attention(first, x, x, mask)

    plan, module = planned(twice, MASKED)
    both = [move for move in offered(plan) if move.choice == "constant_mask"]
    assert len(both) == 2
    after = moves.apply_all(plan, both)
    assert not after.index.constant_calls  # the mask went with the last that read it
    with torch.no_grad():
        torch.testing.assert_close(results(after, module, (MASKED,))[0], module(MASKED))


def test_a_mask_that_a_processor_cannot_make_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = planned(functools.partial(_attended, _triangle), MASKED)
    real = aten.call

    def refusing(*args: Any) -> Any:
        if args[-1] == torch.device("cpu"):
            raise NotImplementedError
        return real(*args)

    monkeypatch.setattr(aten, "call", refusing)
    assert not [move for move in offered(plan) if move.choice == "constant_mask"]


REFUSED: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    ("the layer is read elsewhere", lambda line, x: (line(x) * 0.5, line(x).exp()), (X,)),
    ("the weights are not smaller", lambda line, x: line(x) * 0.5, (X,)),
    ("a factor that is a tensor", lambda line, x: line(x) * x[:, :1], (torch.randn(40, 10),)),
    ("a sum of zeros hides an infinity", lambda line, x: (line(x) * 0).sum(1), (X,)),
    ("columns are scaled apart", lambda line, x, v: (line(x) * v).sum(1), (X, torch.randn(4))),
    ("rows are summed", lambda line, x: line(x).sum(0), (X,)),
    ("the summed product is an output", lambda line, x: (made := line(x), made.sum(1)), (X,)),
    ("windows overlap", lambda line, x: nn.functional.avg_pool1d(line(x).unsqueeze(1), 2, 1).exp(), (X,)),
    ("windows leave a column over", lambda line, x: nn.functional.avg_pool1d(line(x).unsqueeze(1), 3).exp(), (X,)),
    ("an output would be an input", lambda _, x: x * 1, (X,)),
    ("two outputs would share memory", _scaled_beside_itself, (X,)),
    ("the type changes", lambda _, x: x.to(torch.int32) / 1, (X,)),
    ("zero loses its sign", lambda _, x: (x + 0).exp(), (X,)),
    ("dropout drops", lambda _, x: torch.dropout(x, 0.5, True).exp(), (X,)),
    ("what is doubled is written later", lambda _, x: (x.exp() * 1).add_(2), (X,)),
    ("a sum of maxima", lambda _, x: x.amax(1).sum(0), (X,)),
    ("the inner sum is an output", _sum_beside_its_sum, (X,)),
    ("positions are asked for", lambda _, y: y.max(1), (Y,)),
    ("more than the expanded is reduced", lambda _, y: y.expand(6, 7).sum(), (Y,)),
    ("a letter twice", lambda _, x: torch.einsum("aa,ab->b", x[:, :6], x), (X,)),
    ("an ellipsis", lambda _, x: torch.einsum("...a,ab->...b", x, x.T), (X,)),
    ("an extent of one that is repeated", lambda _, x, y: torch.einsum("ab,ac->bc", x, y), (X, torch.randn(1, 3))),
    ("a single operand", lambda _, x: torch.einsum("ab->ba", x).exp(), (X,)),
    ("an infinite shift", lambda _, x: (x + float("inf")).softmax(1), (X,)),
    ("a shift that differs", lambda _, x: (x + x[:, :1] * x).softmax(1), (X,)),
    ("a key is hidden", functools.partial(_attended, lambda x: _hidden(x, 6).expand(5, 7)), (MASKED,)),
    (
        "a triangle from the other corner",
        functools.partial(_attended, lambda _: torch.ones(5, 7).tril(2).log()),
        (MASKED,),
    ),
    ("a triangle that is a bias", functools.partial(_attended, lambda _: torch.ones(5, 7).tril() - 1), (MASKED,)),
    ("a mask that is drawn", functools.partial(_attended, lambda _: torch.rand(5, 7) >= 0), (MASKED,)),
    ("a mask that is a bias", functools.partial(_attended, lambda _: torch.full((5, 7), 0.5)), (MASKED,)),
    ("weights are an output", lambda _, x: (made := torch.softmax(x @ x.mT, -1), made @ x), (MASKED,)),
    ("weights are read", lambda _, x: (made := torch.softmax(x @ x.mT, -1)) @ x + made.sum(-1, True), (MASKED,)),
    ("a scale below zero", lambda _, x: torch.softmax((x @ x.mT) * -2, -1) @ x, (MASKED,)),
    (
        "hidden scores are finite",
        _written_out_under(lambda scores: scores.masked_fill(_later(scores), -1e9)),
        (MASKED[:, :, :5].clone(), MASKED, MASKED),
    ),
    ("scores are added to themselves", _written_out_under(lambda scores: scores + scores), (MASKED,) * 3),
    (
        "a mask makes more of scores",
        _written_out_under(lambda scores: scores[:, :1] + torch.ones(2, 3, 7, 7)),
        (MASKED,) * 3,
    ),
    (
        "what is added is scaled",
        _written_out_under(lambda scores: torch.add(scores, torch.ones(1, 7), alpha=2)),
        (MASKED,) * 3,
    ),
    ("a softmax of columns", lambda _, x: torch.softmax(x @ x.mT, -2) @ x, (MASKED,)),
    ("keys of all heads", lambda _, x: torch.softmax(x @ x[:, :1].mT, -1) @ x, (MASKED,)),
    ("a mask of the input", functools.partial(_attended, lambda x: x[0, 0, :5, :7].isfinite()), (MASKED,)),
]


@pytest.mark.parametrize(("why", "function", "args"), REFUSED)
def test_a_rule_is_not_offered_where_it_does_not_hold(
    why: str, function: Callable[..., Any], args: tuple[torch.Tensor, ...]
) -> None:
    plan, _ = planned(function, *args)
    assert not [move for move in offered(plan) if move.choice != "dead"], why


def test_what_is_never_read_goes_with_all_that_is_made_for_it() -> None:
    def unread(line: Any, x: torch.Tensor) -> torch.Tensor:
        kept = x.exp()
        shifted = (kept.t() + 1).relu()
        torch.einsum("ab,bc,cd->ad", shifted, kept, shifted)
        line(x).softmax(-1)
        return kept.tanh()

    plan, module = planned(unread, X)
    chosen = [move for move in offered(plan) if move.choice == "dead"]
    assert [move.group for move in chosen] == ["einsum", "softmax"]
    assert next(move for move in offered(plan) if move.group == "einsum").choice == "dead"  # not its pairs
    after = moves.apply_all(plan, chosen)
    assert [group.name for group in after.groups] == ["exp", "tanh"]
    assert len(after.index.nodes) == 2  # views went as well
    torch.testing.assert_close(results(after, module, (X,))[0], X.exp().tanh())


def test_what_writes_or_draws_or_is_read_by_what_does_stays() -> None:
    def writes(_: Any, x: torch.Tensor) -> torch.Tensor:
        made = x.exp()
        made[0].mul_(2.0)
        torch.bernoulli(made.sigmoid()).exp()
        return made

    plan, _ = planned(writes, X)
    (chosen,) = [move for move in offered(plan) if move.choice == "dead"]
    after = moves.apply(plan, chosen)
    assert [group.name for group in after.groups] == [group.name for group in plan.groups if group.name != chosen.group]


def test_a_graph_is_never_emptied() -> None:
    def nothing(_: Any, x: torch.Tensor) -> torch.Tensor:
        x.exp().sum()
        return x

    plan, _ = planned(nothing, X)
    assert not offered(plan)


def test_rules_end_whatever_their_order() -> None:
    def chain(line: Any, x: torch.Tensor) -> torch.Tensor:
        summed = (line(x) * 1).sum(1, keepdim=True)
        top = summed.max(1, keepdim=True).values
        end: torch.Tensor = top.mean(1, keepdim=True).logsumexp(1, keepdim=True).logsumexp(1, keepdim=True)
        return end

    plan, module = planned(chain, X)
    used = 0
    while (choices := offered(plan)) and used < 40:
        plan = moves.apply(plan, choices[-1])
        used += 1
    assert not offered(plan)
    assert not any(node.target.startswith(("aten.max", "aten.logsumexp")) for node in plan.index.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(results(plan, module, (X,))[0], module(X), rtol=1e-5, atol=1e-5)


def test_every_rule_says_what_it_is_and_when_it_holds() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.effect
        assert "Holds where" in (rule.__doc__ or "") or "never read" in (rule.__doc__ or "")
    elsewhere = {"dead", "norm_into_weights", "stacked_layers", "stepped", "unrolled"}  # all but one have own files
    assert {name for name, _, _ in HOLDS} | elsewhere == {rule.name for rule in RULES}
