"""The error-ratio rule on tensors whose errors are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gpu_bench.judging.comparison import BLOCK, Forgiveness, compare, ulp
from warpsmith.v1 import verdict_pb2


def sample(count: int = 3 * BLOCK + 17) -> tuple[torch.Tensor, torch.Tensor]:
    """(eager in fp32 with rounding error, truth in float64)."""
    truth = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return truth.float(), truth


def worst(error: verdict_pb2.OutputError) -> float:
    """The largest ratio of all elements, of one, and of a block."""
    return max(error.rms_ratio, error.max_ratio, error.block_ratio)


def test_eager_itself_is_within_every_limit() -> None:
    eager, truth = sample()
    error = compare(eager.clone(), eager, truth)
    assert error.rms_ratio <= 1
    assert error.max_ratio <= 1
    assert error.block_ratio <= 1
    assert error.kernelbench_close


def test_a_tf32_rounding_passes_allclose_and_fails_the_ratio() -> None:
    eager, truth = sample()
    error = compare((truth * (1 + 4e-5)).float(), eager, truth)
    assert error.kernelbench_close
    assert error.rms_ratio > 50


def test_the_error_of_the_one_large_element_is_measured_by_its_own_last_place() -> None:
    truth = torch.full((512,), 0.01, dtype=torch.float64)
    truth[7] = 0.419
    eager = truth.float()
    truth[7] = float(eager[7])  # eager is right there by luck
    candidate = eager.clone()
    candidate[7] += 3 * ulp(0.419, torch.float32)
    assert 2.9 < compare(candidate, eager, truth).max_ratio < 3.1
    candidate[7] += 9 * ulp(0.419, torch.float32)
    assert compare(candidate, eager, truth).max_ratio > 8
    assert 1.4 < compare(candidate, eager, truth, forgiveness=Forgiveness(order_is_luck=True)).max_ratio < 1.6


def test_where_one_term_rules_a_sum_its_order_is_not_held_against_a_result() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.rand(size, 512, generator=generator) for size in (64, 64))
    x[5, 2] = 300.0
    truth, in_order = x.double() @ weight.double().T, torch.zeros(64, 64)
    for k in range(512):
        in_order += torch.outer(x[:, k], weight[:, k])
    unusual = Forgiveness(order_is_luck=True)
    assert compare(in_order, truth.float(), truth).max_ratio > 8
    assert worst(compare(in_order, truth.float(), truth, forgiveness=unusual)) < 4
    assert compare((truth * (1 + 4e-5)).float(), truth.float(), truth, forgiveness=unusual).rms_ratio > 20
    halves = truth.bfloat16()
    assert worst(compare(halves, halves, truth, forgiveness=unusual)) == worst(compare(halves, halves, truth))


def test_one_wrong_element_in_a_million_shows_in_the_maximum() -> None:
    eager, truth = sample(1 << 20)
    candidate = eager.clone()
    candidate[40961] += 1e-4
    error = compare(candidate, eager, truth)
    assert error.rms_ratio < 4
    assert error.max_ratio > 8
    assert error.worst_index == 40961


def test_one_bad_block_shows_in_the_block_ratio() -> None:
    eager, truth = sample(256 * BLOCK)
    candidate = eager.clone()
    candidate[5 * BLOCK : 6 * BLOCK] *= 1 + 5e-6
    error = compare(candidate, eager, truth)
    assert error.rms_ratio < 4
    assert error.block_ratio > 16


def test_where_one_element_of_a_block_is_not_cut_off_every_block_is_measured_by_eagers_worst() -> None:
    truth = torch.ones(8 * BLOCK, dtype=torch.float64)
    truth[::BLOCK] = 0.5
    eager, candidate = truth.float(), truth.float()
    eager[0] += 1e-3
    candidate[BLOCK] += 1e-3
    assert compare(candidate, eager, truth).block_ratio > 100, "eager was lucky in the second block"
    alike = compare(candidate, eager, truth, forgiveness=Forgiveness(worst_block_for_all=True))
    assert worst(alike) <= 1.01


def test_an_error_of_eager_that_is_no_yardstick_counts_as_much_as_is_allowed() -> None:
    _, truth = sample()
    eager, rms = (truth * 1.1).float(), float(truth.square().mean().sqrt())
    assert compare(eager.clone(), eager, truth).rms_ratio == pytest.approx(1.0)
    error = compare(eager.clone(), eager, truth, most_error=0.02 * rms)
    assert [error.rms_ratio, error.max_ratio, error.block_ratio] == pytest.approx([5.0] * 3, rel=1e-3)
    assert error.eager_rms_error == pytest.approx(0.1 * rms, rel=1e-3)
    assert compare(eager.clone(), eager, truth, most_error=0.2 * rms).rms_ratio == pytest.approx(1.0)
    assert compare(truth.float(), truth.float(), truth, most_error=0.02 * rms).rms_ratio <= 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_is_counted_and_found(value: float) -> None:
    eager, truth = sample()
    candidate = eager.clone()
    candidate[77] = value
    error = compare(candidate, eager, truth)
    assert error.non_finite_mismatch_count == 1
    assert error.worst_index == 77


def test_the_mask_of_eager_or_of_the_truth_will_do() -> None:
    truth = torch.tensor([1e39, 2.0, math.nan, 3.0], dtype=torch.float64)
    eager = torch.tensor([math.nan, 2.0, math.nan, 3.0])
    for first in (math.inf, math.nan):
        assert compare(torch.tensor([first, 2.0, math.nan, 3.0]), eager, truth).non_finite_mismatch_count == 0
    assert compare(torch.tensor([5.0, 2.0, math.nan, 3.0]), eager, truth).non_finite_mismatch_count == 1


def test_an_infinity_stands_for_nan_only_where_it_is_forgiven() -> None:
    truth = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    candidate = torch.tensor([math.inf, 1.0])
    assert compare(candidate, truth.float(), truth).non_finite_mismatch_count == 1
    forgiven = compare(candidate, truth.float(), truth, forgiveness=Forgiveness(True))
    assert forgiven.non_finite_mismatch_count == 0


def test_an_exact_reference_allows_two_ulp_of_the_rms() -> None:
    truth = torch.full((4096,), 1.0, dtype=torch.float64)
    step = torch.finfo(torch.float32).eps
    assert compare((truth + 2 * step).float(), truth.float(), truth).rms_ratio == pytest.approx(1.0)
    off = (truth + 16 * step).float()
    assert compare(off, truth.float(), truth).rms_ratio == pytest.approx(8.0)
    unusual, usual = map(Forgiveness.of, (verdict_pb2.VALUE_FAMILY_MIXED, verdict_pb2.VALUE_FAMILY_NORMAL))
    assert compare(off, truth.float(), truth, forgiveness=usual).rms_ratio == pytest.approx(8.0)
    assert compare(off, truth.float(), truth, forgiveness=unusual).rms_ratio == pytest.approx(1.0)


def test_a_result_below_the_normal_range_may_be_flushed() -> None:
    truth = torch.full((64,), 1e-40, dtype=torch.float64)
    assert compare(torch.zeros(64), truth.float(), truth).rms_ratio <= 4


def test_integers_follow_eager_or_the_truth() -> None:
    eager, truth = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert compare(torch.tensor([1, 2, 4]), eager, truth).unequal_count == 0
    wrong = compare(torch.tensor([1, 5, 3]), eager, truth)
    assert (wrong.unequal_count, wrong.worst_index, wrong.worst_value, wrong.worst_truth) == (1, 1, 5, 2)


def test_the_floor_of_a_small_output_counts_its_terms() -> None:
    truth = torch.tensor([1000.0], dtype=torch.float64)
    candidate = torch.tensor([1000.01])
    assert compare(candidate, truth.float(), truth).rms_ratio > 8
    assert compare(candidate, truth.float(), truth, terms_floor=0.01).rms_ratio == pytest.approx(1, rel=0.02)


def test_an_empty_output_compares() -> None:
    assert compare(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.float64)).kernelbench_close


def test_an_ulp_is_the_distance_to_the_next_number() -> None:
    assert ulp(1.0, torch.float32) == torch.finfo(torch.float32).eps
    assert ulp(5.0, torch.bfloat16) == 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("large", [False, True], ids=["all of it", "some blocks of it"])
def test_what_is_small_beside_a_large_column_is_measured_by_its_own_magnitude(large: bool) -> None:
    rows = 20_000 if large else 600
    truth = torch.rand(rows, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) + 0.5
    truth[:, 0] = truth[:, 0] * 1e6 + 1.7e9
    eager = truth.float()

    def ratio_of(change: Callable[[torch.Tensor], torch.Tensor], *, is_usual: bool = True) -> float:
        candidate = eager.clone()
        candidate[:, 1:] = change(candidate[:, 1:])
        error = compare(candidate, eager, truth, forgiveness=Forgiveness(worst_block_for_all=not is_usual))
        assert worst(error) <= 1
        return error.small_ratio

    assert ratio_of(torch.zeros_like) > 8000
    assert ratio_of(lambda part: part.bfloat16().float()) > 8
    assert ratio_of(lambda part: part * (1 + 1e-4)) < 1, "three digits are always enough"
    assert ratio_of(torch.zeros_like, is_usual=False) == 0


def test_what_eager_has_no_digits_of_is_held_to_eagers_error() -> None:
    """Differences of large numbers: eager is as far off in what is small as in what is not."""
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(1 << 20, dtype=torch.float64, generator=generator)
    noise = [2e-5 * torch.randn(1 << 20, dtype=torch.float64, generator=generator) for _ in range(2)]
    eager, candidate = ((truth + each).float() for each in noise)
    error = compare(candidate, eager, truth)
    assert 0 < error.small_ratio < 2


def test_a_few_small_elements_and_zeros_say_nothing_of_a_magnitude() -> None:
    truth = torch.full((4096,), 1e9, dtype=torch.float64)
    truth[:200], truth[200:1000] = 1e-3, 0.0
    eager = truth.float()
    candidate = eager.clone()
    candidate[:1000] = 5e-3
    assert compare(candidate, eager, truth).small_ratio == 0


def left_out(truth: torch.Tensor, *places: slice | int | torch.Tensor) -> float:
    """How far bfloat16 results are off in what is small, which are right but for zeros there."""
    eager = truth.bfloat16()
    candidate = eager.clone()
    candidate[places] = 0.0
    error = compare(candidate, eager, truth)
    assert max(error.rms_ratio, error.max_ratio, error.block_ratio) < 2
    return error.small_ratio


def test_in_16_bits_what_is_small_beside_the_rest_counts_where_its_row_or_column_is_small() -> None:
    generator = torch.Generator().manual_seed(5)
    columns, heads, places = torch.randn(3, 4, 256, 8, 64, dtype=torch.float64, generator=generator).unbind()
    columns[..., 5] *= 1e-3
    heads[:, :, 3] *= 1e-3
    is_small = torch.rand(places.shape, generator=generator) < 0.25
    places[is_small] *= 1e-3
    assert left_out(columns, ..., 5) > 8
    assert left_out(heads, slice(None), slice(None), 3) > 8
    assert left_out(places, is_small) > 8


def test_in_16_bits_sums_whose_terms_cancel_out_are_as_exact_as_their_weights() -> None:
    """Eager under a mask sums unrounded weights of a softmax, fused attention rounds them: both are right."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(3, 8, 512, 64, generator=generator) / 2).bfloat16().double().unbind()
    weights = (scores := q @ k.transpose(1, 2) / 8).sub_(scores.amax(-1, keepdim=True)).exp_()
    truth, rounded = (each @ v / weights.sum(-1, keepdim=True) for each in (weights, weights.bfloat16().double()))
    for shape in (truth.shape, (truth.numel(),)):
        error = compare(*(each.reshape(shape) for each in (rounded.bfloat16(), truth.bfloat16(), truth)))
        assert error.rms_ratio < 2
        assert 0 < error.small_ratio < 4


@pytest.mark.parametrize("gate", [torch.ones_like, torch.nn.functional.gelu, lambda x: torch.relu(x) ** 2, torch.exp])
def test_in_16_bits_a_difference_may_be_of_terms_that_were_rounded(
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Whatever it is multiplied by: then no part of the output is of one magnitude."""
    generator = torch.Generator().manual_seed(1)
    terms = torch.rand(2, 512, 512, generator=generator).bfloat16()
    factors = (2 * torch.randn(512, 512, generator=generator)).bfloat16()
    truth, rounded = (torch.tanh(each) for each in (terms.double(), terms))
    truth, rounded = truth[0] - truth[1], rounded[0] - rounded[1]
    eager = truth.bfloat16() * gate(factors)
    error = compare(rounded * gate(factors), eager, truth * gate(factors.double()))
    assert error.rms_ratio < 4
    assert error.small_ratio < 8


@pytest.mark.parametrize("shape", [(8, 64, 7, 7), (256, 64, 1, 1), (256, 64, 1), (64, 3, 96, 96)])
def test_in_16_bits_a_small_channel_counts_whatever_lies_behind_it(shape: tuple[int, ...]) -> None:
    truth = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    truth[:, 1] *= 1e-3
    assert left_out(truth, slice(None), 1) > 8


def test_in_16_bits_what_is_small_counts_wherever_it_lies() -> None:
    generator = torch.Generator().manual_seed(2)
    planes, rows = torch.randn(2, 1 << 19, dtype=torch.float64, generator=generator).unbind()
    planes, rows = planes.view(4, 4, 128, 256), rows.view(64, 8192) / 8
    planes[1, 2] *= 1e-3
    assert left_out(planes, 1, 2) > 8
    is_small = torch.rand(rows.shape, generator=generator) < 0.4
    is_small[32:] = False  # these rows are of one magnitude
    rows[is_small] *= 1e-3
    assert left_out(rows, is_small) > 8


def test_in_16_bits_a_box_beside_its_score_is_no_box_without_one() -> None:
    generator = torch.Generator().manual_seed(2)
    boxes, scores = 640 * torch.rand(4096, 4, generator=generator), torch.rand(4096, 1, generator=generator)
    truth = torch.cat([boxes, scores], 1).double()
    assert left_out(truth, slice(None), 4) > 8
