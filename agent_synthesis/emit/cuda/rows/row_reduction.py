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
    held_rows,
    rolling_rows,
    row_exchange,
    row_footprint,
    rows_ahead,
    streamed_rows,
    two_pass,
)
from agent_synthesis.emit.cuda.rows.row_team import stages_of, team_of
from agent_synthesis.emit.cuda.rows.settings import row_alternatives, row_defaults
from agent_synthesis.emit.cuda.rows.settings.row_legal import require
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space, passes
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint, Parameters
from warpsmith.errors import IllegalMove


class CudaRowReduction(CudaSchedule):
    """Choices: `reduce`, `merge` (yes: pairs of reductions share an exchange), `loads` once or shared, `stores` plain
    or streaming, `preload` (yes: what only stores read is loaded before the exchange), `exp` accurate or fast,
    `overlap` (yes: may start while the previous kernel ends).

    Integers: `threads` of a block, `lanes` (threads of a row, for warp), `splits` (blocks of a row, for cluster, grid,
    two_pass, stream, hold, roll and ahead), `pack` (elements; more than lie aligned together: packs begin before the
    row), `packs` (in registers at once; for hold and roll, of a part), `min_blocks` (blocks that share an SM), `depth`
    (rows of a block in shared memory, for stream; parts of its row, for hold; parts of rows, for roll; rows of which a
    block stores a chunk, 0 for a slice of one, for two_pass), `lag` (rows that a block goes on to while others answer,
    for stream; parts of the next row asked for meanwhile, for hold; parts added up before they are stored, for roll),
    `held` (packs of a thread in registers: beside those in shared memory, for hold; of what rows share, for roll).
    """

    name = "cuda_row_reduction"

    def accepts(self, nest: Nest) -> bool:
        """Any nest with reductions that reads what it overwrites only in place; places in a row fit 32 bits."""
        if nest.column_count > 2**31 - 2**16:
            return False
        return bool(nest.reductions) and not (nest.windows or nest.scans) and iteration_space.is_safe_in_place(nest)

    def defaults(self, nest: Nest) -> Parameters:
        """The measured rule: lanes for short rows; clusters or a grid for few long rows; a block for many."""
        simple = iteration_space.canonical(nest)
        for candidate in row_defaults.preferred(self, simple):
            try:
                require(self.hardware, nest, candidate)
            except IllegalMove:
                continue
            return candidate
        return row_defaults.settings(self, simple, "block", threads=256, packs=1, pack=1)

    def alternatives(self, nest: Nest, current: Parameters) -> Sequence[Parameters]:
        """One change away, those first that gave most on an H200; another strategy has the settings that suit it.

        A change of the team's size keeps what the team holds; settings that make no difference are left out.
        """
        found = row_alternatives.alternatives(self, iteration_space.canonical(nest), current)
        return geometry.legal(found, lambda parameters: require(self.hardware, nest, parameters))

    def footprint(self, nest: Nest, parameters: Parameters) -> Footprint:
        """Visits after the first cost their bytes again where the rows in flight exceed the second-level cache."""
        simple = iteration_space.canonical(nest)
        team, stages = team_of(self.hardware, simple, parameters), stages_of(self.hardware, simple, parameters)
        return row_footprint.footprint(simple, team, stages, parameters.integers["min_blocks"])

    def emit(self, nest: Nest, parameters: Parameters) -> Emission:
        """One kernel, or with two_pass one for each stage and one for the stores."""
        require(self.hardware, nest, parameters)
        simple = iteration_space.canonical(nest)
        stages = stages_of(self.hardware, simple, parameters)
        header = function_text.header(nest, self.name, parameters)
        writers = {"two_pass": two_pass.emit, "stream": streamed_rows.emit, "hold": held_rows.emit,
                   "ahead": rows_ahead.emit, "roll": rolling_rows.emit}  # fmt: skip
        write = writers.get(parameters.choices["reduce"], row_exchange.emit)
        return write(self.hardware, passes.with_reciprocal(simple), nest, parameters, stages, header)
