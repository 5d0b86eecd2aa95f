"""From formulas to loops: chooses the axes of a nest, binds its reductions to them, merges what is
contiguous.

The one idea: the element stores decide. Axes on which a reduction's value depends are parallel, the others
are the reduced ones, and a reduction over as many elements walks the same reduced axes. Axes begin as fine
as the formulas need, so that indices stay affine, and end as coarse as they allow. Schedules are not chosen
here.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.nests.analysis.known_sums import without_known_sums
from agent_synthesis.nests.attention import Attending
from agent_synthesis.nests.ir import (
    Axis,
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
    Segmented,
    Store,
    Summed,
    Type,
    Windowed,
)
from agent_synthesis.nests.iteration_space import indices, merged, ordered, splits_of
from agent_synthesis.nests.product import multiplied
from agent_synthesis.nests.symbolic import (
    Between,
    Fold,
    Indices,
    Ref,
    Refused,
    Running,
    Sliding,
    Symbol,
    TooLarge,
    Tracer,
    axes_of,
    distinct,
    flatten,
    folds_of_elements,
    refs_of,
    sum_at,
    unflatten,
)
from agent_synthesis.nests.verifier import verify

MAX_EXPRESSION_SIZE = 3000
"""Nodes of all expressions, shared parts counted at each use; beyond it a kernel would not fit its
registers."""

_ROUNDS = 8


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
    sums = _sums(outputs, tracer.extents)
    if sums:
        with contextlib.suppress(Refused):
            return _built(name, [each for each in outputs if each not in sums], sums, tracer, buffers, comment)
    return _built(name, outputs, [], tracer, buffers, comment)


def _sums(outputs: Sequence[Output], extents: dict[str, int]) -> list[Output]:
    """Outputs that may be sums over the rows of larger ones: the gradient of a norm's input needs sums along each row,
    that of its weight sums of columns, and both read the same two tensors."""
    found, most = [], max(output.symbol.element_count for output in outputs)
    for output in outputs:
        shape = output.symbol.shape
        extents.update((f"sum{dim}", extent) for dim, extent in enumerate(shape))
        index = tuple(Index.axis(f"sum{dim}") if extent > 1 else Index() for dim, extent in enumerate(shape))
        if output.symbol.element_count < most and sum_at(output.symbol, index) is not None:
            found.append(output)
    return found


def _built(
    name: str,
    rows: Sequence[Output],
    sums: Sequence[Output],
    tracer: Tracer,
    buffers: Sequence[BufferRef],
    comment: str,
) -> Nest:
    splits: dict[str, set[int]] = {}
    for _ in range(_ROUNDS):
        attempt = _Attempt(tracer, splits)
        try:
            nest = attempt.nest(name, rows, sums, buffers, comment)
        except Refused:
            if not attempt.split(splits_of(attempt.misread, tracer.extents)):
                raise
            continue
        if not attempt.split(splits_of(indices(nest), nest.extents)):
            break
    return verify(merged(ordered(without_known_sums(nest))))


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

    def nest(
        self,
        name: str,
        outputs: Sequence[Output],
        sums: Sequence[Output],
        buffers: Sequence[BufferRef],
        comment: str,
    ) -> Nest:
        anchor = self._anchor(outputs)
        stores: list[Store] = []
        for output in sorted(outputs, key=_is_of_rows):
            where = _rows(output, self._reductions) if _is_of_rows(output) else self._place(output, anchor)
            value = _unrounded(self._resolved(output.symbol.at(where)), output.symbol.type)
            stores.append(Store(output.buffer, _strided(where, output.strides), value))
        stores += [self._summed(output) for output in sums]
        _check_shared(stores)
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

    def _summed(self, output: Output) -> Summed:
        """The store of a sum over all rows, at each of their elements; it divides the axes where no reduction did."""
        extents, shape = self._tracer.extents, output.symbol.shape
        if not (self._rows or self._reduced):
            ref = sum_at(output.symbol, self._axes_for("s", shape))
            counts = list(itertools.accumulate((extents[axis] for axis in self._parallel), operator.mul))
            if ref is not None and (rows := math.prod(ref.fold.extents)) in counts:
                outer = counts.index(rows) + 1
                self._parallel, self._reduced = self._parallel[:outer], self._parallel[outer:]
        where = unflatten(_row_major(self._reduced, extents), shape, extents)
        ref = sum_at(output.symbol, where)
        rows, columns = (math.prod(extents[axis] for axis in axes) for axes in (self._parallel, self._reduced))
        if ref is None or (math.prod(ref.fold.extents), output.symbol.element_count) != (rows, columns):
            raise Refused("what it sums up are not the rows of its other outputs")
        folded = unflatten(_row_major(self._parallel, extents), ref.fold.extents, extents)
        value = self._resolved(ref.fold.body(ref.indices, folded))
        return Summed(output.buffer, _strided(where, output.strides), value, ref.fold.type)

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
                made: Reduction = multiplied(ref, self._tracer.extents)
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
        if isinstance(ref.fold, Between):
            ends = (self._resolved(place(ref.indices)) for place in (ref.fold.begin, ref.fold.end))
            return Segmented("", ref.fold.operation, Call("segment", (value, *ends), ref.fold.type), ref.fold.type)
        if isinstance(ref.fold, Attending):
            return ref.fold.reduction(value)
        return Reduction("", ref.fold.operation, value, ref.fold.type)

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
            raise TooLarge(f"its formulas have more than {MAX_EXPRESSION_SIZE} parts")


def _size(expression: Expression, sizes: dict[int, int]) -> int:
    """Nodes of an expression; `sizes` remembers by identity, and its keys' objects are kept alive by the
    caller."""
    if not isinstance(expression, Call):
        return 1
    found = sizes.get(id(expression))
    if found is None:
        found = sizes[id(expression)] = 1 + sum(_size(argument, sizes) for argument in expression.arguments)
    return found


def _unrounded(value: Expression, type_: Type) -> Expression:
    """The value before it is rounded to a narrow type and widened again, where the store rounds it so too."""
    match value:
        case Call("cast", (Call("cast", (inner,), narrow),), wide) if narrow is type_ and wide is inner.type:
            return inner
    return value


def _check_shared(stores: Sequence[Store]) -> None:
    """Raises Refused where sums over rows read no element that is read for another store."""
    sums = [store.value for store in stores if isinstance(store, Summed)]
    others = set(_loads(store.value for store in stores if not isinstance(store, Summed)))
    if sums and not all(others & set(_loads([value])) for value in sums):
        raise Refused("what it sums up over rows is read nowhere else")


def _of_rows(output: Output) -> Attending | None:
    """The fold of rows' statistics that an output is."""
    leaf = output.symbol.at((Index(),) * len(output.symbol.shape))
    return leaf.fold if isinstance(leaf, Ref) and isinstance(leaf.fold, Attending) and leaf.fold.of else None


def _is_of_rows(output: Output) -> bool:
    return _of_rows(output) is not None


def _rows(output: Output, reductions: Iterable[tuple[Fold, Indices]]) -> Indices:
    """The index of rows' statistics: where the fold of these rows is read, as is known once that is placed."""
    fold = _of_rows(output)
    found = [indices[:-1] for made, indices in reductions if fold is not None and made is fold.of]
    if len(found) != 1:
        raise Refused("statistics of attention whose result it does not store")
    return found[0]


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


def expression_count(nest: Nest) -> int:
    """Operations at one point of the nest, shared parts once."""
    values = [store.value for store in nest.stores] + [reduction.value for reduction in nest.reductions]
    return sum(isinstance(node, Call) for node in distinct(values))
