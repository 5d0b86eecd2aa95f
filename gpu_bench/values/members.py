"""Parameters and state of a case: other values than the constructor's, as training or another seed would leave them.

The one idea: what a constructor gives says little. A gain of ones, a branch behind a factor of 1e-6 and the zeros of an
identity are where training begins, and a table that it draws is another for another seed: a kernel that counts on them
must not pass. What the constructor makes alike whatever the seed is part of the module: a causal mask stays one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from gpu_bench.values import inputs, sorting
from warpsmith.v1 import judging_pb2, verdict_pb2

AS_TRAINED = frozenset({verdict_pb2.VALUE_FAMILY_MIXED, verdict_pb2.VALUE_FAMILY_RARE})
"""Families in which parameters are as training may leave them, and state is as drawn from another seed."""

_SMALL, _ORDINARY = 1e-3, 0.1
"""Magnitude below which all of a parameter is taken for where training begins, and the one that it then gets."""
_STEPS = 7
"""That a count or a position in state is moved on by, at most."""
_FEW, _LOOKED_AT = 16, 4096
"""Elements of a float buffer in which no more different values than these are those of a mask or a code book."""


def vary(
    tensors: Mapping[str, torch.Tensor],
    family: verdict_pb2.ValueFamily.ValueType,
    seed: int,
    *,
    trainable: Collection[str] = (),
    learned: judging_pb2.Learned | None = None,
) -> None:
    """Moves parameters and state (by qualified name) in place, for plain families other than TASK.

    Floats are scaled by up to a quarter, which leaves signs, zeros of masks and infinities; what is zero as a whole (a
    bias, a running mean) gets small normal values. In families that are `AS_TRAINED` those that are `trainable` also
    get an ordinary size, both signs and no zeros, state that is drawn is in another order, and counts are farther on,
    as far as what is `learned` allows.
    """
    if family == verdict_pb2.VALUE_FAMILY_TASK or family not in inputs.PLAIN:
        return
    known = learned or judging_pb2.Learned()
    restraint, as_trained = inputs.restraint_of(known, family), family in AS_TRAINED
    drawn, counts = ({*known.drawn_state}, {*known.written_state}) if as_trained else (set(), set())
    if restraint.own_integers:
        drawn, counts = set(), set()
    seen: set[int] = set()
    for position, (name, tensor) in enumerate(sorted(tensors.items())):
        if tensor.numel() == 0 or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        generator = inputs.generator_for(family, seed, 1_000 + position, tensor.device)
        with torch.no_grad():
            if name in drawn:
                _shuffle(tensor, generator)
            if tensor.is_floating_point() or tensor.is_complex():
                _scale(tensor, generator)
                if as_trained and name in trainable and not tensor.is_complex():
                    _train(tensor, generator, own_signs=restraint.own_signs)
            elif name in counts and is_count(tensor):
                tensor.add_(torch.randint(1, _STEPS + 1, (), generator=generator, device=tensor.device))


def is_count(tensor: torch.Tensor) -> bool:
    """Whether a buffer is one integer, as a count of calls or a position in a cache."""
    return tensor.numel() == 1 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def may_be_drawn(tensor: torch.Tensor) -> bool:
    """Whether a buffer is of the kind that another order tells apart: integers, or few values, and in no order."""
    if tensor.numel() < 2 or tensor.is_complex():
        return False
    flat = tensor.reshape(-1)
    if bool((flat == flat[0]).all()) or bool((tensor[..., 1:] >= tensor[..., :-1]).all()):
        return False
    return not tensor.is_floating_point() or len(sorting.distinct(flat[:_LOOKED_AT])) <= _FEW


def _shuffle(tensor: torch.Tensor, generator: torch.Generator) -> None:
    order = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)
    tensor.copy_(tensor.reshape(-1)[order].view(tensor.shape))


def _scale(tensor: torch.Tensor, generator: torch.Generator) -> None:
    if bool((tensor == 0).all()):
        tensor.copy_(0.1 * _normal(tensor, generator))
    else:
        tensor.mul_(1.0 + 0.25 * _uniform(tensor, generator))


def _train(tensor: torch.Tensor, generator: torch.Generator, *, own_signs: bool) -> None:
    """What is small throughout gets an ordinary size; then zeros go, and of one sign there are two."""
    most = float(tensor.abs().max())
    if not 0 < most < float("inf"):  # false for NaN, too
        return
    if most < _SMALL:
        tensor.mul_(_ORDINARY / most)
    if own_signs:
        return
    zeros = tensor == 0
    if bool(zeros.any()):
        size = 0.5 * float(tensor.float().square().mean().sqrt())
        tensor.copy_(torch.where(zeros, size * _normal(tensor, generator), tensor))
        return
    if bool((tensor > 0).all()) or bool((tensor < 0).all()):
        tensor.mul_(torch.where(_uniform(tensor, generator) < 0.5, -1.0, 1.0).to(tensor.dtype))


def _normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)
