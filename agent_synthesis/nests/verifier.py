"""The rules of the loop-level IR that schedules rely on, checked between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_synthesis.nests.ir import (
    ARG_REDUCTIONS,
    OPERATIONS,
    REDUCTIONS,
    SCANS,
    AxisValue,
    Bound,
    BufferRef,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Memory,
    Nest,
    Reduced,
    Reduction,
    Scan,
    Segmented,
    Summed,
    Type,
    Windowed,
    bounds_inside,
    walk,
)


class MalformedNest(AssertionError):
    """A stage made an IR that breaks a rule: a bug of ours, never of a candidate."""


def verify(nest: Nest) -> Nest:
    """Checks every rule that schedules rely on and returns the nest.

    Raises:
        MalformedNest: names the rule and the place.
    """
    _require(bool(nest.stores), nest, "stores nothing")
    names = [axis.name for axis in nest.parallel + nest.reduced]
    _require(len(set(names)) == len(names), nest, f"axis names repeat: {names}")
    _require(all(axis.extent >= 1 for axis in nest.parallel + nest.reduced), nest, "an axis is empty")
    _require(bool(nest.reduced) or not nest.reductions, nest, "reduces over no axis")
    known: dict[str, Type] = {}
    for reduction in nest.reductions:
        operations = SCANS if isinstance(reduction, Scan) else {**REDUCTIONS, **ARG_REDUCTIONS}
        _require(reduction.operation in operations, nest, f"unknown reduction {reduction.operation}")
        _require(reduction.name not in known, nest, f"reduction {reduction.name} is made twice")
        positions = reduction.positions if isinstance(reduction, Windowed) else ()
        if isinstance(reduction, Windowed) and reduction.is_weighted:
            product = isinstance(reduction.value, Call) and reduction.value.operation == "mul"
            _require(product and reduction.operation == "sum", nest, f"{reduction.name} weights, and sums no products")
        for value in _values(nest, reduction):
            _verify_expression(nest, value, known, set(names), positions)
        known[reduction.name] = reduction.result
    for store in nest.stores:
        target = nest.buffer(store.buffer)
        _require(target.written, nest, f"stores to {store.buffer}, which is not marked written")
        _verify_index(nest, store.index, target)
        if isinstance(store, Summed):
            across = {axis.name for axis in nest.reduced}
            _require(store.index.axes() <= across, nest, f"{store.buffer} has sums of rows, one for each row")
        allowed = set(names) if nest.is_element_store(store) else {axis.name for axis in nest.parallel}
        of_rows = {name: type_ for name, type_ in known.items() if all(scan.name != name for scan in nest.scans)}
        _verify_expression(nest, store.value, known if nest.is_element_store(store) else of_rows, allowed)
    return nest


def _values(nest: Nest, reduction: Reduction) -> tuple[Expression, ...]:
    """What a reduction is of: one value, a value and its position, or a value and two positions."""
    if isinstance(reduction, Segmented):
        match reduction.value:
            case Call("segment", (value, begin, end)) if value.type is reduction.type:
                moving = {axis.name for axis in nest.reduced} & (_axes(begin) | _axes(end))
                _require(not moving, nest, f"{reduction.name} is of parts that differ by element")
                return value, begin, end
        raise MalformedNest(f"{nest.name}: {reduction.name} is of a value without two positions")
    if reduction.operation not in ARG_REDUCTIONS:
        return (reduction.value,)
    match reduction.value:
        case Call("at", (value, position)) if value.type is reduction.type and not position.type.is_float:
            return value, position
    raise MalformedNest(f"{nest.name}: {reduction.name} is of a value without a position")


def _axes(root: Expression) -> set[str]:
    return {axis for part in walk(root) if isinstance(part, Load | AxisValue) for axis in part.index.axes()}


def _verify_expression(
    nest: Nest, root: Expression, known: Mapping[str, Type], axes: set[str], positions: Sequence[Bound] = ()
) -> None:
    for expression in walk(root):
        match expression:
            case Load(buffer, index, type_):
                reference = nest.buffer(buffer)
                _require(type_ is reference.type.compute, nest, f"load of {buffer} has type {type_}")
                _require(index.axes() <= axes, nest, f"load of {buffer} uses an axis out of scope")
                _verify_index(nest, index, reference, positions)
            case Reduced(reduction, type_):
                _require(known.get(reduction) is type_, nest, f"{reduction} is used before it is made")
            case Memory(buffer, type_):
                _require(type_ is nest.buffer(buffer).type.compute, nest, f"{buffer} is looked into as {type_}")
                _require(not nest.buffer(buffer).written, nest, f"{buffer} is looked into while it is written")
            case Call(operation, arguments, _):
                _require(OPERATIONS.get(operation) == len(arguments), nest, f"bad call of {operation}")
                memory = [isinstance(argument, Memory) for argument in arguments]
                _require(memory == ([True, False] if operation == "gather" else [False] * len(memory)), nest,
                         f"{operation} takes a whole buffer")  # fmt: skip
            case AxisValue(index, _):
                _require(index.axes() <= axes, nest, "an axis value is out of scope")
            case Literal():
                pass


def _verify_index(nest: Nest, index: Index, buffer: BufferRef, positions: Sequence[Bound] = ()) -> None:
    low, high = bounds_inside(index, positions, nest.extents)
    inside = low >= 0 and high < buffer.element_count
    _require(inside, nest, f"index of {buffer.name} spans {low}..{high} of {buffer.element_count}")


def _require(holds: bool, nest: Nest, message: str) -> None:
    if not holds:
        raise MalformedNest(f"{nest.name}: {message}")
