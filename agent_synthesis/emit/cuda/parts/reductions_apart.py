"""CUDA schedule of reductions whose elements are stored by a kernel of their own, by whatever schedule suits it.

The one idea: a kernel that reduces and then stores is shaped by the reduction: its blocks are few and long, and it
stores along what it reads along. Apart (`nests.analysis.apart`), elements are moved as those of any pointwise nest are:
by as many blocks as there are vectors, and through tiles where results lie otherwise than what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.transposes.transpose import CudaTranspose
from agent_synthesis.nests import iteration_space, memory_access, passes
from agent_synthesis.nests.analysis.apart import Apart, apart
from agent_synthesis.nests.ir import BufferRef, Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.schedule import Emission, Footprint, Offered
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.v1 import candidate_pb2


@dataclass(frozen=True)
class ReductionsApartSettings(Settings):
    """Of `cuda_reductions_apart`: none, for each half has its own schedule's defaults."""


@dataclass(frozen=True)
class CudaReductionsApart(CudaSchedule):
    """Each half by the first of `others` that takes it."""

    others: tuple[Offered, ...]
    name = "cuda_reductions_apart"
    settings = ReductionsApartSettings

    def accepts(self, nest: Nest) -> bool:
        """Nests that reduce and store elements, of data that lies across their rows or is stored so."""
        if not passes.is_reduction(nest) or multiplies_matrices(nest):
            return False
        found = apart(nest)
        taken = self._taken(found) if found is not None else None
        if taken is None:
            return False
        return _turns(taken[1]) or passes.axis_across(iteration_space.simplified(nest), 2) is not None

    def leads(self, nest: Nest) -> bool:
        """Where there is so much data that better stores spare more than a launch takes, or where what is stored turns.

        Batch norm and ReLU of 103 MB whose channels lie side by side: 93.9 us instead of 98.3; of 51 MB no gain.
        """
        if not self.accepts(nest):
            return False
        half, taken = self._halves(nest)[1]
        return _turns(taken) or 2 * memory_access.row_data_bytes(half) >= 3 * self.hardware.l2_bytes

    def defaults(self, _nest: Nest) -> ReductionsApartSettings:
        """There is nothing to set."""
        return ReductionsApartSettings()

    def alternatives(self, _nest: Nest, _current: ReductionsApartSettings) -> Sequence[ReductionsApartSettings]:
        """None."""
        return ()

    def footprint(self, nest: Nest, _settings: ReductionsApartSettings) -> Footprint:
        """Those of both halves; what both read costs its bytes again."""
        halves = self._halves(nest)
        found = [taken.footprint(half, taken.defaults(half)) for half, taken in halves]
        first, second = (memory_access.row_data_bytes(half) for half, _ in halves)
        again = min(first, second) if first > self.hardware.l2_bytes // 2 else 0
        return Footprint(
            sum(each.extra_bytes for each in found) + again,
            max(each.parallel_count for each in found),
            sum(each.launch_count for each in found),
        )

    def emit(self, nest: Nest, _settings: ReductionsApartSettings) -> Emission:
        """The kernels of both halves, and memory for what the first leaves."""
        made = [taken.emit(half, taken.defaults(half)) for half, taken in self._halves(nest)]
        found = apart(nest)
        spaces = [] if found is None else [_space(nest, buffer) for buffer in found.kept]
        return Emission(
            "\n".join(each.text for each in made),
            tuple(dict.fromkeys(header for each in made for header in each.headers)),
            tuple(launch for each in made for launch in each.launches),
            (*spaces, *(space for each in made for space in each.workspaces)),
        )

    def _taken(self, found: Apart) -> tuple[Offered, Offered] | None:
        one, other = (
            next((each for each in self.others if each.accepts(half)), None) for half in (found.reducing, found.storing)
        )
        return (one, other) if one is not None and other is not None else None

    def _halves(self, nest: Nest) -> list[tuple[Nest, Offered]]:
        found = apart(nest)
        taken = self._taken(found) if found is not None else None
        if found is None or taken is None:
            raise IllegalMove(f"{nest.name} does not reduce and then store elements")
        return [(found.reducing, taken[0]), (found.storing, taken[1])]


def _turns(schedule: Offered) -> bool:
    return isinstance(schedule.made, CudaTranspose)


def _space(nest: Nest, buffer: BufferRef) -> candidate_pb2.Buffer:
    """Memory for what one half leaves to the other, by the name that both know."""
    made = geometry.workspace(nest, buffer.name, -(-buffer.element_count * buffer.type.size_bytes // 8))
    made.name = buffer.name
    return made
