"""Tensors as formulas: what each element of an ATen result is, as a function of its index.

The one idea: run a group's calls on meta tensors under a dispatch mode. PyTorch's own composite operations
fall apart by themselves; each small operation that arrives has a handler that answers with a `Symbol`.
Nothing is computed and no loop is chosen here; `iteration` does that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agent_synthesis.nests.element_types import OF_TORCH, PART_OF_COMPLEX
from agent_synthesis.nests.ir import AxisValue, Bound, Call, Expression, Index, Literal, Load, Type
from warpsmith.graphs import dtypes
from warpsmith.v1 import tensor_pb2

Indices = tuple[Index, ...]
"""One index for each dimension of a tensor."""


class Refused(Exception):
    """The group cannot be one nest; the message says why, for the list of illegal moves."""


class TooLarge(Refused):
    """Its formulas are too large; more calls hardly make them smaller."""


_COMPARISONS: Final = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "not", "and", "or", "xor",
})  # fmt: skip


def type_of(dtype: torch.dtype) -> Type:
    """The IR's type of a torch type."""
    try:
        return OF_TORCH[dtype]
    except KeyError:
        raise Refused(f"tensors of type {dtype} are not lowered") from None


def storage(dtype: tensor_pb2.Dtype.ValueType) -> tuple[Type, int]:
    """The IR's type of what a contract type consists of in memory, and how many of them: two for a complex number."""
    torch_dtype = dtypes.to_torch(dtype)
    if torch_dtype in PART_OF_COMPLEX:
        return PART_OF_COMPLEX[torch_dtype], 2
    return type_of(torch_dtype), 1


# ---- building expressions ----------------------------------------------------------------------------


def literal(value: float | int | bool, type_: Type) -> Literal:
    """A constant, brought to the kind of number that the type holds."""
    if type_ is Type.BOOL:
        return Literal(bool(value), type_)
    return Literal(float(value) if type_.is_float else int(value), type_)


def op(name: str, *arguments: Expression) -> Expression:
    """A call whose type follows from its arguments: BOOL for tests, else the type of the (last) operand."""
    if name in _COMPARISONS:
        return Call(name, arguments, Type.BOOL)
    return Call(name, arguments, arguments[-1].type)


EXACT_IN_16_BITS = frozenset({Type.I8, Type.U8, Type.BOOL})
"""Types all of whose values a float of 16 bits has."""


def cast(value: Expression, type_: Type) -> Expression:
    """The value converted to a type; nothing where it has it already, or had it but for a type that holds all of it."""
    if value.type is type_:
        return value
    match value:
        case Call("cast", (inner,), Type.F16 | Type.BF16) if inner.type in EXACT_IN_16_BITS and type_ is Type.F32:
            return Call("cast", (inner,), type_)
    if isinstance(value, Literal) and not type_.is_widened and math.isfinite(value.value):
        return literal(value.value, type_)
    return Call("cast", (value,), type_)


# ---- symbols -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Symbol:
    """A tensor as a formula. `at` gives the element at an index, of type `type.compute`."""

    shape: tuple[int, ...]
    type: Type
    at: Callable[[Indices], Expression]

    @property
    def element_count(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Fold:
    """A reduction that a symbol refers to: `operation` over `extents` of `body(kept indices, folded
    indices)`."""

    operation: str
    extents: tuple[int, ...]
    body: Callable[[Indices, Indices], Expression]
    type: Type


@dataclass(frozen=True, eq=False)
class Running(Fold):
    """A fold of the elements up to one: the last index of a `Ref` to it is that element's position."""


@dataclass(frozen=True, eq=False)
class Sliding(Fold):
    """A fold over a window of a larger tensor; `positions` says, as `body` does, where an element lies in it."""

    positions: Callable[[Indices, Indices], tuple[Bound, ...]]
    is_weighted: bool = False
    """Whether `body` gives products of what is seen and of a weight."""


@dataclass(frozen=True, eq=False)
class Between(Fold):
    """A fold of the elements from one position to another, which the kept indices decide."""

    begin: Callable[[Indices], Expression]
    end: Callable[[Indices], Expression]


@dataclass(frozen=True)
class Ref:
    """The value of a fold at some kept indices: a leaf of expressions that `iteration` resolves to
    `Reduced`."""

    fold: Fold
    indices: Indices
    type: Type


def fold(operation: str, value: Symbol, dims: Sequence[int], accumulate: Type) -> Symbol:
    """The reduction of a symbol over dimensions, which keep extent 1 in the result."""
    folded = tuple(sorted(dim % max(1, len(value.shape)) for dim in dims)) if value.shape else ()
    kept = tuple(dim for dim in range(len(value.shape)) if dim not in folded)
    shape = tuple(1 if dim in folded else extent for dim, extent in enumerate(value.shape))

    def body(outer: Indices, inner: Indices) -> Expression:
        places = dict(zip(kept, outer, strict=True)) | dict(zip(folded, inner, strict=True))
        return cast(value.at(tuple(places[dim] for dim in range(len(value.shape)))), accumulate)

    extents = tuple(value.shape[dim] for dim in folded)
    if math.prod(extents) == 1:
        return Symbol(shape, accumulate, lambda index: body(tuple(index[d] for d in kept), (Index(),) * len(folded)))
    made = Fold(operation, extents, body, accumulate)

    def refer(index: Indices) -> Expression:
        leaf: Any = Ref(made, tuple(index[dim] for dim in kept), accumulate)
        return leaf  # type: ignore[no-any-return]  # it stands in for an expression until the loops are known

    return Symbol(shape, accumulate, refer)


def sum_at(symbol: Symbol, index: Indices) -> Ref | None:
    """The sum that a symbol is at an index, rounded to its type and no other; None where it is anything else."""
    value = symbol.at(index)
    while isinstance(value, Call) and value.operation == "cast" and value.type in (symbol.type, symbol.type.compute):
        value = value.arguments[0]
    if not isinstance(value, Ref) or type(value.fold) is not Fold or value.fold.operation != "sum":
        return None
    return value if value.fold.type.is_float and axes_of(value.indices) == axes_of(index) else None


def reshaped(value: Symbol, shape: Sequence[int], extents: Mapping[str, int]) -> Symbol:
    """The same elements in row-major order under another shape."""
    if tuple(shape) == value.shape:
        return value
    seen = [dim for dim, extent in enumerate(shape) if extent != 1]
    if [shape[dim] for dim in seen] == [extent for extent in value.shape if extent != 1]:
        # Extents of 1 come and go. The others stay as they are, for windows that look beyond their ends.
        def at(index: Indices) -> Expression:
            kept = iter(seen)
            return value.at(tuple(Index() if extent == 1 else index[next(kept)] for extent in value.shape))

        return Symbol(tuple(shape), value.type, at)
    return Symbol(
        tuple(shape),
        value.type,
        lambda index: value.at(unflatten(flatten(index, shape), value.shape, extents)),
    )


def flatten(index: Indices, shape: Sequence[int]) -> Index:
    """The row-major position of an index."""
    flat, step = Index(), 1
    for part, extent in zip(reversed(index), reversed(shape), strict=True):
        flat = flat + part.scaled(step)
        step *= extent
    return flat


def unflatten(flat: Index, shape: Sequence[int], extents: Mapping[str, int]) -> Indices:
    """The index at a row-major position."""
    parts: list[Index] = []
    outermost = next((dim for dim, extent in enumerate(shape) if extent > 1), 0)
    step = 1
    for dim in reversed(range(len(shape))):
        quotient = flat.divided(step, extents)
        parts.append(
            Index() if shape[dim] == 1 else quotient if dim == outermost else quotient.modulo(shape[dim], extents)
        )
        step *= shape[dim]
    return tuple(reversed(parts))


def broadcast(value: Symbol, shape: Sequence[int]) -> Symbol:
    """The symbol seen under a shape that it broadcasts to."""
    if value.shape == tuple(shape):
        return value
    lead = len(shape) - len(value.shape)

    def at(index: Indices) -> Expression:
        inner = index[lead:]
        return value.at(tuple(Index() if extent == 1 else i for i, extent in zip(inner, value.shape, strict=True)))

    return Symbol(tuple(shape), value.type, at)


def common_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all of them broadcast to."""
    columns = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(max(column) for column in columns)[::-1]


# ---- what formulas are made of -------------------------------------------------------------------------


def distinct(expressions: Iterable[Expression]) -> Iterator[Expression]:
    """All parts of the expressions, shared objects once."""
    seen: set[int] = set()
    pending = list(expressions)
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Call):
            pending += node.arguments


def refs_of(expression: Expression) -> Iterator[Ref]:
    """The folds that a formula reads."""
    return (node for node in distinct([expression]) if isinstance(node, Ref))


def axes_of(indices: Indices) -> set[str]:
    """Axes that some indices use."""
    return {axis for index in indices for axis in index.axes()}


def folds_of_elements(refs: Sequence[Ref], extents: dict[str, int]) -> set[Fold]:
    """Folds that are read at every point of what other folds here reduce, so that those axes are no rows' axes."""
    every = axes_of(tuple(index for ref in refs for index in ref.indices))
    wide = {ref.fold for ref in refs if axes_of(ref.indices) == every}
    outer = {ref.fold: ref for ref in refs if ref.fold not in wide}
    if not outer or any(type(ref.fold) is not Fold for ref in refs):
        return set()
    found = set[Fold]()
    for fold, ref in outer.items():
        places = [f"element{number}" for number in range(len(fold.extents))]
        extents.update(zip(places, fold.extents, strict=True))
        body = fold.body(ref.indices, tuple(Index.axis(place) for place in places))
        found |= {read.fold for read in refs_of(body) if axes_of(read.indices) & {*places}}
    return found & wide


# ---- tracing -----------------------------------------------------------------------------------------

# PyTorch decomposes these into a full reduction for every element: right, and quadratic.
_SCANS: Final = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})

Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
"""Operation packet (without overload), such as "amax" → handler(tracer, out, *args, **kwargs) → symbols."""
COMPLEX_HANDLERS: dict[str, Handler] = {}
"""The same for calls with complex numbers: a complex result is (real part, imaginary part)."""
_MAKES_COMPLEX: Final = frozenset({"complex", "polar", "view_as_complex"})
"""Operations on reals that give complex numbers."""
_MOVES: Final = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "flatten", "clone", "contiguous",
    "alias", "detach", "view_as", "expand", "broadcast_to", "permute", "transpose", "t", "slice", "flip", "select",
    "unbind", "split", "split_with_sizes", "chunk",
})  # fmt: skip
"""Operations that compute nothing, so that their handlers do for each part of complex numbers."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for operations by packet name."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def handles_complex(name: str) -> Callable[[Handler], Handler]:
    """Registers a handler of complex numbers for an operation by packet name."""

    def register(handler: Handler) -> Handler:
        COMPLEX_HANDLERS[name] = handler
        return handler

    return register


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs calls on meta tensors and keeps a symbol for each; `extents` holds the axes that indices are
    over."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.extents: dict[str, int] = {}
        self.reduced_at: dict[Hashable, Fold] = {}
        """Folds that were made of others at looked up positions, so that what reads one twice reads one."""
        self.is_wanted: Sequence[bool] = ()
        """Of the call that is traced now, for each result whether anything reads it."""
        self._symbols: dict[int, Symbol] = {}
        self._imaginary: dict[int, Symbol] = {}
        self._part: int | None = None
        self._alive: list[torch.Tensor] = []
        self._caches: list[dict[Indices, Expression]] = []

    def buffer(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """A meta tensor that stands for a buffer in memory."""
        tensor = torch.empty_strided(
            list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device="meta"
        )
        type_, parts = storage(spec.dtype)

        def part(number: int) -> Symbol:
            def at(index: Indices) -> Expression:
                steps = (own.scaled(parts * step) for own, step in zip(index, spec.strides, strict=True))
                return Load(name, functools.reduce(Index.__add__, steps, Index(number)), type_.compute)

            return Symbol(tuple(spec.shape), type_, at)

        self.bind(tensor, *map(part, range(parts)))
        return tensor

    def scalar(self, value: float | int | bool, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A meta tensor of which every element is one known value."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.bind(tensor, constant_symbol(value, type_of(dtype), shape))
        return tensor

    def bind(self, tensor: torch.Tensor, symbol: Symbol, imaginary: Symbol | None = None) -> None:
        """Says what a meta tensor is; of complex numbers, the real and the imaginary part."""
        self._symbols[id(tensor)] = self._remembered(symbol)
        if imaginary is not None:
            self._imaginary[id(tensor)] = self._remembered(imaginary)
        self._alive.append(tensor)

    def _remembered(self, symbol: Symbol) -> Symbol:
        cache: dict[Indices, Expression] = {}
        self._caches.append(cache)

        def at(index: Indices) -> Expression:
            # One object for each use, so that shared parts stay shared and are compared fast.
            found = cache.get(index)
            if found is None:
                found = cache[index] = symbol.at(index)
            return found

        return Symbol(symbol.shape, symbol.type, at)

    def forget_axes(self) -> None:
        """Makes room for other axes: formulas made for the present ones are dropped."""
        self.extents.clear()
        for cache in self._caches:
            cache.clear()

    def symbol(self, tensor: torch.Tensor) -> Symbol:
        """What a meta tensor is; of complex numbers, the part that is asked about."""
        if tensor.is_complex():
            if self._part is None:
                raise Refused("complex numbers are not lowered here")
            return self.parts(tensor)[self._part]
        found = self._symbols.get(id(tensor))
        if found is None:
            raise Refused("an intermediate tensor has no formula")
        return found

    def parts(self, tensor: torch.Tensor) -> tuple[Symbol, Symbol]:
        """The real and the imaginary part of a tensor of complex numbers."""
        if id(tensor) not in self._imaginary:
            raise Refused("an intermediate tensor has no formula")
        return self._symbols[id(tensor)], self._imaginary[id(tensor)]

    def stored(self, tensor: torch.Tensor) -> tuple[Symbol, int]:
        """What a meta tensor is in memory, and how many numbers an element is: of complex ones the parts, along a last
        dimension of two."""
        return (interleaved(*self.parts(tensor)), 2) if tensor.is_complex() else (self.symbol(tensor), 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        is_complex = name in _MAKES_COMPLEX or any(map(_is_complex, (*args, *kwargs.values())))
        handler = self._complex_handler(name) if is_complex else HANDLERS.get(name)
        if handler is None and not is_complex and name.endswith("_") and name[:-1] in HANDLERS:
            return self._written(HANDLERS[name[:-1]], *args, **kwargs)
        if handler is None:
            decomposition = None if name in _SCANS else decompositions().get(func)
            if decomposition is None:
                raise Refused(f"{name}{' of complex numbers' if is_complex else ''} is not lowered")
            with self:
                return decomposition(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.numel() == 0 and name != "empty":
            raise Refused("a tensor is empty")
        made = handler(self, out, *args, **kwargs)
        pairs = [(out, made)] if isinstance(out, torch.Tensor) else zip(out, made, strict=True)
        for tensor, symbol in pairs:
            if isinstance(tensor, torch.Tensor) and symbol is not None:
                self.bind(tensor, *(symbol if isinstance(symbol, tuple) else (symbol,)))
        return out

    def _complex_handler(self, name: str) -> Handler | None:
        if name in COMPLEX_HANDLERS or name not in _MOVES:
            return COMPLEX_HANDLERS.get(name)

        def each_part(tracer: Tracer, out: Any, *args: Any, **kwargs: Any) -> Any:
            found = []
            for part in range(2):
                self._part = part
                found.append(HANDLERS[name](tracer, out, *args, **kwargs))
            self._part = None
            return tuple(found) if isinstance(out, torch.Tensor) else list(zip(*found, strict=True))

        return each_part

    def _written(self, handler: Handler, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """An in-place step inside one of PyTorch's own composites, on memory that nothing else looks at."""
        storage = target.untyped_storage()._cdata
        if any(other is not target and other.untyped_storage()._cdata == storage for other in self._alive):
            raise Refused("a composite operation writes to a view")
        made = handler(self, target, target, *args, **kwargs)
        self.bind(target, made)
        return target


def interleaved(real: Symbol, imaginary: Symbol) -> Symbol:
    """Both parts beside each other, along a last dimension of two."""

    def at(index: Indices) -> Expression:
        *place, part = index
        if not part.terms:
            return (imaginary if part.offset else real).at(tuple(place))
        is_real = op("lt", AxisValue(part), literal(1, Type.I64))
        return op("where", is_real, real.at(tuple(place)), imaginary.at(tuple(place)))

    return Symbol((*real.shape, 2), real.type, at)


def _is_complex(value: object) -> bool:
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def constant_symbol(value: float | int | bool, type_: Type, shape: Sequence[int]) -> Symbol:
    """A symbol of one value."""
    return Symbol(tuple(shape), type_, lambda _: literal(value, type_.compute))


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Overload → what PyTorch says it is made of, as a function of the same arguments."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    return {**decomposition_table, **core_aten_decompositions()}
