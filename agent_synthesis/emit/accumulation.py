"""How reductions are written in C++: functors, and the types that a skeleton of the CPU is told."""

from __future__ import annotations

from collections.abc import Iterable

from agent_synthesis.emit.expression import Function
from agent_synthesis.emit.spelling import accumulator
from agent_synthesis.nests.ir import Reduction

_FUNCTORS = {
    "sum": "Sum", "prod": "Product", "max": "Maximum", "min": "Minimum", "argmax": "ArgMaximum", "argmin": "ArgMinimum",
}  # fmt: skip
"""Reduction → functor of `ws`."""


def functor(operation: str) -> str:
    """The functor of a reduction's operation."""
    return f"ws::{_FUNCTORS[operation]}"


def reductions_type(function: Function, reductions: Iterable[Reduction]) -> str:
    """The type that says to a skeleton of the CPU what a sweep over the elements reduces."""
    each = (f"ws::Reduction<{functor(r.operation)}, {accumulator(r, function.dialect)}>" for r in reductions)
    return f"ws::Reductions<{', '.join(each)}>"
