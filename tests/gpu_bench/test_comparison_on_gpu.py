"""The one-pass kernel of comparisons against the plain tensor operations: `pytest -m gpu`."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_bench.judging import comparison, comparison_kernel
from gpu_bench.judging.comparison import BLOCK, Forgiveness, compare

pytestmark = pytest.mark.gpu
STRICT = Forgiveness()


def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(candidate, eager, truth) with errors of a few ulp."""
    generator = torch.Generator("cuda").manual_seed(5)
    truth = torch.randn(count, dtype=torch.float64, generator=generator, device="cuda")
    candidate, eager = (
        (truth * (1 + 1e-7 * torch.randn(count, dtype=torch.float64, generator=generator, device="cuda"))).float()
        for _ in range(2)
    )
    return candidate, eager, truth


def both(
    monkeypatch: pytest.MonkeyPatch,
    candidate: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    forgiveness: Forgiveness = STRICT,
) -> tuple[comparison.verdict_pb2.OutputError, comparison.verdict_pb2.OutputError]:
    """What the kernel says, and what plain operations say."""
    by_kernel = compare(candidate, eager, truth, forgiveness=forgiveness)
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "compare_blocks", lambda *_, **__: None)
        return by_kernel, compare(candidate, eager, truth, forgiveness=forgiveness)


def test_this_pytorch_compiles_the_kernel() -> None:
    assert comparison_kernel._kernel() is not None


@pytest.mark.parametrize("count", [1, 17, BLOCK, 5 * BLOCK + 3, (BLOCK << 13) + 4097])
def test_the_kernel_says_what_plain_operations_say(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = both(monkeypatch, *drawn(count))
    for field in ("rms_ratio", "max_ratio", "block_ratio", "rms_error", "eager_rms_error"):
        assert getattr(found, field) == pytest.approx(getattr(wanted, field), rel=1e-12), field
    assert found.worst_index == wanted.worst_index
    assert found.kernelbench_close == wanted.kernelbench_close


@pytest.mark.parametrize("value", [1e-3, 10.0, math.nan, math.inf, -math.inf])
def test_one_wrong_element_is_found_where_it_is(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, eager, truth = drawn(3 * BLOCK + 17)
    candidate[3 * BLOCK + 5] += value
    found, wanted = both(monkeypatch, candidate, eager, truth)
    assert found == wanted or found.max_ratio == pytest.approx(wanted.max_ratio, rel=1e-12)
    assert found.worst_index == wanted.worst_index == 3 * BLOCK + 5
    assert found.non_finite_mismatch_count == wanted.non_finite_mismatch_count == (not math.isfinite(value))
    assert not found.kernelbench_close


@pytest.mark.parametrize("forgiving", [False, True])
def test_infinities_and_nan_of_all_three_are_looked_at_alike(forgiving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn(40 * BLOCK + 99)
    generator = torch.Generator().manual_seed(7)
    specials = torch.tensor([math.inf, -math.inf, math.nan, 1e39, 0.0], dtype=torch.float64)
    for tensor in tensors:
        places = torch.randint(tensor.numel(), (60,), generator=generator)
        values = specials[torch.randint(5, (60,), generator=generator)]
        tensor[places.cuda()] = values.to(tensor.dtype).cuda()
    shared = torch.randint(tensors[0].numel(), (60,), generator=generator).cuda()
    for tensor in tensors:
        tensor[shared] = math.nan
    found, wanted = both(monkeypatch, *tensors, forgiveness=Forgiveness(forgiving))
    for field in ("rms_ratio", "max_ratio", "block_ratio", "rms_error", "eager_rms_error"):
        assert getattr(found, field) == pytest.approx(getattr(wanted, field), rel=1e-12), field
    assert found.non_finite_mismatch_count == wanted.non_finite_mismatch_count > 0
    assert found.worst_index == wanted.worst_index
    assert found.kernelbench_close == wanted.kernelbench_close
