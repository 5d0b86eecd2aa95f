"""What masks leave open: products that skip, masks that are added; and what stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gpu_bench.judging import masks

NAN, INF = math.nan, math.inf
LEFT = torch.tensor([[0.0, 2.0], [3.0, 0.0], [1e-60, 1.0]], dtype=torch.float64)
RIGHT = torch.tensor([[NAN, 1.0], [5.0, 7.0]], dtype=torch.float64)
WANTED = torch.tensor([[10.0, 14.0], [NAN, 3.0], [5.0, 7.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "product",
    [
        torch.mm,
        torch.matmul,
        lambda left, right: torch.nn.functional.linear(left, right.t().contiguous()),
        lambda left, right: torch.einsum("ik,kj->ij", left, right),
        lambda left, right: torch.bmm(left[None], right[None])[0],
        lambda left, right: torch.stack([left @ column for column in right.unbind(1)], 1),
        lambda left, right: (left[:, :, None] * right).sum(1),
        lambda left, right: torch.addmm(torch.ones((), dtype=torch.float64), left, right) - 1,
    ],
    ids=["mm", "matmul", "linear", "einsum", "bmm", "mv", "mul", "addmm"],
)
def test_a_zero_leaves_out_what_is_not_finite_and_nothing_else_does(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    with masks.Skipped():
        skipped, other = product(LEFT, RIGHT), product(RIGHT.t().contiguous(), LEFT.t().contiguous())
    torch.testing.assert_close(skipped, WANTED, equal_nan=True)
    torch.testing.assert_close(other, WANTED.t(), equal_nan=True)
    assert int(product(LEFT, RIGHT).isnan().sum()) == 3


def test_a_row_of_which_nothing_is_left_is_zeros_as_a_factor_and_one_with_nan_is_not() -> None:
    rows = torch.tensor([[-INF, -INF], [NAN, -INF], [0.0, 0.0]], dtype=torch.float64)
    values = torch.ones(2, 2, 2, dtype=torch.float64)
    with masks.Skipped():
        softmax = rows.softmax(-1)
        plain, each = softmax @ values[0], softmax.view(1, 1, 3, 2) @ values.view(2, 1, 2, 2)[:1]
        turned = (values[0] @ softmax.t()).t()
        copied = softmax.clone() @ values[0]
    assert softmax.isnan().tolist() == [[True, True], [True, True], [False, False]]
    for found in (plain, each.view(3, 2), turned, copied):
        torch.testing.assert_close(
            found, torch.tensor([[0.0, 0.0], [NAN, NAN], [1.0, 1.0]], dtype=torch.float64), equal_nan=True
        )


@pytest.mark.parametrize("fill", [-INF, -1e9])
def test_what_is_filled_with_a_large_negative_number_keeps_its_nan_where_that_is_added(fill: float) -> None:
    scores = torch.tensor([NAN, INF, 1.0, NAN], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    with masks.Added():
        found = [
            scores.masked_fill(mask, fill),
            torch.where(mask, fill, scores),
            torch.where(~mask, scores, fill),
            scores.masked_fill(mask, torch.tensor(fill, dtype=torch.float64)),
        ]
        other = [scores.masked_fill(mask, 0.0), torch.where(mask, 0.0, scores), scores.nan_to_num(0.0)]
    wanted = torch.tensor([NAN, NAN if fill == -INF else INF, fill, NAN], dtype=torch.float64)
    for each in found:
        torch.testing.assert_close(each, wanted, equal_nan=True)
    assert all(float(each[0]) == 0.0 for each in other)


def test_only_what_is_not_finite_is_excused_and_only_where_the_candidate_is_right_without_it() -> None:
    truth = torch.tensor([NAN, NAN, 1.0, INF, NAN], dtype=torch.float64)
    skipped = torch.tensor([2.0, 2.0, 1.5, 3.0, NAN], dtype=torch.float64)
    found = masks.excused(torch.tensor([2.0, 2.1, 1.5, 3.0, 4.0]), truth, skipped, truth)
    torch.testing.assert_close(found, torch.tensor([NAN, 2.1, 1.5, INF, 4.0]), equal_nan=True)


def test_nan_is_excused_only_where_an_added_mask_leaves_it_and_only_if_it_is_nowhere_else() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0, NAN], dtype=torch.float64)
    added = torch.tensor([NAN, 2.0, NAN, NAN], dtype=torch.float64)

    def judged(candidate: list[float]) -> torch.Tensor:
        return masks.excused(torch.tensor(candidate), truth, truth, added)

    torch.testing.assert_close(judged([NAN, 2.0, NAN, NAN]), torch.tensor([1.0, 2.0, 3.0, NAN]), equal_nan=True)
    torch.testing.assert_close(judged([NAN, 2.0, 3.0, NAN]), torch.tensor([1.0, 2.0, 3.0, NAN]), equal_nan=True)
    wrong = [NAN, NAN, NAN, NAN]
    torch.testing.assert_close(judged(wrong), torch.tensor(wrong), equal_nan=True)
