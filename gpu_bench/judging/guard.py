"""Guarded memory for judging: every tensor of a program stands between canary bands, and is poisoned before use.

The one idea: memory is a function of two seeds. Runs that differ only in the poison show reads of memory that was
never written; runs that differ only in the canaries show reads outside a buffer; a band that changed shows a write.
Poison and canaries are plausible values of the buffer's own type, so that a kernel cannot recognise them. On a
processor an access farther out than a band hits pages that no process may access. It runs no programs.
"""

from __future__ import annotations

import functools
import mmap
import secrets
from dataclasses import dataclass

import torch

from gpu_bench.running.arena import Arena, arena
from warpsmith.graphs import dtypes
from warpsmith.v1 import tensor_pb2

_TILE = 8191
"""Elements after which poison repeats: prime, so that no row length hides it."""

_ALIGNMENT = 64
"""Bytes; torch's allocator gives memory at multiples of it."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor reread as integers of its width: equal exactly where all bits are, NaN included. Of complex numbers,
    real and imaginary parts along a last dimension of two."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type hold the same bits."""
    return bool(torch.equal(bits(left.contiguous()), bits(right.contiguous())))


def same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """As `same_bits`, but one NaN is as good as another: its sign and payload depend on the order of a sum."""
    if same_bits(left, right):
        return True
    if left.is_complex():
        left, right = (torch.view_as_real(each.resolve_conj()) for each in (left, right))
    if not left.is_floating_point():
        return False
    return bool(((left == right) & (left.signbit() == right.signbit()) | (left.isnan() & right.isnan())).all())


@dataclass(frozen=True)
class _Allocation:
    name: str
    raw: torch.Tensor
    """uint8: band, tensor, band."""
    start: int
    """Byte where the tensor begins."""
    span: int
    """Elements of the tensor's memory."""
    dtype: torch.dtype
    poisoned: bool

    def flat(self) -> torch.Tensor:
        """The tensor's memory as one row."""
        return self.raw[self.start : self.start + self.span * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True)
class Seeds:
    """Of the poison and the canaries of runs that are compared with each other. No program can know them beforehand."""

    poison: int
    other_poison: int
    """Differs from `poison` in every element."""
    canary: int
    other_canary: int

    @staticmethod
    def drawn() -> Seeds:
        """Fresh ones."""
        poison, canary = 2 * secrets.randbelow(1 << 29), 2 * secrets.randbelow(1 << 29)
        return Seeds(poison, poison + 1, canary, canary + 1)


class GuardedMemory:
    """Memory of one run.

    `poison`: seed of the poison. `canary`: seed of the bands; even seeds give large negative values, odd ones large
    positive, so that neither a maximum nor a minimum that reads past the end goes unseen. `place`: of a processor,
    where all of it lies; by default where kernels may write.
    """

    def __init__(self, device: torch.device, poison: int, canary: int, place: Arena | None = None) -> None:
        self._place = place
        self._device = device
        self._poison = poison
        self._canary = canary
        self._band = (16 << 10) if device.type == "cpu" else (64 << 10)
        self._allocations: list[_Allocation] = []
        self._storages: dict[int, _Allocation] = {}
        self._zeros: dict[str, torch.Tensor] = {}

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`, full of poison."""
        span = dtypes.element_span(spec)
        dtype = dtypes.to_torch(spec.dtype)
        flat = self._allocate(name, span, dtype, poisoned=True)
        if span:
            _poison(flat, self._poison)
        return flat.as_strided(list(spec.shape), list(spec.strides))

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.zeros`."""
        flat = self._allocate(name, dtypes.element_span(spec), dtypes.to_torch(spec.dtype), poisoned=False).zero_()
        self._zeros[name] = flat
        return flat.as_strided(list(spec.shape), list(spec.strides))

    def dirty(self) -> list[str]:
        """Names of the workspaces that had to be left zero and were not."""
        return [name for name, flat in self._zeros.items() if bool(bits(flat).any())]

    def copy_of(self, name: str, tensor: torch.Tensor, *, aligned: bool = True) -> torch.Tensor:
        """A guarded copy of a tensor, strides kept, overlapping ones included; unless `aligned`, as oddly placed."""
        spec = dtypes.spec_of(tensor)
        span = dtypes.element_span(spec)
        shift = 0 if aligned else tensor.data_ptr() % _ALIGNMENT
        flat = self._allocate(name, span, tensor.dtype, poisoned=False, shift=shift)
        if span:
            flat.copy_(tensor.as_strided((span,), (1,)))
        return flat.as_strided(tensor.shape, tensor.stride())

    def poison_again(self, seed: int) -> None:
        """Makes of outputs and workspaces what they were before the first call, with another poison."""
        self._poison = seed
        for flat in self._zeros.values():
            flat.zero_()
        for allocation in self._allocations:
            if allocation.poisoned and allocation.span:
                _poison(allocation.flat(), seed)

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As `Memory.adopt`: a result with memory of its own moves behind canaries; a view stays a view."""
        if tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in self._storages:
            return tensor
        if not dtypes.is_supported(tensor.dtype):
            return tensor
        return self.copy_of(name, tensor)

    def broken(self) -> list[str]:
        """Names of the tensors with a band that was written, in order."""
        return [allocation.name for allocation in self._allocations if not self._intact(allocation)]

    def still_poisoned(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Where `tensor` still holds the poison, if only in a part of a complex number, as a bool tensor of its shape;
        None when it was never poisoned."""
        allocation = self._storages.get(tensor.untyped_storage().data_ptr())
        if allocation is None or not allocation.poisoned or tensor.dtype != allocation.dtype:
            return None
        if tensor.numel() == allocation.span and tensor.is_contiguous():
            return _holds_poison(tensor.reshape(-1), self._poison).view(tensor.shape)
        pattern = torch.empty(allocation.span, dtype=allocation.dtype, device=self._device)
        _poison(pattern, self._poison)
        offset = tensor.storage_offset() - allocation.start // tensor.element_size()
        expected = pattern.as_strided(tensor.shape, tensor.stride(), offset)
        found = bits(tensor.contiguous()) == bits(expected.contiguous())
        return found.any(-1) if tensor.is_complex() else found

    def _allocate(self, name: str, span: int, dtype: torch.dtype, *, poisoned: bool, shift: int = 0) -> torch.Tensor:
        size = span * dtype.itemsize
        raw = self._raw(self._band + shift + size + self._band)
        allocation = _Allocation(name, raw, self._band + shift, span, dtype, poisoned)
        self._allocations.append(allocation)
        self._storages[raw.untyped_storage().data_ptr()] = allocation
        for band in self._bands(allocation):
            band.copy_(self._pattern(dtype, band.numel()))
        return allocation.flat()

    def _raw(self, size: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return (self._place or arena()).raw(size)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _bands(self, allocation: _Allocation) -> tuple[torch.Tensor, torch.Tensor]:
        end = allocation.start + allocation.span * allocation.dtype.itemsize
        return allocation.raw[: allocation.start], allocation.raw[end:]

    def _pattern(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        # The band behind a tensor of a processor reaches to the end of its page.
        return _canary_pattern(dtype, self._canary, self._device, self._band + mmap.PAGESIZE + _ALIGNMENT)[:size]

    def _intact(self, allocation: _Allocation) -> bool:
        kind = allocation.dtype
        return all(bool(torch.equal(band, self._pattern(kind, band.numel()))) for band in self._bands(allocation))


@functools.lru_cache(maxsize=64)
def _canary_pattern(dtype: torch.dtype, seed: int, device: torch.device, size: int) -> torch.Tensor:
    dtype = dtype.to_real()
    count = size // dtype.itemsize
    generator = torch.Generator().manual_seed(seed * 2 + 1)
    if dtype.is_floating_point:
        values = (1.0 + torch.rand(count, generator=generator)) * (1e4 if seed % 2 else -1e4)
    elif dtype == torch.bool:
        values = torch.full((count,), float(seed % 2))
    else:
        values = torch.randint(0, 8, (count,), generator=generator) + (8 if seed % 2 else 0)
    return values.to(dtype).view(torch.uint8).to(device)


@functools.lru_cache(maxsize=64)
def _poison_tile(dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    if dtype.is_complex:
        part = _poison_tile(dtype.to_real(), seed, device)
        return torch.complex(part, part)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        signs = torch.randn(_TILE, generator=torch.Generator().manual_seed(seed // 2))
        values = torch.randn(_TILE, generator=generator)
        tile = values.copysign(-signs if seed % 2 else signs).to(dtype)  # seeds 2k and 2k + 1 differ in every element
    elif dtype == torch.bool:
        tile = torch.rand(_TILE, generator=torch.Generator().manual_seed(seed // 2)) < 0.5
        tile = tile ^ bool(seed % 2)
    else:
        tile = torch.randint(0, 4, (_TILE,), generator=torch.Generator().manual_seed(seed // 2))
        tile = (tile + (4 if seed % 2 else 0)).to(dtype)
    return tile.to(device)


def _poison(flat: torch.Tensor, seed: int) -> None:
    """Fills a flat tensor with the poison, tile after tile."""
    tile = _poison_tile(flat.dtype, seed, flat.device)
    whole = flat.numel() // _TILE * _TILE
    flat[:whole].view(-1, _TILE).copy_(tile)
    flat[whole:].copy_(tile[: flat.numel() - whole])


def _holds_poison(flat: torch.Tensor, seed: int) -> torch.Tensor:
    """Where a flat tensor holds what `_poison` wrote, bit by bit; of a complex number, in either part."""
    if flat.is_complex():
        real, imaginary = (_holds_poison(part.contiguous(), seed) for part in torch.view_as_real(flat).unbind(-1))
        return real | imaginary
    tile = bits(_poison_tile(flat.dtype, seed, flat.device))
    held, whole = bits(flat), flat.numel() // _TILE * _TILE
    found = torch.empty(flat.shape, dtype=torch.bool, device=flat.device)
    torch.eq(held[:whole].view(-1, _TILE), tile, out=found[:whole].view(-1, _TILE))
    torch.eq(held[whole:], tile[: flat.numel() - whole], out=found[whole:])
    return found
