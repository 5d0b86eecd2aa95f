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
        return _kept_bytes(found, 1, min(_BLOCK, found.row.outputs)) <= _KEPT_BYTES

    def defaults(self, nest: Nest) -> ConvolutionSettings:
        """Whole rows, as many as stay in the first-level cache."""
        found = _found(nest)
        block, rows = min(_BLOCK, found.row.outputs), 1
        most = min((found.down or STILL).outputs, 64)
        while rows * 2 <= most and _kept_bytes(found, rows * 2, block) <= _NEAR_BYTES:
            rows *= 2
        return ConvolutionSettings(rows, block, cpu_function.default_threads(nest))

    def alternatives(self, nest: Nest, current: ConvolutionSettings) -> Sequence[ConvolutionSettings]:
        """One change away."""
        found = _found(nest)
        most = (found.down or STILL).outputs
        changes = [
            each for each in current.one_change_away() if each.rows < 2 * most and each.block < 2 * found.row.outputs
        ]
        return [each for each in changes if _kept_bytes(found, each.rows, each.block) <= _KEPT_BYTES]

    def footprint(self, nest: Nest, settings: ConvolutionSettings) -> Footprint:
        """Plain stores read each line of an output before they write it."""
        return Footprint(
            cpu_function.fill_bytes(nest, Stores.PLAIN), cpu_function.thread_count(nest, settings.threads), 1
        )

    def emit(self, nest: Nest, settings: ConvolutionSettings) -> Emission:
        """One function."""
        found = _found(nest)
        if settings.rows < 1 or settings.block < 1 or _kept_bytes(found, settings.rows, settings.block) > _KEPT_BYTES:
            raise IllegalMove(f"{nest.name}: {settings.rows} rows of {settings.block} outputs do not stay in the cache")
        return convolution_text.emission(nest, found, function_text.header(nest, self.name, settings), settings)


def _found(nest: Nest) -> Convolution:
    found = convolution.convolution(nest)
    assert found is not None, nest.name
    return found


def _kept_bytes(found: Convolution, rows: int, block: int) -> int:
    """Bytes of rows of data, sums and weights."""
    row, down = found.row, found.down or STILL
    rows, block = min(rows, down.outputs), min(block, row.outputs)
    weights = down.size * row.size * (block if found.weight_varies_along_row else 1)
    return found.reduction.type.compute.size_bytes * (down.span(rows) * row.span(block) + rows * block + weights)
