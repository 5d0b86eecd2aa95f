"""How far elements are off that are small beside the rest of an output: by their own magnitude.

The one idea: a column of ids or of pixels beside one of scores sets the yardstick for both, and nothing that is done to
the scores shows in it. So elements below what it resolves are gathered by the magnitude of their truth, and held to
eager's error there, or to three digits, whichever is more. Of a large output some blocks speak for all, drawn anew.
In 16 bits they are gathered by what is usual beside them, in a row, a plane or a channel: of sums whose terms cancel
out nothing is left where terms are rounded to 16 bits, and one of two right kernels rounds them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence

import torch

_BINADES = 8
"""Powers of two that count as one magnitude."""
_RESOLVED = 2.0**12
"""Elements that are so many times the yardstick show in it."""
_DIGITS = 2.0**-13
"""Relative error that is always allowed: less than a rounding to bf16 makes, more than a fast function does."""
_EVEN, _LEAST_BESIDE = 1 / 8, 16
"""Of the rms that is usual where elements are of one magnitude (of normal numbers 0.4), and how many of them tell."""
_SPARED = 0.05
"""Of the elements of a magnitude that are alone with it, how many may be right where the others are wrong: a product of
something small by chance and of something small is as far off as the first."""
_PER_OCTAVE, _LEVELS = 4, 97
"""Levels of how many times an element is off, from 2**-4 to 2**20."""
_LEAST_COUNT = 256
"""Elements of a magnitude: the error of few is small by luck."""
_LOWEST, _BINS = -1100, 2200 // _BINADES
_MOST_ELEMENTS = 1 << 19
"""That are looked at, about."""


class Magnitudes:
    """Of one output of `count` elements, chunk by chunk; `block`: elements that are taken together; `shape`: of all;
    `dtype`: whose roundings count."""

    def __init__(self, count: int, block: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._share, self._block, self._shape = min(1.0, _MOST_ELEMENTS / count), block, shape
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))
        self._sums: torch.Tensor | None = None
        """float64 [magnitudes, 5]: squares of the errors of candidate, eager and rounding, and of truth; count."""
        self._alone: torch.Tensor | None = None
        """[magnitudes, levels]: elements that are alone with their magnitude in 16 bits, by how far they are off."""

    def add(self, candidate: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, start: int = 0) -> None:
        """Takes flat tensors in, from element `start` on."""
        (candidate, eager, truth), places = self._drawn(candidate, eager, truth)
        truth = truth.double()
        rounded = truth.to(self._dtype)
        counts = torch.isfinite(truth) & torch.isfinite(candidate) & torch.isfinite(eager) & (truth != 0.0)
        known = torch.where(counts, truth, 1.0)
        sizes = known.abs()
        if self._dtype.itemsize < 4:
            sizes, is_alone = _usual_beside(sizes, counts, start + places, self._shape)
            step = torch.finfo(self._dtype).eps / 4
            self._add_alone(candidate - known, eager - known, sizes, step, counts & is_alone)
            counts = counts & ~is_alone
        bins = _bins(sizes)
        columns = [torch.where(counts, each - known, 0.0).square() for each in (candidate, eager, rounded)]
        columns += [torch.where(counts, known, 0.0).square(), counts.double()]
        sums = torch.stack([torch.bincount(bins, column, _BINS) for column in columns], dim=1)
        self._sums = sums if self._sums is None else self._sums + sums

    def _add_alone(
        self, off: torch.Tensor, own: torch.Tensor, sizes: torch.Tensor, step: float, is_alone: torch.Tensor
    ) -> None:
        """Counts how far each of those elements is off, in errors of eager's or in roundings."""
        times = off.abs() / torch.maximum(own.abs(), step * sizes)
        level = (_PER_OCTAVE * times.clamp(2.0**-4, 2.0**20).log2()).floor().long() + 4 * _PER_OCTAVE
        places = (_bins(sizes) * _LEVELS + level)[is_alone]
        alone = torch.bincount(places, minlength=_BINS * _LEVELS).view(_BINS, _LEVELS)
        self._alone = alone if self._alone is None else self._alone + alone

    def ratio(self, yardstick: float, part: float, least: float, usual: Magnitudes | None = None) -> float:
        """The largest rms error of a magnitude that `yardstick` does not resolve over what it may be, of which `part`
        is the share that eager's errors have and `least` the least; 0 where there is none of enough elements. `usual`
        has eager's errors on other values, which count as well."""
        if self._sums is None:
            return 0.0
        off, own, rounding, size, count = self._sums.cpu().unbind(dim=1)
        tops = 2.0 ** (torch.arange(1, _BINS + 1, dtype=torch.float64) * _BINADES + _LOWEST).clamp(max=1000.0)
        is_unresolved = tops < _RESOLVED * yardstick
        is_small, alone = is_unresolved & (count >= _LEAST_COUNT), self._alone_ratio(is_unresolved)
        if not bool(is_small.any()):
            return alone
        off, own, rounding, size = ((each / count).sqrt()[is_small] for each in (off, own, rounding, size))
        if usual is not None and usual._sums is not None:
            _, squares, _, _, counts = usual._sums.cpu().unbind(dim=1)
            own = torch.maximum(own, (squares / counts.clamp(min=1.0)).sqrt()[is_small])
        allowed = torch.stack([part * own, rounding, _DIGITS * size, torch.full_like(own, least)]).amax(dim=0)
        return max(alone, float((off / allowed).max()))

    def _alone_ratio(self, is_unresolved: torch.Tensor) -> float:
        """How far nearly all elements of some magnitude are off at least, of those that are alone with theirs."""
        if self._alone is None:
            return 0.0
        alone = self._alone.cpu()
        alone = alone[is_unresolved & (alone.sum(dim=1) >= _LEAST_COUNT)]
        if not len(alone):
            return 0.0
        levels = (alone.cumsum(dim=1) > _SPARED * alone.sum(dim=1, keepdim=True)).int().argmax(dim=1)
        return float(2.0 ** (int(levels.max()) / _PER_OCTAVE - 4))

    def _drawn(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Some blocks of each, the same ones, and the places of their elements; all where there are few."""
        whole, device = tensors[0].numel() // self._block, tensors[0].device
        if self._share == 1.0 or not whole:
            return list(tensors), torch.arange(tensors[0].numel(), device=device)
        rows = torch.randint(whole, (math.ceil(self._share * whole),), generator=self._generator)
        rows = rows.to(device)
        drawn = [each[: whole * self._block].view(whole, self._block)[rows].reshape(-1) for each in tensors]
        return drawn, (rows[:, None] * self._block + torch.arange(self._block, device=device)).reshape(-1)


def _usual_beside(
    sizes: torch.Tensor, counts: torch.Tensor, places: torch.Tensor, shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least size that is usual in what an element is part of; its own where none of these is of one magnitude, and
    whether that is so.

    The mean of power -1/4, which is far below the rms where a tenth of the elements is small.
    """
    roots, squares = (torch.where(counts, sizes**power, 0.0) for power in (-0.25, 2.0))
    usual = torch.full_like(sizes, math.inf)
    for parts in _parts(places, shape):
        of_each = parts.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
        count, root, square = (of_each.bincount(each) for each in (counts.double(), roots, squares))
        mean = (count / root) ** 4
        is_even = (count >= _LEAST_BESIDE) & (mean >= _EVEN * (square / count).sqrt())
        usual = torch.minimum(usual, torch.where(is_even, mean, math.inf)[of_each])
    is_alone = usual.isinf()
    return torch.where(is_alone, sizes, usual), is_alone


def _bins(sizes: torch.Tensor) -> torch.Tensor:
    return (sizes.log2().floor().long() - _LOWEST) // _BINADES


def _parts(places: torch.Tensor, shape: Sequence[int]) -> Iterator[torch.Tensor]:
    """Numbers of what elements are part of: those with the same index of one dimension, or of several leading ones, and
    all."""
    stride = 1
    for number, extent in reversed(list(enumerate(shape))):
        if extent > 1:
            yield places // stride % extent
            if number and stride > 1:
                yield places // stride
        stride *= extent
    yield torch.zeros_like(places)
