"""Nests put into the form that a CPU schedule wants, and the parts of a function that all schedules share.

Axes of one iteration vanish, axes that lie one after the other in every index merge, and axes are ordered as the
stores lie in memory. Nothing here knows a schedule's strategy.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from agent_synthesis.emit.expression import EXPENSIVE, Function, Interner, Names
from agent_synthesis.nests.attention import Attended
from agent_synthesis.nests.ir import (
    Axis,
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
    Windowed,
    with_value,
)
from agent_synthesis.nests.product import Multiplied
from agent_synthesis.schedule import Parameters
from warpsmith.v1 import candidate_pb2

LAST_LEVEL_BYTES = 32 << 20
"""What a shared last-level cache holds, about; larger traffic goes to memory."""
PRIVATE_CACHE_BYTES = 1 << 20
"""What one core's own cache holds, about."""

HEADERS = ("ws_loops.hpp", "ws_math.hpp", "ws_types.hpp")
"""What every CPU program includes; `ws_loops.hpp` includes the others."""
_SERIAL_WORK = 100_000
"""Simple element operations below which starting threads costs more than it saves (about 5 microseconds)."""


# ---- indices -----------------------------------------------------------------------------------------


def roots(nest: Nest) -> list[Expression]:
    """All expressions that the nest evaluates: of reductions, then of stores."""
    return [reduction.value for reduction in nest.reductions] + [store.value for store in nest.stores]


def indices(nest: Nest) -> list[Index]:
    """Every index that the nest uses, stores first."""
    found = [store.index for store in nest.stores]
    for part in Interner().parts(roots(nest)).values():
        if isinstance(part, Load | AxisValue):
            found.append(part.index)
    return found + [position.index for window in nest.windows for position in window.positions]


def reindexed(nest: Nest, change: Callable[[Index], Index], parallel: Iterable[Axis], reduced: Iterable[Axis]) -> Nest:
    """The nest over other axes, with every index changed. Shared expressions stay shared."""
    done: dict[int, tuple[Expression, Expression]] = {}

    def renew(expression: Expression) -> Expression:
        if id(expression) in done:
            return done[id(expression)][1]
        match expression:
            case Load(_, index, _) | AxisValue(index, _):
                fresh: Expression = replace(expression, index=change(index))
            case Call(_, arguments, _):
                fresh = replace(expression, arguments=tuple(renew(argument) for argument in arguments))
            case _:
                fresh = expression
        done[id(expression)] = (expression, fresh)
        return fresh

    return replace(
        nest,
        parallel=tuple(parallel),
        reduced=tuple(reduced),
        reductions=tuple(with_value(r, renew(r.value), change) for r in nest.reductions),
        stores=tuple(replace(s, index=change(s.index), value=renew(s.value)) for s in nest.stores),
    )


def simplified(nest: Nest) -> Nest:
    """Without axes of one iteration, and with adjacent axes merged where every index allows it.

    Parallel axes come in the order of the first store's strides, so that the last one is written contiguously.
    """
    extents = nest.extents
    gone = {axis.name: Index() for axis in nest.parallel + nest.reduced if axis.extent == 1}
    kept = {name: extent for name, extent in extents.items() if name not in gone}
    if gone:
        parallel = [axis for axis in nest.parallel if axis.name in kept]
        reduced = [axis for axis in nest.reduced if axis.name in kept]
        if nest.reduced and not reduced:
            reduced = [nest.reduced[-1]]
            gone.pop(reduced[0].name)
            kept[reduced[0].name] = 1
        nest = reindexed(nest, lambda index: index.substituted(gone, kept | dict.fromkeys(gone, 1)), parallel, reduced)
    nest = replace(nest, parallel=_by_stride(nest))
    while (merged := _merged_pair(nest)) is not None:
        nest = merged
    return nest


def _by_stride(nest: Nest) -> tuple[Axis, ...]:
    strides = {axis.name: nest.stores[0].index.coefficient(axis.name) for axis in nest.parallel}
    if not all(strides.values()):  # inside a quotient, or not stored along: leave the order that was given
        return nest.parallel
    return tuple(sorted(nest.parallel, key=lambda axis: -abs(strides[axis.name] or 0)))


def _merged_pair(nest: Nest) -> Nest | None:
    found = indices(nest)
    for group in (nest.parallel, nest.reduced):
        for outer, inner in itertools.pairwise(group):
            if all(_lie_together(index, outer, inner) for index in found):
                both = Axis(inner.name, outer.extent * inner.extent)

                def renamed(axes: tuple[Axis, ...], outer: Axis = outer, both: Axis = both) -> list[Axis]:
                    return [both if a.name == both.name else a for a in axes if a.name != outer.name]

                def change(index: Index, outer: Axis = outer) -> Index:
                    return Index(index.offset, tuple(term for term in index.terms if term[0] != outer.name))

                return reindexed(nest, change, renamed(nest.parallel), renamed(nest.reduced))
    return None


def _lie_together(index: Index, outer: Axis, inner: Axis) -> bool:
    far, near = index.coefficient(outer.name), index.coefficient(inner.name)
    return far is not None and near is not None and far == near * inner.extent


def flattened(nest: Nest) -> Nest:
    """A nest without reductions over one flat axis; what is not contiguous becomes quotients and remainders."""
    axes = nest.parallel + nest.reduced
    flat = Axis(axes[-1].name, math.prod(axis.extent for axis in axes))
    extents = {flat.name: flat.extent}
    whole = Index.axis(flat.name)

    def run(first: int, last: int) -> Index:
        """The row-major number formed by axes first … last."""
        inside = math.prod(axis.extent for axis in axes[last + 1 :])
        part = whole.divided(inside, extents)
        size = math.prod(axis.extent for axis in axes[first : last + 1])
        return part if first == 0 else part.modulo(size, extents)

    singles = {axis.name: run(number, number) for number, axis in enumerate(axes)}

    def change(index: Index) -> Index:
        coefficients = [index.coefficient(axis.name) for axis in axes]
        if None in coefficients:
            return index.substituted(singles, extents)
        result, last = Index(index.offset), len(axes) - 1
        while last >= 0:
            first, step = last, coefficients[last] or 0
            reach = step * axes[last].extent
            while first > 0 and coefficients[first - 1] == reach:
                first -= 1
                reach *= axes[first].extent
            if step:
                result = result + run(first, last).scaled(step)
            last = first - 1
        return result

    return reindexed(nest, change, [flat], [])


def is_contiguous(index: Index, axis: str) -> bool:
    """Whether a step along the axis is a step to the next element."""
    return index.coefficient(axis) == 1


def is_safe_in_place(nest: Nest) -> bool:
    """Whether every buffer both read and written is read only at the very place that is written."""
    written = {store.buffer: store.index for store in nest.stores}
    loads = [part for part in Interner().parts(roots(nest)).values() if isinstance(part, Load)]
    return all(written.get(load.buffer, load.index) == load.index for load in loads)


def reads_what_it_writes(nest: Nest) -> bool:
    """Whether some buffer is both read and written, so that the nest must not run twice."""
    written = {store.buffer for store in nest.stores}
    return any(isinstance(part, Load) and part.buffer in written for part in Interner().parts(roots(nest)).values())


def work(nest: Nest) -> int:
    """Rough cost of the nest in simple element operations."""
    interner = Interner()
    costs = (
        16 if isinstance(part, Call) and part.operation in EXPENSIVE else 1
        for part in interner.parts(roots(nest)).values()
        if not isinstance(part, Literal)
    )
    return nest.row_count * nest.column_count * sum(costs)


# ---- text --------------------------------------------------------------------------------------------


def prologue(function: Function, entry: str, workspaces: Mapping[str, str] | None = None) -> list[str]:
    """The signature and one typed pointer for each argument: buffers in order, then workspaces (name → type)."""
    lines = [f'extern "C" void {entry}(void* const* arguments) {{']
    position = 0
    for buffer in function.nest.buffers:
        element = "std::uint8_t" if function.reads_bytes(buffer) else function.dialect.storage[buffer.type]
        kind = f"{'' if buffer.written else 'const '}{element}*"
        lines.append(
            f"  {kind} __restrict {function.buffers[buffer.name]} = static_cast<{kind}>(arguments[{position}]);"
        )
        position += 1
    for name, kind in (workspaces or {}).items():
        lines.append(f"  {kind}* __restrict {name} = static_cast<{kind}*>(arguments[{position}]);")
        position += 1
    return lines


def name_everything(function: Function) -> str:
    """Takes identifiers for the entry, axes, buffers and reductions; returns the entry's."""
    nest, names = function.nest, function.names
    entry = names.take(nest.name)
    for axis in nest.parallel + nest.reduced:
        function.axes[axis.name] = names.take(axis.name)
    for buffer in nest.buffers:
        function.buffers[buffer.name] = names.take(buffer.name)
    for reduction in nest.reductions:
        function.reductions[reduction.name] = names.take(reduction.name)
    return entry


def entry_name(nest: Nest) -> str:
    """The entry point's symbol: the nest's name made legal."""
    return Names().take(nest.name)


def launch(nest: Nest, workspaces: Iterable[str] = ()) -> candidate_pb2.Launch:
    """The launch record: the nest's buffers in order, then the workspaces."""
    extra = list(workspaces)
    return candidate_pb2.Launch(
        entry=entry_name(nest),
        arguments=[candidate_pb2.LaunchArgument(buffer=name) for name in [*(b.name for b in nest.buffers), *extra]],
        writes=[buffer.name for buffer in nest.buffers if buffer.written] + extra,
    )


def header(nest: Nest, schedule: str, parameters: Parameters) -> list[str]:
    """The comment over a function: the nest in words and how it is scheduled."""
    lines = [f"{entry_name(nest)}: {nest.comment or 'one fused group'}"]
    axes = [", ".join(f"{a.name}:{a.extent}" for a in group) for group in (nest.parallel, nest.reduced)]
    lines.append("for all " + (axes[0] or "one point") + (f"; over {axes[1]}" if axes[1] else ""))
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
        if isinstance(reduction, Multiplied):
            lines[-1] = f"  {reduction.name} = at every element, sum of {reduction.depth} {in_words(reduction.value)}"
    for store in nest.stores:
        lines.append(f"  {store.buffer}[{index_in_words(store.index)}] = {in_words(store.value)}")
    settings = [*parameters.choices.items(), *parameters.integers.items()]
    lines.append(f"{schedule}: " + ", ".join(f"{key} = {value}" for key, value in settings))
    return [f"// {line}" for line in lines]


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


def loop_over(function: Function, axis: Axis) -> str:
    """The head of a loop over a whole axis."""
    name = function.axes[axis.name]
    return f"for (long {name} = 0; {name} < {axis.extent}; ++{name})"


def parallel_pragma(threads: int, clauses: str = "") -> str:
    """The OpenMP line of a parallel region or loop; `threads` 0 means all that the caller allows."""
    count = f" num_threads({threads})" if threads > 0 else ""
    return f"#pragma omp parallel{f' {clauses}' if clauses else ''}{count}"


# ---- parameters that all CPU schedules have ----------------------------------------------------------


def default_threads(nest: Nest) -> int:
    """1 where starting threads would cost more than it saves, else 0 (all)."""
    return 1 if work(nest) < _SERIAL_WORK else 0


def default_stores(nest: Nest) -> str:
    """Streaming for outputs that crowd the last-level cache but do not exceed what an allocator reuses.

    Measured against fresh outputs of `torch.empty`: below 16 MiB the cache still holds them; from 32 MiB on every call
    gets new pages, whose lines the kernel's zeroing has just brought into the cache, and streaming costs 10 %.
    """
    written = sum(buffer.element_count * buffer.type.size_bytes for buffer in nest.buffers if buffer.written)
    return "streaming" if LAST_LEVEL_BYTES // 2 <= written < LAST_LEVEL_BYTES else "plain"


def fill_bytes(nest: Nest, parameters: Parameters) -> int:
    """Bytes of outputs that plain stores read from memory only to overwrite them."""
    if parameters.choices.get("stores") == "streaming":
        return 0
    written = sum(buffer.element_count * buffer.type.size_bytes for buffer in nest.buffers if buffer.written)
    return written if written > LAST_LEVEL_BYTES else 0


def thread_count(nest: Nest, parameters: Parameters) -> int:
    """Threads that can be busy at once: bounded by the machine's cores and by the work."""
    return parameters.integers["threads"] or max(1, min(os.cpu_count() or 1, work(nest) // _SERIAL_WORK))


def changed(parameters: Parameters, key: str, value: str | int) -> Parameters:
    """The parameters with one of them set anew."""
    if isinstance(value, str):
        return Parameters({**parameters.choices, key: value}, dict(parameters.integers))
    return Parameters(dict(parameters.choices), {**parameters.integers, key: value})


def variations(parameters: Parameters, domain: Mapping[str, Iterable[str | int]]) -> list[Parameters]:
    """Every set of parameters one change away, within the domain."""
    current: dict[str, str | int] = {**parameters.choices, **parameters.integers}
    return [
        changed(parameters, key, value) for key, values in domain.items() for value in values if current[key] != value
    ]
