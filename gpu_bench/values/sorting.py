"""Sorting of any size: on a GPU PyTorch sorts rows of at most INT_MAX elements, and selects by masks of as many.

The one idea: what is longer is cut at a pivot. It decides nothing about values.
"""

from __future__ import annotations

import math

import torch

AT_ONCE = 1 << 28
"""Elements of a row that are sorted, or selected from, in one go."""
_SAMPLED = 1 << 12


def in_order(values: torch.Tensor) -> torch.Tensor:
    """Each row (along the last dimension) from the least to the greatest; same shape and dtype, no NaN."""
    if not values.dim() or values.shape[-1] <= AT_ONCE:
        return values.sort(dim=-1).values
    return torch.stack([_row_in_order(row) for row in values.reshape(-1, values.shape[-1])]).reshape(values.shape)


def _row_in_order(row: torch.Tensor) -> torch.Tensor:
    if len(row) <= AT_ONCE:
        return row.sort().values
    sample = row[:: max(len(row) // _SAMPLED, 1)].sort().values
    pivot = sample[len(sample) // 2]
    below, above = (torch.cat([part[cut(part, pivot)] for part in _parts(row)]) for cut in (torch.lt, torch.gt))
    same = pivot.expand(len(row) - len(below) - len(above))
    return torch.cat([_row_in_order(below), same, _row_in_order(above)])


def distinct(values: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, each once and in order, 1-D."""
    parts = [part.unique() for part in _parts(values.reshape(-1))]  # type: ignore[no-untyped-call]
    return torch.cat(parts).unique()  # type: ignore[no-untyped-call,no-any-return]


def permuted(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each row in another order: any where it is short enough to be sorted, else by a random step through it."""
    width = values.shape[-1]
    if width <= AT_ONCE:
        keys = torch.rand(values.shape, generator=generator, device=generator.device)
        return values.gather(-1, keys.argsort(dim=-1))
    while True:
        step, begin = torch.randint(width // 4, width // 2, (2,), generator=generator, device=generator.device).tolist()
        if math.gcd(step, width) == 1:
            places = torch.arange(width, device=values.device).mul_(step).add_(begin).remainder_(width)
            return torch.cat([values.index_select(-1, part) for part in _parts(places)], dim=-1)


def _parts(row: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return row.split(AT_ONCE)  # type: ignore[no-untyped-call,no-any-return]
