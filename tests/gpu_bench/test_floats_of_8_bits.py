"""Floats of 8 bits as inputs and as results: what is drawn of them, and what is right of them."""

from __future__ import annotations

import pytest
import torch

from gpu_bench.judging import comparison
from gpu_bench.truth.floats_of_8_bits import before_rounding
from gpu_bench.values import inputs
from warpsmith.v1 import verdict_pb2

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FREE = [
    family
    for family in verdict_pb2.ValueFamily.values()
    if family > verdict_pb2.VALUE_FAMILY_TASK and family != verdict_pb2.VALUE_FAMILY_FRESH
]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("family", FREE)
def test_every_family_has_several_values_of_8_bits(dtype: torch.dtype, family: int) -> None:
    own = torch.randn(64, 48).to(dtype).t()
    (made,) = inputs.replaced([own], family, seed=5)  # type: ignore[arg-type]
    assert (made.dtype, made.shape, made.stride()) == (own.dtype, own.shape, own.stride())
    assert len(made.float().nan_to_num(7.0).unique()) > 3
    assert bool(made.float().isnan().any()) <= (family in inputs.UNUSUAL)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0, 1e6])
def test_what_is_rounded_is_no_farther_off_than_what_was_before(dtype: torch.dtype, size: float) -> None:
    truth = size * torch.randn(20_000, dtype=torch.float64)
    near = truth * (1 + 2**-9 * torch.randn(20_000, dtype=torch.float64))
    found = before_rounding(near.to(dtype), truth)
    valid = near.to(dtype).double().isfinite()
    assert bool(((found - truth).abs() <= (near - truth).abs() * (1 + 1e-12))[valid].all())
    assert torch.equal(before_rounding(truth.to(dtype), truth)[valid], truth[valid])
    wrong = before_rounding((truth * 1.3).to(dtype), truth)[valid]
    assert size in (1e-4, 1e6) or float((wrong - truth[valid]).abs().mean()) > 0.1 * size


def test_a_result_of_8_bits_is_right_as_it_was_before_its_rounding() -> None:
    x, w = torch.randn(128, 4096), torch.randn(128, 4096)
    truth = x.double() @ w.double().t()
    eager = (x @ w.t()).bfloat16().to(E5M2)
    other = ((x[:, :2000] @ w[:, :2000].t()) + x[:, 2000:] @ w[:, 2000:].t()).bfloat16().to(E5M2)
    ratio = comparison.compare(other, eager, truth)
    assert max(ratio.rms_ratio, ratio.max_ratio / 2, ratio.block_ratio / 4, ratio.small_ratio / 2) <= 4
    less = (x[:, :-64] @ w[:, :-64].t()).bfloat16().to(E5M2)  # a 64th of the terms
    assert comparison.compare(less, eager, truth).rms_ratio > 4


def test_infinities_and_nan_of_8_bits_are_compared_first() -> None:
    truth = torch.tensor([1.0, float("inf"), float("nan"), 2.0], dtype=torch.float64)
    eager = truth.to(E5M2)
    assert comparison.compare(eager, eager, truth).non_finite_mismatch_count == 0
    other = torch.tensor([1.0, 1.0, 1.0, float("nan")]).to(E5M2)
    assert comparison.compare(other, eager, truth).non_finite_mismatch_count == 3


def test_what_is_rounded_to_8_bits_on_the_way_may_be_left_unrounded_and_no_64th_left_out() -> None:
    x, w = torch.randn(128, 4096), torch.randn(128, 4096).to(E4M3).float()
    scale = x.abs().amax(-1, keepdim=True) / 448
    short = (x / scale).to(E4M3).float() * scale
    truth, eager = x.double() @ w.double().t(), (short @ w.t()).bfloat16()
    unrounded, less = (x @ w.t()).bfloat16(), (short[:, :-64] @ w[:, :-64].t()).bfloat16()
    assert comparison.compare(unrounded, eager, truth).rms_ratio < 0.2
    assert comparison.compare(less, eager, truth).rms_ratio > 4
