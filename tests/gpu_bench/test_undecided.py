"""Elements that any rounding decides otherwise, and what a judge makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from agent_correctness.checks import limits
from gpu_bench.judging import alone, comparison, undecided
from gpu_bench.truth import conditioning
from warpsmith.graphs import capture
from warpsmith.v1 import judging_pb2, verdict_pb2

ROWS, TIED = 4000, 17


def scores() -> dict[str, torch.Tensor]:
    """Two scores a row that are far apart, but for one row in which they are a rounding apart."""
    first = torch.full((ROWS,), 1e8)
    second = torch.where(torch.arange(ROWS) % 2 == 0, 0.9e8, 1.1e8)
    second[TIED] = first[TIED] * (1 + 2**-23)
    return {"first": first[:, None], "second": second[:, None]}


def weighed(sources: dict[str, torch.Tensor] | conditioning.Moved) -> torch.Tensor:
    """The softmax's first weight of each row, in float64."""
    return torch.softmax(torch.cat([sources["first"].double(), sources["second"].double()], 1), 1)[:, 0]


def after(sources: dict[str, torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    """What the moves make of the truth."""
    for seeded, reach in undecided.moves(seed):
        yield weighed(conditioning.Moved(sources, seeded, reach))


@pytest.mark.parametrize("seed", range(5))
def test_the_other_of_two_scores_that_a_rounding_parts_is_excused_and_no_other_row(seed: int) -> None:
    sources = scores()
    truth = weighed(sources)
    assert float(truth[TIED]) < 0.01
    candidate = truth.float()
    candidate[TIED] = 1.0
    assert torch.equal(undecided.excused(candidate, truth, after(sources, seed)), truth.float())
    candidate[TIED + 1] = 1.0 - candidate[TIED + 1]
    left = undecided.excused(candidate, truth, after(sources, seed)) != truth.float()
    assert left.nonzero().flatten().tolist() == [TIED + 1]


def test_what_is_farther_than_the_moves_go_is_not_excused_nor_what_is_not_finite() -> None:
    sources = scores()
    truth = weighed(sources)
    for wrong in (-5.0, float("nan"), float("inf")):
        candidate = truth.float()
        candidate[TIED] = wrong
        kept = undecided.excused(candidate, truth, after(sources, 1))[TIED]
        assert torch.equal(kept.nan_to_num(7.0), candidate[TIED].nan_to_num(7.0))


def test_nothing_is_excused_where_many_elements_are_undecided() -> None:
    sources = scores()
    sources["second"][:100] = sources["first"][:100]
    truth = weighed(sources)
    candidate = truth.float()
    candidate[:3] = 1.0
    assert torch.equal(undecided.excused(candidate, truth, after(sources, 1)), candidate)


def test_moves_there_and_back_are_of_opposite_rows_and_within_their_reach() -> None:
    sources = {"x": torch.ones(64, 3)}
    (seed, reach), (_, back) = list(undecided.moves(5))[:2]
    there, again = (conditioning.Moved(sources, seed, each)["x"] - 1.0 for each in (reach, back))
    assert torch.allclose(there, -again, rtol=1e-6, atol=0.0)
    assert 0.0 < float(there.abs().max()) <= undecided.REACH * 2.0**-24
    assert torch.equal(there[:, 0], there[:, 1])  # a row moves as a whole


def by_running_sums(steps: torch.Tensor, values: torch.Tensor, halves: int) -> torch.Tensor:
    """[heads, 64, 64]: values times exponentials of running sums, in as many pieces as `halves` says."""
    pieces = [torch.zeros_like(steps[:, :1])]
    for piece in steps.split(steps.shape[1] // halves, 1):
        pieces.append(pieces[-1][:, -1:] + torch.stack([piece[:, : n + 1].sum(1) for n in range(piece.shape[1])], 1))
    return torch.exp(torch.cat(pieces[1:], 1))[..., None] * values[:, None]


def heads(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources; fp32 results of two orders of summing; the truth."""
    generator = torch.Generator().manual_seed(seed)
    sources = {"steps": torch.randn(2048, 64, generator=generator), "values": torch.rand(2048, 64, generator=generator)}
    made = [by_running_sums(*sources.values(), halves) for halves in (1, 64)]
    return sources, *made, by_running_sums(*(each.double() for each in sources.values()), 1)


def is_within_limits(error: verdict_pb2.OutputError) -> bool:
    return all(ratio <= most for ratio, most in zip(limits.ratios_of(error), limits.LIMITS, strict=True))


def is_let_in(candidate: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> bool:
    return is_within_limits(comparison.compare(candidate, eager, truth))


def moved_heads(sources: dict[str, torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    for seeded, reach in undecided.moves(seed):
        yield by_running_sums(*conditioning.Moved(sources, seeded, reach).values(), 1)


def test_an_other_order_of_sums_is_excused_where_one_heads_exponentials_are_all_of_the_error() -> None:
    refused = 0
    for seed in range(12):
        sources, *orders, truth = heads(seed)
        for candidate, eager in (orders, orders[::-1]):
            if is_let_in(candidate, eager, truth):
                continue
            refused += 1
            assert undecided.is_of_few(candidate, truth)
            judged = undecided.excused(candidate, truth, moved_heads(sources, seed), if_many=True)
            assert is_let_in(judged, eager, truth), seed
    print(f"{refused} of 24 were beyond a limit, and none was after a second look")
    assert refused, "nothing was to be excused"


class RunningSums(torch.nn.Module):
    """What `by_running_sums` computes, in one piece."""

    def forward(self, steps: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return by_running_sums(steps, values, 1)


def test_so_it_is_of_a_group_judged_alone_which_then_lets_a_lower_precision_through_as_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = (heads(seed) for seed in range(12))
    sources, candidate = next((own, other) for own, eager, other, truth in drawn if not is_let_in(other, eager, truth))
    graph = capture.capture(RunningSums(), list(sources.values()))
    (output,) = graph.outputs
    made = judging_pb2.Region(name=output, kind=judging_pb2.REGION_KIND_MADE)
    given = dict(zip((source.name for source in graph.sources), sources.values(), strict=True))

    def is_let_in_alone(candidate: torch.Tensor) -> bool:
        seen = judging_pb2.Observation(family=verdict_pb2.VALUE_FAMILY_TASK, group=output)
        boundary = alone.Boundary(graph, [made], 0)
        judged = alone.judge(boundary, seen, [candidate], given, torch.device("cpu"))
        assert not judged.unjudged
        return is_within_limits(judged.outputs[0])

    assert is_let_in_alone(candidate)
    assert not is_let_in_alone((1 + 2**-12) * candidate)
    monkeypatch.setattr(undecided, "excused", Mock(side_effect=RuntimeError("the matrix is singular")))
    assert not is_let_in_alone(candidate)
    monkeypatch.setattr(undecided, "excused", Mock(side_effect=torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):  # whoever asks makes room and asks again
        is_let_in_alone(candidate)


def test_a_lower_precision_is_not_excused_where_a_few_elements_are_all_of_the_error() -> None:
    sources, eager, _, truth = heads(0)
    steps = sources["steps"].bfloat16().float()
    for candidate in (by_running_sums(steps, sources["values"], 1), (1 + 2**-12) * eager):
        judged = undecided.excused(candidate, truth, moved_heads(sources, 0), if_many=True)
        assert not is_let_in(judged, eager, truth)


def test_of_many_undecided_elements_the_ones_that_move_most_are_excused_and_no_more() -> None:
    sources, candidate, _, truth = heads(1)
    judged = undecided.excused(candidate, truth, moved_heads(sources, 1), if_many=True)
    kept = judged != candidate
    assert 0 < int(kept.sum()) <= undecided.MOST_SHARE * truth.numel()
    assert float(truth[kept].abs().min()) > float(truth[~kept].abs().mean())
