"""Handlers of operations that look values up: gathers, rolls, and what needs a test of bounds (cat, pad).

The one idea: a symbol is asked for its element at an axis that does not exist, then that axis is replaced by a
position computed from data. Loads along it become gathers, all else stays. Every position is brought into range, so
that a value which a `where` does not choose is still read inside its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from agent_synthesis.nests.ir import AxisValue, Call, Expression, Index, Literal, Load, Memory, Quotient, Type
from agent_synthesis.nests.iteration_space import recombined
from agent_synthesis.nests.symbolic import (
    Fold,
    Indices,
    Ref,
    Refused,
    Running,
    Symbol,
    Tracer,
    axes_of,
    broadcast,
    cast,
    common_shape,
    handles,
    literal,
    op,
    type_of,
)

MOST_SCATTERED = 8
"""Values along a dimension that each element is compared with: a target of each row, the largest few of it."""
Positions = Mapping[int, Callable[[Indices], Expression]]
"""Dimension of a symbol → the position along it, of type I64 and in range, by the index of the result."""


def looked_up(
    tracer: Tracer, value: Symbol, positions: Positions, rest: Callable[[Indices], Indices], shape: Sequence[int]
) -> Symbol:
    """The symbol of `shape` whose element at an index is `value` at computed positions.

    `rest` gives an index of `value` from one of the result; what it says of the dimensions in `positions` is not used.
    """

    def at(index: Indices) -> Expression:
        inner = list(rest(index))
        found: dict[str, Expression] = {}
        for dim, position in positions.items():
            if value.shape[dim] == 1:
                inner[dim] = Index()
                continue
            axis = f"found{len(tracer.extents)}"
            tracer.extents[axis] = value.shape[dim]
            inner[dim], found[axis] = Index.axis(axis), position(index)
        return _replaced(value.at(tuple(inner)), found, tracer)

    return Symbol(tuple(shape), value.type, at)


def within(position: Expression, extent: int) -> Expression:
    """The position as I64, brought into [0, extent): PyTorch refuses what lies outside, a kernel may not read there."""
    wide = cast(position, Type.I64)
    return op("min", op("max", wide, literal(0, Type.I64)), literal(extent - 1, Type.I64))


def _replaced(root: Expression, found: Mapping[str, Expression], tracer: Tracer) -> Expression:
    """The expression with axes replaced by positions."""
    done: dict[int, tuple[Expression, Expression]] = {}

    def visit(node: Any) -> Expression:
        if id(node) not in done:
            result: Any = node
            match node:
                case Load(buffer, index, type_) if index.axes() & found.keys():
                    place = _offset(recombined(_divided_twice(index, tracer.extents)), found)
                    result = Call("gather", (Memory(buffer, type_), place), type_)
                case AxisValue(index, _) if index.axes() & found.keys():
                    result = _offset(index, found)
                case Call():
                    result = replace(node, arguments=tuple(visit(argument) for argument in node.arguments))
                case Ref(Running(), (*kept, place), _) if _is_plain(place, found):
                    # The value at a position that had to be brought into range is not used.
                    result = replace(node, indices=(*kept, _unbounded(found[str(place.terms[0][0])])))
                case Ref() if axes_of(node.indices) & found.keys():
                    result = _reduced_at(node, found, tracer)
            done[id(node)] = (node, result)
        return done[id(node)][1]

    return visit(root)


def _reduced_at(ref: Ref, found: Mapping[str, Expression], tracer: Tracer) -> Ref:
    """What is reduced at positions that were brought into range, as a reduction at places that may lie beyond it: each
    of its elements is looked up where the position says."""
    if type(ref.fold) is not Fold:
        raise Refused("it looks a value up in what it reduces")
    used = sorted(axes_of(ref.indices) & found.keys())
    names = {axis: f"position{number} of {tracer.extents[axis]}" for number, axis in enumerate(used)}
    tracer.extents.update((names[axis], tracer.extents[axis]) for axis in used)
    renamed = {axis: Index.axis(name) for axis, name in names.items()}
    indices = tuple(index.substituted(renamed, tracer.extents) for index in ref.indices)
    bounds, places = [_bounds(found[axis]) for axis in used], [_unbounded(found[axis]) for axis in used]
    axes = sorted(axes_of((*indices, *places)) - {*names.values()})
    key = (ref.fold, indices, tuple(places), tuple(map(tuple, bounds)))
    if (made := tracer.reduced_at.get(key)) is None:

        def body(outer: Indices, inner: Indices) -> Expression:
            own = dict(zip(axes, outer, strict=True))
            positions = dict[str, Expression]()
            for name, place, limits in zip(names.values(), places, bounds, strict=True):
                position: Expression = AxisValue(place.substituted(own, tracer.extents))
                for operation, limit in limits:
                    position = op(operation, position, limit)
                positions[name] = position
            kept = tuple(index.substituted(own, tracer.extents) for index in indices)
            return _replaced(ref.fold.body(kept, inner), positions, tracer)

        made = tracer.reduced_at[key] = replace(ref.fold, body=body)
    return Ref(made, tuple(map(Index.axis, axes)), ref.type)


def _divided_twice(index: Index, extents: Mapping[str, int]) -> Index:
    """The index with quotients of merged dimensions in two steps where the first is simple: of 8 i + j, j < 8, over 48
    that is i / 6."""
    made = Index(index.offset)
    for atom, coefficient in index.terms:
        part = Index(0, ((atom, 1),))
        if isinstance(atom, Quotient):
            for step in sorted({step for _, step in atom.value.terms if 1 < step < atom.divisor}):
                inner = atom.value.divided(step, extents)
                if atom.divisor % step == 0 and all(isinstance(each, str) for each, _ in inner.terms):
                    part = inner.divided(atom.divisor // step, extents)
        made = made + part.scaled(coefficient)
    return made


def _offset(index: Index, found: Mapping[str, Expression]) -> Expression:
    """An index over axes that do not exist as arithmetic on their positions."""
    plain = Index(index.offset, tuple(term for term in index.terms if not _depends(term[0], found)))
    parts: list[Expression] = [AxisValue(plain)] if plain.terms or plain.offset else []
    for atom, coefficient in index.terms:
        if not _depends(atom, found):
            continue
        if isinstance(atom, str):
            value = found[atom]
        else:
            operation = "floor_div" if isinstance(atom, Quotient) else "remainder"
            value = op(operation, _offset(atom.value, found), literal(atom.divisor, Type.I64))
        parts.append(value if coefficient == 1 else op("mul", value, literal(coefficient, Type.I64)))
    total = parts[0]
    for part in parts[1:]:
        total = op("add", total, part)
    return total


def _bounds(position: Expression) -> list[tuple[str, Literal]]:
    """How a position was brought into range, the innermost first."""
    match position:
        case Call("min" | "max" as operation, (inner, Literal() as limit), _):
            return [*_bounds(inner), (operation, limit)]
    return []


def _unbounded(position: Expression) -> Index:
    """The index of a position that was brought into range."""
    match position:
        case AxisValue(index, _):
            return index
        case Call("min" | "max", (inner, Literal()), _):
            return _unbounded(inner)
    raise Refused("it looks a value up in what it reduces")


def _is_plain(place: Index, found: Mapping[str, Expression]) -> bool:
    """Whether a place is an axis that stands for an index brought into range."""
    return len(place.terms) == 1 and place == Index.axis(str(place.terms[0][0])) and place.terms[0][0] in found


def _depends(atom: Any, found: Mapping[str, Expression]) -> bool:
    return atom in found if isinstance(atom, str) else bool(atom.value.axes() & found.keys())


# ---- by an index tensor --------------------------------------------------------------------------------


@handles("gather")
def _gather(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> Symbol:
    value, place = tracer.symbol(x), tracer.symbol(index)
    if not x.dim():
        return value
    dim %= x.dim()
    return looked_up(tracer, value, {dim: lambda at: within(place.at(at), x.shape[dim])}, lambda at: at, out.shape)


@handles("index")
def _index(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Symbol:
    """Advanced indexing: negative positions count from the end."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if any(index is not None and not _is_integer(index.dtype) for index in indices):
        raise Refused("a mask as an index is not lowered")
    tensors = {dim: indices[dim] for dim in used}
    shape = common_shape(tensor.shape for tensor in tensors.values() if tensor is not None)
    together = used == list(range(used[0], used[-1] + 1))
    begin, rank = used[0] if together else 0, len(shape)
    symbols = {dim: broadcast(tracer.symbol(tensor), shape) for dim, tensor in tensors.items() if tensor is not None}

    def rest(at: Indices) -> Indices:
        others = iter((*at[:begin], *at[begin + rank :]))
        return tuple(Index() if dim in symbols else next(others) for dim in range(x.dim()))

    def position(dim: int) -> Callable[[Indices], Expression]:
        def of(at: Indices) -> Expression:
            place = cast(symbols[dim].at(at[begin : begin + rank]), Type.I64)
            from_end = op("add", place, literal(x.shape[dim], Type.I64))
            return within(op("where", op("lt", place, literal(0, Type.I64)), from_end, place), x.shape[dim])

        return of

    return looked_up(tracer, tracer.symbol(x), {dim: position(dim) for dim in used}, rest, out.shape)


@handles("scatter")
def _scatter(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor, given: Any, **named: Any
) -> Symbol:
    """At each element, the last of the few values that were put there."""
    if named:
        raise Refused("a scatter that reduces is not lowered")
    return _put(tracer, out, x, dim, index, given, lambda is_here, new, old: op("where", is_here, new, old))


@handles("scatter_add")
def _scatter_add(
    tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, index: torch.Tensor, given: torch.Tensor
) -> Symbol:
    """At each element, the sum of the few values that were put there."""

    def added(is_here: Expression, new: Expression, old: Expression) -> Expression:
        return op("where", is_here, op("add", old, new), old)

    return _put(tracer, out, x, dim, index, given, added)


def _put(
    tracer: Tracer,
    out: torch.Tensor,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    given: Any,
    joined: Callable[[Expression, Expression, Expression], Expression],
) -> Symbol:
    """`x` with values put at an index along a dimension, each compared with where an element is."""
    if not x.dim():
        raise Refused("a scatter into one element is not lowered")
    dim %= x.dim()
    count = index.shape[dim]
    others = [extent for other, extent in enumerate(index.shape) if other != dim]
    if others != [extent for other, extent in enumerate(x.shape) if other != dim]:
        raise Refused("a scatter into a part of a tensor is not lowered")
    if count > MOST_SCATTERED:
        raise Refused(f"a scatter of more than {MOST_SCATTERED} values along a dimension is not lowered")
    old, place, type_ = tracer.symbol(x), tracer.symbol(index), type_of(out.dtype)
    new = tracer.symbol(given) if isinstance(given, torch.Tensor) else None

    def at(position: Indices) -> Expression:
        found = cast(old.at(position), type_.compute)
        for number in range(count):
            read = (*position[:dim], Index(number), *position[dim + 1 :])
            is_here = op("eq", AxisValue(position[dim]), cast(place.at(read), Type.I64))
            value = cast(new.at(read), type_.compute) if new is not None else literal(given, type_.compute)
            found = joined(is_here, value, found)
        return found

    return Symbol(tuple(out.shape), type_, at)


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype is not torch.bool


@handles("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(
    tracer: Tracer, out: Any, x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int
) -> list[Symbol | None]:
    """The loss of each sample. Its mean divides by a sum over the samples, which rewriting takes apart."""
    if reduction:
        raise Refused("a loss over samples that are themselves reduced takes a rewrite")
    value, truth = tracer.symbol(x), tracer.symbol(target)
    classes = 1 if x.dim() > 1 else 0
    extent, type_ = x.shape[classes], value.type.compute

    def position(at: Indices) -> Expression:
        return within(truth.at(at), extent)

    def rest(at: Indices) -> Indices:
        return (*at[:classes], Index(), *at[classes:])

    chosen = looked_up(tracer, value, {classes: position}, rest, target.shape)
    scale = None
    if weight is not None:
        scale = looked_up(tracer, tracer.symbol(weight), {0: position}, lambda _: (Index(),), target.shape)

    def loss(at: Indices) -> Expression:
        found = op("neg", chosen.at(at))
        if scale is not None:
            found = op("mul", found, cast(scale.at(at), type_))
        is_ignored = op("eq", cast(truth.at(at), Type.I64), literal(ignored, Type.I64))
        return op("where", is_ignored, literal(0, type_), found)

    return [Symbol(tuple(out[0].shape), value.type, loss), None]


@handles("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(
    tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: Any,
    reduction: int, ignored: int, total: torch.Tensor,
) -> Symbol:  # fmt: skip
    """Zero but at each sample's target, where a given gradient is infinite too."""
    given, truth, classes = tracer.symbol(gradient), tracer.symbol(target), 1 if x.dim() > 1 else 0
    type_ = type_of(out.dtype)

    def of_sample(symbol: Symbol, sample: Indices) -> Expression:
        return symbol.at(sample if len(symbol.shape) == len(sample) else (Index(),) * len(symbol.shape))

    def at(position: Indices) -> Expression:
        sample = (*position[:classes], *position[classes + 1 :])
        wanted = cast(of_sample(truth, sample), Type.I64)
        value = cast(of_sample(given, sample), type_.compute)
        if reduction == 1:  # a mean
            value = op("div", value, cast(of_sample(tracer.symbol(total), ()), type_.compute))
        if weight is not None:
            value = op("mul", value, cast(tracer.symbol(weight).at((position[classes],)), type_.compute))
        is_here = op("eq", AxisValue(position[classes]), wanted)
        is_counted = op("ne", wanted, literal(ignored, Type.I64))
        return op("where", op("and", is_here, is_counted), op("neg", value), literal(0, type_.compute))

    return Symbol(tuple(out.shape), type_, at)


# ---- by arithmetic on the index ------------------------------------------------------------------------


@handles("roll")
def _roll(tracer: Tracer, _: torch.Tensor, x: torch.Tensor, shifts: Any, dims: Any = ()) -> Symbol:
    value = tracer.symbol(x)
    steps = [shifts] if isinstance(shifts, int) else list(shifts)
    places = [dims] if isinstance(dims, int) else list(dims)
    if not places:
        raise Refused("a roll of the flattened tensor is not lowered")
    turns = dict.fromkeys(range(x.dim()), 0)
    for step, dim in zip(steps, places, strict=True) if x.dim() else ():
        turns[dim % x.dim()] += step

    def at(index: Indices) -> Expression:
        # Shifted up by whole turns, so that the remainder is one of a number that is not negative.
        rolled = (
            part if not turns[dim] % extent else part.shifted(-turns[dim] % extent).modulo(extent, tracer.extents)
            for dim, (part, extent) in enumerate(zip(index, value.shape, strict=True))
        )
        return value.at(tuple(rolled))

    return Symbol(value.shape, value.type, at)


@handles("cat", "concat")
def _cat(tracer: Tracer, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> Symbol:
    """The part that holds an index, chosen by comparing it with where the parts end."""
    dim %= out.dim()
    type_ = type_of(out.dtype)
    parts: list[tuple[int, Symbol]] = []
    begin = 0
    for tensor in tensors:
        if tensor.numel():
            parts.append((begin, tracer.symbol(tensor)))
            begin += tensor.shape[dim]

    def at(index: Indices) -> Expression:
        low, high = index[dim].bounds(tracer.extents)
        possible = [(start, part) for start, part in parts if start <= high and start + part.shape[dim] > low]
        result: Expression | None = None
        for start, part in reversed(possible):
            found = cast(clamped(tracer, part, {dim: -start}).at(index), type_.compute)
            if result is None:
                result = found
                continue
            test = op("lt", AxisValue(index[dim]), literal(start + part.shape[dim], Type.I64))
            result = op("where", test, found, result)
        if result is None:
            raise Refused("a tensor is empty")
        return result

    return Symbol(tuple(out.shape), type_, at)


@handles("constant_pad_nd")
def _pad(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, pad: Sequence[int], fill: float = 0) -> Symbol:
    value, type_ = tracer.symbol(x), type_of(out.dtype)
    before = {x.dim() - 1 - place // 2: pad[place] for place in range(0, len(pad), 2)}
    inner = clamped(tracer, value, {dim: -count for dim, count in before.items()})

    def at(index: Indices) -> Expression:
        tests = []
        for dim, count in before.items():
            place = index[dim].shifted(-count)
            low, high = place.bounds(tracer.extents)
            if low < 0:
                tests.append(op("ge", AxisValue(place), literal(0, Type.I64)))
            if high >= x.shape[dim]:
                tests.append(op("lt", AxisValue(place), literal(x.shape[dim], Type.I64)))
        found = cast(inner.at(index), type_.compute)
        if not tests:
            return found
        inside = tests[0]
        for test in tests[1:]:
            inside = op("and", inside, test)
        return op("where", inside, found, literal(fill, type_.compute))

    return Symbol(tuple(out.shape), type_, at)


def clamped(tracer: Tracer, value: Symbol, shifts: Mapping[int, int]) -> Symbol:
    """The symbol moved along dimensions; beyond its ends it has what it has there."""

    def at(index: Indices) -> Expression:
        moved = tuple(part.shifted(shifts.get(dim, 0)) for dim, part in enumerate(index))
        outside = {}
        for dim in shifts:
            low, high = moved[dim].bounds(tracer.extents)
            if low < 0 or high >= value.shape[dim]:
                place: Expression = AxisValue(moved[dim])
                if low < 0:
                    place = op("max", place, literal(0, Type.I64))
                if high >= value.shape[dim]:
                    place = op("min", place, literal(value.shape[dim] - 1, Type.I64))
                outside[dim] = lambda _, place=place: place
        if not outside:
            return value.at(moved)
        return looked_up(tracer, value, outside, lambda _: moved, value.shape).at(moved)

    return Symbol(value.shape, value.type, at)
