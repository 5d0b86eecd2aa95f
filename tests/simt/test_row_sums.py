"""Rows added up by where they go, executed here: sums as in float64, no race, nothing outside a buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated import program_of

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.segments.segments import CudaSegments
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.testing import Applied
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]  # each test compiles and runs all


@dataclass(frozen=True)
class Case:
    """Bags of rows of a table, and what differs from the schedule's defaults."""

    name: str
    lengths: tuple[int, ...]
    """Rows of each bag."""
    columns: int
    settings: dict[str, int] | None = None
    dtype: torch.dtype = torch.float32
    mode: str = "sum"
    padding: int | None = None
    table: int = 50

    def inputs(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        rows = torch.randint(0, self.table, (sum(self.lengths),), generator=generator)
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return torch.randn(self.table, self.columns, generator=generator).to(self.dtype), rows, ends

    def function(self, table: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(rows, table, ends, mode=self.mode, include_last_offset=True, padding_idx=self.padding)


PIECES = {"piece": 32, "threads": 128, "lanes": 4, "vectors": 1}
CASES = [
    Case("few", (3, 0, 1, 7, 0, 2), 20),
    Case("narrow", (3, 0, 1, 70, 5), 64, dtype=torch.bfloat16),
    Case("halves_ragged", (4, 9), 6, dtype=torch.float16),
    Case("doubles", (4, 0, 9), 10, dtype=torch.float64),
    Case("one_column", (4, 0, 9, 30, 1, 2), 1),
    Case("columns_past_the_end", (4, 0, 9), 90, {"lanes": 8, "vectors": 2, "unroll": 4}),
    Case("several_tiles", (4, 0, 9), 96, {"lanes": 2, "vectors": 4, "unroll": 2}),
    Case("one_row_in_flight", (4, 0, 9), 32, {"lanes": 8, "vectors": 1, "unroll": 1}),
    Case("all_of_one", (0, 0, 300, 0), 16, PIECES),
    Case("pieces_and_ends", (20, 0, 150, 7, 0, 33, 64, 31), 16, PIECES),
    Case("pieces_of_one_column", (20, 0, 150, 7, 0, 33), 1, {"piece": 32, "lanes": 1}),
    Case("pieces_of_halves", (1, 200, 3), 24, {"piece": 64}, dtype=torch.float16),
    Case("mean", (3, 0, 100, 7), 12, {"piece": 32}, mode="mean"),
    Case("mean_with_padding", (3, 0, 100, 7), 12, {"piece": 32}, mode="mean", padding=3, table=5),
    Case("many", tuple(range(60)), 12),
]


_ORDERED = ("few", "several_tiles", "pieces_and_ends", "mean", "many")
"""What orders threads is the same in all others."""


def nest_of(case: Case) -> Nest:
    index = GraphIndex(capture(Applied(case.function), case.inputs()))
    nest = lower(index, [node.name for node in index.graph.nodes], list(index.graph.outputs))
    assert isinstance(nest, Nest), nest
    return replace(nest, name=f"ws_bags_{case.name}")


@pytest.mark.parametrize("sanitizer", [Sanitizer.ADDRESS, Sanitizer.THREAD])
def test_bags_come_out_as_in_float64(simulator: Simulator, sanitizer: Sanitizer) -> None:
    simulations, nests, schedule = [], [], CudaSegments(H200)
    cases = [each for each in CASES if sanitizer is Sanitizer.ADDRESS or each.name in _ORDERED]
    for case in cases:
        nest = nest_of(case)
        settings: Any = schedule.defaults(nest).changed(case.settings or {})
        names = [buffer.name for buffer in nest.buffers if not buffer.written]
        given = dict(zip(("args_0", "args_1", "args_2"), case.inputs(), strict=True))
        sources = {name: bytes(given[name].view(torch.uint8).numpy()) for name in names}
        simulations.append(Simulation(program_of(nest, schedule.emit(nest, settings)), sources))
        nests.append(nest)
    executions = simulator.execute_all(simulations, sanitizer)
    for case, nest, execution in zip(cases, nests, executions, strict=True):
        assert not execution.findings, (case.name, execution.findings)
        table, rows, ends = case.inputs()
        wanted = case.function(table.double(), rows, ends)
        (name,) = (buffer.name for buffer in nest.buffers if buffer.written)
        got = torch.frombuffer(bytearray(execution.outputs[name]), dtype=case.dtype).reshape(wanted.shape)
        eps = torch.finfo(case.dtype).eps
        torch.testing.assert_close(got.double(), wanted, rtol=eps, atol=60 * eps if eps < 1e-6 else eps)
