"""Parameters and state of a case: other values than the constructor's, as training or another seed would leave them.

The one idea: what a constructor gives says little. A gain of ones, a branch behind a factor of 1e-6 and the zeros of an
identity are where training begins, and a table that it draws is another for another seed: a kernel that counts on them
must not pass. What the constructor makes alike whatever the seed is part of the module: a causal mask stays one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from gpu_bench.values import inputs
from warpsmith.graphs import dtypes
from warpsmith.v1 import judging_pb2, verdict_pb2

AS_TRAINED = frozenset({verdict_pb2.VALUE_FAMILY_MIXED, verdict_pb2.VALUE_FAMILY_RARE})
"""Families in which parameters are as training may leave them, and state is as drawn from another seed, as far as the
module takes them. Unusual families have what it takes of RARE: as in timed calls, so that nothing tells those."""

_SMALL, _ORDINARY = 1e-3, 0.1
"""Magnitude below which all of a parameter is taken for where training begins, and the one that it then gets."""
_STEPS = 7
"""That a count or a position in state is moved on by, at most."""
_GROWN_TENSORS, _GROWN_ROWS = 8, 8
"""Parameters of which some rows are larger than the constructor makes any, about, and one row of how many that is."""
_GROWTH = (3.0, 8.0)
"""How many times as large those are."""
_ONE_SIDED = 0.9
"""Share of a parameter's elements of one sign from which on it has that one for its beginning."""


def vary(
    tensors: Mapping[str, torch.Tensor],
    family: verdict_pb2.ValueFamily.ValueType,
    seed: int,
    *,
    trainable: Collection[str] = (),
    drawn: Mapping[str, torch.Tensor] = MappingProxyType({}),
    learned: judging_pb2.Learned | None = None,
    is_timed: bool = False,
) -> None:
    """Moves parameters and state (by qualified name) in place, for families other than TASK and FRESH.

    Floats are scaled by up to a quarter, which leaves signs, zeros of masks and infinities; what is zero as a whole (a
    bias, a running mean) gets small normal values. As training may leave them, those that are `trainable` also
    get an ordinary size, both signs and no zeros, and a few of them some rows several times as large; state is what is
    `drawn` from another seed, and counts are farther on, as far as what is `learned` allows. `is_timed`: a single
    number then keeps its sign, which may decide what there is to compute.
    """
    known = learned or judging_pb2.Learned()
    if family in inputs.UNUSUAL and not inputs.restraint_of(known, family).own_state:
        family = verdict_pb2.VALUE_FAMILY_RARE
    if family in (verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_FRESH, *inputs.UNUSUAL):
        return
    restraint, as_trained = inputs.restraint_of(known, family), family in AS_TRAINED
    signed = trainable if restraint.own_signs else {*restraint.signed_parameters}
    is_drawn = as_trained and not restraint.own_state
    counts = {*known.written_state} if as_trained and not restraint.own_integers else set()
    rows = sum(name in trainable and _has_rows(tensor) for name, tensor in tensors.items())
    seen: set[int] = set()
    for position, (name, tensor) in enumerate(sorted(tensors.items())):
        if tensor.numel() == 0 or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        generator = inputs.generator_for(family, seed, 1_000 + position, tensor.device)
        with torch.no_grad():
            if is_drawn and name in drawn:
                tensor.copy_(drawn[name])
            if tensor.is_floating_point() or tensor.is_complex():
                held = dtypes.computable(tensor)
                _scale(held, generator)
                if as_trained and name in trainable and not held.is_complex():
                    _grow(held)
                    if name not in signed and _has_rows(held):
                        _grow_rows(held, _GROWN_TENSORS / rows, generator)
                    if name not in signed and held.numel() > 1:
                        _change_signs(held, generator)
                    elif name not in signed and family == verdict_pb2.VALUE_FAMILY_RARE and not is_timed:
                        held.neg_()
                if held is not tensor:
                    limits = torch.finfo(tensor.dtype)
                    tensor.copy_(held.clamp_(limits.min, limits.max))
            elif name in counts and is_count(tensor):
                tensor.add_(torch.randint(1, _STEPS + 1, (), generator=generator, device=tensor.device))


def is_count(tensor: torch.Tensor) -> bool:
    """Whether a buffer is one integer, as a count of calls or a position in a cache."""
    return tensor.numel() == 1 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def is_of_one_value(tensor: torch.Tensor) -> bool:
    """Whether all elements are equal, or there are none: as no buffer is that follows from a seed."""
    flat = tensor.reshape(-1)
    return bool((flat == flat[:1]).all())


def has_signs(tensor: torch.Tensor) -> bool:
    """Whether a parameter has zeros or a sign that training may change."""
    if not tensor.is_floating_point() or is_zero(tensor):
        return False
    return bool((tensor == 0).any()) or _is_one_sided(dtypes.computable(tensor))


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether all elements are zero."""
    return not bool((tensor != 0).any())


def _is_one_sided(tensor: torch.Tensor) -> bool:
    above, below = int((tensor > 0).sum()), int((tensor < 0).sum())
    return max(above, below) >= _ONE_SIDED * (above + below)


def _scale(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if is_zero(tensor):
        tensor.copy_(0.1 * _normal(tensor, generator))
    else:
        tensor.mul_(1.0 + 0.25 * _uniform(tensor, generator))


def _grow(tensor: torch.Tensor) -> None:
    """What is small throughout gets an ordinary size."""
    most = float(tensor.abs().max())
    if 0 < most < _SMALL:
        tensor.mul_(_ORDINARY / most)


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.numel() > 0 and tensor.is_floating_point()


def _grow_rows(tensor: torch.Tensor, chance: float, generator: torch.Generator) -> None:
    """By chance some rows get larger, as without a bound on them training makes them."""
    count = tensor.shape[0]
    least, most = _GROWTH
    draws = torch.rand(2 + count, device=tensor.device, generator=generator)
    if float(draws[0]) < chance:
        grown = draws[2:] <= max(1 / _GROWN_ROWS, float(draws[2:].min()))
        factors = torch.where(grown, least + (most - least) * draws[1], 1.0)
        tensor.mul_(factors.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)))


def _change_signs(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Of one sign there are two afterwards, and no zeros; what is not finite stays as it is."""
    if not bool(tensor.isfinite().all()):
        return
    zeros = tensor == 0
    if _is_one_sided(tensor):
        tensor.mul_(torch.where(_uniform(tensor, generator) < 0.5, -1.0, 1.0).to(tensor.dtype))
    if bool(zeros.any()):
        size = 0.5 * float(tensor.float().square().mean().sqrt())
        tensor.copy_(torch.where(zeros, size * _normal(tensor, generator), tensor))


def _normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)
