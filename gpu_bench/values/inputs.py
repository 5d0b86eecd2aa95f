"""Values to judge on, drawn from a family and a seed on the device where they are used.

The one idea: equal family, seed and knowledge of the inputs (`learning`) give equal tensors in every process, so no
tensor ever crosses one. Floats and complex numbers are replaced, integers and booleans within what the module takes.
Parameters and state move as well (`members`).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from gpu_bench.values import integers, sorting
from warpsmith.contract import words
from warpsmith.graphs import dtypes
from warpsmith.graphs.task_module import seed_generator
from warpsmith.models.proposed_values import BASES, OFFSETS, SCALES, SHARES, SPECIALS, Recipe, recipe_of
from warpsmith.v1 import judging_pb2, verdict_pb2

_LOOKED_AT, _FEW = 4096, 16
"""Elements of a float input in which no more different values than these are those of a mask."""
_NEAR = 1e-3
"""Of their root mean square, by which values are moved that have to stay near the task's."""
_BEYOND = 0.875
"""Share of rare floats that lie beyond what the task draws: branches hang on size far more often than on order."""
_NOT_FINITE = (math.inf, -math.inf, math.nan)

Draw = Callable[[Sequence[int], torch.dtype, torch.Generator], torch.Tensor]
"""(shape, float dtype, generator) → contiguous tensor of that shape, on the generator's device; in float32 of values
for floats of 8 bits."""

UNUSUAL = frozenset({
    verdict_pb2.VALUE_FAMILY_LARGE, verdict_pb2.VALUE_FAMILY_TINY, verdict_pb2.VALUE_FAMILY_NON_FINITE,
    verdict_pb2.VALUE_FAMILY_MASKED, verdict_pb2.VALUE_FAMILY_PROPOSED,
})  # fmt: skip
"""Families of extremes, which do not say what parameters and state a module takes."""


def family_name(family: verdict_pb2.ValueFamily.ValueType) -> str:
    """The family for people: "normal"."""
    return words.value_family(family)


def generator_for(
    family: verdict_pb2.ValueFamily.ValueType, seed: int, position: int, device: torch.device
) -> torch.Generator:
    """A generator of its own for one tensor of one case."""
    name = f"{seed} {int(family)} {position}".encode()
    mixed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1  # no tensor's tells another's
    return seed_generator(torch.Generator(device=device), mixed)


def replaced(
    leaves: Sequence[torch.Tensor],
    family: verdict_pb2.ValueFamily.ValueType,
    seed: int,
    learned: judging_pb2.Learned | None = None,
) -> list[torch.Tensor]:
    """The tensor inputs with values of the family, in the layout they had; TASK leaves them as they are.

    Of inputs of which nothing is `learned`, integers and booleans stay: anything else might be out of some range.
    FRESH masks and indices resemble the task's where another input varies by itself, else they are anything.
    """
    if family == verdict_pb2.VALUE_FAMILY_TASK:
        return list(leaves)
    known = learned.inputs if learned is not None else []
    restraint = restraint_of(learned, family) if learned is not None else judging_pb2.Restraint()
    resembling = any(each.varies for each in known)
    chosen = _with_handful(leaves, family, seed, known, restraint)
    made: dict[int, torch.Tensor] = {}
    for position, leaf in enumerate(leaves):
        if id(leaf) in made:
            continue  # a tensor passed twice stays one tensor: modules ask "is key query?"
        if chosen is not None and leaf is not chosen:
            made[id(leaf)] = leaf
            continue
        legal = known[position] if position < len(known) else None
        generator = generator_for(family, seed, position, leaf.device)
        values = _values(leaf, family, seed, legal, restraint, generator, resembling) if leaf.numel() else leaf
        made[id(leaf)] = leaf if values is leaf else _in_layout_of(leaf, values)
    return [made[id(leaf)] for leaf in leaves]


def restraint_of(learned: judging_pb2.Learned, family: verdict_pb2.ValueFamily.ValueType) -> judging_pb2.Restraint:
    """How a family is held back, where the reference refused what was drawn freely."""
    found = [each for each in learned.restraints if each.family == family]
    return found[0] if found else judging_pb2.Restraint(family=family)


def _with_handful(
    leaves: Sequence[torch.Tensor],
    family: verdict_pb2.ValueFamily.ValueType,
    seed: int,
    known: Sequence[judging_pb2.Legal],
    restraint: judging_pb2.Restraint,
) -> torch.Tensor | None:
    """The input that has the handful of the case, for who looks at one input must not learn of another; none in other
    cases, and where no input may have it."""
    is_rare = family == verdict_pb2.VALUE_FAMILY_RARE
    if not (is_rare or family == verdict_pb2.VALUE_FAMILY_NON_FINITE) or not integers.is_handful(seed):
        return None
    may = dict[int, torch.Tensor]()
    for position, leaf in enumerate(leaves):
        is_known = position < len(known) and not restraint.own_integers
        may_differ = is_rare and is_known and integers.may_be_rare(known[position])
        if leaf.numel() and (may_differ or leaf.is_floating_point() or leaf.is_complex()):
            may[id(leaf)] = leaf
    return [*may.values()][integers.whose_turn(seed, len(may))] if may else None


def _values(
    leaf: torch.Tensor,
    family: verdict_pb2.ValueFamily.ValueType,
    seed: int,
    legal: judging_pb2.Legal | None,
    restraint: judging_pb2.Restraint,
    generator: torch.Generator,
    resembling: bool,
) -> torch.Tensor:
    """Contiguous or expanded values for one input, or the input itself."""
    wide = dtypes.computable(leaf)
    values = _values_in(leaf.dtype, wide, family, seed, legal, restraint, generator, resembling)
    if wide is leaf:
        return values
    return leaf if values is wide else _of_8_bits(values, leaf.dtype)


def _values_in(
    dtype: torch.dtype,
    leaf: torch.Tensor,
    family: verdict_pb2.ValueFamily.ValueType,
    seed: int,
    legal: judging_pb2.Legal | None,
    restraint: judging_pb2.Restraint,
    generator: torch.Generator,
    resembling: bool,
) -> torch.Tensor:
    """As `_values`, for a leaf of `dtype` that has its values in one to compute with."""
    is_proposed = family == verdict_pb2.VALUE_FAMILY_PROPOSED
    is_handful = family == verdict_pb2.VALUE_FAMILY_NON_FINITE and integers.is_handful(seed)
    if not (leaf.is_floating_point() or leaf.is_complex()):
        if legal is None or restraint.own_integers or is_handful:
            return leaf
        named = _base_of(recipe_of(seed)) if is_proposed else family
        return integers.drawn(leaf, named, legal, generator, resembling=resembling, arrangement=seed)
    if family == verdict_pb2.VALUE_FAMILY_FRESH:
        return leaf if legal is None or legal.varies else _likeness(leaf, generator, resembling)
    if family == verdict_pb2.VALUE_FAMILY_RARE:
        return _rare(leaf, seed, restraint, legal, generator)
    if restraint.floats_near:
        return _near(leaf, generator)
    if restraint.floats_within and legal is not None and not leaf.is_complex():
        share = _uniform(leaf.shape, leaf.dtype, generator)
        return (share * (legal.most - legal.least) + legal.least).clamp_(legal.least, legal.most)
    if is_handful:
        return integers.with_few(leaf, functools.partial(_specials, arrangement=seed), seed, generator)
    draw = _proposed(recipe_of(seed)) if is_proposed else _DRAWS[family]
    if leaf.is_complex():
        part = leaf.dtype.to_real()
        return torch.complex(draw(leaf.shape, part, generator), draw(leaf.shape, part, generator))
    return draw(leaf.shape, dtype, generator)


def _of_8_bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded; what is too large is the largest, and so is an infinity where a type has none."""
    limits = torch.finfo(dtype)
    held = values.clamp(limits.min, limits.max)
    if dtype == torch.float8_e5m2:
        held = torch.where(values.isinf(), values, held)
    return held.to(dtype)


def _rare(
    leaf: torch.Tensor,
    arrangement: int,
    restraint: judging_pb2.Restraint,
    legal: judging_pb2.Legal | None,
    generator: torch.Generator,
) -> torch.Tensor:
    """The task's own values but for a few: beyond either end of their range, of the family of mixed magnitudes, zero or
    another small half, or the task's own from another place. Restrained floats are those, or anywhere in the range. In
    a handful of them each is another of these."""
    is_held, has_range = restraint.floats_within, legal is not None and not leaf.is_complex()

    def others(old: torch.Tensor) -> torch.Tensor:
        own = integers.elsewhere(leaf, old, generator)
        if is_held and not has_range:
            return own
        free = _values(old, verdict_pb2.VALUE_FAMILY_MIXED, 0, legal, restraint, generator, resembling=False)
        kind = _uniform(old.shape, torch.float32, generator)
        if is_held or legal is None or not has_range:
            return torch.where(kind < 0.5, own, free)
        if integers.is_handful(arrangement):
            turns = integers.turns_of(arrangement, old, 4)
            beyond = _beyond(old, legal, turns == 0, generator)
            return torch.where(turns < 2, beyond, torch.where(turns == 2, 0.0, torch.where(kind < 0.5, own, free)))
        is_above = _uniform(old.shape, torch.float32, generator) < 0.5
        free = torch.where(kind < 1 - _BEYOND, free, _beyond(old, legal, is_above, generator))
        halves = torch.randint(-8, 9, old.shape, device=old.device, generator=generator) / 2
        free = torch.where(kind < 0.7 * (1 - _BEYOND), halves.to(old.dtype), free)
        free = torch.where(kind < 0.5 * (1 - _BEYOND), 0.0, free)
        return torch.where(kind < 0.3 * (1 - _BEYOND), own, free)

    return integers.with_few(leaf, others, arrangement, generator)


def _beyond(
    old: torch.Tensor, legal: judging_pb2.Legal, is_above: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Finite values above what the task draws or below it, by a tenth of its range to a hundred times as much; in fp16
    to twice as much, whose squares overflow soon."""
    width, limits = (legal.most - legal.least) or abs(legal.most) or 1.0, torch.finfo(old.dtype)
    decades = 3.0 if limits.max > 1e30 else 1.3
    far = width * torch.pow(10.0, decades * _uniform(old.shape, torch.float64, generator) - 1.0)
    return torch.where(is_above, legal.most + far, legal.least - far).clamp_(limits.min, limits.max).to(old.dtype)


def _near(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The values of a float input, each moved by about a thousandth of what they are by root mean square."""
    if leaf.is_complex():
        return torch.complex(*(_near(part.contiguous(), generator) for part in (leaf.real, leaf.imag)))
    wide = leaf.double()
    size = wide[wide.isfinite()].square().mean().sqrt().nan_to_num(0.0)
    return (wide + _NEAR * size * _normal(leaf.shape, torch.float32, generator)).to(leaf.dtype)


def _likeness(leaf: torch.Tensor, generator: torch.Generator, resembling: bool) -> torch.Tensor:
    """Other values of the kind that a float input has which the task draws alike each time."""
    if leaf.is_complex():
        parts = [_likeness(part.contiguous(), generator, resembling) for part in (leaf.real, leaf.imag)]
        return torch.complex(*parts)
    flat = leaf.reshape(-1)
    few = sorting.distinct(flat[:_LOOKED_AT])
    if len(few) == 1 and bool((flat == few[0]).all()):
        varied = few[0] * (1.0 + 0.25 * _uniform(leaf.shape, leaf.dtype, generator))
        return varied if bool(few[0] != 0) else 0.1 * _normal(leaf.shape, leaf.dtype, generator)
    if len(few) <= _FEW or not bool(flat.isfinite().all()):  # a mask
        if not resembling:
            return flat[torch.randint(flat.numel(), leaf.shape, device=leaf.device, generator=generator)]
        if len(few) == 1:  # others come later
            few = sorting.distinct(flat)
        step = torch.randint(1, len(few), leaf.shape, device=leaf.device, generator=generator)

        def others(moved: torch.Tensor) -> torch.Tensor:
            return few[(torch.searchsorted(few, moved.contiguous()) + step) % len(few)]

        return integers.resemblance(leaf, others, generator)
    wide = flat.float() if leaf.itemsize < 4 else flat
    values = _normal(leaf.shape, leaf.dtype, generator) * float(wide.std()) + float(wide.mean())
    return values.clamp_(float(flat.min()), float(flat.max()))


def _in_layout_of(leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if any(stride == 0 and extent > 1 for stride, extent in zip(leaf.stride(), leaf.shape, strict=True)):
        # An expanded input repeats one value along that dimension: so does its replacement.
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in leaf.stride())
        return values[index].clone().expand(leaf.shape)
    if leaf.stride() == values.stride():
        return values
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(values)


def _normal(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=_drawn_in(dtype), device=generator.device, generator=generator)


def _uniform(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, dtype=_drawn_in(dtype), device=generator.device, generator=generator)


def _drawn_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in dtypes.FLOATS_OF_8_BITS else dtype


def _large(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    limit = torch.finfo(dtype).max / 2
    return (_normal(shape, dtype, generator) * min(1e4, limit / 2)).clamp_(-limit, limit)


def _tiny(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    scale = 1e-30 if torch.finfo(dtype).tiny < 1e-30 else torch.finfo(dtype).tiny
    return _normal(shape, dtype, generator) * scale


def _mixed(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    exponent = _uniform(shape, torch.float32, generator) * 8.0 - 4.0
    sign = torch.where(_uniform(shape, torch.float32, generator) < 0.5, -1.0, 1.0)
    return (sign * torch.pow(10.0, exponent)).to(_drawn_in(dtype))


def _constant_rows(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    rows = [*shape[:-1], 1] if shape else []
    return _normal(rows, dtype, generator).expand(list(shape)).contiguous()


def _non_finite(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = _normal(shape, dtype, generator)
    flat = values.view(-1)
    rows = flat.numel() // max(1, shape[-1] if shape else 1)
    count = min(flat.numel(), max(1, rows // 8))
    for special in _NOT_FINITE:
        where = torch.randint(max(1, flat.numel()), (count,), device=generator.device, generator=generator)
        if flat.numel():
            flat[where] = special
    return values


def _specials(old: torch.Tensor, arrangement: int) -> torch.Tensor:
    """An infinity or NaN in the place of each."""
    special = torch.tensor(_NOT_FINITE, dtype=old.dtype, device=old.device)
    return special[integers.turns_of(arrangement, old, len(special))]


def _masked(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    values = _normal(shape, dtype, generator)
    if not shape or values.numel() == 0:
        return values
    width = shape[-1]
    rows = values.view(-1, width)
    starts = torch.randint(1, width + 1, (rows.shape[0], 1), device=generator.device, generator=generator)
    if rows.shape[0] >= 8:
        starts[rows.shape[0] // 2] = 0  # one row is masked as a whole
    columns = torch.arange(width, device=generator.device)
    return rows.masked_fill_(columns >= starts, -math.inf).view(list(shape))


def _base_of(recipe: Recipe) -> verdict_pb2.ValueFamily.ValueType:
    return verdict_pb2.ValueFamily.Value(f"VALUE_FAMILY_{BASES[recipe.base].upper()}")


def _proposed(recipe: Recipe) -> Draw:
    """Scaled and shifted values of a family within the type's range, some of them replaced by a special one."""
    base = _DRAWS[_base_of(recipe)]

    def draw(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        limits = torch.finfo(dtype)
        values = base(shape, dtype, generator)
        scale, offset = min(SCALES[recipe.scale], limits.max), OFFSETS[recipe.offset]
        values.mul_(scale).add_(max(limits.min, min(offset, limits.max))).clamp_(limits.min, limits.max)
        special = SPECIALS[recipe.special]
        if special == "none":
            return values
        named = {"zero": 0.0, "negative_zero": -0.0, "largest": limits.max, "smallest": limits.tiny}
        chosen = _uniform(shape, torch.float32, generator) < SHARES[recipe.share]
        return values.masked_fill_(chosen, named[special] if special in named else float(special))

    return draw


_DRAWS: Mapping[int, Draw] = {
    verdict_pb2.VALUE_FAMILY_NORMAL: _normal,
    verdict_pb2.VALUE_FAMILY_UNIFORM: _uniform,
    verdict_pb2.VALUE_FAMILY_LARGE: _large,
    verdict_pb2.VALUE_FAMILY_TINY: _tiny,
    verdict_pb2.VALUE_FAMILY_MIXED: _mixed,
    verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS: _constant_rows,
    verdict_pb2.VALUE_FAMILY_NON_FINITE: _non_finite,
    verdict_pb2.VALUE_FAMILY_MASKED: _masked,
}
