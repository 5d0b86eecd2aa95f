"""Stages of a reduction: what one visit of the elements computes and one exchange merges.

The one idea: a maximum with the sum of exponentials below it, and a sum with the squares about its mean, are one stage
each although they are two reductions, because their partial results merge. Everything else is a stage a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal as OneOf

from agent_synthesis.nests import passes
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Call, Expression, Literal, Nest, Reduced, Reduction, Type


@dataclass(frozen=True)
class Stage:
    """Reductions that one visit makes."""

    kind: OneOf["folds", "shifted", "moments"]
    reductions: tuple[Reduction, ...]
    """In order; two, where two are merged, and behind them of `shifted` the folds that the same visit makes."""
    shared: Expression | None = field(default=None, compare=False)
    """`shifted`: the exponential; `moments`: the mean, in the type of the squares."""
    even: bool = field(default=False, compare=False)
    """`moments`: whether the lanes of every exchange have equally many elements."""

    @property
    def name(self) -> str:
        """The name of its first reduction."""
        return self.reductions[0].name

    def state_bytes(self) -> int:
        """Size of that state."""
        sizes = [accumulator_bytes(reduction) for reduction in self.reductions]
        if self.kind == "moments":
            return sizes[0] + 2 * sizes[1]
        return max(sizes) * len(sizes)  # aligned to the largest


def accumulator_bytes(reduction: Reduction) -> int:
    """Size of what a reduction accumulates: a value, or a structure of one and its position."""
    size = reduction.type.compute.size_bytes
    return size if reduction.operation not in ARG_REDUCTIONS else 2 * max(size, reduction.result.size_bytes)


def plan(
    nest: Nest, *, merge: bool, even: bool = False, apart: bool = False, beside: bool = False
) -> list[Stage]:  # fmt: skip
    """The stages in order; with `merge`, pairs whose partial results merge share one. `even` as in `Stage`. `apart`:
    several pairs side by side share one each, where a visit reads no more than it needs. `beside`: a maximum with its
    sum of exponentials takes other folds into its visit."""
    levels = passes.levels(nest)
    stages: list[Stage] = []
    position = 0
    while position < len(levels):
        pairs: list[Stage] = []
        if merge and position + 1 < len(levels) and (apart or len(levels[position]) == 1):
            pairs = _pairs(nest, levels[position], levels[position + 1])
        elif merge and beside and position + 1 < len(levels):
            pairs = _with_folds(nest, levels[position], levels[position + 1])
        stages += [replace(pair, even=even) for pair in pairs] or [Stage("folds", levels[position])]
        position += 2 if pairs else 1
    return stages


def _pairs(nest: Nest, tops: Sequence[Reduction], totals: Sequence[Reduction]) -> list[Stage]:
    """The reductions of two levels as stages of one of each; none where not all of them find another."""
    left, found = list(totals), list[Stage]()
    for top in tops:
        pair = next((pair for total in left if (pair := _merged(nest, top, total)) is not None), None)
        if pair is None:
            return []
        left.remove(pair.reductions[1])
        found.append(pair)
    return found if not left else []


def _with_folds(nest: Nest, tops: Sequence[Reduction], totals: Sequence[Reduction]) -> list[Stage]:
    """A maximum, its sum of exponentials, and the other reductions of the maximum's level; none where there is no such
    pair, or more in the second level."""
    if len(totals) != 1 or any(top.operation in ARG_REDUCTIONS for top in tops):
        return []
    for top in tops:
        pair = _merged(nest, top, totals[0])
        if pair is not None and pair.kind == "shifted":
            others = [other for other in tops if other is not top]
            return [replace(pair, reductions=(*pair.reductions, *others))]
    return []


def can_merge(nest: Nest) -> bool:
    """Whether some pair of reductions of rows merges."""
    return any(stage.kind != "folds" for stage in plan(nest, merge=True, beside=True))


def _merged(nest: Nest, top: Reduction, total: Reduction) -> Stage | None:
    real = (Type.F32, Type.F64)
    if top.type not in real or total.type not in real or total.operation != "sum":
        return None
    interner = Interner()
    if top.operation == "max" and top.type is total.type:
        exponential = _exponential(total.value, top, interner)
        return Stage("shifted", (top, total), exponential) if exponential is not None else None
    if top.operation == "sum":
        mean = _mean_of_squares(total.value, top, interner, nest.column_count)
        return Stage("moments", (top, total), mean) if mean is not None else None
    return None


def _exponential(value: Expression, top: Reduction, interner: Interner) -> Expression | None:
    """exp(v - max v) in `value`, when value is that, or that times something that does not use the maximum."""
    match value:
        case Call("exp", (Call("sub", (inner, Reduced(name, _)), _),), kind) if name == top.name and kind is top.type:
            return value if interner.number(inner) == interner.number(top.value) else None
        case Call("mul", (left, right), kind) if kind is top.type:
            for factor, other in ((left, right), (right, left)):
                if f"%{top.name}" not in interner.needs(other):
                    return _exponential(factor, top, interner)
    return None


def _mean_of_squares(value: Expression, top: Reduction, interner: Interner, count: int) -> Expression | None:
    """The mean, when `value` is the square of v less the mean of v."""
    match value:
        case Call("mul", (left, right), _) if interner.number(left) == interner.number(right):
            distance = left
        case Call("pow", (left, Literal(exponent, _)), _) if exponent == 2:
            distance = left
        case _:
            return None
    match distance:
        case Call("sub", (inner, mean), kind) if interner.number(inner) == interner.number(narrowed(top.value, kind)):
            pass
        case _:
            return None
    match _wide(mean):
        case Call("div", (Reduced(name, _), Literal(divisor, _)), _) if name == top.name and divisor == count:
            return mean
        case Call("mul", (Reduced(name, _), Literal(factor, _)), _) if name == top.name and factor * count == 1:
            return mean
    return None


def narrowed(value: Expression, type_: Type) -> Expression:
    """What was widened to be summed, where that is of the type."""
    match value:
        case Call("cast", (inner,), Type.F64) if inner.type is type_:
            return inner
    return value


def _wide(mean: Expression) -> Expression:
    """What was narrowed to be subtracted."""
    match mean:
        case Call("cast", (inner,), Type.F32):
            return inner
    return mean


def kept_parts(nest: Nest, stages: Sequence[Stage]) -> Mapping[int, Sequence[Expression]]:
    """Stage number → expensive parts of its elements that are needed again later."""
    levels = passes.levels(nest)
    where = {reduction.name: number for number, stage in enumerate(stages) for reduction in stage.reductions}
    found: dict[int, list[Expression]] = {}
    for level, parts in passes.worth_keeping(nest).items():
        found.setdefault(where[levels[level][0].name], []).extend(p for p in parts if p.type in (Type.F32, Type.F64))
    return found
