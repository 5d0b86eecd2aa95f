"""Rows that are longer than what is sorted in one go come out as if they were not."""

from __future__ import annotations

import pytest
import torch

from gpu_bench.values import sorting


@pytest.fixture(autouse=True)
def seven_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "AT_ONCE", 7)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (100,), (3, 64), (2, 2, 33)])
@pytest.mark.parametrize(("low", "high"), [(-3, 3), (0, 1), (-(2**60), 2**60)])
def test_rows_come_in_order(shape: tuple[int, ...], low: int, high: int) -> None:
    values = torch.randint(low, high, shape)
    assert torch.equal(sorting.in_order(values), values.sort(dim=-1).values)


def test_each_value_comes_once() -> None:
    values = torch.randint(-5, 5, (4, 50)).float()
    assert torch.equal(sorting.distinct(values), values.unique())


@pytest.mark.parametrize("shape", [(6,), (64,), (3, 50)])
def test_a_row_keeps_its_elements_in_another_order(shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    one, other = (sorting.permuted(values, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    for made in (one, other):
        assert torch.equal(made.sort(dim=-1).values, values)
        assert not torch.equal(made, values)
    assert not torch.equal(one, other)
