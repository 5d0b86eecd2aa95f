"""From formulas to loops: chooses the axes of a nest, binds its reductions to them, merges what is
contiguous.

The one idea: the element stores decide. Axes on which a reduction's value depends are parallel, the others
are the reduced ones, and a reduction over as many elements walks the same reduced axes. Axes begin as fine
as the formulas need, so that indices stay affine, and end as coarse as they allow. Schedules are not chosen
here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests.attention import Attended, Attending
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    BufferRef,
    Call,
    Expression,
    Index,
    Load,
    Memory,
    Nest,
    Reduced,
    Reduction,
    Scan,
    Store,
    Type,
    Windowed,
    with_value,
)
from agent_synthesis.nests.iteration_space import splits_of
from agent_synthesis.nests.product import Multiplied
from agent_synthesis.nests.symbolic import (
    Fold,
    Indices,
    Ref,
    Refused,
    Running,
    Sliding,
    Symbol,
    Tracer,
    axes_of,
    distinct,
    flatten,
    folds_of_elements,
    refs_of,
    unflatten,
)
from agent_synthesis.nests.verifier import verify

MAX_EXPRESSION_SIZE = 3000
"""Nodes of all expressions, shared parts counted at each use; beyond it a kernel would not fit its
registers."""

_ROUNDS = 8
_DEPTH = "depth"
"""The axis that a product's own sum runs along while its strides are found."""


@dataclass(frozen=True)
class Output:
    """What a nest must store: the formula, and the buffer with its strides in elements."""

    buffer: str
    symbol: Symbol
    strides: tuple[int, ...]


def build(name: str, outputs: Sequence[Output], tracer: Tracer, buffers: Sequence[BufferRef], comment: str) -> Nest:
    """The verified nest that stores all outputs.

    Raises:
        Refused: the outputs do not share one (parallel, reduced) split, or the formulas grow too large.
    """
    splits: dict[str, set[int]] = {}
    for _ in range(_ROUNDS):
        attempt = _Attempt(tracer, splits)
        try:
            nest = attempt.nest(name, outputs, buffers, comment)
        except Refused:
            if not attempt.split(splits_of(attempt.misread, tracer.extents)):
                raise
            continue
        if not attempt.split(splits_of(_indices(nest), nest.extents)):
            break
    return verify(_merged(_ordered(nest)))


class _Attempt:
    """One try with given splits of the dimensions into axes."""

    def __init__(self, tracer: Tracer, splits: dict[str, set[int]]) -> None:
        self._tracer = tracer
        self._splits = splits
        self._origins: dict[str, tuple[str, int]] = {}  # axis → (dimension's label, its step within it)
        self._label_extents: dict[str, int] = {}
        self._parallel: list[str] = []
        self._reduced: list[str] = []
        self._reductions: dict[tuple[Fold, Indices], Reduction] = {}
        self._sizes: dict[int, int] = {}
        self._kept_alive: list[Expression] = []
        self._anchor_index: Indices = ()
        self._inner: set[Fold] = set()
        """Folds that have a value at every element, of which others are."""
        self.misread: Indices = ()
        """Where a scan is read that is not at its element, or a row begins that is stored: it may be, once the axes are
        finer."""
        self._rows: Indices = ()
        """Where the anchor's reductions are read."""
        tracer.forget_axes()

    def nest(self, name: str, outputs: Sequence[Output], buffers: Sequence[BufferRef], comment: str) -> Nest:
        anchor = self._anchor(outputs)
        stores = []
        for output in outputs:
            where = self._place(output, anchor)
            value = self._resolved(output.symbol.at(where))
            stores.append(Store(output.buffer, _strided(where, output.strides), value))
        self._check_size([store.value for store in stores])
        extents = self._tracer.extents
        return Nest(
            name=name,
            parallel=tuple(Axis(axis, extents[axis]) for axis in self._parallel),
            reduced=tuple(Axis(axis, extents[axis]) for axis in self._reduced),
            reductions=tuple(dict.fromkeys(self._reductions.values())),
            stores=tuple(stores),
            buffers=_touched(buffers, stores, self._reductions.values()),
            comment=comment,
        )

    def split(self, wanted: Mapping[str, set[int]]) -> bool:
        """Adds splits (axis → steps) to the dimensions behind the axes; whether any is new and possible."""
        changed = False
        for axis, steps in wanted.items():
            label, step_of_axis = self._origins[axis]
            points = self._splits.setdefault(label, set())
            for step in steps:
                point = step * step_of_axis
                if point in points:
                    continue
                chain = [1, *sorted({*points, point}), self._label_extents[label]]
                if all(b % a == 0 and b > a for a, b in itertools.pairwise(chain)):
                    points.add(point)
                    changed = True
        return changed

    # -- choosing the axes

    def _anchor(self, outputs: Sequence[Output]) -> Output:
        """The output whose dimensions become the axes: the largest, one that depends on a reduction if any
        does."""
        placed = {output.buffer: self._axes_for(f"o{n}", output.symbol.shape) for n, output in enumerate(outputs)}
        refs = {o.buffer: list(refs_of(o.symbol.at(placed[o.buffer]))) for o in outputs}
        reducing = [output for output in outputs if refs[output.buffer]] or list(outputs)
        largest = max(output.symbol.element_count for output in reducing)
        reducing = [output for output in reducing if output.symbol.element_count == largest]
        folds = {output.buffer: folds_of_elements(refs[output.buffer], self._tracer.extents) for output in reducing}
        anchor = next((output for output in reducing if folds[output.buffer]), reducing[0])
        self._anchor_index = placed[anchor.buffer]
        used = [axis for axis in self._origins if axis in axes_of(self._anchor_index)]
        self._inner = folds[anchor.buffer]
        found = [ref for ref in refs[anchor.buffer] if ref.fold not in self._inner]
        if not found:
            self._parallel = used
            return anchor
        self._rows = tuple(index for ref in found for index in _kept(ref))
        row_axes = {axis for index in self._rows for axis in index.axes()}
        self._parallel = [axis for axis in used if axis in row_axes]
        self._reduced = [axis for axis in used if axis not in row_axes]
        fold = max((ref.fold for ref in found), key=lambda f: math.prod(f.extents))
        scanned = [ref.indices[-1] for ref in found if isinstance(ref.fold, Running)]
        if scanned:
            self._reduced.sort(key=lambda axis: -abs(scanned[0].coefficient(axis) or 0))
            return anchor
        if not self._reduced:
            inner = self._axes_for("r", fold.extents)
            self._reduced = [axis for axis in self._origins if axis in axes_of(inner)]
        self._arrange_reduced(found, anchor.symbol.at(self._anchor_index))
        return anchor

    def _arrange_reduced(self, refs: Sequence[Ref], stored: Expression) -> None:
        """Orders the reduced axes so that reductions load what the stores load: the row stays where it is."""
        if not 1 < len(self._reduced) <= 5:
            return
        direct = set(_loads([stored]))
        best, best_score = self._reduced, -1
        for order in itertools.permutations(self._reduced):
            self._reduced = list(order)
            score = 0
            for ref in refs:
                body = ref.fold.body(ref.indices, self._folded(ref.fold))
                loads = set(_loads([body]))
                score += 2 * len(loads & direct) + sum(_is_affine(load.index) for load in loads)
            if score > best_score:
                best, best_score = list(order), score
        self._reduced = best

    def _axes_for(self, label: str, shape: Sequence[int]) -> Indices:
        """Fresh axes for the dimensions of a shape, split as known so far; extents of 1 get none."""
        return tuple(self._axes_for_dimension(f"{label}d{dim}", extent) for dim, extent in enumerate(shape))

    def _axes_for_dimension(self, label: str, extent: int) -> Index:
        if extent == 1:
            return Index()
        self._label_extents[label] = extent
        points = [1, *sorted(self._splits.get(label, ())), extent]
        index = Index()
        for step, above in reversed(list(itertools.pairwise(points))):
            axis = f"{label}s{step}"
            self._tracer.extents[axis] = above // step
            self._origins[axis] = (label, step)
            index = index + Index.axis(axis, step)
        return index

    # -- placing outputs and reductions on them

    def _place(self, output: Output, anchor: Output) -> Indices:
        """The index at which an output is stored, over the chosen axes."""
        shape = output.symbol.shape
        if output is anchor or shape == anchor.symbol.shape:
            return self._anchor_index
        extents = self._tracer.extents
        count = output.symbol.element_count
        if count == anchor.symbol.element_count:
            return unflatten(flatten(self._anchor_index, anchor.symbol.shape), shape, extents)
        if count != math.prod(extents[axis] for axis in self._parallel):
            self.misread = self._rows
            raise Refused("its outputs differ in size in a way that one loop cannot store")
        row = _row_major(self._parallel, extents)
        return unflatten(row, shape, extents)

    def _folded(self, fold: Fold) -> Indices:
        extents = self._tracer.extents
        count = math.prod(extents[axis] for axis in self._reduced)
        if math.prod(fold.extents) != count:
            raise Refused("it reduces over different numbers of elements")
        return unflatten(_row_major(self._reduced, extents), fold.extents, extents)

    def _resolved(self, expression: Expression) -> Expression:
        """The expression with every reference to a fold bound to a reduction of this nest."""
        done: dict[int, Expression] = {}

        def visit(node: Expression) -> Expression:
            found = done.get(id(node))
            if found is not None:
                return found
            result = node
            if isinstance(node, Ref):
                result = self._bound(node)
            elif isinstance(node, Call):
                arguments = tuple(visit(argument) for argument in node.arguments)
                if any(new is not old for new, old in zip(arguments, node.arguments, strict=True)):
                    result = replace(node, arguments=arguments)
            done[id(node)] = result
            self._kept_alive += (node, result)
            return result

        return visit(expression)

    def _bound(self, ref: Ref) -> Expression:
        reduced = set(self._reduced)
        is_element = any(index.axes() & reduced for index in _kept(ref))
        key = (ref.fold, ref.indices)
        if key not in self._reductions:
            if is_element or ref.fold in self._inner:
                made: Reduction = self._multiplied(ref)
            else:
                made = self._scan(ref) if isinstance(ref.fold, Running) else self._reduction(ref)
            self._check_size([made.value])
            self._reductions[key] = self._known_or(made)
        return Reduced(self._reductions[key].name, ref.type)

    def _reduction(self, ref: Ref) -> Reduction:
        folded = self._folded(ref.fold)
        value = self._resolved(ref.fold.body(ref.indices, folded))
        if isinstance(ref.fold, Sliding):
            positions = ref.fold.positions(ref.indices, folded)
            return Windowed("", ref.fold.operation, value, ref.fold.type, positions, ref.fold.is_weighted)
        if isinstance(ref.fold, Attending):
            f = ref.fold
            return Attended("", "attend", value, f.type, f.depth, f.query_stride, f.key_stride, f.scale)
        return Reduction("", ref.fold.operation, value, ref.fold.type)

    def _multiplied(self, ref: Ref) -> Multiplied:
        """What is reduced over other dimensions at every element that is reduced here: a product of two loads' rows."""
        extents = {**self._tracer.extents, _DEPTH: math.prod(ref.fold.extents)}
        self._tracer.extents[_DEPTH] = extents[_DEPTH]
        body = ref.fold.body(ref.indices, unflatten(Index.axis(_DEPTH), ref.fold.extents, extents))
        match body:
            case Call("mul", (Load() as left, Load() as right), Type.F32) if type(ref.fold) is Fold:
                strides = [load.index.coefficient(_DEPTH) for load in (left, right)]
                first = [
                    replace(load, index=load.index.substituted({_DEPTH: Index()}, extents)) for load in (left, right)
                ]
                if ref.fold.operation == "sum" and all(strides):
                    value = Call("mul", tuple(first), Type.F32)
                    return Multiplied("", "sum", value, Type.F32, extents[_DEPTH], strides[0] or 0, strides[1] or 0)
        raise Refused("it reduces what was reduced over other dimensions")

    def _scan(self, ref: Ref) -> Scan:
        """The scan, where it is read at the element itself or, without that one, at the element before."""
        extents = self._tracer.extents
        count = math.prod(extents[axis] for axis in self._reduced)
        here = _row_major(self._reduced, extents)
        for reverse, exclusive in itertools.product((False, True), repeat=2):
            place = here.scaled(-1).shifted(count - 1) if reverse else here
            if ref.indices[-1] == place.shifted(-int(exclusive)) and count - exclusive <= ref.fold.extents[0]:
                value = self._resolved(ref.fold.body(_kept(ref), (place,)))
                return Scan("", ref.fold.operation, value, ref.fold.type, reverse, exclusive)
        self.misread = ref.indices
        raise Refused("it reads a scan elsewhere than at the element that is stored")

    def _known_or(self, made: Reduction) -> Reduction:
        """The reduction, or the equal one that is there already (a mean that the user wrote twice)."""
        distinct = dict.fromkeys(self._reductions.values())
        for known in distinct:
            if known == replace(made, name=known.name):
                return known
        return replace(made, name=f"r{len(distinct)}")

    def _check_size(self, expressions: Iterable[Expression]) -> None:
        total = sum(_size(expression, self._sizes) for expression in expressions)
        if total > MAX_EXPRESSION_SIZE:
            raise Refused(f"its formulas have more than {MAX_EXPRESSION_SIZE} parts")


def _size(expression: Expression, sizes: dict[int, int]) -> int:
    """Nodes of an expression; `sizes` remembers by identity, and its keys' objects are kept alive by the
    caller."""
    if not isinstance(expression, Call):
        return 1
    found = sizes.get(id(expression))
    if found is None:
        found = sizes[id(expression)] = 1 + sum(_size(argument, sizes) for argument in expression.arguments)
    return found


def _kept(ref: Ref) -> Indices:
    """Where a fold is read, without the position in the row for one that has a value at every element."""
    return ref.indices[:-1] if isinstance(ref.fold, Running) else ref.indices


def _loads(expressions: Iterable[Expression]) -> Iterator[Load]:
    return (node for node in distinct(expressions) if isinstance(node, Load))


def _row_major(axes: Sequence[str], extents: Mapping[str, int]) -> Index:
    return flatten(tuple(Index.axis(axis) for axis in axes), [extents[axis] for axis in axes])


def _strided(index: Indices, strides: Sequence[int]) -> Index:
    total = Index()
    for part, stride in zip(index, strides, strict=True):
        total = total + part.scaled(stride)
    return total


def _is_affine(index: Index) -> bool:
    return all(isinstance(atom, str) for atom, _ in index.terms)


def _touched(
    buffers: Sequence[BufferRef], stores: Sequence[Store], reductions: Iterable[Reduction]
) -> tuple[BufferRef, ...]:
    values = [store.value for store in stores] + [reduction.value for reduction in reductions]
    read = (node.buffer for node in distinct(values) if isinstance(node, Load | Memory))
    used = {*read, *(store.buffer for store in stores)}
    return tuple(buffer for buffer in buffers if buffer.name in used)


# ---- rewriting whole nests -----------------------------------------------------------------------------


def _indices(nest: Nest) -> list[Index]:
    values = [store.value for store in nest.stores] + [reduction.value for reduction in nest.reductions]
    found = [store.index for store in nest.stores]
    found += [node.index for node in distinct(values) if isinstance(node, Load | AxisValue)]
    found += [position.index for window in nest.windows for position in window.positions]
    return list(dict.fromkeys(found))


def _ordered(nest: Nest) -> Nest:
    """Parallel axes by falling stride of the first store, reduced axes by falling stride of the first big
    load."""
    parallel = sorted(nest.parallel, key=lambda axis: -abs(nest.stores[0].index.coefficient(axis.name) or 0))
    reduced = list(nest.reduced)
    values = [reduction.value for reduction in nest.reductions]
    loads = [load.index for load in _loads(values) if load.index.axes() >= {axis.name for axis in reduced}]
    if not nest.scans and loads and all(loads[0].coefficient(axis.name) is not None for axis in reduced):
        reduced.sort(key=lambda axis: -abs(loads[0].coefficient(axis.name) or 0))
    return replace(nest, parallel=tuple(parallel), reduced=tuple(reduced))


def _merged(nest: Nest) -> Nest:
    """Neighbouring axes become one wherever every index runs through them as through one; then all are
    renamed."""
    groups = []
    indices = _indices(nest)
    extents = dict(nest.extents)
    for axes in (list(nest.parallel), list(nest.reduced)):
        position = 0
        while position + 1 < len(axes):
            outer, inner = axes[position], axes[position + 1]
            if all(_runs_through(index, outer.name, inner) for index in indices):
                drop = {outer.name: Index()}
                merged = Axis(inner.name, outer.extent * inner.extent)
                axes[position : position + 2] = [merged]
                extents[merged.name] = merged.extent
                del extents[outer.name]
                nest = _substituted(nest, drop, extents)
                indices = _indices(nest)
            else:
                position += 1
        groups.append(axes)
    names = {}
    for axes, letter in zip(groups, "ij", strict=True):
        for position, axis in enumerate(axes):
            names[axis.name] = letter if len(axes) == 1 else f"{letter}{position}"
    renamed_extents = {names[axis.name]: axis.extent for axes in groups for axis in axes}
    renamed = _substituted(nest, {old: Index.axis(new) for old, new in names.items()}, renamed_extents)
    parallel, reduced = (tuple(Axis(names[a.name], a.extent) for a in axes) for axes in groups)
    return replace(renamed, parallel=parallel, reduced=reduced)


def _runs_through(index: Index, outer: str, inner: Axis) -> bool:
    """Whether the index depends on the two axes only through `outer · extent(inner) + inner`, at every
    level."""
    steps = {outer: 0, inner.name: 0}
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            if atom in steps:
                steps[atom] = coefficient
        elif not _runs_through(atom.value, outer, inner):
            return False
    return steps[outer] == steps[inner.name] * inner.extent


def _substituted(nest: Nest, replacements: Mapping[str, Index], extents: Mapping[str, int]) -> Nest:
    """The nest with axes replaced in every index; `extents` are those of the axes that remain."""
    done: dict[int, Expression] = {}
    alive: list[Expression] = []

    def visit(node: Expression) -> Expression:
        found = done.get(id(node))
        if found is not None:
            return found
        match node:
            case Load() | AxisValue():
                result: Expression = replace(node, index=node.index.substituted(replacements, extents))
            case Call():
                result = replace(node, arguments=tuple(visit(argument) for argument in node.arguments))
            case _:
                result = node
        done[id(node)] = result
        alive.extend((node, result))
        return result

    def change(index: Index) -> Index:
        return index.substituted(replacements, extents)

    reductions = tuple(with_value(reduction, visit(reduction.value), change) for reduction in nest.reductions)
    stores = tuple(replace(store, index=change(store.index), value=visit(store.value)) for store in nest.stores)
    return replace(nest, reductions=reductions, stores=stores)


def expression_count(nest: Nest) -> int:
    """Operations at one point of the nest, shared parts once."""
    values = [store.value for store in nest.stores] + [reduction.value for reduction in nest.reductions]
    return sum(isinstance(node, Call) for node in distinct(values))
