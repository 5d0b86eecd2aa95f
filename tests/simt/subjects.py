"""Every CUDA schedule, in every strategy, on every class of shape that makes it write other code: small ones.

The one idea: a class is a property of a nest that an emitter branches on (ragged ends, narrow types, several axes,
several exchanges), so a class is one small nest, and a strategy one set of settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from simulated import Subject

from agent_synthesis.emit.cuda.columns.column_reduction import CudaColumnReduction
from agent_synthesis.emit.cuda.parts.pieces import CudaPieces
from agent_synthesis.emit.cuda.parts.reductions_apart import CudaReductionsApart
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.rows.row_reduction import CudaRowReduction
from agent_synthesis.emit.cuda.rows.rows_and_columns import CudaRowsAndColumns
from agent_synthesis.emit.cuda.scans.scan import CudaScan
from agent_synthesis.emit.cuda.transposes.transpose import CudaTranspose
from agent_synthesis.emit.cuda.windows.convolution import CudaConvolution
from agent_synthesis.emit.cuda.windows.window import CudaWindow
from agent_synthesis.emit.registry import schedules_of_parts
from agent_synthesis.nests.ir import (
    Axis,
    Bound,
    BufferRef,
    Call,
    Literal,
    Load,
    Nest,
    Reduced,
    Reduction,
    Store,
    Type,
    Windowed,
)
from agent_synthesis.nests.verifier import verify
from agent_synthesis.schedule import Schedule
from agent_synthesis.settings import Settings
from agent_synthesis.testing import (
    F32,
    at,
    batch_norm,
    batch_statistics,
    call,
    column_scan,
    column_softmax,
    column_sum,
    concatenation,
    gelu,
    group_norm,
    layer_norm,
    log_probabilities,
    norm_backward,
    row_dot,
    running_sum,
    softmax,
    transposed,
    turned,
)
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200


def biased(images: int, channels: int, pixels: int) -> Nest:
    """Images plus a bias of each channel, squared."""
    size = channels * pixels
    total = call("add", Load("x", at(n=size, c=pixels, s=1), F32), Load("bias", at(c=1), F32))
    stores = (Store("y", at(n=size, c=pixels, s=1), call("mul", total, total)),)
    buffers = (
        BufferRef("x", F32, images * size), BufferRef("bias", F32, channels),
        BufferRef("y", F32, images * size, True),
    )  # fmt: skip
    return verify(Nest("biased", (Axis("n", images), Axis("c", channels), Axis("s", pixels)), (), (), stores, buffers))


def channels_last(images: int, channels: int, pixels: int) -> Nest:
    """Images whose channels come last, times a weight of each channel, and where that is positive, as they were."""
    size = channels * pixels
    product = call("mul", Load("x", at(n=size, c=pixels, s=1), F32), Load("weight", at(c=1), F32))
    place = at(n=size, s=channels, c=1)
    positive = call("gt", product, Literal(0.0, F32), type_=Type.BOOL)
    stores = (Store("y", place, product), Store("mask", at(n=size, c=pixels, s=1), positive))
    buffers = (
        BufferRef("x", F32, images * size), BufferRef("weight", F32, channels),
        BufferRef("y", F32, images * size, True), BufferRef("mask", Type.BOOL, images * size, True),
    )  # fmt: skip
    axes = (Axis("n", images), Axis("s", pixels), Axis("c", channels))
    return verify(Nest("channels_last", axes, (), (), stores, buffers))


def flattened(rows: int, columns: int) -> Nest:
    """A transposed matrix of doubles as one row of halves, from a flipped one: one axis that a view has merged."""
    k, count = at(k=1), rows * columns
    extents = {"k": count}
    place = k.modulo(rows, extents).scaled(-columns) + k.divided(rows, extents)
    x = Load("x", place.shifted(columns * (rows - 1)), Type.F64)
    stores = (Store("y", k, Call("cast", (x,), Type.F16)),)
    buffers = (BufferRef("x", Type.F64, count), BufferRef("y", Type.F16, count, True))
    return verify(Nest("flattened", (Axis("k", count),), (), (), stores, buffers))


def integers(count: int) -> Nest:
    """Integers that wrap, and whether each is negative."""
    kind = Type.I32
    x = Load("x", at(i=1), kind)
    stores = (Store("y", at(i=1), call("mul", x, x, type_=kind)),)
    buffers = (BufferRef("x", kind, count), BufferRef("y", kind, count, True))
    return verify(Nest("integers", (Axis("i", count),), (), (), stores, buffers))


def row_maximum(rows: int, columns: int, storage: Type = Type.F32) -> Nest:
    """The greatest of each row."""
    x = Load("x", at(i=columns, j=1), storage.compute)
    reduction = Reduction("top", "max", x, storage.compute)
    stores = (Store("y", at(i=1), Reduced("top", storage.compute)),)
    buffers = (BufferRef("x", storage, rows * columns), BufferRef("y", storage, rows, True))
    return verify(Nest("row_maximum", (Axis("i", rows),), (Axis("j", columns),), (reduction,), stores, buffers))


def mean_norm(rows: int, columns: int) -> Nest:
    """Each row over the mean of its magnitudes."""
    x, place = Load("x", at(i=columns, j=1), F32), at(i=columns, j=1)
    reduction = Reduction("total", "sum", call("abs", x), F32)
    mean = call("div", Reduced("total", F32), Literal(float(columns), F32))
    stores = (Store("y", place, call("div", x, mean)),)
    buffers = (BufferRef("x", F32, rows * columns), BufferRef("y", F32, rows * columns, True))
    return verify(Nest("mean_norm", (Axis("i", rows),), (Axis("j", columns),), (reduction,), stores, buffers))


def two_norms(rows: int, columns: int) -> Nest:
    """The sum of two matrices, each normalised by its columns: pairs of reductions that need different loads."""
    count, place = float(rows), at(k=columns, m=1)
    totals, squares, parts = [], [], []
    for name in ("a", "b"):
        shifted = call("sub", Load(name, place, F32), Load(name, at(m=1), F32))
        mean = Call(
            "cast", (call("div", Reduced(f"{name}_total", Type.F64), Literal(count, Type.F64), type_=Type.F64),), F32
        )
        distance = call("sub", shifted, mean)
        totals.append(Reduction(f"{name}_total", "sum", Call("cast", (shifted,), Type.F64), Type.F64))
        squares.append(Reduction(f"{name}_squares", "sum", call("mul", distance, distance), F32))
        scale = call("rsqrt", call("div", Reduced(f"{name}_squares", F32), Literal(count, F32)))
        parts.append(call("mul", distance, scale))
    buffers = (
        *(BufferRef(name, F32, rows * columns) for name in ("a", "b")),
        BufferRef("y", F32, rows * columns, True),
    )
    stores = (Store("y", place, call("add", *parts)),)
    return verify(Nest("two_norms", (Axis("m", columns),), (Axis("k", rows),), (*totals, *squares), stores, buffers))


def divergence(rows: int, columns: int) -> Nest:
    """Of each row, the sum of t log t - t log p, where 0 log 0 is 0: some t are 0."""
    p, t = (Load(name, at(i=columns, j=1), F32) for name in ("p", "t"))
    zero = Literal(0.0, F32)
    some = call("max", call("add", t, Literal(2.0, F32)), zero)
    own = call("where", call("eq", some, zero, type_=Type.BOOL), zero, call("mul", some, call("log", some)))
    value = call("sub", own, call("mul", some, call("log", call("abs", p))))
    reduction = Reduction("total", "sum", value, F32)
    stores = (Store("y", at(i=1), Reduced("total", F32)),)
    buffers = (*(BufferRef(name, F32, rows * columns) for name in ("p", "t")), BufferRef("y", F32, rows, True))
    return verify(Nest("divergence", (Axis("i", rows),), (Axis("j", columns),), (reduction,), stores, buffers))


def window_maximum(images: int, side: int, window: int, stride: int, padding: int = 0) -> Nest:
    """The greatest of each square window of square images; windows hang over the edge by the padding."""
    count = (side + 2 * padding - window) // stride + 1
    down, right = at(-padding, h=stride, p=1), at(-padding, w=stride, q=1)
    place = at(-padding * (side + 1), n=side * side, h=stride * side, w=stride, p=side, q=1)
    positions = (Bound(down, side), Bound(right, side))
    reduction = Windowed("top", "max", Load("x", place, F32), F32, positions)
    stores = (Store("y", at(n=count * count, h=count, w=1), Reduced("top", F32)),)
    buffers = (BufferRef("x", F32, images * side * side), BufferRef("y", F32, images * count * count, True))
    axes = (Axis("n", images), Axis("h", count), Axis("w", count))
    return verify(Nest("windows", axes, (Axis("p", window), Axis("q", window)), (reduction,), stores, buffers))


def window_spread(side: int, window: int, stride: int, padding: int) -> Nest:
    """The greatest and the least of each window, over the sum of its doubles: reductions of unlike types."""
    nest = window_maximum(1, side, window, stride, padding)
    (top,), (store,) = nest.windows, nest.stores
    wide = call("cast", top.value, type_=Type.F64)
    total = replace(top, name="total", operation="sum", value=wide, type=Type.F64)
    least = replace(top, name="least", operation="min")
    both = call("add", Reduced("top", F32), Reduced("least", F32))
    ratio = call("div", call("cast", both, type_=Type.F64), Reduced("total", Type.F64), type_=Type.F64)
    stores = (replace(store, value=call("cast", ratio, type_=F32)),)
    return verify(replace(nest, reductions=(top, total, least), stores=stores))


def convolved(
    images: int, channels: int, side: int, window: int, *, stride: int = 1, padding: int = 0, dilation: int = 1,
    summed: int = 1, storage: Type = F32, last: bool = False,
) -> Nest:  # fmt: skip
    """Square images convolved with a window of each channel, or of `summed` channels, and what is positive of that.

    `last`: channels come last.
    """
    count = (side + 2 * padding - dilation * (window - 1) - 1) // stride + 1
    read, kind, every = side * side, storage.compute, channels * summed
    step, far, near = (1, side * every, every) if last else (read, side, 1)
    seen = at(
        -padding * (far + near), n=every * read, c=summed * step, g=step, r=stride * far, s=stride * near,
        p=dilation * far, q=dilation * near,
    )  # fmt: skip
    weight = at(c=summed * window * window, g=window * window, p=window, q=1)
    positions = tuple(Bound(at(-padding, **{o: stride, k: dilation}), side) for o, k in (("r", "p"), ("s", "q")))
    value = call("mul", Load("x", seen, kind), Load("weight", weight, kind), type_=kind)
    reduction = Windowed("total", "sum", value, kind, positions, is_weighted=True)
    place = at(n=channels * count * count, c=1, r=count * channels, s=channels)
    if not last:
        place = at(n=channels * count * count, c=count * count, r=count, s=1)
    stores = (Store("y", place, call("max", Reduced("total", kind), Literal(0.0, kind), type_=kind)),)
    buffers = (
        BufferRef("x", storage, images * every * read), BufferRef("weight", storage, every * window * window),
        BufferRef("y", storage, images * channels * count * count, True),
    )  # fmt: skip
    outputs = [Axis("n", images), Axis("r", count), Axis("s", count)]
    outputs.insert(3 if last else 1, Axis("c", channels))
    reduced = (Axis("g", summed), Axis("p", window), Axis("q", window))
    return verify(Nest("convolved", tuple(outputs), reduced, (reduction,), stores, buffers))


Make = Callable[[int], Nest]
"""A nest of a class with about that many rows, where it has rows."""
Changes = Mapping[str, str | int]
"""What a strategy changes of a schedule's defaults."""

_STRATEGIES: Mapping[str, Changes] = {
    "warp": {"reduce": "warp", "threads": 64, "lanes": 16, "vectors": 2, "merge": "no", "dependent_launch": "yes"},
    "lanes": {"reduce": "warp", "threads": 64, "lanes": 4, "vectors": 2, "merge": "no", "preload": "yes"},
    "block": {"reduce": "block", "threads": 64, "lanes": 64, "vectors": 2, "merge": "no", "min_blocks": 1},
    "online": {"reduce": "block", "threads": 64, "lanes": 64, "vectors": 1, "merge": "yes", "min_blocks": 1},
    "held": {"reduce": "block", "threads": 96, "lanes": 96, "vectors": 8, "merge": "yes", "preload": "yes"},
    "cluster": {"reduce": "cluster", "threads": 64, "lanes": 64, "vectors": 2, "ctas": 2, "min_blocks": 1},
    "grid": {"reduce": "grid", "threads": 64, "lanes": 64, "vectors": 2, "ctas": 3, "min_blocks": 1,
             "dependent_launch": "no"},
    "two_kernels": {"reduce": "two_kernels", "threads": 64, "lanes": 64, "vectors": 1, "ctas": 3,
                    "dependent_launch": "yes"},
    "two_kernels_rows": {"reduce": "two_kernels", "threads": 64, "lanes": 64, "vectors": 1, "ctas": 3, "stages": 2,
                         "dependent_launch": "yes"},
    "two_kernels_chunks": {"reduce": "two_kernels", "threads": 64, "lanes": 64, "vectors": 1, "ctas": 3, "stages": 1},
    "prefetched": {"reduce": "prefetched", "threads": 64, "lanes": 64, "ctas": 1, "vectors": 16, "merge": "yes",
                   "preload": "no", "min_blocks": 1},
    "prefetched_cluster": {"reduce": "prefetched", "threads": 64, "lanes": 64, "ctas": 2, "vectors": 16, "merge": "no",
                           "preload": "yes", "min_blocks": 1},
    "prefetched_parts": {"reduce": "prefetched", "threads": 32, "lanes": 32, "ctas": 1, "vectors": 1, "merge": "yes",
                         "min_blocks": 1, "stages": 1},
    "prefetched_cluster_parts": {"reduce": "prefetched", "threads": 32, "lanes": 32, "ctas": 2, "vectors": 2,
                                 "merge": "no", "min_blocks": 1, "stages": 3},
    "pipelined": {"reduce": "pipelined", "threads": 64, "lanes": 64, "ctas": 1, "stages": 3, "lag": 0, "merge": "yes",
                  "preload": "yes"},
    "pipelined_ctas": {"reduce": "pipelined", "threads": 64, "lanes": 64, "ctas": 2, "stages": 4, "lag": 2,
                       "preload": "yes", "merge": "yes"},
    "resident": {"reduce": "resident", "threads": 64, "lanes": 64, "ctas": 1, "vectors": 2, "stages": 2, "lag": 1,
                 "preload": "no", "merge": "yes", "min_blocks": 1},
    "resident_registers": {"reduce": "resident", "threads": 64, "lanes": 64, "ctas": 2, "vectors": 1, "stages": 1,
                           "held": 1, "lag": 0, "preload": "no", "merge": "yes", "min_blocks": 1},
    "resident_ctas": {"reduce": "resident", "threads": 64, "lanes": 64, "ctas": 3, "vectors": 1, "stages": 1, "lag": 1,
                      "preload": "no", "merge": "yes", "min_blocks": 1},
    "resident_team": {"reduce": "resident", "threads": 64, "lanes": 64, "ctas": 67, "vectors": 1, "stages": 1, "lag": 1,
                      "preload": "no", "merge": "yes", "min_blocks": 1},
    "ring": {"reduce": "ring", "threads": 64, "lanes": 64, "ctas": 2, "vectors": 1, "stages": 4, "lag": 2, "held": 1,
             "preload": "no", "merge": "yes", "min_blocks": 1},
    "ring_team": {"reduce": "ring", "threads": 64, "lanes": 64, "ctas": 67, "vectors": 1, "stages": 5, "lag": 3,
                  "held": 3, "preload": "no", "merge": "yes", "min_blocks": 1},
    "ring_single": {"reduce": "ring", "threads": 32, "lanes": 32, "ctas": 67, "vectors": 3, "stages": 2, "lag": 1,
                    "held": 0, "preload": "no", "merge": "yes", "min_blocks": 1, "stores": "streaming"},
    "ring_pairs": {"reduce": "ring", "threads": 64, "lanes": 64, "ctas": 2, "vectors": 1, "stages": 2, "lag": 1,
                   "held": 1, "preload": "no", "merge": "yes", "min_blocks": 1, "dependent_launch": "no"},
    "unaligned": {"reduce": "cluster", "threads": 64, "lanes": 64, "vector_width": 4, "vectors": 4, "ctas": 2,
                  "min_blocks": 1},
    "unaligned_visits": {"reduce": "block", "threads": 64, "lanes": 64, "vector_width": 4, "vectors": 1, "merge": "yes",
                         "min_blocks": 1, "stores": "streaming"},
}  # fmt: skip

_ROWS: Mapping[str, Make] = {
    "softmax": lambda rows: softmax(rows, 1024),
    "softmax_ragged": lambda rows: softmax(rows, 333),
    "softmax_half": lambda rows: softmax(rows, 1024, Type.F16),
    "several_beside": lambda rows: log_probabilities(rows, 512),
    "norm": lambda rows: layer_norm(rows, 1024),
    "norm_ragged": lambda rows: layer_norm(rows, 517),
    "norm_bfloat16": lambda rows: layer_norm(rows, 1024, Type.BF16),
    "dot": lambda rows: row_dot(rows, 1024),
    "maximum_integer": lambda rows: row_maximum(rows, 260, Type.I32),
    "several_axes": lambda rows: batch_norm(3, rows, 49),
    "short_rows": lambda rows: softmax(4 * rows + 1, 17),
    "one_row": lambda _: layer_norm(1, 2048),
    "one_element": lambda rows: softmax(rows, 1),
    "statistics": lambda rows: batch_statistics(3, rows, 512, "before"),
    "groups": lambda rows: group_norm(1, rows, 4, 256),
    "groups_ragged": lambda rows: group_norm(1, rows, 3, 121),
    "quotients_ragged": lambda rows: mean_norm(rows, 1501),
    "logarithms": lambda rows: divergence(rows, 1024),
    "several_turns": lambda _: layer_norm(3, 25728),
}
_FEW_ROWS, _ROWS_OF_A_PIPELINE = 2, 5
_SEVERAL_ROWS = ("pipelined", "resident", "ring", "prefetched", "two_kernels_rows")
"""Strategies whose blocks take one row after the other."""

_COLUMNS: Mapping[str, Make] = {
    "sum": lambda _: column_sum(70, 64),
    "sum_ragged": lambda _: column_sum(33, 37),
    "sum_half": lambda _: column_sum(64, 64, Type.F16),
    "softmax": lambda _: column_softmax(37, 64),
    "softmax_ragged": lambda _: column_softmax(20, 19),
    "statistics": lambda _: batch_statistics(3, 32, 49, "before", channels_last=True),
    "means": lambda _: batch_norm(40, 37, 1),
    "statistics_ragged": lambda _: batch_statistics(2, 37, 31, "before", channels_last=True),
    "two_norms": lambda _: two_norms(147, 32),
    "two_norms_ragged": lambda _: two_norms(62, 37),
}
_COLUMN_TEAMS: Mapping[str, Changes] = {
    "one_block": {"threads": 64, "lanes": 8, "ctas": 1, "unroll": 2, "min_blocks": 1},
    "ctas": {"threads": 64, "lanes": 16, "ctas": 3, "unroll": 2, "min_blocks": 1},
    "wide": {"threads": 64, "lanes": 64, "ctas": 1, "unroll": 4, "stores": "streaming"},
    "tall": {"threads": 256, "lanes": 8, "ctas": 2, "unroll": 2, "min_blocks": 1},
}

_SUMMED: Mapping[str, Make] = {
    "norm": lambda _: norm_backward(20, 512),  # more rows than blocks
    "norm_bfloat16": lambda _: norm_backward(9, 256, Type.BF16),
    "ragged": lambda _: norm_backward(11, 37),
    "elements": lambda _: norm_backward(20, 64, reduced=False),
    "few_rows": lambda rows: norm_backward(rows, 256),
}
_SUMMING_TEAMS: Mapping[str, Changes] = {
    "block": {"threads": 32, "lanes": 32, "vectors": 8, "ctas": 1, "min_blocks": 1},
    "blocks": {"threads": 64, "lanes": 64, "vectors": 4, "ctas": 1, "min_blocks": 2, "preload": "yes",
               "stores": "streaming", "dependent_launch": "no"},
    "cluster": {"threads": 32, "lanes": 32, "vectors": 16, "ctas": 2, "min_blocks": 1},
    "ahead": {"threads": 64, "lanes": 64, "vectors": 4, "ctas": 1, "min_blocks": 1, "stages": 3},
    "parts": {"threads": 32, "lanes": 32, "vectors": 1, "ctas": 1, "min_blocks": 1, "stages": 2},
    "cluster_parts": {"threads": 32, "lanes": 32, "vectors": 1, "ctas": 2, "min_blocks": 1, "stages": 3},
}  # fmt: skip

_POINTWISE: Mapping[str, Make] = {
    "vectors": lambda _: gelu(1024),
    "ragged": lambda _: gelu(1003),
    "half": lambda _: gelu(1000, Type.F16),
    "transposed": lambda _: transposed(24, 20),
    "integers": lambda _: integers(515),
    "biased": lambda _: biased(2, 3, 1044),
    "biased_ragged": lambda _: biased(2, 2, 519),
}
_VECTORS: Mapping[str, Changes] = {
    "single": {"threads": 64, "vectors": 1},
    "vectors": {"threads": 64, "vectors": 2, "stores": "streaming", "dependent_launch": "no"},
    "rows": {"threads": 64, "vectors": 2, "by_rows": "yes"},
}

_TURNS: Mapping[str, Make] = {
    "vectors": lambda _: transposed(72, 40),
    "ragged": lambda _: transposed(45, 37),
    "half": lambda _: transposed(64, 40, Type.F16),
    "both_ways": lambda _: channels_last(2, 36, 49),
    "few_channels": lambda _: channels_last(3, 3, 400),
    "merged": lambda _: flattened(40, 44),
    "bytes": lambda _: transposed(40, 64, Type.U8),
}
_TILES: Mapping[str, Changes] = {
    "default": {},
    "small": {"threads": 64, "along": 32, "across": 32},
    "large": {"threads": 128, "along": 64, "across": 32, "preload": "no", "order": "across", "stores": "streaming",
              "dependent_launch": "no"},
}  # fmt: skip

_SCANS: Mapping[str, Make] = {
    "sum": lambda rows: running_sum(rows, 1024),
    "reverse": lambda rows: running_sum(rows, 1024, reverse=True),
    "exclusive_ragged": lambda rows: running_sum(rows, 517, exclusive=True),
    "half": lambda rows: running_sum(rows, 1024, Type.F16),
    "product": lambda rows: running_sum(rows, 260, operation="cumprod"),
    "columns": lambda rows: column_scan(rows, 40, 64),
    "columns_ragged": lambda rows: column_scan(rows, 33, 37, reverse=True),
}
_SCAN_TEAMS: Mapping[str, Changes] = {
    "lanes": {"scan": "rows", "threads": 64, "lanes": 16, "vectors": 2, "min_blocks": 1},
    "block": {"scan": "rows", "threads": 64, "lanes": 64, "vectors": 1, "min_blocks": 1},
    "prefetch": {"scan": "rows", "threads": 64, "lanes": 64, "vectors": 1, "prefetch": "yes", "min_blocks": 1},
    "grid": {"scan": "grid", "threads": 64, "lanes": 64, "vectors": 1, "min_blocks": 1, "prefetch": "no"},
    "columns": {"scan": "columns", "threads": 64, "lanes": 8, "vectors": 2, "ctas": 1},
    "column_ctas": {"scan": "columns", "threads": 64, "lanes": 8, "vectors": 2, "ctas": 3},
}

_WINDOWS: Mapping[str, Make] = {
    "overlapping": lambda _: window_maximum(2, 19, 3, 2),
    "apart": lambda _: window_maximum(3, 16, 2, 2),
    "padded": lambda _: window_maximum(1, 32, 3, 1, 1),
    "several_reductions": lambda _: window_spread(19, 3, 2, 1),
}
_WINDOW_TEAMS: Mapping[str, Changes] = {
    "columns": {"reuse": "columns", "threads": 64, "rows": 2, "vectors": 1, "min_blocks": 1},
    "each": {"reuse": "none", "threads": 64, "min_blocks": 1, "vector_width": 1, "rows": 1, "vectors": 1},
}

_CONVOLUTIONS: Mapping[str, Make] = {
    "padded": lambda _: convolved(2, 3, 16, 3, padding=1),
    "ragged": lambda _: convolved(1, 2, 13, 4, padding=2),
    "strided": lambda _: convolved(1, 3, 24, 5, stride=2, padding=2),
    "dilated": lambda _: convolved(1, 2, 12, 3, padding=5, dilation=4),
    "half": lambda _: convolved(1, 2, 16, 3, padding=1, storage=Type.F16),
    "doubles": lambda _: convolved(1, 2, 12, 3, storage=Type.F64),
    "channels_summed": lambda _: convolved(1, 4, 12, 3, padding=1, summed=3),
    "channels_last": lambda _: convolved(2, 12, 9, 3, padding=1, last=True),
    "channels_last_ragged": lambda _: convolved(1, 5, 9, 3, stride=2, padding=1, last=True),
    "long_window": lambda _: convolved(1, 2, 20, 9, padding=4),
}
_STRIPS: Mapping[str, Changes] = {
    "single": {"threads": 64, "rows": 1, "outputs": 1, "vector_width": 1},
    "strip": {"threads": 64, "rows": 4, "outputs": 4, "vector_width": 4, "dependent_launch": "no"},
    "wide": {"threads": 64, "rows": 1, "outputs": 8, "vector_width": 2},
    "tile": {"threads": 64, "rows": 2, "outputs": 4, "vector_width": 4, "shared": "yes"},
    "narrow_tile": {"threads": 64, "rows": 1, "outputs": 2, "vector_width": 1, "shared": "yes"},
}

_CONCATENATIONS: Mapping[str, Make] = {
    "pointwise": lambda _: concatenation(2, (5, 40, 3), 64),
    "ragged": lambda _: concatenation(3, (1, 7), 37),
    "reduced": lambda _: concatenation(2, (4, 6), 50, normalised=True),
}

_APART: Mapping[str, Make] = {
    "statistics": lambda _: batch_statistics(3, 32, 49, "before", channels_last=True),
    "turned": lambda _: turned(batch_statistics(2, 36, 40, "before", channels_last=True), n=36 * 40, c=40, s=1),
    "bare": lambda _: column_softmax(40, 37),
    "rows": lambda _: turned(layer_norm(64, 48), i=1, j=64),
}

_FAMILIES: Mapping[str, tuple[Schedule, Mapping[str, Make], Mapping[str, Changes]]] = {
    "pointwise": (CudaPointwise(H200), _POINTWISE, _VECTORS),
    "turn": (CudaTranspose(H200), _TURNS, _TILES),
    "row": (CudaRowReduction(H200), _ROWS, _STRATEGIES),
    "column": (CudaColumnReduction(H200), _COLUMNS, _COLUMN_TEAMS),
    "summed": (CudaRowsAndColumns(replace(H200, sm_count=8)), _SUMMED, _SUMMING_TEAMS),
    "scan": (CudaScan(H200), _SCANS, _SCAN_TEAMS),
    "window": (CudaWindow(H200), _WINDOWS, _WINDOW_TEAMS),
    "convolution": (CudaConvolution(H200), _CONVOLUTIONS, _STRIPS),
    "apart": (CudaReductionsApart(H200, schedules_of_parts(H200)), _APART, {"each": {}}),
    "pieces": (CudaPieces(H200, schedules_of_parts(H200), large_bytes=0), _CONCATENATIONS, {"each": {}}),
}


def every_subject() -> list[Subject]:
    """All combinations that the schedules accept, each with a name of its own."""
    found = []
    for family, (schedule, classes, strategies) in _FAMILIES.items():
        for (shape_class, make), (strategy, changes) in itertools.product(classes.items(), strategies.items()):
            nest = make(_ROWS_OF_A_PIPELINE if strategy.startswith(_SEVERAL_ROWS) else _FEW_ROWS)
            named = replace(nest, name=f"{family}_{strategy}_{shape_class}")
            for parameters in _accepted(named, schedule, changes):
                found.append(Subject(named.name, f"{family} {strategy}", shape_class, named, schedule, parameters))
    return found


def a_slice() -> list[Subject]:
    """Every strategy, and every class of shape of each family; those new in both come first: few are enough."""
    chosen, seen, everything = [], set[tuple[str, str]](), every_subject()
    for wanted in (2, 1):
        for subject in everything:
            family = subject.strategy.split()[0]
            fresh = {("strategy", subject.strategy), (family, subject.shape_class)} - seen
            if len(fresh) >= wanted:
                chosen.append(subject)
                seen |= fresh
    return chosen


def subject(name: str) -> Subject:
    """The subject of that name."""
    return next(each for each in every_subject() if each.name == name)


def _accepted(nest: Nest, schedule: Schedule, changes: Changes) -> Iterator[Settings]:
    """The settings, as wide as the nest allows; none where the schedule refuses the combination altogether, such as
    16-byte copies of ragged rows or two exchanges in one pipeline."""
    if not schedule.accepts(nest):
        return
    base = schedule.defaults(nest)
    if not base.declared():
        yield base
        return
    wanted = base.changed(changes)
    for width, merge in itertools.product(dict.fromkeys((wanted.vector_width, 4, 2, 1)), ("yes", "no")):
        merged = {"merge": merge} if changes.get("merge", base.words().get("merge")) == "yes" else {}
        candidate = wanted.changed({**merged, "vector_width": width})
        try:
            schedule.emit(nest, candidate)
        except IllegalMove:
            continue
        yield candidate
        return
