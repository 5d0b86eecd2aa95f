"""Loop nests to try a schedule on, ours or a plugin's: rows, columns, several axes, pointwise; functions as modules.

The one idea: a schedule is tested on the IR itself, so that no capture and no lowering stands between a test and what
it means.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
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
    Store,
    Summed,
    Type,
)
from agent_synthesis.nests.verifier import verify

F32 = Type.F32


class Applied(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """What the function gives."""
        return self._function(*args)


class Recurrent(torch.nn.Module):
    """A recurrent network from given states, whose results are all read: the sequence, then the last states."""

    def __init__(self, network: torch.nn.RNNBase) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the network gives, in one tuple."""
        sequence, last = self.network(x, states if len(states) > 1 else states[0])
        return (sequence, *last) if isinstance(last, tuple) else (sequence, last)


def batched_product(
    seed: int, m: int, n: int, k: int, dtype: torch.dtype = torch.float32
) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A product with two to four batch axes, each of one operand or both, in any order of dimensions; and operands.

    The last dimension in memory is the depth, or the rows or columns.
    """
    chosen = random.Random(seed)
    batch = "abcd"[: chosen.randint(2, 4)]
    extents = {**{axis: chosen.randint(2, 3) for axis in batch}, "m": m, "n": n, "k": k}
    knows = [chosen.choice(("both", "both", "left", "right")) for _ in batch]
    views, tensors = [], []
    for side, last, matrix in (("left", "m", "mk"), ("right", "n", "kn")):
        own = [axis for axis, who in zip(batch, knows, strict=True) if who in ("both", side)]
        inner = chosen.choice((last, "k"))
        order = [*own, *(axis for axis in matrix if axis != inner)]
        chosen.shuffle(order)
        order.append(inner)
        views.append(
            ([order.index(axis) for axis in (*own, *matrix)], [i for i, a in enumerate(batch) if a not in own])
        )
        tensors.append(torch.randn([extents[axis] for axis in order], dtype=dtype))

    def function(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        placed = []
        for tensor, (order, missing) in zip((left, right), views, strict=True):
            placed.append(tensor.permute(order))
            for place in missing:
                placed[-1] = placed[-1].unsqueeze(place)
        return placed[0] @ placed[1]

    return function, (tensors[0], tensors[1])


def at(offset: int = 0, **coefficients: int) -> Index:
    """An index from axis coefficients."""
    result = Index(offset)
    for name, coefficient in coefficients.items():
        result = result + Index.axis(name, coefficient)
    return result


def call(operation: str, *arguments: Expression, type_: Type = F32) -> Call:
    """An operation of one type."""
    return Call(operation, arguments, type_)


def number(value: float) -> Literal:
    """A constant in fp32."""
    return Literal(value, F32)


def rows_of(name: str, rows: int, columns: int, reductions: tuple[Reduction, ...], value: Expression,
            storage: Type = F32, loads: tuple[str, ...] = ()) -> Nest:  # fmt: skip
    """A nest over the rows of a matrix x that stores one value an element; `loads` are vectors along the row."""
    vectors = tuple(BufferRef(vector, storage, columns) for vector in loads)
    buffers = (BufferRef("x", storage, rows * columns), *vectors, BufferRef("y", storage, rows * columns, True))
    place = at(i=columns, j=1)
    return verify(
        Nest(name, (Axis("i", rows),), (Axis("j", columns),), reductions, (Store("y", place, value),), buffers)
    )


def bags(rows: int, parts: int, columns: int, storage: Type = F32) -> Nest:
    """Sums of parts of a list of rows, each a row of a table."""
    kind, place = storage.compute, Load("order", at(k=1), Type.I64)
    offset = call("mul", place, Literal(columns, Type.I64), type_=Type.I64)
    offset = call("add", AxisValue(at(m=1)), offset, type_=Type.I64)
    x = call("gather", Memory("x", kind), offset, type_=kind)
    ends = [Load("ends", at(i=1).shifted(n), Type.I64) for n in (0, 1)]
    total = Segmented("total", "sum", call("segment", x, *ends, type_=kind), kind)
    buffers = (
        BufferRef("x", storage, rows * columns), BufferRef("order", Type.I64, rows),
        BufferRef("ends", Type.I64, parts + 1), BufferRef("y", storage, parts * columns, True),
    )  # fmt: skip
    axes = (Axis("i", parts), Axis("m", columns))
    stores = (Store("y", at(i=columns, m=1), Reduced("total", kind)),)
    return verify(Nest("bags", axes, (Axis("k", rows),), (total,), stores, buffers))


def softmax(rows: int, columns: int, storage: Type = F32) -> Nest:
    """Softmax of each row of [rows, columns]."""
    x = Load("x", at(i=columns, j=1), F32)
    power = call("exp", call("sub", x, Reduced("row_max", F32)))
    reductions = (Reduction("row_max", "max", x, F32), Reduction("row_sum", "sum", power, F32))
    return rows_of("softmax", rows, columns, reductions, call("div", power, Reduced("row_sum", F32)), storage)


def layer_norm(rows: int, columns: int, storage: Type = F32) -> Nest:
    """Layer norm of each row of [rows, columns], with weight and bias."""
    x = Load("x", at(i=columns, j=1), F32)
    mean = call("div", Reduced("total", F32), number(float(columns)))
    distance = call("sub", x, mean)
    variance = call("div", Reduced("squares", F32), number(float(columns)))
    scaled = call("mul", distance, call("rsqrt", call("add", variance, number(1e-5))))
    value = call("add", call("mul", scaled, Load("weight", at(j=1), F32)), Load("bias", at(j=1), F32))
    reductions = (
        Reduction("total", "sum", x, F32),
        Reduction("squares", "sum", call("mul", distance, distance), F32),
    )
    return rows_of("layer_norm", rows, columns, reductions, value, storage, ("weight", "bias"))


def row_dot(rows: int, columns: int) -> Nest:
    """[rows, columns] times a vector."""
    product = call("mul", Load("x", at(i=columns, j=1), F32), Load("s", at(j=1), F32))
    return verify(Nest(
        "row_dot", (Axis("i", rows),), (Axis("j", columns),), (Reduction("total", "sum", product, F32),),
        (Store("y", at(i=1), Reduced("total", F32)),),
        (BufferRef("x", F32, rows * columns), BufferRef("s", F32, columns), BufferRef("y", F32, rows, True)),
    ))  # fmt: skip


def log_probabilities(rows: int, columns: int, storage: Type = F32) -> Nest:
    """Logarithms of the softmax of each row, with the sum about its first element and the least of each."""
    place, kind = at(i=columns, j=1), storage.compute
    x = Load("x", place, kind)
    total = call("log", Reduced("total", kind), type_=kind)
    value = call("sub", call("sub", x, Reduced("top", kind), type_=kind), total, type_=kind)
    reductions = (
        Reduction("sum", "sum", call("sub", x, Load("x", at(i=columns), kind), type_=kind), kind),
        Reduction("top", "max", x, kind), Reduction("least", "min", x, kind),
        Reduction("total", "sum", call("exp", call("sub", x, Reduced("top", kind), type_=kind), type_=kind), kind),
    )  # fmt: skip
    stores = (Store("y", place, value), *(Store(name, at(i=1), Reduced(name, kind)) for name in ("sum", "least")))
    buffers = (
        BufferRef("x", storage, rows * columns), BufferRef("y", storage, rows * columns, True),
        BufferRef("sum", F32, rows, True), BufferRef("least", F32, rows, True),
    )  # fmt: skip
    return verify(Nest("log_probabilities", (Axis("i", rows),), (Axis("j", columns),), reductions, stores, buffers))


def norm_backward(rows: int, columns: int, storage: Type = F32, *, reduced: bool = True) -> Nest:
    """What [rows, columns] of gradients come to through a norm, with sums over the rows for its weight and bias.

    Without `reduced`, through the weight alone.
    """
    place, count = at(i=columns, j=1), rows * columns
    x, gradient, weight = Load("x", place, F32), Load("g", place, F32), Load("w", at(j=1), F32)
    own = call("mul", gradient, weight)
    mean = call("div", Reduced("total", F32), number(float(columns)))
    scaled = call("mul", gradient, call("mul", x, Load("scale", at(i=1), F32)))
    stores = (
        Store("y", place, call("sub", own, call("mul", x, mean)) if reduced else own),
        Summed("of_weight", at(j=1), scaled), Summed("of_bias", at(j=1), gradient),
    )  # fmt: skip
    buffers = (
        BufferRef("x", storage, count), BufferRef("g", storage, count), BufferRef("w", storage, columns),
        BufferRef("scale", F32, rows), BufferRef("y", storage, count, True),
        BufferRef("of_weight", storage, columns, True), BufferRef("of_bias", F32, columns, True),
    )  # fmt: skip
    reductions = (Reduction("total", "sum", call("mul", own, x), F32),) if reduced else ()
    return verify(Nest("norm_backward", (Axis("i", rows),), (Axis("j", columns),), reductions, stores, buffers))


def column_sum(rows: int, columns: int, storage: Type = F32) -> Nest:
    """Sum of the rows of [rows, columns]."""
    type_ = storage.compute
    return verify(Nest(
        "column_sum", (Axis("m", columns),), (Axis("k", rows),),
        (Reduction("total", "sum", Load("x", at(k=columns, m=1), type_), type_),),
        (Store("y", at(m=1), Reduced("total", type_)),),
        (BufferRef("x", storage, rows * columns), BufferRef("y", storage, columns, True)),
        "sum of the rows",
    ))  # fmt: skip


def column_softmax(rows: int, columns: int, kind: Type = F32) -> Nest:
    """Softmax of each column of [rows, columns], in the type that it is stored in."""
    x = Load("x", at(k=columns, m=1), kind)
    power = call("exp", call("sub", x, Reduced("top", kind), type_=kind), type_=kind)
    return verify(Nest(
        "column_softmax", (Axis("m", columns),), (Axis("k", rows),),
        (Reduction("top", "max", x, kind), Reduction("total", "sum", power, kind)),
        (Store("y", at(k=columns, m=1), call("div", power, Reduced("total", kind), type_=kind)),),
        (BufferRef("x", kind, rows * columns), BufferRef("y", kind, rows * columns, True)),
    ))  # fmt: skip


def batch_norm(batch: int, channels: int, pixels: int) -> Nest:
    """[batch, channels, pixels] normalised by channel, and the means."""
    place = at(n=channels * pixels, c=pixels, s=1)
    x = Load("x", place, F32)
    mean = call("div", Reduced("total", F32), number(float(batch * pixels)))
    distance = call("sub", x, mean)
    scale = call("rsqrt", call("div", Reduced("squares", F32), number(float(batch * pixels))))
    count = batch * channels * pixels
    return verify(Nest(
        "batch_norm", (Axis("c", channels),), (Axis("n", batch), Axis("s", pixels)),
        (Reduction("total", "sum", x, F32), Reduction("squares", "sum", call("mul", distance, distance), F32)),
        (Store("y", place, call("mul", distance, scale)), Store("mean", at(c=1), mean)),
        (BufferRef("x", F32, count), BufferRef("y", F32, count, True), BufferRef("mean", F32, channels, True)),
    ))  # fmt: skip


def batch_statistics(
    batch: int, channels: int, pixels: int, running: str = "running", *, channels_last: bool = False
) -> Nest:
    """Batch norm in training: its mean is summed in float64 and updates the `running` one, in place if it is that."""
    across, apart = (1, channels) if channels_last else (pixels, 1)
    place = at(n=channels * pixels, c=across, s=apart)
    shifted = call("sub", Load("x", place, F32), Load("x", at(c=across), F32))
    total = call("div", Reduced("total", Type.F64), Literal(float(batch * pixels), Type.F64), type_=Type.F64)
    distance = call("sub", shifted, Call("cast", (total,), F32))
    scale = call("rsqrt", call("div", Reduced("squares", F32), number(float(batch * pixels))))
    mean = call("add", Call("cast", (Load("x", at(c=across), F32),), Type.F64), total, type_=Type.F64)
    moved = call("add", call("mul", Load(running, at(c=1), F32), number(0.9)), Call("cast", (mean,), F32))
    count = batch * channels * pixels
    reductions = (
        Reduction("total", "sum", Call("cast", (shifted,), Type.F64), Type.F64),
        Reduction("squares", "sum", call("mul", distance, distance), F32),
    )
    return verify(Nest(
        "batch_statistics", (Axis("c", channels),), (Axis("n", batch), Axis("s", pixels)), reductions,
        (Store("y", place, call("mul", distance, scale)), Store("running", at(c=1), moved)),
        (BufferRef("x", F32, count), BufferRef("y", F32, count, True), BufferRef("running", F32, channels, True),
         *([BufferRef(running, F32, channels)] if running != "running" else [])),
    ))  # fmt: skip


def turned(nest: Nest, **strides: int) -> Nest:
    """The nest with elements stored otherwise: by these strides."""
    stores = tuple(
        replace(store, index=at(**strides)) if nest.is_element_store(store) else store for store in nest.stores
    )
    return verify(replace(nest, stores=stores))


def transposed(rows: int, columns: int, storage: Type = F32) -> Nest:
    """The sum of a matrix and of another one that lies transposed."""
    kind, count = storage.compute, rows * columns
    value = call("add", Load("a", at(i=columns, j=1), kind), Load("b", at(i=1, j=rows), kind), type_=kind)
    buffers = (BufferRef("a", storage, count), BufferRef("b", storage, count), BufferRef("y", storage, count, True))
    stores = (Store("y", at(i=columns, j=1), value),)
    return verify(Nest("transposed", (Axis("i", rows), Axis("j", columns)), (), (), stores, buffers))


def concatenation(batch: int, channels: Sequence[int], pixels: int, *, normalised: bool = False) -> Nest:
    """[batch, channels, pixels] of tensors beside each other, as PyTorch's `cat` is lowered; the second is
    channels-last. Each channel is centred where it is `normalised`."""
    whole, long = sum(channels), Type.I64
    ends = [sum(channels[: n + 1]) for n in range(len(channels))]

    def part(which: int) -> Expression:
        count, begin = channels[which], ends[which] - channels[which]
        near, far = (1, count) if which == 1 else (pixels, 1)
        place: Expression = AxisValue(at(-begin, c=1))
        place = call("max", place, Literal(0, long), type_=long) if begin else place
        place = call("min", place, Literal(count - 1, long), type_=long)
        scaled = call("mul", place, Literal(near, long), type_=long)
        offset = call("add", AxisValue(at(n=count * pixels, s=far)), scaled, type_=long)
        return call("gather", Memory(f"x{which}", F32), offset)

    value = part(len(channels) - 1)
    for which in reversed(range(len(channels) - 1)):
        test = Call("lt", (AxisValue(at(c=1)), Literal(ends[which], long)), Type.BOOL)
        value = call("where", test, part(which), value)
    reductions = (Reduction("total", "sum", value, F32),) if normalised else ()
    mean = call("div", Reduced("total", F32), number(float(batch * pixels)))
    stored = call("sub", value, mean) if normalised else call("exp", value)
    n, c, s = Axis("n", batch), Axis("c", whole), Axis("s", pixels)
    count = batch * whole * pixels
    buffers = [BufferRef(f"x{n}", F32, batch * each * pixels) for n, each in enumerate(channels)]
    return verify(Nest(
        "concatenation", (c,) if normalised else (n, c, s), (n, s) if normalised else (), reductions,
        (Store("y", at(n=whole * pixels, c=pixels, s=1), stored),), (*buffers, BufferRef("y", F32, count, True)),
    ))  # fmt: skip


def group_norm(batch: int, groups: int, channels: int, pixels: int) -> Nest:
    """[batch, groups, channels of a group, pixels] normalised by group, with a weight for each channel."""
    rest = {"g": channels * pixels, "c": pixels, "s": 1}
    place = at(n=groups * channels * pixels, **rest)
    size = number(float(channels * pixels))
    x, weight = Load("x", place, F32), Load("weight", at(g=channels, c=1), F32)
    distance = call("sub", x, call("div", Reduced("total", F32), size))
    scale = call("rsqrt", call("div", Reduced("squares", F32), size))
    count = batch * groups * channels * pixels
    return verify(Nest(
        "group_norm", (Axis("n", batch), Axis("g", groups)), (Axis("c", channels), Axis("s", pixels)),
        (Reduction("total", "sum", x, F32), Reduction("squares", "sum", call("mul", distance, distance), F32)),
        (Store("y", place, call("mul", call("mul", distance, scale), weight)),),
        (BufferRef("x", F32, count), BufferRef("weight", F32, groups * channels), BufferRef("y", F32, count, True)),
    ))  # fmt: skip


def gelu(count: int, storage: Type = F32) -> Nest:
    """GELU without its half, pointwise."""
    x = Load("x", at(i=1), F32)
    value = call("mul", x, call("add", number(1.0), call("erf", call("mul", x, number(0.70710678)))))
    buffers = (BufferRef("x", storage, count), BufferRef("y", storage, count, True))
    return verify(Nest("gelu", (Axis("i", count),), (), (), (Store("y", at(i=1), value),), buffers))


def running_sum(rows: int, columns: int, storage: Type = F32, *, reverse: bool = False, exclusive: bool = False,
                operation: str = "cumsum") -> Nest:  # fmt: skip
    """The scan of each row of [rows, columns]."""
    type_ = storage.compute if storage.is_float else Type.I64
    load: Expression = Load("x", at(i=columns, j=1), storage.compute)
    value = load if load.type is type_ else Call("cast", (load,), type_)
    scan = Scan("running", operation, value, type_, reverse, exclusive)
    stored = storage if storage.is_float else Type.I64
    count = rows * columns
    return verify(Nest(
        f"running_{operation}", (Axis("i", rows),), (Axis("j", columns),), (scan,),
        (Store("y", at(i=columns, j=1), Reduced("running", type_)),),
        (BufferRef("x", storage, count), BufferRef("y", stored, count, True)),
        "running sum" if operation == "cumsum" else "running product",
    ))  # fmt: skip


def column_scan(batch: int, rows: int, columns: int, *, reverse: bool = False, exclusive: bool = False) -> Nest:
    """The running sum down the columns of [batch, rows, columns]."""
    place = at(b=rows * columns, k=columns, m=1)
    scan = Scan("running", "cumsum", Load("x", place, F32), F32, reverse, exclusive)
    count = batch * rows * columns
    return verify(Nest(
        "column_scan", (Axis("b", batch), Axis("m", columns)), (Axis("k", rows),), (scan,),
        (Store("y", place, call("mul", Reduced("running", F32), number(2.0))),),
        (BufferRef("x", F32, count), BufferRef("y", F32, count, True)),
    ))  # fmt: skip
