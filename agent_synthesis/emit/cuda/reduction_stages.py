"""Stages of a row reduction on CUDA: what one visit of the elements computes and one exchange merges.

The one idea: a maximum with the sum of exponentials below it, and a sum with the squares about its mean, are one stage
each although they are two reductions, because their partial results merge. Everything else is a stage a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal as OneOf

from agent_synthesis.emit import accumulation
from agent_synthesis.emit.spelling import Dialect, accumulator, accumulator_bytes
from agent_synthesis.nests import passes
from agent_synthesis.nests.interner import Interner
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Call, Expression, Literal, Nest, Reduced, Reduction, Type


@dataclass(frozen=True)
class Stage:
    """Reductions that one visit makes."""

    kind: OneOf["folds", "shifted", "moments"]
    reductions: tuple[Reduction, ...]
    """In order; two, where two are merged."""
    shared: Expression | None = field(default=None, compare=False)
    """`shifted`: the exponential; `moments`: the mean, in the type of the squares."""
    even: bool = field(default=False, compare=False)
    """`moments`: whether the lanes of every exchange have equally many elements."""

    @property
    def name(self) -> str:
        """The name of its first reduction."""
        return self.reductions[0].name

    def state_type(self, dialect: Dialect) -> str:
        """The state of `ws` that it exchanges."""
        kinds = [accumulator(reduction, dialect) for reduction in self.reductions]
        if self.kind == "shifted":
            return f"ws::ShiftedSum<{kinds[0]}, {'true' if dialect.functions.get('exp') else 'false'}>"
        if self.kind == "moments":
            mean = f", {kinds[0]}" if kinds[0] != kinds[1] else ""
            return f"ws::Moments<{kinds[1]}{', true' if self.even else (', false' if mean else '')}{mean}>"
        folds = [f"ws::Fold<{self.functor(r)}, {kind}>" for r, kind in zip(self.reductions, kinds, strict=True)]
        text = folds[-1]
        for fold in reversed(folds[:-1]):
            text = f"ws::Both<{fold}, {text}>"
        return text

    def state_bytes(self) -> int:
        """Size of that state."""
        sizes = [accumulator_bytes(reduction) for reduction in self.reductions]
        if self.kind == "moments":
            return sizes[0] + 2 * sizes[1]
        return max(sizes) * len(sizes)  # aligned to the largest

    def functor(self, reduction: Reduction) -> str:
        """The functor of `ws` for one reduction."""
        return f"ws::{accumulation.FUNCTORS[reduction.operation]}"

    def state_of(self, values: Sequence[str]) -> str:
        """Braces around the parts of a state of folds, in order."""
        text = f"{{{values[-1]}}}"
        for value in reversed(values[:-1]):
            text = f"{{{{{value}}}, {text}}}"
        return text

    def results(self, state: str) -> dict[str, str]:
        """Reduction → text of its value, from the row's state."""
        if self.kind == "shifted":
            return {self.reductions[0].name: f"{state}.greatest", self.reductions[1].name: f"{state}.total()"}
        if self.kind == "moments":
            return {
                self.reductions[0].name: f"{state}.mean * {state}.count",
                self.reductions[1].name: f"{state}.squares",
            }
        found, path = {}, state
        for number, reduction in enumerate(self.reductions):
            last = number == len(self.reductions) - 1
            position = ".position" if reduction.operation in ARG_REDUCTIONS else ""
            found[reduction.name] = f"{path}.value{position}" if last else f"{path}.first.value{position}"
            path = f"{path}.second"
        return found


def plan(nest: Nest, *, merge: bool, even: bool = False) -> list[Stage]:
    """The stages in order; with `merge`, pairs whose partial results merge share one. `even` as in `Stage`."""
    levels = passes.levels(nest)
    stages: list[Stage] = []
    position = 0
    while position < len(levels):
        pair = None
        if merge and position + 1 < len(levels) and len(levels[position]) == len(levels[position + 1]) == 1:
            pair = _merged(nest, levels[position][0], levels[position + 1][0])
        stages.append(replace(pair, even=even) if pair else Stage("folds", levels[position]))
        position += 2 if pair else 1
    return stages


def can_merge(nest: Nest) -> bool:
    """Whether some pair of reductions merges."""
    return any(stage.kind != "folds" for stage in plan(nest, merge=True))


def exponentials(nest: Nest) -> list[Call]:
    """Every distinct exponential."""
    roots = [r.value for r in nest.reductions] + [s.value for s in nest.stores]
    return [p for p in Interner().parts(roots).values() if isinstance(p, Call) and p.operation == "exp"]


def distance_exponentials_only(nest: Nest) -> bool:
    """Whether every exponential is of a distance from a maximum, where an approximate one weighs little."""
    maxima = {reduction.name for reduction in nest.reductions if reduction.operation == "max"}
    found = exponentials(nest)

    def is_distance(part: Call) -> bool:
        match part.arguments[0]:
            case Call("sub", (_, Reduced(name, _)), _):
                return name in maxima and part.type is Type.F32
        return False

    return bool(found) and all(is_distance(part) for part in found)


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


def slot_words(stage: Stage) -> int:
    """64-bit words of one state's slot in a mailbox: one for each 32-bit word, in pairs."""
    words = -(-stage.state_bytes() // 4)
    return words + words % 2
