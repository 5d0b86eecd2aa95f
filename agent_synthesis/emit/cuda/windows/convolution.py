"""CUDA schedule of convolutions: each thread makes a strip of outputs, a few neighbours of a few rows.

The one idea: what windows of a strip share is read once, in vectors, and stays in registers; what neighbouring strips
share comes from the first-level cache, or from a tile in shared memory that the block brings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.windows.convolution_text import MOST_HELD_WEIGHTS, ConvolutionSettings, Strips, kernel
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis import convolution
from agent_synthesis.nests.analysis.convolution import Convolution
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.sliding_window import STILL
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import STATIC_SHARED_BYTES

_HEADERS = (*geometry.HEADERS, "ws_axes.cuh", "ws_window.cuh", "ws_convolution.cuh")
_VECTOR_BYTES = 16
"""That a thread reads and stores at once by default."""
_ROWS = 4
"""Rows of a thread by default: of a 3x3 window six rows of data are read for them instead of twelve."""


class CudaConvolution(CudaSchedule):
    """Convolutions whose sums stay in registers."""

    name = "cuda_convolution"
    settings = ConvolutionSettings

    def accepts(self, nest: Nest) -> bool:
        """Convolutions that memory bounds rather than arithmetic, of windows whose row fits in registers."""
        found = convolution.convolution(nest)
        if found is None or not convolution.is_hopeful(nest) or not iteration_space.is_safe_in_place(nest):
            return False
        return bool(geometry.legal([self._least()], lambda settings: self._require(nest, settings)))

    def defaults(self, nest: Nest) -> ConvolutionSettings:
        """Strips as wide as a vector and of a few rows, where they leave an SM enough of them; of long windows, what
        strips share comes from shared memory (7x7: 100 µs instead of 164 at 64x96x56x56, H200)."""
        guesses = self._guesses(_found(nest))
        return geometry.first_legal(guesses, lambda settings: self._require(nest, settings), self._least())

    def alternatives(self, nest: Nest, current: ConvolutionSettings) -> Sequence[ConvolutionSettings]:
        """One change away."""
        changes = current.one_change_away(dependent_launch=self.pdl)
        return geometry.legal(changes, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: ConvolutionSettings) -> Footprint:
        """Nothing beyond the nest's own bytes: what strips share comes from the caches."""
        return Footprint(0, Strips(_found(nest), settings).blocks, 1)

    def emit(self, nest: Nest, settings: ConvolutionSettings) -> Emission:
        """One kernel."""
        self._require(nest, settings)
        strips = Strips(_found(nest), settings)
        lines = function_text.header(nest, self.name, settings) + kernel(strips, nest.windows[0])
        return geometry.one_kernel(
            nest, lines, _HEADERS, grid=strips.blocks, threads=settings.threads, dependent=settings.dependent_launch
        )

    def _least(self) -> ConvolutionSettings:
        return ConvolutionSettings(dependent_launch=self.pdl[0])

    def _guesses(self, found: Convolution) -> Iterator[ConvolutionSettings]:
        """Settings from the best guess to the safest."""
        widest = min(Strips.widest_vector(found), _VECTOR_BYTES // found.reduction.type.compute.size_bytes)
        for rows, outputs in ((_ROWS, 4), (2, 4), (1, 4), (1, 2), (1, 1)):
            for width in (each for each in (8, 4, 2, 1) if each <= widest):
                made = ConvolutionSettings(
                    shared=math.prod(slide.size for slide in (found.row, found.down or STILL)) > MOST_HELD_WEIGHTS,
                    dependent_launch=self.pdl[0], rows=rows, outputs=outputs, vector_width=width,
                )  # fmt: skip
                if Strips(found, made).blocks >= self.hardware.sm_count or rows == 1:
                    yield made

    def _require(self, nest: Nest, settings: ConvolutionSettings) -> None:
        strips = Strips(_found(nest), settings)
        strips.require(nest.name)
        if strips.shared_bytes > STATIC_SHARED_BYTES:
            raise IllegalMove(f"{nest.name}: {strips.shared_bytes} bytes of shared memory")
        geometry.require_block(
            self.hardware, nest, threads=settings.threads, min_blocks=settings.min_blocks,
            shared_bytes=strips.shared_bytes, held_registers=strips.held_registers,
        )  # fmt: skip


def _found(nest: Nest) -> Convolution:
    found = convolution.convolution(nest)
    assert found is not None, nest.name
    return found
