"""Transposed convolutions as windows that slide by one, phase by phase.

The one idea: with a stride, output `o` meets those elements of the weight that its phase, `(o + padding) mod stride`,
says. Outputs of one phase are an ordinary convolution, by elements of their own: so an axis of outputs is taken for
two, positions and phases, and what is seen is told for phase 0 alone: another one sees it some positions away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.convolution import factors
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import Atom, Axis, Bound, Call, Expression, Index, Load, Nest, Windowed


@dataclass(frozen=True)
class Phase:
    """What outputs of a phase meet along a dimension."""

    first: int
    """Of a window's elements."""
    size: int
    """Elements from there on; 0 where the phase meets none."""
    shift: int
    """Positions from what phase 0 sees to what this one sees."""


@dataclass(frozen=True)
class Phases:
    """Outputs along a dimension: position `at` and phase `p` make output `at · count + p`, if there is one."""

    outputs: tuple[str, ...]
    """Axes of the outputs in the nest as it was, outermost first."""
    axis: Axis
    """Of phases."""
    results: int
    each: tuple[Phase, ...]


@dataclass(frozen=True)
class Phased:
    """A transposed convolution of which phase 0 is a convolution."""

    nest: Nest
    """With axes of phases behind the others, which the weight alone knows."""
    phases: Mapping[int, Phases]
    """By dimension of the window, outermost first."""


def phased(nest: Nest) -> Phased | None:
    """The simplified nest with its phases as axes of their own; None where no outputs have different ones."""
    if len(nest.reductions) != 1 or not nest.windows or not nest.windows[0].is_weighted:
        return None
    apart: dict[str, Axis | None] = {}
    for axis in nest.parallel:
        if (count := _phase_count(nest, axis)) > 1:
            phase = _unused(nest, f"{axis.name}_phase")
            nest = _with_phases(nest, axis, Axis(phase, count))
            apart[phase] = axis
    for phase_axis in _known_to_weights(nest):
        apart.setdefault(phase_axis.name, None)
    return _by_phase(nest, apart) if apart else None


def _phase_count(nest: Nest, axis: Axis) -> int:
    """The least number of outputs after which all positions have moved on by whole numbers; 1 where each one does."""
    indices = [bound.index for bound in nest.windows[0].positions if axis.name in bound.index.axes()]
    most = math.lcm(*(_divisors(atom, axis) for index in indices for atom, _ in index.terms))
    for count in (each for each in range(1, most + 1) if most % each == 0):
        instead = {axis.name: Index.axis(axis.name, count) + Index.axis("")}
        extents = {**nest.extents, axis.name: -(-axis.extent // count), "": count}
        if all(index.substituted(instead, extents).coefficient(axis.name) is not None for index in indices):
            return count
    return 1


def _divisors(atom: Atom, axis: Axis) -> int:
    """The product of all that an axis is divided by in an index."""
    if isinstance(atom, str) or axis.name not in atom.value.axes():
        return 1
    return atom.divisor * math.prod(_divisors(inner, axis) for inner, _ in atom.value.terms)


def _unused(nest: Nest, name: str) -> str:
    while name in nest.extents:
        name += "s"
    return name


def _with_phases(nest: Nest, axis: Axis, phase: Axis) -> Nest:
    """The nest with positions in the place of an axis of outputs, and its phases behind all others."""
    positions = Axis(axis.name, -(-axis.extent // phase.extent))
    instead = {axis.name: Index.axis(axis.name, phase.extent) + Index.axis(phase.name)}
    extents = {**nest.extents, axis.name: positions.extent, phase.name: phase.extent}
    parallel = [*(positions if each == axis else each for each in nest.parallel), phase]
    return iteration_space.reindexed(nest, lambda index: index.substituted(instead, extents), parallel, nest.reduced)


def _known_to_weights(nest: Nest) -> list[Axis]:
    """Axes of phases that are apart already: a bound of the weight's elements knows them."""
    seen, _ = factors(nest.windows[0])
    known = {axis for load in _loads(seen) for axis in load.index.axes()}
    bounds = (bound for bound in nest.windows[0].positions if not bound.index.axes() & known & {*_names(nest.parallel)})
    own = {axis for bound in bounds for axis in bound.index.axes()}
    return [axis for axis in nest.parallel if axis.name in own]


def _by_phase(nest: Nest, apart: Mapping[str, Axis | None]) -> Phased | None:
    """`apart`: phases by name, with the axis of outputs that they were part of, if any."""
    window, outputs = nest.windows[0], {*_names(nest.parallel)} - apart.keys()
    of_data = [bound for bound in window.positions if bound.index.axes() & outputs]
    others = [bound for bound in window.positions if bound not in of_data]
    found: dict[int, Phases] = {}
    for dimension, bound in enumerate(of_data):
        own = [axis for axis in nest.parallel if axis.name in outputs & bound.index.axes()]
        elements = [axis for axis in nest.reduced if axis.name in bound.index.axes()]
        if len(own) != 1 or len(elements) > 1:
            return None
        known = set(bound.index.axes()).union(*(each.index.axes() for each in others if _share(each, elements)))
        known |= {name for name, axis in apart.items() if axis is not None and axis.name == own[0].name}
        axes = [axis for axis in nest.parallel if axis.name in known & apart.keys()]
        if len(axes) > 1:
            return None
        if axes:
            made = _phases(own[0], axes[0], apart[axes[0].name], bound, others, elements)
            if made is None:
                return None
            found[dimension] = made
    if {each.axis.name for each in found.values()} != apart.keys():
        return None
    at_first = {name: Index() for name in apart}
    seen, weight = factors(window)
    value = Call("mul", (_substituted(nest, seen, at_first), weight), window.type)
    bounds = tuple(Bound(bound.index.substituted(at_first, nest.extents), bound.extent) for bound in of_data)
    made_of = Windowed(window.name, "sum", value, window.type, positions=bounds, is_weighted=True)
    return Phased(replace(nest, reductions=(made_of,)), found)


def _phases(
    output: Axis, axis: Axis, original: Axis | None, bound: Bound, others: Sequence[Bound], elements: Sequence[Axis]
) -> Phases | None:  # fmt: skip
    """What each phase of a dimension meets; None where that is no run of neighbours."""
    count, each = axis.extent, list[Phase]()
    extents = {output.name: output.extent, axis.name: count, **{e.name: e.extent for e in elements}}
    first = bound.index.substituted({axis.name: Index()}, extents)
    mine = [other for other in others if other.index.axes() <= extents.keys()]
    for phase in range(count):
        at = {axis.name: Index(phase)}
        index = bound.index.substituted(at, extents)
        if index.terms != first.terms:
            return None
        met = [
            k for k in range(math.prod(e.extent for e in elements))
            if all(_is_inside(other, {**at, **{e.name: Index(k) for e in elements}}, extents) for other in mine)
        ]  # fmt: skip
        begin = met[0] if met else 0
        if met != list(range(begin, begin + len(met))):
            return None
        each.append(Phase(begin, len(met), index.offset - first.offset))
    if original is None:
        return Phases((output.name, axis.name), axis, output.extent * count, tuple(each))
    return Phases((original.name,), axis, original.extent, tuple(each))


def _is_inside(bound: Bound, at: Mapping[str, Index], extents: Mapping[str, int]) -> bool:
    return 0 <= bound.index.substituted(at, extents).offset < bound.extent


def _share(bound: Bound, elements: Sequence[Axis]) -> bool:
    return any(axis.name in bound.index.axes() for axis in elements)


def _loads(value: Expression) -> list[Load]:
    return [part for part in Interner().parts([value]).values() if isinstance(part, Load)]


def _substituted(nest: Nest, value: Expression, instead: Mapping[str, Index]) -> Expression:
    """A value at other places."""
    alone = replace(nest, stores=(), reductions=(replace(nest.reductions[0], value=value),))
    moved = iteration_space.reindexed(
        alone, lambda index: index.substituted(instead, nest.extents), nest.parallel, nest.reduced
    )
    return moved.reductions[0].value


def _names(axes: Sequence[Axis]) -> list[str]:
    return [axis.name for axis in axes]
