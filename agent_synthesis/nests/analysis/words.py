"""A nest in words, for people who read the kernel that runs it."""

from __future__ import annotations

from agent_synthesis.nests.attention import Attended, Statistics
from agent_synthesis.nests.ir import (
    AxisValue,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Quotient,
    Reduced,
    Remainder,
    Summed,
    Windowed,
)
from agent_synthesis.nests.product import Multiplied
from agent_synthesis.nests.tailed import Tailed


def described(nest: Nest) -> list[str]:
    """What it reduces over which axes, and what it stores: a line each."""
    if isinstance(nest, Tailed):
        return [line for member in nest.members for line in described(member)]
    axes = [", ".join(f"{a.name}:{a.extent}" for a in group) for group in (nest.parallel, nest.reduced)]
    lines = ["for all " + (axes[0] or "one point") + (f"; over {axes[1]}" if axes[1] else "")]
    for reduction in nest.reductions:
        lines.append(f"  {reduction.name} = {reduction.operation}({in_words(reduction.value)})")
        if isinstance(reduction, Windowed):
            inside = (f"{index_in_words(p.index)} in 0..{p.extent - 1}" for p in reduction.positions)
            lines[-1] += f" where {', '.join(inside)}"
        if isinstance(reduction, Attended):
            value, query, key = (in_words(load) for load in reduction.loads)
            scores = f"{reduction.scale:g} * sum of {reduction.depth} {query} * {key}"
            scores += f" + {in_words(reduction.mask)}" if reduction.mask is not None else ""
            lines[-1] = f"  {reduction.name} = sum({value} * softmax({scores}))"
            if isinstance(reduction, Statistics):
                lines[-1] = f"  {reduction.name} = log(sum(exp({scores})))"
        if isinstance(reduction, Multiplied):
            lines[-1] = f"  {reduction.name} = at every element, sum of {reduction.depth} {in_words(reduction.value)}"
    for store in nest.stores:
        value = in_words(store.value)
        value = f"sum over rows({value})" if isinstance(store, Summed) else value
        lines.append(f"  {store.buffer}[{index_in_words(store.index)}] = {value}")
    return lines


def in_words(expression: Expression, limit: int = 160) -> str:
    """The expression as one readable line, cut off where it grows long."""
    budget = [60]

    def write(part: Expression) -> str:
        budget[0] -= 1
        if budget[0] < 0:
            return "…"
        match part:
            case Literal(value, _):
                return f"{value:g}" if isinstance(value, float) else str(value)
            case Load(buffer, index, _):
                return f"{buffer}[{index_in_words(index)}]"
            case AxisValue(index, _):
                return f"({index_in_words(index)})"
            case Memory(buffer, _):
                return buffer
            case Reduced(reduction, _):
                return reduction
            case Call("cast", (inner,), type_):
                return f"{type_.value}({write(inner)})"
            case Call(operation, arguments, _):
                texts = [write(argument) for argument in arguments]
                sign = {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(operation)
                return f"({f' {sign} '.join(texts)})" if sign else f"{operation}({', '.join(texts)})"

    text = write(expression)
    if text.startswith("(") and text.endswith(")") and _closes_at_the_end(text):
        text = text[1:-1]
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _closes_at_the_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and position < len(text) - 1:
            return False
    return True


def index_in_words(index: Index) -> str:
    """The index as one readable line."""
    parts = []
    for atom, coefficient in index.terms:
        match atom:
            case str():
                text = atom
            case Quotient(value, divisor):
                text = f"({index_in_words(value)}) / {divisor}"
            case Remainder(value, divisor):
                text = f"({index_in_words(value)}) % {divisor}"
        parts.append(text if coefficient == 1 else f"{coefficient} {text}")
    if index.offset or not parts:
        parts.append(str(index.offset))
    return " + ".join(parts)
