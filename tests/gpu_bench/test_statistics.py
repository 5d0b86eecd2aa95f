"""Intervals and the rule for "faster"."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpu_bench.timing.statistics import (
    Ratio,
    faster,
    median,
    noise_floor,
    ratio,
    split_noise_floor,
    threshold,
)


def noisy(centre: float, count: int, seed: int, sigma: float = 0.01) -> np.ndarray:
    return centre * np.exp(sigma * np.random.default_rng(seed).standard_normal((count, 2)))


def test_the_interval_contains_the_true_ratio_and_the_median():
    result = ratio(noisy(200.0, 80, 1), noisy(100.0, 80, 2))
    assert result.low < 2.0 < result.high
    assert result.low <= result.median <= result.high
    assert result.high - result.low < 0.02
    assert result.block_count == 80


def test_a_slower_numerator_scales_the_interval_exactly():
    first, second = noisy(100.0, 50, 1), noisy(100.0, 50, 2)
    equal, slower = ratio(first, second), ratio(1.03 * first, second)
    assert slower.median == pytest.approx(1.03 * equal.median)
    assert (slower.low, slower.high) == pytest.approx((1.03 * equal.low, 1.03 * equal.high))


def test_equal_seeds_give_equal_intervals():
    first, second = noisy(3.0, 40, 1), noisy(2.0, 40, 2)
    assert ratio(first, second, seed=7) == ratio(first, second, seed=7)


def test_drift_that_both_arms_share_does_not_widen_the_interval():
    drift = np.linspace(1.0, 2.0, 60)[:, None]
    numerator, denominator = noisy(110.0, 60, 1) * drift, noisy(100.0, 60, 2) * drift
    together = ratio(numerator, denominator)
    shuffled = ratio(numerator, np.random.default_rng(0).permutation(denominator))
    assert together.high - together.low < 0.3 * (shuffled.high - shuffled.low)


def test_a_machine_with_two_speeds_does_not_widen_the_interval():
    speed = np.repeat([1.0, 1.8, 1.0, 1.8], 15)[:, None]
    result = ratio(noisy(110.0, 60, 1) * speed, noisy(100.0, 60, 2) * speed)
    assert result.high - result.low < 0.02
    assert result.low < 1.1 < result.high


def two_speeds(share: float, fast: float, slow: float, seed: int, visits: int = 2) -> np.ndarray:
    """60 blocks of an arm that is fast in that share of its visits, or of its blocks where `visits` is 1."""
    drawn = np.random.default_rng(seed).random((60, visits)) < share
    return noisy(1.0, 60, seed + 1000, 0.005) * np.where(drawn, fast, slow)


@pytest.mark.parametrize("share", [0.4, 0.5])
def test_a_candidate_of_two_speeds_is_not_faster_than_its_median(share):
    pairs = [(noisy(2.0, 60, seed, 0.005), two_speeds(share, 1.0, 3.0, seed)) for seed in range(40)]
    found = [ratio(eager, candidate) for eager, candidate in pairs]
    assert sum(faster(each, 0.005) for each in found) <= 1
    plain = [median(eager) / median(candidate) for eager, candidate in pairs]
    assert all(each.low <= medians for each, medians in zip(found, plain, strict=True))


def test_two_arms_of_two_speeds_are_held_to_their_medians():
    eager, candidate = two_speeds(0.55, 1.4, 5.0, 1, visits=1), two_speeds(0.35, 0.75, 2.0, 5)
    assert median(eager) / median(candidate) < 0.8
    assert not faster(ratio(eager, candidate), 0.005)


def test_that_a_machine_has_two_speeds_takes_no_gain_away():
    found = []
    for seed in range(20):
        speed = np.repeat(np.random.default_rng(seed).choice([1.0, 1.8], 20), 3)[:, None]
        found.append(ratio(noisy(110.0, 60, seed) * speed, noisy(100.0, 60, seed + 99) * speed))
    assert all(faster(each, 0.01) for each in found)


def test_few_blocks_take_the_range_of_the_block_ratios():
    result = ratio(np.array([[2.0, 2.0], [4.0, 4.0], [2.0, 2.0]]), np.array([[1.0, 1.0]] * 3))
    assert (result.low, result.high) == (2.0, 4.0)


def test_blocks_that_only_one_arm_has_are_left_out():
    numerator = np.array([[2.0, 2.0], [math.nan, math.nan], [2.0, 2.0], [9.0, 9.0]])
    result = ratio(numerator, np.array([[1.0, 1.0]] * 3))
    assert result.block_count == 2
    assert result.high == 2.0


def test_no_common_block_says_nothing():
    result = ratio(np.full((3, 2), math.nan), np.ones((3, 2)))
    assert result.block_count == 0
    assert not faster(result, 0.0)
    assert math.isnan(median(np.full((3, 2), math.nan)))
    assert noise_floor(np.full((3, 2), math.nan), np.ones((3, 2))) == math.inf


def test_a_bias_between_equals_counts_as_noise():
    assert noise_floor(noisy(103.0, 100, 1, 0.001), noisy(100.0, 100, 2, 0.001)) > 0.029


def test_split_noise_ignores_drift_within_blocks():
    blocks = noisy(100.0, 200, 3, 0.001)
    blocks[:, 1] *= 1.002
    assert split_noise_floor(blocks) < 0.004
    assert split_noise_floor(noisy(100.0, 100, 3, 0.01)) < 0.01


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 1.01), (0.002, 1.01), (0.01, 1.03)])
def test_the_threshold_is_one_percent_or_three_times_the_noise(noise, expected):
    assert threshold(noise) == pytest.approx(expected)


def test_faster_needs_the_lower_bound_and_three_blocks():
    assert faster(Ratio(1.2, 1.15, 1.25, 20), 0.01)
    assert not faster(Ratio(1.2, 1.02, 1.4, 20), 0.01)
    assert not faster(Ratio(2.0, 2.0, 2.0, 2), 0.0)
