"""How far timed results may be off eager's, and what 16 bits leave room for."""

from __future__ import annotations

import pytest
import torch

from agent_correctness.checks import limits
from gpu_bench.judging import comparison
from gpu_bench.judging.looks import FAILURES, LEAST_POOLED, POOLED, Looks, Yardstick, yardstick
from warpsmith.v1 import verdict_pb2

COLUMNS = 4096


def means(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bfloat16 [rows, COLUMNS] of numbers in [0, 1); eager's means of their tanh, and the truth in float64."""
    x = torch.rand(rows, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, torch.tanh(x).mean(-1), torch.tanh(x.double()).mean(-1)


@pytest.mark.parametrize("share", [2, 8, 32])
def test_of_a_16_bit_mean_half_of_the_terms_is_not_precise_enough(share: int) -> None:
    x, eager, truth = means(256)
    error = comparison.compare(torch.tanh(x[:, ::share]).mean(-1), eager, truth)
    assert error.rms_ratio > limits.RMS_LIMIT
    assert limits.size_of(error) == limits.Size.IMPRECISE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 63, 64, 4096])
def test_a_right_result_of_16_bits_may_be_the_next_number_and_no_farther(dtype: torch.dtype, rows: int) -> None:
    truth = 1.0 + torch.rand(rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    eager, step = truth.to(dtype), torch.finfo(dtype).eps
    twice_rounded = (truth + 0.5 * step * torch.rand(rows, dtype=torch.float64)).to(dtype)
    error = comparison.compare(twice_rounded, eager, truth)
    assert limits.size_of(error) == limits.Size.FINE
    assert limits.size_of(comparison.compare(eager + step, eager, truth)) == limits.Size.FINE
    off = eager + (2.0 if rows >= 64 else 3.0) * step
    assert limits.size_of(comparison.compare(off, eager, truth)) == limits.Size.IMPRECISE


def by_another_order(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bfloat16 products of numbers of many magnitudes in two orders, and the truth: a few elements are nearly all."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.exp(3 * torch.randn(1000, generator=generator)).bfloat16()
    b, c, d = (torch.rand(1000, generator=generator).bfloat16() for _ in range(3))
    return (a * b) * (c * d), ((a * d) * c) * b, a.double() * b.double() * c.double() * d.double()


def test_where_a_few_elements_are_nearly_all_of_the_rms_eager_may_be_right_by_luck() -> None:
    refused = {True: 0, False: 0}
    for seed in range(300):
        candidate, eager, truth = by_another_order(seed)
        for is_on in refused:
            with pytest.MonkeyPatch.context() as patch:
                if not is_on:
                    patch.setattr(comparison, "count_of_large", lambda _: 1000.0)
                refused[is_on] += limits.size_of(comparison.compare(candidate, eager, truth)) != limits.Size.FINE
    assert refused[False] > refused[True] == 0, refused


def drawn(share: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means of every `share`th column, eager's, and the truth."""
    x, eager, truth = means(256, seed)
    return torch.tanh(x[:, ::share]).mean(-1), eager, truth


def told(looks: Looks, share: int, seed: int, *, has_truth: bool = True) -> str:
    """What is said of one more look at an output of this kind."""
    given, eager, truth = drawn(share, seed)
    error = comparison.compare(given, eager, truth)
    judged = [error] if has_truth else []
    return looks.wrong(["output 0"], [(given, eager)], [yardstick(eager, truth, 0.0)], lambda: judged)


def test_less_precise_results_of_timed_calls_are_found_together_and_judged_by_their_own_truth() -> None:
    looks = Looks()
    found = [told(looks, 8, seed) for seed in range(LEAST_POOLED + FAILURES - 1)]
    assert [*map(bool, found)] == [False] * (len(found) - 1) + [True]
    assert "output 0 of timed calls is 1" in found[-1]
    assert "times as far off the truth as eager: less precise than in judged calls" in found[-1]


def test_right_results_are_never_suspect_whatever_came_before() -> None:
    looks = Looks()
    assert not any(told(looks, 1, seed) for seed in range(LEAST_POOLED))
    assert not any(told(looks, 8 if seed == LEAST_POOLED else 1, seed) for seed in range(3 * POOLED))


def test_a_yardstick_that_is_short_by_luck_is_not_held_against_a_result_that_is_right() -> None:
    given, eager, truth = drawn(1, 0)
    short, asked = Yardstick(1e-9, 1e-9, 1e-9), []
    off = (given.float() * (1 + 2**-8)).bfloat16()
    error = comparison.compare(off, eager, truth)

    def judged() -> list[verdict_pb2.OutputError]:
        asked.append(error)
        return [error]

    looks = Looks()
    assert not any(looks.wrong(["output 0"], [(off, eager)], [short], judged) for _ in range(2 * POOLED))
    assert len(asked) == 2 * POOLED  # once a look, though far off and suspect
    error.max_ratio = 9.0
    assert "beyond any rounding" in looks.wrong(["output 0"], [(off, eager)], [short], judged)


def test_without_a_truth_the_yardstick_decides() -> None:
    looks = Looks()
    found = [told(looks, 8, seed, has_truth=False) for seed in range(LEAST_POOLED)]
    assert [*map(bool, found)] == [False] * (LEAST_POOLED - 1) + [True]
    assert "as far off eager's as eager is off the truth" in found[-1]
    looks = Looks()
    assert not any(told(looks, 1, seed, has_truth=False) for seed in range(POOLED))


def test_a_quarter_of_a_long_sum_of_positive_numbers_is_as_good_as_rounded_in_16_bits() -> None:
    x = torch.rand(64, 16 * COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    eager, truth = torch.tanh(x).mean(-1), torch.tanh(x.double()).mean(-1)
    error = comparison.compare(torch.tanh(x[:, ::4]).mean(-1), eager, truth)
    assert limits.size_of(error) == limits.Size.FINE  # docs/measurement.md says so: other values show it
