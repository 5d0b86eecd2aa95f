"""Nests whose loads run along another axis than their stores: which axes are tiled, and how, on both targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis import generator
from agent_synthesis.emit.cpu.cpu_settings import Loop, PointwiseSettings
from agent_synthesis.emit.cpu.pointwise import CpuPointwise
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.transposes.transpose import CudaTranspose
from agent_synthesis.emit.registry import schedules
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.analysis.transposition import turn
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission, Offered
from agent_synthesis.settings import Stores
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

GOLDEN = Path(__file__).parent.parent / "golden"
F32, BF16, F64, U8, BOOL = torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool
Function = Callable[..., torch.Tensor]
Case = tuple[Function, Sequence[tuple[torch.dtype, tuple[int, ...]]]]

CASES: dict[str, Case] = {
    "gelu": (lambda x: F.gelu(x.t()).contiguous(), [(F32, (2048, 1024))]),
    "odd": (lambda x: x.t().contiguous(), [(F32, (1021, 1511))]),
    "sum": (lambda x, y: x + y.t(), [(BF16, (1024, 512)), (BF16, (512, 1024))]),
    "channels_last": (lambda x: x.permute(0, 2, 3, 1).contiguous(), [(F32, (8, 96, 28, 28))]),
    "channels_first": (lambda x: torch.relu(x.permute(0, 3, 1, 2)).contiguous(), [(F32, (8, 28, 28, 96))]),
    "three_last": (lambda x: x.permute(0, 2, 3, 1).contiguous(), [(F32, (8, 3, 64, 80))]),
    "reversed": (lambda x: x.permute(3, 2, 1, 0).contiguous(), [(F32, (40, 9, 5, 33))]),
    "merged": (lambda x: x.t().reshape(-1) * 2, [(F64, (640, 384))]),
    "sliced": (lambda x: x[1:, 3:].flip(0).t().contiguous(), [(F32, (402, 403))]),
    "masked": (lambda x, m: torch.where(m.t(), x, 0.0), [(F32, (300, 512)), (BOOL, (512, 300))]),
    "bytes": (lambda x: x.t().contiguous(), [(U8, (2048, 4096))]),
}


def tensors(case: Case) -> tuple[torch.Tensor, ...]:
    with FakeTensorMode():
        return tuple(torch.empty(shape, dtype=dtype) for dtype, shape in case[1])


def planned(case: Case, target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA) -> Plan:
    return plan_zero(GraphIndex(capture(Applied(case[0]), tensors(case))), target)


def nest_of(name: str, case: Case) -> Nest:
    index = planned(case).index
    calls = tuple(node for group in planned(case).groups for node in group.nodes)
    nest = lower(index, calls, tuple(index.graph.outputs))
    assert isinstance(nest, Nest), nest
    return replace(nest, name=name)


def first_schedule(nest: Nest, target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA) -> Offered:
    return next(schedule for schedule in schedules(target) if schedule.accepts(nest))


# ---- which axes --------------------------------------------------------------------------------------


def axes_of(name: str) -> tuple[int, int, bool]:
    """Extents along and across, and whether tiles pay."""
    found = turn(nest_of(name, CASES[name]), 32)
    assert found is not None
    return found.along.extent, found.across.extent, found.pays


def test_a_tile_lies_along_the_stores_and_across_them() -> None:
    assert axes_of("gelu") == (2048, 1024, True)
    assert axes_of("channels_last") == (96, 28 * 28, True)
    assert axes_of("channels_first") == (28 * 28, 96, True)
    assert axes_of("reversed") == (40, 33, True)


def test_axes_that_a_view_merged_are_taken_apart() -> None:
    assert axes_of("merged") == (640, 384, True)


def test_packs_lie_along_the_axis_that_fewer_bytes_cross() -> None:
    nest = nest_of("both", (lambda x, y: (x.t() + y.t()).contiguous(), [(F32, (256, 512)), (F32, (256, 512))]))
    found = turn(nest, 32)
    assert found is not None
    assert found.along.extent == 512  # as the two loads lie: only what is stored crosses
    assert [found.crosses(store.index) for store in found.nest.stores] == [True]


@pytest.mark.parametrize(
    "case",
    [
        (lambda x, y: x + y, [(F32, (512, 512))] * 2),
        (lambda x: x[:, ::2] + 1, [(F32, (512, 512))]),
        (lambda x, b: x + b[:, None], [(F32, (512, 256)), (F32, (512,))]),
        (lambda x: x.permute(0, 3, 1, 2).contiguous(), [(F32, (8, 64, 64, 3))]),
    ],
    ids=["along one axis", "every other", "one a row", "three channels first"],
)
def test_what_tiles_would_not_help_stays_pointwise(case: Case) -> None:
    assert first_schedule(nest_of("straight", case)).name == "cuda_pointwise"


# ---- the CUDA schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_defaults_and_their_neighbours_compile_without_spills(
    compile_cuda: Callable[[Emission], str], name: str
) -> None:
    nest, schedule = nest_of(name, CASES[name]), CudaTranspose(H200)
    assert first_schedule(nest).name == "cuda_transpose"
    default = schedule.defaults(nest)
    others = schedule.alternatives(nest, default)
    assert len(others) >= 5
    assert default not in others
    for parameters in others:
        schedule.emit(nest, parameters)
    report = compile_cuda(schedule.emit(nest, default))
    assert max(int(count) for count in re.findall(r"(\d+) bytes spill stores", report)) == 0


def test_a_default_tile_leaves_several_for_each_multiprocessor() -> None:
    for rows, tile in ((768, 32), (8192, 64)):
        nest = nest_of("tiled", (lambda x: x.t().contiguous(), [(F32, (rows, 512))]))
        settings = CudaTranspose(H200).defaults(nest)
        assert (settings.along, settings.across) == (tile, tile)
    settings = CudaTranspose(H200).defaults(nest_of("bytes", (CASES["bytes"][0], [(U8, (8192, 4096))])))
    assert (settings.along, settings.across, settings.threads) == (128, 128, 512)


@pytest.mark.parametrize(
    "change",
    [
        {"along": 48},
        {"threads": 96},
        {"vector_width": 8},
        {"across": 2},
        {"along": 256, "across": 256},
        {"threads": 1024},
    ],
    ids=str,
)
def test_illegal_tiles_are_refused(change: dict[str, int]) -> None:
    nest, schedule = nest_of("gelu", CASES["gelu"]), CudaTranspose(H200)
    start = schedule.defaults(nest)
    with pytest.raises(IllegalMove):
        schedule.emit(nest, start.changed(change))


def test_emitted_source_is_the_golden_one() -> None:
    nest, schedule = nest_of("channels_last", CASES["channels_last"]), CudaTranspose(H200)
    text = schedule.emit(nest, schedule.defaults(nest)).text
    golden = GOLDEN / "channels_last.cu"
    assert golden.exists(), f"write it with: {golden.name}\n{text}"
    assert text == golden.read_text()


def test_a_group_that_is_fused_with_what_turns_is_tiled() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.permute(0, 2, 3, 1).contiguous()) * y

    plan = planned((function, [(F32, (8, 96, 28, 28)), (F32, (96,))]))
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="mul"))
    assert [group.schedule for group in plan.groups if group.name == "mul"] == ["cuda_pointwise"]
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="mul", choice="*"))
    assert [group.schedule for group in plan.groups] == ["cuda_transpose"]
    assert "ws_transpose.cuh" in {source.name for source in generator.generate(plan).sources}


def test_strided_accesses_cost_sectors_in_the_estimate() -> None:
    nest = nest_of("gelu", CASES["gelu"])
    pointwise, tiles = (
        s.footprint(nest, s.defaults(nest)).extra_bytes for s in (CudaPointwise(H200), CudaTranspose(H200))
    )
    assert (pointwise, tiles) == (2048 * 1024 * (32 - 4), 0)


def test_beyond_32_bits_places_are_64_bit_numbers() -> None:
    nest = nest_of("large", (lambda x: x.t().contiguous(), [(U8, (65536, 32776))]))
    text = CudaTranspose(H200).emit(nest, CudaTranspose(H200).defaults(nest)).text
    assert "using Offset = ws::int64;" in text
    assert "const ws::int64 (&at)[1], ws::int64 i0_begin, ws::int64 i1)" in " ".join(text.split())


# ---- the CPU schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1])
def test_tiles_on_the_cpu_give_what_the_interpreter_gives(
    compile_jobs: Callable[..., list[Callable[..., dict[str, torch.Tensor]]]], threads: int
) -> None:
    nests = [nest_of(name, case) for name, case in CASES.items() if name != "bytes"]
    parameters = PointwiseSettings(loop=Loop.TILED, block=64, threads=threads)
    kernels = compile_jobs([(nest, CpuPointwise(), parameters) for nest in nests])
    for nest, kernel in zip(nests, kernels, strict=True):
        memory = {b.name: torch.empty(b.element_count, dtype=TORCH[b.type]) for b in nest.buffers}
        for tensor in memory.values():
            tensor.copy_(torch.arange(tensor.numel()) * 7 % 31 - 9 if tensor.dtype != BOOL else tensor)
            if tensor.dtype == BOOL:
                tensor.copy_(torch.arange(tensor.numel()) % 3 == 0)
        found = kernel({b.name: memory[b.name] for b in nest.buffers if not b.written})
        interpreter.run(nest, memory)
        for name, value in found.items():
            torch.testing.assert_close(value, memory[name], msg=f"{nest.name}: {name}")


def test_the_cpu_tiles_what_exceeds_a_cores_cache() -> None:
    schedule = CpuPointwise()
    large, small = nest_of("gelu", CASES["gelu"]), nest_of("small", (CASES["gelu"][0], [(F32, (300, 200))]))
    tiled = schedule.defaults(large)
    assert (tiled.loop, tiled.block) == ("tiled", 64)
    assert schedule.defaults(small).loop == "nested"
    found = schedule.alternatives(small, schedule.defaults(small))
    assert ("tiled", 64) in [(p.loop, p.block) for p in found]
    assert {p.block for p in schedule.alternatives(large, tiled) if p.loop != "tiled"} == {4096}
    for parameters in schedule.alternatives(large, tiled):
        schedule.emit(large, parameters)
    with pytest.raises(IllegalMove, match="too short to stream"):
        schedule.emit(large, replace(tiled, stores=Stores.STREAMING))


def test_the_cpu_refuses_tiles_where_nothing_turns() -> None:
    nest = nest_of("straight", (lambda x: x + 1, [(F32, (64, 64))]))
    with pytest.raises(IllegalMove, match="run along one axis"):
        CpuPointwise().emit(nest, PointwiseSettings(loop=Loop.TILED, block=64))
