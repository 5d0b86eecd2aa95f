"""CPU schedule of convolutions: a few rows of data in the first-level cache, and every output's window walked there.

The one idea: what is read is computed, widened and padded once for all windows that meet it, so that the loop over
outputs has no test, reads neighbours whatever the stride, and keeps the sums of several rows in registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cpu import convolution_text, cpu_function
from agent_synthesis.emit.cpu.cpu_settings import ConvolutionSettings
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis import convolution
from agent_synthesis.nests.analysis.convolution import Convolution
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.sliding_window import STILL
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Stores
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

_KEPT_BYTES = 256 << 10
"""What the rows that a thread keeps may take: a part of its second-level cache."""
_NEAR_BYTES = 32 << 10
"""What they take by default: about the first-level cache."""
_MADE = 8
"""Outputs that share what is brought by default."""
_BLOCK = 1024
"""Outputs of a row at once by default."""


class CpuConvolution:
    """Convolutions whose data is brought into the cache by rows."""

    name = "cpu_convolution"
    settings = ConvolutionSettings
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """Convolutions that memory bounds rather than arithmetic."""
        found = convolution.convolution(nest)
        if found is None or not convolution.is_hopeful(nest) or not iteration_space.is_safe_in_place(nest):
            return False
        return _kept_bytes(found, 1, 1, min(_BLOCK, found.row.outputs)) <= _KEPT_BYTES

    def defaults(self, nest: Nest) -> ConvolutionSettings:
        """Whole rows, as many as stay in the first-level cache; what is brought serves a few outputs that see it."""
        found = _found(nest)
        block, rows = min(_BLOCK, found.row.outputs), 1
        made = min(_MADE, found.made.extent) if found.made else 1
        most = min((found.down or STILL).outputs, 64)
        while rows * 2 <= most and _kept_bytes(found, 1, rows * 2, block) <= _NEAR_BYTES:
            rows *= 2
        while made > 1 and _kept_bytes(found, made, rows, block) > _KEPT_BYTES:
            made //= 2
        return ConvolutionSettings(made, rows, block, cpu_function.default_threads(nest))

    def alternatives(self, nest: Nest, current: ConvolutionSettings) -> Sequence[ConvolutionSettings]:
        """One change away."""
        found = _found(nest)
        most = ((found.made.extent if found.made else 1), (found.down or STILL).outputs, found.row.outputs)
        changes = (
            each
            for each in current.one_change_away()
            if all(some < 2 * all_ for some, all_ in zip((each.made, each.rows, each.block), most, strict=True))
        )
        return [each for each in changes if _kept_bytes(found, each.made, each.rows, each.block) <= _KEPT_BYTES]

    def footprint(self, nest: Nest, settings: ConvolutionSettings) -> Footprint:
        """Plain stores read each line of an output before they write it."""
        return Footprint(
            cpu_function.fill_bytes(nest, Stores.PLAIN), cpu_function.thread_count(nest, settings.threads), 1
        )

    def emit(self, nest: Nest, settings: ConvolutionSettings) -> Emission:
        """One function."""
        found = _found(nest)
        made, rows, block = settings.made, settings.rows, settings.block
        if min(made, rows, block) < 1 or _kept_bytes(found, made, rows, block) > _KEPT_BYTES:
            raise IllegalMove(f"{nest.name}: {made} x {rows} rows of {block} outputs do not stay in the cache")
        return convolution_text.emission(nest, found, function_text.header(nest, self.name, settings), settings)


def _found(nest: Nest) -> Convolution:
    found = convolution.convolution(nest)
    assert found is not None, nest.name
    return found


def _kept_bytes(found: Convolution, made: int, rows: int, block: int) -> int:
    """Bytes of rows of data, sums and weights."""
    row, down = found.row, found.down or STILL
    made = min(made, found.made.extent) if found.made else 1
    rows, block = min(rows, down.outputs), min(block, row.outputs)
    weights = down.size * row.size * (block if found.weight_varies_along_row else 1)
    return found.reduction.type.compute.size_bytes * (down.span(rows) * row.span(block) + made * rows * block + weights)
