"""The loop-level IR of one fused group: what one authored kernel computes, without saying how.

A `Nest` visits every point of its parallel axes; at each it makes the reductions in order over the reduced
axes, then the stores. Schedules (`emit/`) decide threads, vectors and memory. Extents are static. A softmax:

    parallel i:16, reduced j:1024
      m = max(x[1024 i + j]);  s = sum(exp(x[1024 i + j] - m))
      y[1024 i + j] = exp(x[1024 i + j] - m) / s

Views, broadcasts and slices are index expressions, not operations. Nothing here knows a target or a schedule.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

T = TypeVar("T")
_SHAPE = "shape"


class Type(enum.Enum):
    """Element type: of storage in a `BufferRef`, of computation in an `Expression`."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element in memory."""
        return _SIZE_BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type."""
        return self in (Type.F64, Type.F32) or self.is_widened

    @property
    def is_widened(self) -> bool:
        """Whether it is a float of 16 or 8 bits, which is computed in f32."""
        return self in (Type.F16, Type.BF16, Type.E4M3, Type.E5M2)

    @property
    def compute(self) -> Type:
        """Type that arithmetic on it is done in: short floats widen to f32, as in PyTorch's own kernels."""
        return Type.F32 if self.is_widened else self


_SIZE_BYTES = {
    Type.F64: 8, Type.F32: 4, Type.F16: 2, Type.BF16: 2, Type.I64: 8,
    Type.I32: 4, Type.I16: 2, Type.I8: 1, Type.U8: 1, Type.BOOL: 1, Type.E4M3: 1, Type.E5M2: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """A loop: its name, unique in the nest, and its number of iterations (at least 1)."""

    name: str
    extent: int


# ---- index expressions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quotient:
    """`floor(value / divisor)`; arises when a view splits a merged dimension."""

    value: Index
    divisor: int


@dataclass(frozen=True)
class Remainder:
    """`value mod divisor`, never negative."""

    value: Index
    divisor: int


Atom = str | Quotient | Remainder
"""What an index is linear in: an axis (by name), or a quotient or remainder that could not be simplified."""


@dataclass(frozen=True)
class Index:
    """`offset + Σ coefficient × atom`, in elements. `terms` is sorted, without zero coefficients."""

    offset: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    @staticmethod
    def axis(name: str, coefficient: int = 1) -> Index:
        """The axis times a coefficient."""
        return Index(0, ((name, coefficient),) if coefficient else ())

    def __add__(self, other: Index) -> Index:
        sums: dict[Atom, int] = {}
        for atom, coefficient in self.terms + other.terms:
            sums[atom] = sums.get(atom, 0) + coefficient
        terms = tuple(sorted(((a, c) for a, c in sums.items() if c), key=lambda term: repr(term[0])))
        return Index(self.offset + other.offset, terms)

    def scaled(self, factor: int) -> Index:
        """The index times an integer."""
        if factor == 0:
            return Index()
        return Index(self.offset * factor, tuple((a, c * factor) for a, c in self.terms))

    def shifted(self, offset: int) -> Index:
        """The index plus an integer."""
        return Index(self.offset + offset, self.terms)

    def bounds(self, extents: Mapping[str, int]) -> tuple[int, int]:
        """Least and greatest value over the axes' extents (exact for affine, safe for the rest)."""
        low = high = self.offset
        for atom, coefficient in self.terms:
            atom_low, atom_high = _atom_bounds(atom, extents)
            products = (coefficient * atom_low, coefficient * atom_high)
            low, high = low + min(products), high + max(products)
        return low, high

    def divided(self, divisor: int, extents: Mapping[str, int]) -> Index:
        """`floor(self / divisor)`, simplified where terms are multiples of it and the rest stays below it."""
        if divisor == 1:
            return self
        multiple, rest = self._split(divisor)
        low, high = rest.bounds(extents)
        exact = Index(multiple.offset // divisor, tuple((a, c // divisor) for a, c in multiple.terms))
        if low >= 0 and high < divisor:
            return exact
        return exact + Index(0, ((Quotient(rest, divisor), 1),))

    def modulo(self, divisor: int, extents: Mapping[str, int]) -> Index:
        """`self mod divisor`, simplified likewise."""
        if divisor == 1:
            return Index()
        rest = self._split(divisor)[1]
        low, high = rest.bounds(extents)
        if low >= 0 and high < divisor:
            return rest
        return Index(0, ((Remainder(rest, divisor), 1),))

    def coefficient(self, axis: str) -> int | None:
        """How far one step along the axis moves; None when the axis is inside a quotient or remainder."""
        total = 0
        for atom, coefficient in self.terms:
            if atom == axis:
                total += coefficient
            elif not isinstance(atom, str) and axis in atom.value.axes():
                return None
        return total

    def axes(self) -> frozenset[str]:
        """Names of all axes that it depends on."""
        found: set[str] = set()
        for atom, _ in self.terms:
            found |= {atom} if isinstance(atom, str) else atom.value.axes()
        return frozenset(found)

    def substituted(self, replacements: Mapping[str, Index], extents: Mapping[str, int]) -> Index:
        """With axes replaced by indices over other axes, whose extents are given."""
        result = Index(self.offset)
        for atom, coefficient in self.terms:
            if isinstance(atom, str):
                part = replacements.get(atom, Index.axis(atom))
            else:
                inner = atom.value.substituted(replacements, extents)
                divide = isinstance(atom, Quotient)
                part = inner.divided(atom.divisor, extents) if divide else inner.modulo(atom.divisor, extents)
            result = result + part.scaled(coefficient)
        return result

    def _split(self, divisor: int) -> tuple[Index, Index]:
        """Parts that are a multiple of the divisor, and the rest."""
        inside = tuple((a, c) for a, c in self.terms if c % divisor == 0)
        outside = tuple((a, c) for a, c in self.terms if c % divisor)
        whole = self.offset // divisor * divisor
        return Index(whole, inside), Index(self.offset - whole, outside)


def _atom_bounds(atom: Atom, extents: Mapping[str, int]) -> tuple[int, int]:
    match atom:
        case str():
            return 0, extents[atom] - 1
        case Quotient(value, divisor):
            low, high = value.bounds(extents)
            return low // divisor, high // divisor
        case Remainder(value, divisor):
            return 0, divisor - 1


# ---- scalar expressions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Literal:
    """A constant of type `type`; may be an infinity or NaN."""

    value: float | int | bool
    type: Type


@dataclass(frozen=True)
class Load:
    """An element of a buffer, widened to `type` (the compute type of the buffer's storage type)."""

    buffer: str
    index: Index
    type: Type


@dataclass(frozen=True)
class Memory:
    """A whole buffer that nothing writes: what `gather` looks into at a position that only the data knows."""

    buffer: str
    type: Type


@dataclass(frozen=True)
class AxisValue:
    """An index as an integer value of type I64: for arange, one-hot and triangular masks."""

    index: Index
    type: Type = Type.I64


@dataclass(frozen=True)
class Reduced:
    """The value of an earlier reduction of the nest, by name."""

    reduction: str
    type: Type


@dataclass(frozen=True)
class Call:
    """An operation of `OPERATIONS` on expressions; `cast` converts to `type` (and rounds: f16 and bf16 allowed)."""

    operation: str
    arguments: tuple[Expression, ...]
    type: Type


Expression = Literal | Load | Memory | AxisValue | Reduced | Call

OPERATIONS: Mapping[str, int] = {
    "cast": 1, "neg": 1, "abs": 1, "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log1p": 1,
    "sqrt": 1, "rsqrt": 1, "reciprocal": 1, "sin": 1, "cos": 1, "tan": 1, "asin": 1, "acos": 1, "atan": 1,
    "sinh": 1, "cosh": 1, "tanh": 1, "erf": 1, "erfc": 1, "sigmoid": 1, "floor": 1, "ceil": 1, "round": 1,
    "trunc": 1, "sign": 1, "isnan": 1, "isinf": 1, "not": 1, "bitwise_not": 1,
    "add": 2, "sub": 2, "mul": 2, "div": 2, "floor_div": 2, "trunc_div": 2, "fmod": 2, "remainder": 2,
    "pow": 2, "atan2": 2, "max": 2, "min": 2, "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2,
    "and": 2, "or": 2, "xor": 2, "bitwise_and": 2, "bitwise_or": 2, "bitwise_xor": 2,
    "shift_left": 2, "shift_right": 2, "where": 3, "gather": 2,
}  # fmt: skip
"""Operation → number of arguments. `max` and `min` give NaN when either argument is NaN, as PyTorch does. `gather` is
the element of a `Memory` at an offset of type I64; code that makes it keeps the offset inside the buffer."""

REDUCTIONS: Mapping[str, float] = {
    "sum": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0, "attend": 0.0, "attend_statistics": math.inf,
}  # fmt: skip
"""Reduction → its neutral element. `max` and `min` propagate NaN. The last two are for `attention.Attended` alone."""

ARG_REDUCTIONS: Mapping[str, str] = {"argmax": "max", "argmin": "min"}
"""Reduction that finds a place → the one that finds its value. Of equal values the least position wins; NaN wins."""
SCANS: Mapping[str, str] = {"cumsum": "sum", "cumprod": "prod"}
"""Reduction that has a value at every element → what it makes of the elements up to there."""


@dataclass(frozen=True)
class Reduction:
    """`name = operation over the reduced axes of value`, accumulated in `type`; a place is of `at(x, position)`."""

    name: str
    operation: str
    value: Expression
    type: Type

    @property
    def result(self) -> Type:
        """Type of what it comes to: of a position for `ARG_REDUCTIONS`."""
        is_place = self.operation in ARG_REDUCTIONS
        return self.value.arguments[1].type if is_place and isinstance(self.value, Call) else self.type


@dataclass(frozen=True)
class Scan(Reduction):
    """A reduction (of `SCANS`) with a value at every element: of the row up to there, in row-major order."""

    reverse: bool = False
    """From the row's last element on, down to this one."""
    exclusive: bool = False
    """Without the element itself."""


@dataclass(frozen=True)
class Bound:
    """A position along a dimension, and the dimension's extent: inside where `0 <= index < extent`."""

    index: Index
    extent: int


@dataclass(frozen=True)
class Windowed(Reduction):
    """A reduction over a window that slides over the data and may hang over its edge: elements outside are skipped.

    `value` is evaluated only inside, so its loads reach outside of their buffers elsewhere.
    """

    positions: tuple[Bound, ...] = ()
    """Where an element lies along each dimension of the window: stride, dilation and padding in one index."""
    is_weighted: bool = False
    """Whether `value` is a product of what is seen and of a weight, in this order: a convolution."""


@dataclass(frozen=True)
class Segmented(Reduction):
    """A reduction over a part of each row: `value` is `segment(x, begin, end)`, of elements and of two positions, of
    type I64 and inside the row, that data says. Elements count in row-major order; others are skipped."""

    @property
    def parts(self) -> tuple[Expression, Expression, Expression]:
        """The value of an element, the first position and the one after the last."""
        assert isinstance(self.value, Call)
        element, begin, end = self.value.arguments
        return element, begin, end


@dataclass(frozen=True)
class Store:
    """Writes `value` (converted to the buffer's type) at `index`.

    A store whose index uses a reduced axis is made at every element, otherwise once for each parallel point.
    """

    buffer: str
    index: Index
    value: Expression


@dataclass(frozen=True)
class Summed(Store):
    """Adds up `value`, in `type`, over all parallel axes, and writes the sums at `index`, of reduced axes alone.

    A norm's backward has them: each row's gradient needs sums along it, each weight's is a sum of columns.
    """

    type: Type = Type.F32


@dataclass(frozen=True)
class BufferRef:
    """A buffer that the nest touches: storage type, elements from the base address on, whether it is written."""

    name: str
    type: Type
    element_count: int
    written: bool = False


@dataclass(frozen=True)
class Nest:
    """One kernel's worth of work. Axes are ordered outermost first; the last reduced axis varies fastest."""

    name: str
    parallel: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    reductions: tuple[Reduction, ...]
    stores: tuple[Store, ...]
    buffers: tuple[BufferRef, ...]
    comment: str = field(default="", compare=False)
    allows_tf32: bool = False
    """Whether factors of matrix products may be rounded to TF32."""
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What functions of this nest gave (`remembered`)."""

    @property
    def shape(self) -> Nest:
        """Itself, or a nest that differs in names alone and was asked before: it stands for all that do."""
        found: Nest = self.memo.get(_SHAPE, self)
        return found

    def stood_for_by(self, other: Nest) -> Nest:
        """Itself, after `other`, from which it differs in names alone, stands for it."""
        self.memo[_SHAPE] = other.shape
        return self

    @property
    def extents(self) -> dict[str, int]:
        """Axis name → extent."""
        return {axis.name: axis.extent for axis in self.parallel + self.reduced}

    @property
    def row_count(self) -> int:
        """Points of the parallel axes."""
        return math.prod(axis.extent for axis in self.parallel)

    @property
    def column_count(self) -> int:
        """Points of the reduced axes; 1 when there are none."""
        return math.prod(axis.extent for axis in self.reduced)

    def buffer(self, name: str) -> BufferRef:
        """The buffer of that name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    @property
    def scans(self) -> tuple[Scan, ...]:
        """The reductions that have a value at every element."""
        return tuple(reduction for reduction in self.reductions if isinstance(reduction, Scan))

    @property
    def windows(self) -> tuple[Windowed, ...]:
        """The reductions over sliding windows."""
        return tuple(reduction for reduction in self.reductions if isinstance(reduction, Windowed))

    @property
    def segments(self) -> tuple[Segmented, ...]:
        """The reductions over parts of rows."""
        return tuple(reduction for reduction in self.reductions if isinstance(reduction, Segmented))

    @property
    def summed(self) -> tuple[Summed, ...]:
        """The stores of sums over the rows."""
        return tuple(store for store in self.stores if isinstance(store, Summed))

    def is_element_store(self, store: Store) -> bool:
        """Whether the store is made at every element rather than once a row."""
        return bool(store.index.axes() & {axis.name for axis in self.reduced})


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and all below it, parents first; shared parts come once for each use."""
    yield expression
    if isinstance(expression, Call):
        for argument in expression.arguments:
            yield from walk(argument)


def with_value(reduction: Reduction, value: Expression, change: Callable[[Index], Index]) -> Reduction:
    """The reduction of another value, with the indices that it has itself changed like those of the value."""
    if not isinstance(reduction, Windowed):
        return replace(reduction, value=value)
    positions = tuple(replace(position, index=change(position.index)) for position in reduction.positions)
    return replace(reduction, value=value, positions=positions)


def bounds_inside(index: Index, positions: Sequence[Bound], extents: Mapping[str, int]) -> tuple[int, int]:
    """Least and greatest value of an index where all positions are inside: of the index itself, or of a multiple of a
    position and of the rest, whichever is narrower."""
    if not positions:
        return index.bounds(extents)
    position, others = positions[0], positions[1:]
    low, high = bounds_inside(index, others, extents)
    for atom, step in position.index.terms:
        times, rest = divmod(dict(index.terms).get(atom, 0), step)
        if times and not rest:
            ends = (0, times * (position.extent - 1))
            without = bounds_inside(index + position.index.scaled(-times), others, extents)
            return max(low, without[0] + min(ends)), min(high, without[1] + max(ends))
    return low, high


def needs_int64(buffer: BufferRef) -> bool:
    """Whether element offsets into the buffer overflow a 32-bit signed integer."""
    return buffer.element_count > 2**31 - 1


def remembered(function: Callable[[Nest], T]) -> Callable[[Nest], T]:
    """Has a function of a nest alone compute once what it gives for a nest: the search for a plan asks again and again.

    Nobody may change what it gives.
    """

    @functools.wraps(function)
    def known(nest: Nest) -> T:
        if known not in nest.memo:
            nest.memo[known] = function(nest)
        found: T = nest.memo[known]
        return found

    return known
