"""How far timed results may be off eager's, and what 16 bits leave room for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_correctness.checks import limits
from gpu_bench.judging import comparison, looks
from gpu_bench.judging.looks import FAILURES, JUDGED_WITHIN, Looks, Yardstick, yardstick
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


@pytest.mark.parametrize("has_truth", [True, False])
def test_less_precise_results_of_timed_calls_are_told_from_their_own_truth(has_truth: bool) -> None:
    looks = Looks()
    found = [told(looks, 8, seed, has_truth=has_truth) for seed in range(FAILURES)]
    assert [*map(bool, found)] == [False] * (FAILURES - 1) + [True]
    assert "output 0 of timed calls is 1" in found[-1]
    assert "less precise than in judged calls" in found[-1]
    assert ("as far off the truth as eager" in found[-1]) is has_truth


@pytest.mark.parametrize("has_truth", [True, False])
def test_right_results_between_others_acquit_none_of_them(has_truth: bool) -> None:
    looks = Looks()
    assert not any(told(looks, 1, seed, has_truth=has_truth) for seed in range(20))
    assert not told(looks, 8, 20, has_truth=has_truth)  # one may be so by luck
    assert not any(told(looks, 1, seed, has_truth=has_truth) for seed in range(20))
    assert told(looks, 8, 21, has_truth=has_truth)


def test_timed_results_are_held_to_the_limits_of_judged_ones_on_ordinary_values() -> None:
    assert tuple(JUDGED_WITHIN.values()) == limits.LIMITS
    assert comparison.Forgiveness.of(verdict_pb2.VALUE_FAMILY_FRESH) == comparison.Forgiveness()


class Judged:
    """A judge that says the same each time, and counts how often it is asked."""

    def __init__(self, error: verdict_pb2.OutputError) -> None:
        self.error, self.count = error, 0

    def __call__(self) -> list[verdict_pb2.OutputError]:
        self.count += 1
        return [self.error]


def test_a_yardstick_that_is_short_by_luck_is_not_held_against_a_result_that_is_right() -> None:
    given, eager, truth = drawn(1, 0)
    short = Yardstick(1e-9, 1e-9, 1e-9)
    off = (given.float() * (1 + 2**-8)).bfloat16()
    judged, looks = Judged(comparison.compare(off, eager, truth)), Looks()
    assert not any(looks.wrong(["output 0"], [(off, eager)], [short], judged) for _ in range(10))
    assert judged.count == 10  # once a look
    for ratio in ("max_ratio", "block_ratio", "small_ratio"):
        judged.error.ClearField("max_ratio")
        setattr(judged.error, ratio, 17.0)
        assert "beyond any rounding" in looks.wrong(["output 0"], [(off, eager)], [short], judged)
        judged.error.ClearField(ratio)


def test_few_second_looks_of_many_may_fail() -> None:
    given, eager, _ = drawn(8, 0)
    yard = Yardstick(1.0, 1.0, 1e-9)
    judged, looks = Judged(verdict_pb2.OutputError(rms_ratio=3.9)), Looks()
    assert not any(looks.wrong(["output 0"], [(given, eager)], [yard], judged) for _ in range(20))
    judged.error.rms_ratio = 4.1
    found = [bool(looks.wrong(["output 0"], [(given, eager)], [yard], judged)) for _ in range(8)]
    assert found == [False] * 6 + [True] * 2  # a quarter


def test_a_result_that_changes_after_the_call_is_none() -> None:
    given, eager, truth = drawn(8, 0)

    def late() -> list[verdict_pb2.OutputError]:
        given.copy_(eager)
        return [comparison.compare(given, eager, truth)]

    said = Looks().wrong(["output 0"], [(given, eager)], [yardstick(eager, truth, 0.0)], late)
    assert said == "a result changed after the timed call: then it was less precise"


def beside_scores(seed: int, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[512, 64]: scores of up to 1.7e9 beside 63 columns of products, times a power of two; as eager has them, and the
    truth."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((512, 256), (256, 63)))
    scores = (1.7e9 * torch.rand(512, 1, generator=generator)).to(dtype)
    truth = torch.cat([scores.double(), a.double() @ b.double()], dim=1)
    return scale * torch.cat([scores, a @ b], dim=1), scale * truth


def said_of_small(changed: torch.Tensor, dtype: torch.dtype, scale: float, *, has_truth: bool) -> tuple[str, int]:
    """What is said of a result whose products are multiplied by these, and how often the truth was asked."""
    yard = yardstick(*beside_scores(0, dtype, scale), 0.0)
    eager, truth = beside_scores(1, dtype, scale)
    given = eager.clone()
    given[:, 1:] *= changed
    judged = Judged(comparison.compare(given, eager, truth))
    said = Looks().wrong(["output 0"], [(given, eager)], [yard], lambda: judged() if has_truth else (judged(), [])[1])
    return said, judged.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_truth", [True, False])
@pytest.mark.parametrize(("changed", "scale"), [(0.0, 1.0), (0.0, 2.0**-100), (0.5, 1.0), (1.02, 1.0)])
def test_what_is_small_beside_the_rest_of_a_timed_call_is_asked_by_magnitude(
    dtype: torch.dtype, has_truth: bool, changed: float, scale: float
) -> None:
    some = torch.tensor([changed] * 32 + [1.0] * 31, dtype=dtype)
    said, count = said_of_small(some, dtype, scale, has_truth=has_truth)
    if changed != 1.02 or dtype == torch.float32:
        assert said.startswith("what is small beside the rest of output 0 of a timed call is ")
        far = "the truth as eager or the third digit" if has_truth else "eager's as eager is off the truth"
        assert said.endswith(far)
        assert count == 1
    assert said_of_small(torch.ones(63, dtype=dtype), dtype, scale, has_truth=has_truth) == ("", 0)


def near_zero(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[1024, 1024] sums of 512 terms, of which some nearly cancel out: by another order, eager's, and the truth."""
    generator = torch.Generator().manual_seed(seed)
    a, b = 3 * torch.randn(1024, 512, generator=generator), torch.randn(512, 1024, generator=generator)
    turned = a.flip(1) @ b.flip(0)
    return turned, a @ b, a.double() @ b.double()


def test_sums_that_cancel_out_cost_no_second_look() -> None:
    usual = yardstick(*near_zero(0)[1:], 0.0)
    turned, eager, truth = near_zero(1)
    judged = Judged(comparison.compare(turned, eager, truth))
    assert not Looks().wrong(["output 0"], [(turned, eager)], [usual], judged)
    assert judged.count == 0
    assert not Looks().wrong(["output 0"], [(turned, eager)], [replace(usual, small=None)], judged)
    assert judged.count == 1  # without eager's errors by magnitude, the truth has to say that they are


@pytest.mark.parametrize("huge", [1e60, 1e100, 1e200, float("inf")])
def test_what_no_16_bit_number_holds_does_not_count_as_large(huge: float) -> None:
    truth = 1.0 + torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth[7] = huge
    eager = truth.bfloat16()
    assert limits.size_of(comparison.compare(eager, eager, truth)) == limits.Size.FINE
    off = eager.clone()
    off[::2] += 2 * torch.finfo(eager.dtype).eps
    assert limits.size_of(comparison.compare(off, eager, truth)) == limits.Size.IMPRECISE


def test_a_quarter_of_a_long_sum_of_positive_numbers_is_as_good_as_rounded_in_16_bits() -> None:
    x = torch.rand(64, 16 * COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    eager, truth = torch.tanh(x).mean(-1), torch.tanh(x.double()).mean(-1)
    error = comparison.compare(torch.tanh(x[:, ::4]).mean(-1), eager, truth)
    assert limits.size_of(error) == limits.Size.FINE  # docs/measurement.md says so: other values show it


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ({}, ""),
        ({"rms_ratio": 8.0, "max_ratio": 40.0}, ""),
        ({"max_ratio": 400.0}, "output 0 is 400 times as far off the truth as eager in a call"),
        (
            {"rms_ratio": math.nan, "max_ratio": math.nan},
            "output 0 is nan times as far off the truth as eager in a call",
        ),
        ({"non_finite_mismatch_count": 3}, "output 0 differs in 3 elements in a call"),
        ({"unequal_count": 2}, "output 0 differs in 2 elements in a call"),
    ],
)
def test_a_judged_call_between_timed_ones_has_to_be_plainly_wrong(error: dict[str, Any], told: str) -> None:
    assert looks.plainly_wrong(["output 0"], [verdict_pb2.OutputError(**error)]) == told
    assert not looks.plainly_wrong(["output 0"], [])
