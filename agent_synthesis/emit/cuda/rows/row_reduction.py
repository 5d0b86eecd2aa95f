"""CUDA schedule of reductions along rows: softmax, norms, products of rows with a vector, and what else is like them.

The one idea: a row belongs to a team of threads as small as keeps all SMs busy, each holding its part in registers
between the visits, so that most rows are read once and written once. What to choose where was measured on an H200:
`row_defaults`.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.rows import (
    pipelined_rows,
    prefetched_rows,
    resident_rows,
    ring_rows,
    row_exchange,
    row_footprint,
    two_kernels,
)
from agent_synthesis.emit.cuda.rows.row_struct import RowProblem
from agent_synthesis.emit.cuda.rows.row_team import stages_of, team_of
from agent_synthesis.emit.cuda.rows.settings import row_alternatives, row_defaults
from agent_synthesis.emit.cuda.rows.settings.row_legal import require
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce, RowSettings
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint

_WRITERS = {Reduce.TWO_KERNELS: two_kernels.emit, Reduce.PIPELINED: pipelined_rows.emit, Reduce.RING: ring_rows.emit,
            Reduce.RESIDENT: resident_rows.emit, Reduce.PREFETCHED: prefetched_rows.emit}  # fmt: skip


class CudaRowReduction(CudaSchedule):
    """Teams of lanes, blocks, clusters or all of the GPU."""

    name = "cuda_row_reduction"
    settings = RowSettings

    def accepts(self, nest: Nest) -> bool:
        """Any nest with reductions that reads what it overwrites only in place; places in a row fit 32 bits."""
        return nest.column_count <= 2**31 - 2**16 and passes.is_reduction(nest)

    def defaults(self, nest: Nest) -> RowSettings:
        """The measured rule: lanes for short rows; clusters or a grid for few long rows; a block for many."""
        simple = iteration_space.canonical(nest)
        candidates = row_defaults.preferred(self, simple)
        least = row_defaults.made(self, simple, Reduce.BLOCK, threads=256, vectors=1, width=1)
        return geometry.first_legal(candidates, lambda settings: require(self.hardware, nest, settings), least)

    def alternatives(self, nest: Nest, current: RowSettings) -> Sequence[RowSettings]:
        """One change away, those first that gave most on an H200; another strategy has the settings that suit it.

        A change of the team's size keeps what the team holds; settings that make no difference are left out.
        """
        found = row_alternatives.alternatives(self, iteration_space.canonical(nest), current)
        return geometry.legal(found, lambda settings: require(self.hardware, nest, settings))

    def footprint(self, nest: Nest, settings: RowSettings) -> Footprint:
        """Visits after the first cost their bytes again where the rows in flight exceed the second-level cache."""
        simple = iteration_space.canonical(nest)
        team, stages = team_of(self.hardware, simple, settings), stages_of(self.hardware, simple, settings)
        return row_footprint.footprint(simple, team, stages, settings.min_blocks)

    def emit(self, nest: Nest, settings: RowSettings) -> Emission:
        """One kernel, or with two_pass one for each stage and one for the stores."""
        require(self.hardware, nest, settings)
        simple = iteration_space.canonical(nest)
        stages = stages_of(self.hardware, simple, settings)
        header = function_text.header(nest, self.name, settings)
        write = _WRITERS.get(settings.reduce, row_exchange.emit)
        return write(RowProblem(self.hardware, passes.with_reciprocal(simple), nest, settings, stages, header))
