"""How far timed results may be off eager's, and what 16 bits leave room for."""

from __future__ import annotations

import pytest
import torch

from agent_correctness.checks import limits
from gpu_bench.judging import comparison
from gpu_bench.judging.looks import POOLED, LastLooks, less_precise, pace, yardstick
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


def test_timed_results_are_suspect_by_the_yardstick_of_judged_ones_and_only_together() -> None:
    looks = LastLooks()
    for seed in range(POOLED):
        x, eager, truth = means(256, seed)
        yard = yardstick(eager, truth, 0.0)
        right, part = torch.tanh(x.float()).mean(-1).bfloat16(), torch.tanh(x[:, ::8]).mean(-1)
        found = looks.suspect([pace(right, eager, yard), pace(part, eager, yard)])
        assert set(found) == ({1} if seed == POOLED - 1 else set())
    assert found[1] > 8.0


def test_a_suspect_result_is_let_in_where_it_is_as_exact_as_a_judged_one() -> None:
    exact, inexact = verdict_pb2.OutputError(rms_ratio=3.9), verdict_pb2.OutputError(rms_ratio=4.1)
    assert less_precise(["output 0", "output 1"], {1: 9.0}, [inexact, exact]) == ""
    assert "output 1 of 8 timed calls is 9 times as far off" in less_precise(
        ["output 0", "output 1"], {1: 9.0}, [exact, inexact]
    )
    assert less_precise(["output 0"], {0: 9.0}, []) == ""  # no truth
    assert less_precise(["output 0"], {0: 17.0}, []) != ""
