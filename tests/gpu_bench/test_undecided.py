"""Elements that any rounding decides otherwise, and what a judge makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpu_bench.judging import undecided
from gpu_bench.truth import conditioning

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
