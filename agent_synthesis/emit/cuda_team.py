"""Who shares a row on CUDA: some lanes, a block, a cluster or several blocks, and what each thread holds of it.

Numbers only; `cuda_row_text` writes the kernel and `cuda_row_reduction` chooses the team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_synthesis.emit import cuda_shape
from agent_synthesis.emit.cuda_stages import Stage
from agent_synthesis.ir import Nest
from agent_synthesis.schedule import Parameters


@dataclass(frozen=True)
class Team:
    """Who shares a row, and how much of it each holds."""

    reduce: str
    """warp, block, cluster, grid or two_pass."""
    threads: int
    """Threads of a block."""
    lanes: int
    """Threads of a block that share a row: a part of a warp, or all."""
    splits: int
    """Blocks that share a row."""
    pack: int
    """Elements of a pack."""
    packs: int
    """Packs that a thread has in registers at once."""
    columns: int
    """Elements of a row."""

    @property
    def slice(self) -> int:
        """Elements of a row that one block has."""
        return cuda_shape.round_up(-(-self.columns // self.splits), self.pack)

    @property
    def stride(self) -> int:
        """Elements from one pack of a thread to its next."""
        return self.pack * self.lanes

    @property
    def holds_row(self) -> bool:
        """Whether the packs in registers are all that a thread has of a row."""
        return self.packs * self.stride >= self.slice

    @property
    def is_even(self) -> bool:
        """Whether every thread has equally many packs, in whole chunks."""
        return self.columns == self.slice * self.splits and self.slice % (self.packs * self.stride) == 0

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @property
    def rows_a_block(self) -> int:
        """Rows that a block works on at once."""
        return self.threads // self.lanes if self.splits == 1 else 1


def team_of(nest: Nest, parameters: Parameters) -> Team:
    """The team of a canonical nest, as many packs in registers as the parameters want and a row has."""
    reduce, integers = parameters.choices["reduce"], parameters.integers
    lanes = integers["lanes"] if reduce == "warp" else integers["threads"]
    splits = 1 if reduce in ("warp", "block") else integers["splits"]
    team = Team(reduce, integers["threads"], lanes, splits, integers["pack"], integers["packs"], nest.column_count)
    most = -(-team.slice // team.stride)
    return replace(team, packs=min(team.packs, most))


def require(nest: Nest, team: Team, stages: Sequence[Stage], min_blocks: int, *, preload: bool) -> None:
    """Checks that a block of the team fits an SM.

    Raises:
        IllegalMove: names the limit.
    """
    elements = team.pack * team.packs
    axis = nest.reduced[0].name
    roots = [reduction.value for stage in stages for reduction in stage.reductions]
    roots += [store.value for store in nest.stores] if preload else []
    held = [load for load in cuda_shape.loads_below(roots) if axis in load.index.axes()]
    registers = sum(max(1, elements * nest.buffer(load.buffer).type.size_bytes // 4) for load in held)
    boxes = sum(stage.state_bytes() for stage in stages) * team.warps * (team.splits if team.reduce == "cluster" else 1)
    cuda_shape.require_sm90(
        nest, threads=team.threads, min_blocks=min_blocks, shared_bytes=boxes, held_registers=registers
    )
