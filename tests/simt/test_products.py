"""The kernels of matrix products that use no tensor cores, executed here: small products, splits, repairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from simulated import draw, program_of, wrong_values

from agent_correctness.simulation.simt import Execution, Sanitizer, Simulation, Simulator
from agent_correctness.simulation.simt_findings import Kind
from agent_synthesis.emit.cuda.products.product_engine import ENGINES
from agent_synthesis.emit.cuda.products.product_text import ProductText
from agent_synthesis.emit.cuda.products.product_tiling import Tiling, padded, slice_depth
from agent_synthesis.emit.cuda.products.reduced_product import ReducedText
from agent_synthesis.emit.cuda.products.small_product import CudaSmallProduct, SmallSettings
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.reduced_product import reduced_product
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import matrix_product
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied, batched_product
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import task_pb2

pytestmark = pytest.mark.simt
R = torch.randn


def nest_of(name: str, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> Nest:
    """The function's nest; by a name of its own, so that all are compiled together."""
    index = GraphIndex(capture(Applied(function), args))
    calls = tuple(node for group in plan_zero(index, task_pb2.TARGET_CUDA).groups for node in group.nodes)
    nest = lower(index, calls, tuple(index.results(calls[-1])[:1]))
    assert isinstance(nest, Nest), nest
    return replace(nest, name=f"ws_{name.replace(' ', '_')}")


SMALL: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], dict[str, int]]] = {
    "rows by columns": (lambda a, b: a @ b, (R(20, 18), R(18, 40)), {"rows": 32, "columns": 64, "split_k": 1}),
    "columns by rows": (lambda a, b: a.T @ b.T, (R(33, 9), R(35, 33)), {"rows": 32, "columns": 32, "split_k": 1}),
    "slices": (lambda a, b: a @ b, (R(9, 300), R(300, 12)), {"rows": 32, "columns": 32, "split_k": 2}),
    "a batch": (torch.bmm, (R(2, 17, 8), R(2, 8, 6)), {"rows": 64, "columns": 32, "split_k": 1}),
    "a large tile": (lambda a, b: a @ b, (R(70, 33), R(33, 24)), {"rows": 128, "columns": 128, "split_k": 1}),
    "a GELU of bf16": (
        lambda a, b: torch.nn.functional.gelu(4 * (a @ b)),
        (R(7, 5).bfloat16(), R(5, 9).bfloat16()),
        {"rows": 32, "columns": 32, "split_k": 1},
    ),
    "bf16": (
        lambda a, b: a @ b,
        (R(7, 20).bfloat16(), R(20, 9).bfloat16()),
        {"rows": 32, "columns": 32, "split_k": 1},
    ),
    "a batch backwards": (
        lambda a, b: a.flip(0).transpose(0, 1) @ b.transpose(0, 1),
        (R(2, 3, 17, 8), R(2, 3, 8, 6)),
        {"rows": 32, "columns": 32, "split_k": 1},
    ),
}
_TILES = (
    (4, 512, 64, (3, 1024, 3)), (8, 256, 64, (6, 300, 4)), (16, 32, 64, (16, 32, 70)), (32, 16, 256, (36, 16, 33)),
    (64, 16, 64, (64, 16, 72)), (64, 64, 128, (64, 64, 64)), (128, 64, 256, (70, 50, 40)), (32, 512, 256, (5, 516, 20)),
)  # fmt: skip
"""Rows and columns of a tile, its threads; rows, columns and depth of a product. Whole packs of four, and not."""
for _rows, _columns, _threads, (_m, _n, _k) in _TILES:
    for _how, _function, _shapes in (
        ("along", lambda a, b: a @ b.mT, ((2, _m, _k), (2, _n, _k))),
        ("across", lambda a, b: a.mT @ b, ((2, _k, _m), (2, _k, _n))),
    ):
        SMALL[f"{_rows} by {_columns} of {_threads} threads {_how}"] = (
            _function, tuple(R(*shape) for shape in _shapes),
            {"rows": _rows, "columns": _columns, "threads": _threads},
        )  # fmt: skip
_SIZES = [name for name in SMALL if " threads " in name][2:]
"""Of tiles, beyond one size."""
_BATCHES = ((2, torch.float32, 1), (7, torch.float32, 2), (13, torch.float32, 1), (15, torch.bfloat16, 1))
"""Of several axes: seed, type, slices."""
for _seed, _dtype, _slices in _BATCHES:
    SMALL[f"batches {_seed}"] = (
        *batched_product(_seed, 9, 12, 70 if _slices > 1 else 20, _dtype),
        {"rows": 32, "columns": 64, "split_k": _slices},
    )


def small(name: str) -> tuple[Nest, Emission]:
    function, args, integers = SMALL[name]
    nest = nest_of(f"small {name}", function, *args)
    return nest, CudaSmallProduct(H200).emit(nest, SmallSettings(**integers))


@pytest.fixture(scope="module", params=list(Sanitizer), ids=lambda sanitizer: sanitizer.value)
def executions(simulator: Simulator, request: pytest.FixtureRequest) -> dict[str, Execution]:
    """Every case's execution under one sanitizer; tiles of all sizes order threads alike."""
    chosen = [name for name in SMALL if request.param is Sanitizer.ADDRESS or name not in _SIZES]
    made = [*map(small, chosen), *map(halved, SPLIT), marked()[:2], reduced()[:2]]
    values = [draw(nest) for nest, _ in made[:-2]] + [marked()[2], reduced()[2]]
    simulations = [
        Simulation(program_of(nest, emission), {name: bytes(t.view(torch.uint8).numpy()) for name, t in drawn.items()})
        for (nest, emission), drawn in zip(made, values, strict=True)
    ]
    found = simulator.execute_all(simulations, request.param)
    return {nest.name: execution for (nest, _), execution in zip(made, found, strict=True)}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_product_is_the_interpreters_and_no_access_is_stray(
    executions: dict[str, Execution], name: str
) -> None:
    nest, _ = small(name)
    if nest.name not in executions:
        pytest.skip("its order is that of other cases")
    assert not executions[nest.name].findings
    assert not wrong_values(nest, executions[nest.name].outputs)


def without_tensor_cores(nest: Nest, slices: int = 1, *, engine: str = "fp16x3", repaired: bool = False) -> Emission:
    """A product of parts, without the kernel that multiplies them; perhaps with its repair, by two blocks."""
    simple = iteration_space.simplified(nest)
    product = matrix_product(simple)
    assert product is not None
    tiling = Tiling(columns=128, stages=3, cluster=1, raster=8, promote=1, split_k=slices)
    made = ProductText(H200, simple, product, ENGINES[engine], tiling)
    split, repair = made.operands.kernels(), made.repair()
    pieces = [made.shape(), made.end(), *(kernel.text for kernel in (*split, repair))]
    launches = [kernel.launch for kernel in split]
    if repaired:
        launches.append(repair.launch)
        launches[-1].grid.x = 2
    text = "\n\n".join("\n".join(piece) for piece in pieces)
    headers = ("ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_split.cuh", "ws_product_shape.cuh")
    headers = (*headers, "ws_product_simt.cuh", "ws_product_slices.cuh")
    return Emission(f"{text}\n", headers, tuple(launches), made.workspaces())


SPLIT: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], int, str]] = {
    "along both": (lambda a, b: a @ b.T, (R(6, 40), R(9, 40)), 1, "fp16x3"),
    "across both": (lambda a, b: a.T @ b.T, (R(40, 8), R(36, 40)), 1, "fp16x3"),
    "odd sizes": (lambda a, b: a @ b, (R(5, 37), R(37, 67)), 1, "fp16x3"),
    "many columns": (lambda a, b: a @ b, (R(3, 70), R(70, 300)), 1, "fp16x3"),
    "TF32": (lambda a, b: a @ b.T, (R(6, 40), R(9, 40)), 1, "tf32x3"),
    "TF32 and slices": (lambda a, b: a @ b.T, (R(3, 151), R(8, 151)), 2, "tf32x3"),
    "slices": (lambda a, b: a @ b, (R(3, 150), R(150, 8)), 2, "fp16x3"),
    "a batch": (torch.bmm, (R(2, 3, 33), R(2, 33, 12)), 1, "fp16x3"),
    "batches in any order": (*batched_product(15, 4, 12, 33), 1, "fp16x3"),
    "batches and slices": (*batched_product(2, 4, 12, 150), 2, "fp16x3"),
    "batches of TF32": (*batched_product(9, 3, 12, 37), 1, "tf32x3"),
}


_TYPES = {"fp16x3": torch.float16, "tf32x3": torch.float32}


def halved(name: str) -> tuple[Nest, Emission]:
    function, args, slices, engine = SPLIT[name]
    nest = nest_of(f"split {name}", function, *args)
    return nest, without_tensor_cores(nest, slices, engine=engine)


@pytest.mark.parametrize("name", SPLIT)
def test_parts_and_roots_make_the_floats_again(executions: dict[str, Execution], name: str) -> None:
    (nest, _), (_, _, slices, engine) = halved(name), SPLIT[name]
    product = matrix_product(iteration_space.simplified(nest))
    assert product is not None
    execution = executions[nest.name]
    assert {finding.kind for finding in execution.findings} <= {Kind.UNWRITTEN}  # the product's own output
    batch, m, n, k = product.extents
    for side, operand, rows in (("left", product.left, m), ("right", product.right, n)):
        made = {what: execution.outputs[f"{nest.name}_{side}_{what}"] for what in ("halves", "roots")}
        roots = torch.frombuffer(bytearray(made["roots"]), dtype=torch.float32).double()
        halves = torch.frombuffer(bytearray(made["halves"]), dtype=_TYPES[engine]).double()
        layers = batch * slices
        depth = slice_depth(k, slices)
        inner = padded(rows) if operand.depth_stride != 1 else padded(depth)
        parts = halves.view(layers, 2, -1, inner)
        if operand.depth_stride != 1:
            parts = parts[:, :, :, :rows].transpose(2, 3)
        value = (parts[:, 0] + parts[:, 1] / 2048)[:, :, :depth] * roots.view(layers, rows, 1) ** 2
        memory = draw(nest)[operand.buffer].double()
        for layer in range(layers):
            first = layer % slices * depth
            count = min(depth, k - first)
            at = operand.offset + operand.layer_at(layer // slices) + first * operand.depth_stride
            truth = memory.as_strided((rows, count), (operand.row_stride, operand.depth_stride), at)
            torch.testing.assert_close(value[layer, :, :count], truth, rtol=2**-21, atol=0)
            assert not value[layer, :, count:].any()


def marked() -> tuple[Nest, Emission, dict[str, torch.Tensor]]:
    """A product whose rows halves cannot hold, but for the last, and its values."""
    nest = nest_of("marked", lambda a, b: a @ b, R(5, 40), R(40, 12))
    values = draw(nest)
    first = next(buffer.name for buffer in nest.buffers if not buffer.written)
    rows = values[first].view(5, 40)
    rows[0, 3], rows[1], rows[2, 7], rows[3, 1] = 1e30, 1e-40, -torch.inf, torch.nan
    return nest, without_tensor_cores(nest, repaired=True), values


def test_marked_rows_are_repaired_and_the_next_call_begins_clean(executions: dict[str, Execution]) -> None:
    nest, _, values = marked()
    execution = executions[nest.name]
    assert not execution.findings
    first, second = (buffer.name for buffer in nest.buffers if not buffer.written)
    (written,) = (buffer.name for buffer in nest.buffers if buffer.written)
    got = torch.frombuffer(bytearray(execution.outputs[written]), dtype=torch.float32).view(5, 12)
    truth = values[first].view(5, 40).double() @ values[second].view(40, 12).double()
    torch.testing.assert_close(got[1].double(), truth[1], rtol=1e-3, atol=0)
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True)
    for name in ("marks", "right_ranges"):
        assert not any(execution.outputs[f"{nest.name}_{name}"])


def reduced() -> tuple[Nest, Emission, dict[str, torch.Tensor]]:
    """Rows of a product that are reduced, all by the repair of the tile: one has an element that halves cannot hold."""
    nest = nest_of("reduced", lambda a, b: torch.logsumexp(a @ b, 1) * 2, R(5, 40), R(40, 132))
    values = draw(nest)
    first = next(buffer.name for buffer in nest.buffers if not buffer.written)
    values[first][3] = 1e-30
    taken = reduced_product(nest)
    assert taken is not None
    tiling = Tiling(columns=128, stages=3, cluster=1, raster=8, promote=1, split_k=1)
    made = ReducedText(H200, taken, ENGINES["fp16x3"], tiling)
    kernels = [*made.operands.kernels(), made.repair(), made.rows()]
    kernels[2].launch.grid.x = 2
    headers = ("ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_split.cuh", "ws_product_shape.cuh", "ws_reduce.cuh")
    headers = (*headers, "ws_product_partials.cuh", "ws_product_simt.cuh")
    return nest, made.emission([], kernels, headers), values


def test_rows_of_a_tile_become_states_and_states_become_rows(executions: dict[str, Execution]) -> None:
    nest, _, values = reduced()
    execution = executions[nest.name]
    assert not execution.findings
    first, second = (buffer.name for buffer in nest.buffers if not buffer.written)
    (written,) = (buffer.name for buffer in nest.buffers if buffer.written)
    got = torch.frombuffer(bytearray(execution.outputs[written]), dtype=torch.float32)
    truth = torch.logsumexp(values[first].view(5, 40).double() @ values[second].view(40, 132).double(), 1) * 2
    torch.testing.assert_close(got.double(), truth, rtol=1e-6, atol=1e-6)


def test_a_product_without_tensor_cores_is_what_the_schedule_emits_but_for_one_kernel() -> None:
    nest = nest_of("both", lambda a, b: a @ b, R(64, 40), R(40, 72))
    whole = CudaProduct(H200).emit(nest, CudaProduct(H200).defaults(nest))
    part = without_tensor_cores(nest, repaired=True)
    entries = [launch.entry for launch in whole.launches if not launch.entry.endswith("_product")]
    assert [launch.entry for launch in part.launches] == entries
