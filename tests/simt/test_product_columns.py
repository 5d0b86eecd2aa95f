"""The kernels of a batch norm of a product, but for the product's own: tiles are all repaired, states joined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulated import draw, program_of

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.products.normalized_product import NormalizedText
from agent_synthesis.emit.cuda.products.product_engine import ENGINES
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.analysis.products.normalized_product import normalized_product
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import task_pb2

pytestmark = pytest.mark.simt
ROWS, DEPTH, COLUMNS = 133, 40, 37


def normed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.nn.functional.batch_norm(a @ b + 100, None, None, training=True))


def repaired() -> tuple[Nest, Emission, dict[str, torch.Tensor]]:
    """A norm of a product with a row in each tile that halves cannot hold, and its values."""
    index = GraphIndex(capture(Applied(normed), (torch.randn(ROWS, DEPTH), torch.randn(DEPTH, COLUMNS))))
    calls = tuple(node for group in plan_zero(index, task_pb2.TARGET_CUDA).groups for node in group.nodes)
    lowered = lower(index, calls, tuple(index.results(calls[-1])[:1]))
    assert isinstance(lowered, Nest), lowered
    nest = replace(lowered, name="ws_normed")
    found = normalized_product(nest)
    assert found is not None
    values = draw(nest)
    left = values[found.product.left.buffer].view(ROWS, DEPTH)
    left[[3, 130]] = 1e-40
    tiling = Tiling(columns=128, stages=3, cluster=1, raster=8, promote=1, split_k=1)
    made = NormalizedText(H200, found, ENGINES["fp16x3"], tiling)
    last = CudaPointwise(H200).emit(found.normalized, CudaPointwise(H200).defaults(found.normalized))
    kernels = [*made.operands.kernels(), made.repair(), made.columns()]
    kernels[-2].launch.grid.x = 2
    headers = ("ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_split.cuh", "ws_product_shape.cuh")
    headers = (*headers, "ws_product_simt.cuh", "ws_column_states.cuh", "ws_reduce.cuh")
    return nest, made.emission([], kernels, headers, last), values


@pytest.mark.parametrize("sanitizer", list(Sanitizer), ids=lambda sanitizer: sanitizer.value)
def test_repaired_tiles_leave_states_that_join_to_the_columns_statistics(
    simulator: Simulator, sanitizer: Sanitizer
) -> None:
    nest, emission, values = repaired()
    bytes_of = {name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in values.items()}
    (execution,) = simulator.execute_all([Simulation(program_of(nest, emission), bytes_of)], sanitizer)
    assert not execution.findings
    (written,) = (buffer.name for buffer in nest.buffers if buffer.written)
    got = torch.frombuffer(bytearray(execution.outputs[written]), dtype=torch.float32).view(ROWS, COLUMNS)
    a, b = (
        values[name].view(shape).double() for name, shape in zip(values, ((ROWS, DEPTH), (DEPTH, COLUMNS)), strict=True)
    )
    torch.testing.assert_close(got.double(), normed(a, b), rtol=1e-4, atol=1e-5)
