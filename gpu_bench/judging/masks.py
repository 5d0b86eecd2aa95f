"""What masks leave open: results of NaN and infinities that a kernel may give by skipping what is masked, or by adding.

The one idea: 0 * NaN is NaN to PyTorch where it multiplies, and nothing to a kernel that never reads what a mask has
taken out, PyTorch's own attention among them, which also gives zeros for a row of scores of which nothing is left. And
a score of NaN is gone where it is filled, and stays where minus infinity is added. All are right. What a factor other
than zero meets stays as it is, a softmax that is no factor does, and so does what is filled otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warpsmith.graphs import dtypes

_FACTORS: Mapping[Callable[..., Any], tuple[int, int]] = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.mv.default: (0, 1),
    torch.ops.aten.dot.default: (0, 1),
    torch.ops.aten.mul.Tensor: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.baddbmm.default: (1, 2),
    torch.ops.aten.addmv.default: (1, 2),
}
"""Products → which arguments are factors; one ahead of them is a summand."""
_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
_FILLS = frozenset({torch.ops.aten.masked_fill.Scalar, torch.ops.aten.masked_fill.Tensor})
_FILL = -1e4
"""A score that is filled with this or less counts for nothing."""
_ZERO = torch.finfo(torch.float32).tiny
"""Magnitude below which a factor in float64 is zero to a kernel in fp32."""
_WITHIN = {torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Of its size and of the mean, that a result may be off; 1e-3 of all other types."""


class Skipped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, factors of zero leave out what they meet, in float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._softmaxes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By address the result, and which of its elements are of rows of which nothing is left."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain, places = func(*args, **(kwargs or {})), _FACTORS.get(func)
        gone: torch.Tensor | None = None
        if func is torch.ops.aten._softmax.default:
            gone = (args[0] == -torch.inf).all(args[1], keepdim=True)
        elif func in _COPIES:
            gone = self._gone_of(args[0])
        if gone is not None and bool(gone.any()):
            self._softmaxes[plain.data_ptr()] = plain, torch.zeros_like(plain, dtype=torch.bool) | gone
        if places is None or not all(_is_wide(args[place]) for place in places):
            return plain
        left, right = (self._left_of(args[place]) for place in places)
        odd = [~factor.isfinite() for factor in (left, right)]
        if bool(plain.isfinite().all()):
            return plain

        def product(one: torch.Tensor, other: torch.Tensor, *ahead: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = func(*ahead, one.double(), other.double(), **(kwargs or {}))
            return made

        ahead = args[: places[0]]
        nothing = [torch.zeros_like(each) for each in ahead]
        met = product(odd[0], _is_there(right), *nothing).abs() + product(_is_there(left), odd[1], *nothing).abs()
        clean = product(left.masked_fill(odd[0], 0.0), right.masked_fill(odd[1], 0.0), *ahead)
        return torch.where(met > 0, plain, clean)

    def _left_of(self, factor: torch.Tensor) -> torch.Tensor:
        """A factor, zero where it is a softmax's row of which nothing is left."""
        gone = self._gone_of(factor)
        return factor if gone is None else factor.masked_fill(gone, 0.0)

    def _gone_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Which elements of a view of a softmax are of such rows; None for other tensors."""
        result, gone = self._softmaxes.get(tensor.data_ptr(), (None, None))
        if result is None or gone is None or tensor.numel() != result.numel() or gone.stride() != result.stride():
            return None
        return gone.as_strided(tensor.shape, tensor.stride())


class Added(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a mask of large negative numbers is added to what it would take the place of."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain = func(*args, **(kwargs or {}))
        if func in _FILLS:
            scores, mask, fill = args
        elif func is torch.ops.aten.where.self:
            mask, fill, scores = args
            if not _is_fill(fill):
                mask, scores, fill = ~mask, fill, scores
        else:
            return plain
        if not _is_fill(fill) or not _is_wide(scores):
            return plain
        return torch.where(mask & ~scores.isfinite(), scores + fill, plain)


def excused(candidate: torch.Tensor, truth: torch.Tensor, skipped: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The candidate's values, and the truth's where that is not finite and the candidate is what was `skipped` to.

    The truth's also where the candidate is NaN as is what was `added`, if it is so nowhere else: of tiles some may be
    skipped, and others added to.

    All but the candidate are float64; all have one shape and one device. Returns the candidate's type.
    """
    size = skipped.abs().nan_to_num_(0.0, 0.0, 0.0)
    reach = _WITHIN.get(candidate.dtype, 1e-3) * (size + size.mean())
    given = dtypes.computable(candidate)
    is_open = ~truth.isfinite() & ((given - skipped).abs() <= reach)
    if not bool((given.isnan() & ~added.isnan() & truth.isfinite()).any()):
        is_open |= given.isnan() & added.isnan()
    return torch.where(is_open, truth.to(candidate.dtype), candidate)


def _is_wide(factor: object) -> bool:
    return isinstance(factor, torch.Tensor) and factor.dtype == torch.float64


def _is_there(factor: torch.Tensor) -> torch.Tensor:
    return ~(factor.abs() < _ZERO)


def _is_fill(value: object) -> bool:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return isinstance(number, int | float) and number <= _FILL
