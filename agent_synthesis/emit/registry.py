"""Schedules: the ways to run a nest on a target, one file a schedule and target.

`schedules(target)` lists the built-ins in order of preference, then those of chosen plugins (role `schedule`); the
first that accepts a nest is the default, unless another says that it leads there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from agent_synthesis.bundle import Bundle
from agent_synthesis.emit.cpu.column_reduction import CpuColumnReduction
from agent_synthesis.emit.cpu.convolution import CpuConvolution
from agent_synthesis.emit.cpu.pointwise import CpuPointwise
from agent_synthesis.emit.cpu.row_reduction import CpuRowReduction
from agent_synthesis.emit.cpu.scan import CpuScan
from agent_synthesis.emit.cpu.window import CpuWindow
from agent_synthesis.emit.cuda.attention import CudaAttention
from agent_synthesis.emit.cuda.attention_backward import CudaAttentionBackward
from agent_synthesis.emit.cuda.columns.column_reduction import CudaColumnReduction
from agent_synthesis.emit.cuda.parts.bundle import CudaBundle
from agent_synthesis.emit.cuda.parts.pieces import CudaPieces
from agent_synthesis.emit.cuda.parts.reductions_apart import CudaReductionsApart
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import CudaConvolutionProduct
from agent_synthesis.emit.cuda.products.convolutions.reduced_convolution import CudaReducedConvolution
from agent_synthesis.emit.cuda.products.decoded_product import CudaDecodedProduct
from agent_synthesis.emit.cuda.products.normalized_product import CudaNormalizedProduct
from agent_synthesis.emit.cuda.products.reduced_product import CudaReducedProduct
from agent_synthesis.emit.cuda.products.scaled_product import CudaScaledProduct
from agent_synthesis.emit.cuda.products.small_product import CudaSmallProduct
from agent_synthesis.emit.cuda.products.streamed_product import CudaStreamedProduct
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.emit.cuda.recurrences.loop import CudaLoop
from agent_synthesis.emit.cuda.recurrences.recurrent import CudaRecurrent
from agent_synthesis.emit.cuda.rows.row_reduction import CudaRowReduction
from agent_synthesis.emit.cuda.rows.rows_and_columns import CudaRowsAndColumns
from agent_synthesis.emit.cuda.scans.scan import CudaScan
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.segments.segments import CudaSegments
from agent_synthesis.emit.cuda.transposes.transpose import CudaTranspose
from agent_synthesis.emit.cuda.windows.convolution import CudaConvolution
from agent_synthesis.emit.cuda.windows.window import CudaWindow
from agent_synthesis.nests.calls.attention_backward import AttentionBackward
from agent_synthesis.nests.calls.recurrence import Recurrence
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.nests.tailed import Tailed
from agent_synthesis.schedule import Offered, Schedule
from agent_synthesis.settings import Settings
from warpsmith import plugins
from warpsmith.errors import BadInput
from warpsmith.hardware import H200, Hardware
from warpsmith.v1 import task_pb2

INCLUDE_DIRECTORY = Path(__file__).parent.parent / "include"
"""Where the headers that emissions name are."""

_CPU = (
    Offered(CpuPointwise()), Offered(CpuScan()), Offered(CpuWindow()), Offered(CpuConvolution()),
    Offered(CpuColumnReduction()), Offered(CpuRowReduction()),
)  # fmt: skip


def _pointwise(card: Hardware) -> tuple[Offered, ...]:
    return Offered(CudaTranspose(card)), Offered(CudaPointwise(card))


def _reductions(card: Hardware) -> tuple[Offered, ...]:
    return Offered(CudaColumnReduction(card)), Offered(CudaRowReduction(card))


def schedules_of_parts(card: Hardware) -> tuple[Offered, ...]:
    """What parts of a nest may be run by, preferred first."""
    return (*_pointwise(card), *_reductions(card))


def _cuda(card: Hardware) -> tuple[Offered, ...]:
    """Of products, the first two take what gains by it."""
    return (
        Offered(CudaPieces(card, schedules_of_parts(card))), *_pointwise(card), Offered(CudaScan(card)),
        Offered(CudaWindow(card)), Offered(CudaConvolution(card)), Offered(CudaConvolutionProduct(card)),
        *_reductions(card), Offered(CudaReductionsApart(card, schedules_of_parts(card))),
        Offered(CudaRowsAndColumns(card)), Offered(CudaSegments(card)),
        Offered(CudaStreamedProduct(card)), Offered(CudaConvertedProduct(card)), Offered(CudaProduct(card)),
        Offered(CudaScaledProduct(card)), Offered(CudaSmallProduct(card)), Offered(CudaDecodedProduct(card)),
        Offered(CudaReducedProduct(card)), Offered(CudaNormalizedProduct(card)), Offered(CudaAttention(card)),
        Offered(CudaAttentionBackward(card)), Offered(CudaRecurrent(card)), Offered(CudaLoop(card)),
        Offered(CudaBundle(card)), Offered(CudaReducedConvolution(card)),
    )  # fmt: skip


PRODUCTS = frozenset({
    "cuda_product_streamed", "cuda_product_converted", "cuda_product", "cuda_product_simt", "cuda_product_reduced",
    "cuda_product_columns", "cuda_product_decoded", "cuda_product_scaled", "cuda_attention",
})  # fmt: skip
"""Schedules of matrix products and of attention, which no other schedule takes."""
APART = "cuda_reductions_apart"
"""The schedule of reductions whose elements are stored by a kernel of their own."""
PIECES = "cuda_pieces"
"""The schedule of what others would take too, and make of it element by element."""
RECURRENT = frozenset({"cuda_loop", "cuda_recurrent"})
"""Schedules of recurrent networks, which have no loops for others to read."""
BACKWARDS = frozenset({"cuda_attention_backward"})
"""Schedules of attention's backward, which has none either."""
TAILED = frozenset({"cuda_convolution_reduced"})
"""Schedules of a convolution with what reduces its result, which are two nests to others."""
BUNDLES = frozenset({"cuda_bundle"})
"""Schedules of several nests that are launched as one."""
MAY_BE_BUNDLED = frozenset({"cuda_pointwise", "cuda_transpose"})
"""Schedules of their members."""
SUMS_OVER_ROWS = frozenset({"cuda_rows_and_columns"})
"""Schedules of nests that sum over their rows besides, which others would store as if they did not."""


SEGMENTS = frozenset({"cuda_segments", "cpu_column_reduction"})
"""Schedules of reductions over parts of rows, which others would make over the whole."""


@functools.cache
def schedules(target: task_pb2.Target.ValueType, hardware: Hardware = H200) -> tuple[Offered, ...]:
    """The schedules of a target that the card has all for, preferred first; empty for a target without any."""
    return tuple(each for each in every_schedule(target, hardware) if not why_not(each))


@functools.cache
def every_schedule(target: task_pb2.Target.ValueType, hardware: Hardware = H200) -> tuple[Offered, ...]:
    """Those too that the card lacks something for.

    Raises:
        UnknownPlugin: a chosen schedule is not installed, or does not import. BadInput: one has the name of another.
    """
    ours = _cuda(hardware) if target == task_pb2.TARGET_CUDA else _CPU
    chosen = [Offered(make(hardware)) for make in _chosen()]
    theirs = tuple(each for each in chosen if each.target == target)
    names = [each.name for each in (*ours, *theirs)]
    for each in theirs:
        if names.count(each.name) > 1:
            raise BadInput(f"two schedules are called {each.name!r}; one is of the plugin {type(each.made).__module__}")
    return (*ours, *theirs)


@functools.cache
def _chosen() -> tuple[Callable[[Hardware], Schedule[Settings]], ...]:
    return tuple(plugins.find("schedule", name) for name in plugins.chosen("schedule"))


def asked_about(nest: Nest, target: task_pb2.Target.ValueType, hardware: Hardware = H200) -> list[Offered]:
    """The schedules of a target that are asked about a nest: those of recurrent networks, of attention's
    backward, of bundles, of convolutions with a tail, of what
    multiplies matrices, of what reduces parts of rows or sums over its rows, or of what does none of this; one of a
    plugin is asked about products and the last."""
    offered = schedules(target, hardware)
    if isinstance(nest, Recurrence):
        return [each for each in offered if each.name in RECURRENT]
    if isinstance(nest, AttentionBackward):
        return [each for each in offered if each.name in BACKWARDS]
    if isinstance(nest, Tailed):
        return [each for each in offered if each.name in TAILED]
    if isinstance(nest, Bundle):
        return [each for each in offered if each.name in BUNDLES]
    if nest.segments:
        return [each for each in offered if each.name in SEGMENTS]
    if nest.summed:
        return [each for each in offered if each.name in SUMS_OVER_ROWS]
    named = PRODUCTS | RECURRENT | BACKWARDS | SUMS_OVER_ROWS | BUNDLES | TAILED
    others = PRODUCTS if multiplies_matrices(nest) else {each.name for each in offered} - named
    return [each for each in offered if each.name in others or not type(each.made).__module__.startswith(__package__)]


def why_not(schedule: Offered) -> str:
    """Why a schedule is not offered on its card, in a sentence; empty where it is."""
    made = schedule.made
    refusal = made.hardware.refusal(made.needs) if isinstance(made, CudaSchedule) else ""
    return f"{schedule.name} {refusal}" if refusal else ""
