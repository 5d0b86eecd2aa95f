"""How reductions are written in C++: functors, accumulators and their neutral elements."""

from __future__ import annotations

from dataclasses import dataclass

from agent_synthesis.emit.expression import Function
from agent_synthesis.emit.spelling import accumulator, literal
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Reduction, Type

FUNCTORS = {
    "sum": "Sum", "prod": "Product", "max": "Maximum", "min": "Minimum", "argmax": "ArgMaximum", "argmin": "ArgMinimum",
}  # fmt: skip
"""Reduction → functor of `ws`."""


@dataclass(frozen=True)
class Accumulation:
    """How one reduction is written in C++."""

    reduction: Reduction
    operation: str
    """Functor of `ws`, for folds."""
    kind: str
    """Type of a lane."""
    total: str
    """Type that blocks add up in: f32 sums add up in double, so that long rows stay as exact as pairwise sums."""
    neutral: str

    @property
    def finds_place(self) -> bool:
        """Whether values come with their positions, which lie in an array of their own."""
        return self.reduction.operation in ARG_REDUCTIONS

    def array(self, name: str, count: str) -> str:
        """The declaration of an array of accumulators."""
        lanes = f"ws::Places{self.kind.removeprefix('ws::At').removesuffix('>')}, {count}> {name};"
        return f"alignas(64) {lanes if self.finds_place else f'{self.kind} {name}[{count}];'}"

    def step(self, array: str, place: str, value: str) -> str:
        """The statement that takes one more value into an accumulator of an array."""
        accumulator = f"{array}[{place}]"
        sign = {"sum": "+=", "prod": "*="}.get(self.reduction.operation)
        if sign and self.reduction.type.is_float:
            return f"{accumulator} {sign} {value};"
        if self.finds_place:
            return f"{array}.take<ws::{self.operation}>({place}, {value});"
        return f"{accumulator} = ws::{self.operation}::of<{self.kind}>({accumulator}, {value});"

    @property
    def neutral_total(self) -> str:
        """The neutral element in the type of totals."""
        return "0.0" if self.total != self.kind else self.neutral


def accumulation(function: Function, reduction: Reduction) -> Accumulation:
    """The reduction in C++."""
    type_ = reduction.type.compute
    kind = accumulator(reduction, function.dialect)
    operation = FUNCTORS[reduction.operation]
    if reduction.operation in ARG_REDUCTIONS:
        return Accumulation(reduction, operation, kind, kind, f"ws::{operation}::neutral<{kind}>()")
    return Accumulation(
        reduction,
        operation,
        kind,
        "double" if type_ is Type.F32 and reduction.operation == "sum" else kind,
        literal(_neutral(reduction.operation, type_), type_, function.dialect),
    )


def _neutral(operation: str, type_: Type) -> float | int | bool:
    if operation in ("sum", "prod"):
        return {"sum": 0, "prod": 1}[operation]
    if type_.is_float:
        return float("-inf") if operation == "max" else float("inf")
    if type_ is Type.BOOL:
        return operation == "min"
    bits = 8 * type_.size_bytes
    low, high = (0, 2**bits - 1) if type_ is Type.U8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return low if operation == "max" else high
