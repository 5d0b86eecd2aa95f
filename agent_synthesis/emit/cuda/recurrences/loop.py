"""CUDA schedule of loops of any cell in one kernel that keeps their weights on chip: `ws_loop.cuh`.

The one idea: as in `recurrent`, a step costs what it takes to tell all CTAs a vector; so one layer is spread as widely
as the card allows. What a unit computes is text made of the step's expressions; the skeleton has all loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.recurrences.loop_text import LoopText
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests.calls.recurrence import Loop, Stage, loop_of
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware

_HEADERS = (*geometry.HEADERS, "ws_recurrent.cuh", "ws_loop.cuh")
_LANES, _VECTOR, _MOST_CHUNK = 32, 128, 16
_OTHER_REGISTERS = 72
"""Registers of a thread beside its weights and what it has of its own units: a sum for each lane, values, addresses."""
_COUNTER_WORDS = 16


@dataclass(frozen=True)
class LoopSettings(Settings):
    """Of `cuda_loop`."""

    threads: int = setting(256, "threads of a block", (256, 512))


@dataclass(frozen=True)
class Tiling:
    """How a loop is spread."""

    loop: Loop
    threads: int
    ctas: int
    units: int
    """Of a CTA."""

    @staticmethod
    def of(hardware: Hardware, loop: Loop, settings: LoopSettings) -> Tiling:
        """Raises IllegalMove."""
        if settings.threads < _LANES or settings.threads % _LANES:
            raise IllegalMove(f"{settings.threads} threads a block, which has whole warps")
        units = -(-loop.units // hardware.sm_count)
        return Tiling(loop, settings.threads, -(-loop.units // units), units)

    def warp_rows(self, stage: Stage) -> int:
        """Rows of a stage's weights that a warp has."""
        return -(-len(stage.gates) * self.units // (self.threads // _LANES))

    def chunk(self, stage: Stage) -> int:
        """Rows of the batch whose sums a warp has at a time, in chunks of about equal size."""
        chunks = -(-self.loop.batch // max(1, min(_MOST_CHUNK, _LANES // self.warp_rows(stage))))
        return -(-self.loop.batch // chunks)

    @property
    def pitch(self) -> int:
        """Columns of a weight, in whole vectors of a warp."""
        return geometry.round_up(self.loop.units, _VECTOR)

    @property
    def own(self) -> int:
        """Units times rows of the batch that a thread has."""
        return -(-self.units * self.loop.batch // self.threads)

    @property
    def held_registers(self) -> int:
        """Of a thread: its weights, and of its own units states, sums and what is read."""
        reads = len({read for read in self.loop.reads.values() if read.kind in ("element", "other")})
        own = len(self.loop.begin) + len(self.loop.gates) + reads
        return sum(map(self.warp_rows, self.loop.stages)) * self.pitch // _LANES + self.own * own

    @property
    def shared_bytes(self) -> int:
        sums = sum(len(stage.gates) * self.units * self.padded(stage) for stage in self.loop.stages)
        return geometry.round_up(4 * (self.most_padded * self.pitch + sums + 1), 16)

    def padded(self, stage: Stage) -> int:
        """Rows of the batch in whole chunks."""
        return geometry.round_up(self.loop.batch, self.chunk(stage))

    @property
    def most_padded(self) -> int:
        """Likewise, of the stage that has the most."""
        return max(map(self.padded, self.loop.stages))

    @property
    def words(self) -> int:
        """Words by which CTAs tell each other vectors, and a counter."""
        return 2 * self.loop.batch * geometry.round_up(self.loop.units, 2) + _COUNTER_WORDS


class CudaLoop(CudaSchedule):
    """All steps in one cooperative kernel."""

    name = "cuda_loop"
    settings = LoopSettings

    def accepts(self, nest: Nest) -> bool:
        """A loop whose weights fit in the registers of the card."""
        return loop_of(nest) is not None and bool(self._legal(nest))

    def defaults(self, nest: Nest) -> LoopSettings:
        """The fewest threads that hold it."""
        return self._legal(nest)[0]

    def alternatives(self, nest: Nest, current: LoopSettings) -> Sequence[LoopSettings]:
        """One change away."""
        return geometry.legal(current.one_change_away(), lambda settings: self._require_fits(nest, settings))

    def footprint(self, nest: Nest, settings: LoopSettings) -> Footprint:
        """One launch."""
        return Footprint(extra_bytes=0, parallel_count=self._tiling(nest, settings).ctas, launch_count=1)

    def emit(self, nest: Nest, settings: LoopSettings) -> Emission:
        """One kernel, with a workspace for words between CTAs."""
        self._require_fits(nest, settings)
        tiling = self._tiling(nest, settings)
        words = geometry.workspace(nest, "words", tiling.words, zero=True)
        launch = geometry.launch(
            nest, grid=tiling.ctas, threads=settings.threads, workspaces=[words.name], cooperative=True,
            shared_bytes=tiling.shared_bytes,
        )  # fmt: skip
        stages = [(len(stage.gates), tiling.chunk(stage)) for stage in tiling.loop.stages]
        tiles = {"ctas": tiling.ctas, "units": tiling.units, "threads": tiling.threads, "padded": tiling.most_padded}
        text = LoopText(nest, tiling.loop)
        lines = [
            *function_text.header(nest, self.name, settings),
            *text.struct(),
            *text.kernel(tiles, stages),
        ]
        return Emission("\n".join(lines), _HEADERS, (launch,), (words,))

    def _legal(self, nest: Nest) -> list[LoopSettings]:
        threads = LoopSettings.declared()["threads"].values
        every = [LoopSettings(int(count)) for count in threads]  # type: ignore[arg-type]
        return geometry.legal(every, lambda settings: self._require_fits(nest, settings))

    def _tiling(self, nest: Nest, settings: LoopSettings) -> Tiling:
        loop = loop_of(nest)
        assert loop is not None
        return Tiling.of(self.hardware, loop, settings)

    def _require_fits(self, nest: Nest, settings: LoopSettings) -> None:
        """Raises IllegalMove, which names the limit."""
        tiling = self._tiling(nest, settings)
        loop = tiling.loop
        rows = max(map(tiling.warp_rows, loop.stages))
        if rows > _LANES:
            raise IllegalMove(f"{nest.name}: {rows} rows a warp, of {_LANES} sums it can add up")
        if loop.steps * len(loop.stages) >= 2**31:
            raise IllegalMove(f"{nest.name}: more steps than can be counted")
        geometry.require_block(
            self.hardware, nest, threads=settings.threads, shared_bytes=tiling.shared_bytes,
            held_registers=tiling.held_registers + _OTHER_REGISTERS - geometry.KERNEL_OVERHEAD_REGISTERS,
        )  # fmt: skip
