"""Pooling: what its nests mean, and that the window schedules compute it on both targets' sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agent_synthesis.emit.cpu.window import CpuWindow
from agent_synthesis.emit.cuda.windows.window import CudaWindow
from agent_synthesis.emit.registry import schedules
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import Nest, Windowed
from agent_synthesis.schedule import Emission, Schedule
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import graph_pb2, task_pb2

Pool = Callable[..., Any]
Job = tuple[Nest, Schedule, Settings | None]
Kernel = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
CompileJobs = Callable[[Sequence[Job]], list[Kernel]]


class Function(nn.Module):
    def __init__(self, function: Pool) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def lowered(function: Pool, *args: torch.Tensor) -> tuple[GraphIndex, Nest | Refusal]:
    graph = capture(Function(function), args)
    index = GraphIndex(graph)
    nodes = [node.name for node in graph.nodes if not index.is_view(node.name)]
    return index, lower(index, nodes, index.base_tensors(graph.outputs)[0])


def nest_of(function: Pool, *args: torch.Tensor) -> Nest:
    _, nest = lowered(function, *args)
    assert isinstance(nest, Nest), nest
    return nest


def inputs_of(index: GraphIndex, nest: Nest, args: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    sources = {s.name: args[s.input_index] for s in index.graph.sources if s.origin == graph_pb2.ORIGIN_INPUT}
    return {
        buffer.name: torch.as_strided(sources[buffer.name], (buffer.element_count,), (1,)).clone()
        for buffer in nest.buffers
        if not buffer.written
    }


def image(*shape: int, special: bool = True) -> torch.Tensor:
    """Normal values with ties, infinities and NaNs in them."""
    torch.manual_seed(7)
    x = torch.randn(shape).mul(4).round().div(4)
    if special:
        flat = x.view(-1)
        flat[3::41] = float("nan")
        flat[5::37] = float("inf")
        flat[7::31] = -float("inf")
        flat[20:30] = -float("inf")
    return x


def pooled(name: str, *args: Any, **kwargs: Any) -> Pool:
    def function(x: torch.Tensor) -> Any:
        return getattr(F, name)(x, *args, **kwargs)

    return function


CASES: list[tuple[Pool, tuple[int, ...]]] = [
    (pooled("max_pool1d", 8, 1, 4, 3), (2, 3, 50)),
    (pooled("max_pool1d", 2), (3, 17)),
    (pooled("max_pool2d", 4, 1, 1), (2, 3, 16, 20)),
    (pooled("max_pool2d", 3, 2, 1, ceil_mode=True), (2, 3, 14, 17)),
    (pooled("max_pool2d", (3, 1), (2, 1), (1, 0)), (2, 2, 9, 8)),
    (pooled("max_pool3d", 3, 2, 1, 3), (1, 2, 15, 13, 16)),
    (pooled("max_pool2d", 3, 2, 1, return_indices=True), (2, 3, 14, 17)),
    (pooled("max_pool1d", 5, 2, 2, return_indices=True), (2, 3, 40)),
    (pooled("max_pool3d", 2, return_indices=True), (2, 2, 6, 4, 10)),
    (pooled("adaptive_max_pool2d", (2, 4), return_indices=True), (2, 3, 8, 12)),
    (pooled("adaptive_max_pool1d", 5), (2, 3, 15)),
]
MEANS: list[tuple[Pool, tuple[int, ...]]] = [
    (pooled("avg_pool1d", 8, 1, 4), (2, 3, 64)),
    (pooled("avg_pool2d", 11), (2, 3, 32, 48)),
    (pooled("avg_pool2d", 3, 2, 1), (2, 3, 13, 18)),
    (pooled("avg_pool2d", 3, 2, 1, ceil_mode=True), (2, 3, 14, 17)),
    (pooled("avg_pool2d", 3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 3, 14, 17)),
    (pooled("avg_pool2d", (2, 3), divisor_override=5), (2, 3, 14, 17)),
    (pooled("avg_pool3d", 3, 2, 1), (1, 2, 8, 10, 16)),
    (pooled("avg_pool3d", 3, 2, 1, count_include_pad=False), (1, 2, 7, 9, 11)),
    (pooled("adaptive_avg_pool2d", (4, 2)), (2, 3, 8, 12)),
    (pooled("adaptive_avg_pool2d", 1), (2, 3, 8, 12)),
    (pooled("lp_pool2d", 2.0, 3, 2), (2, 3, 9, 16)),
]


def interpreted(function: Pool, *args: torch.Tensor) -> list[torch.Tensor]:
    index, nest = lowered(function, *args)
    assert isinstance(nest, Nest), nest
    memory = inputs_of(index, nest, args)
    for buffer in nest.buffers:
        if buffer.written:
            memory[buffer.name] = torch.full((buffer.element_count,), 77).to(TORCH[buffer.type])
    interpreter.run(nest, memory)
    return results(index, memory)


def results(index: GraphIndex, memory: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [memory[name] for name in index.base_tensors(index.graph.outputs)[0]]


def expected(function: Pool, *args: torch.Tensor) -> list[torch.Tensor]:
    found = function(*args)
    return [tensor.flatten() for tensor in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize(("function", "shape"), CASES)
def test_a_maximum_means_exactly_what_pytorch_means(function: Pool, shape: tuple[int, ...]) -> None:
    x = image(*shape)
    for found, wanted in zip(interpreted(function, x), expected(function, x), strict=True):
        assert torch.equal(found.nan_to_num(1e9), wanted.nan_to_num(1e9))


@pytest.mark.parametrize(("function", "shape"), MEANS)
def test_a_mean_divides_by_the_elements_that_pytorch_counts(function: Pool, shape: tuple[int, ...]) -> None:
    x = image(*shape, special=False)
    for found, wanted in zip(interpreted(function, x), expected(function, x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_pool_fuses_with_what_comes_before_and_after() -> None:
    x, bias = image(2, 3, 9, 16, special=False), torch.randn(3, 1, 1)
    nest = nest_of(lambda x, b: torch.sigmoid(F.max_pool2d(F.relu(x + b), 3, 2, 1)) * b, x, bias)
    assert [window.operation for window in nest.windows] == ["max"]


def test_a_global_pool_is_a_plain_reduction() -> None:
    nest = nest_of(pooled("adaptive_avg_pool2d", 1), torch.randn(2, 3, 8, 12))
    assert not any(isinstance(reduction, Windowed) for reduction in nest.reductions)


@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "adaptive_max_pool2d"])
def test_adaptive_windows_may_differ_in_size(name: str) -> None:
    x = image(2, 3, 8, 12, special=False)
    x[0, 0, 3, 3] = torch.nan
    for found, wanted in zip(interpreted(pooled(name, 5), x), expected(pooled(name, 5), x), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_places_in_windows_that_differ_in_size_are_refused() -> None:
    _, refusal = lowered(pooled("adaptive_max_pool2d", 5, return_indices=True), torch.randn(2, 3, 8, 12))
    assert refusal == Refusal("positions in windows that differ in size are not lowered")


# ---- the schedule of processors ----------------------------------------------------------------------


def renamed(nest: Nest, number: int) -> Nest:
    return replace(nest, name=f"{nest.name}_{number}")


def test_both_ways_of_the_cpu_compute_what_pytorch_does(compile_jobs: CompileJobs) -> None:
    jobs: list[Job] = []
    wanted = []
    schedule = CpuWindow()
    for function, shape in [*CASES, *MEANS]:
        x = image(*shape, special=(function, shape) in CASES)
        index, nest = lowered(function, x)
        assert isinstance(nest, Nest)
        if not nest.windows:
            continue
        default = schedule.defaults(nest)
        variants = [default, *schedule.alternatives(nest, default)]
        if default.reuse == "columns":
            variants.append(replace(default, block=min(3, default.block)))
        for parameters in variants:
            jobs.append((renamed(nest, len(jobs)), schedule, parameters))
            wanted.append((index, inputs_of(index, nest, (x,)), expected(function, x)))
    assert {parameters.reuse for _, _, parameters in jobs if parameters} == {"columns", "none"}
    for kernel, (index, inputs, values) in zip(compile_jobs(jobs), wanted, strict=True):
        for found, value in zip(results(index, kernel(inputs)), values, strict=True):
            torch.testing.assert_close(found, value, equal_nan=True)


def fused(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(F.max_pool2d(F.relu(x + bias), 3, 2, 1)) * bias


def test_columns_are_joined_of_what_is_computed_first_and_outputs_go_on(compile_jobs: CompileJobs) -> None:
    jobs: list[Job] = []
    wanted = []
    schedule = CpuWindow()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        args = image(2, 3, 9, 16, special=False).to(dtype), torch.randn(3, 1, 1).to(dtype)
        index, nest = lowered(fused, *args)
        assert isinstance(nest, Nest), nest
        assert schedule.defaults(nest).reuse == "columns"
        jobs.append((renamed(nest, len(jobs)), schedule, None))
        wanted.append((index, inputs_of(index, nest, args), expected(fused, *(arg.double() for arg in args))))
    for kernel, (index, inputs, (value,)) in zip(compile_jobs(jobs), wanted, strict=True):
        (found,) = results(index, kernel(inputs))
        torch.testing.assert_close(
            found.double(), value, rtol=2e-2 if found.dtype is torch.bfloat16 else 1e-5, atol=1e-5
        )


# ---- the schedule of GPUs ----------------------------------------------------------------------------

SHAPES: list[tuple[Pool, tuple[int, ...]]] = [
    (pooled("max_pool1d", 8, 1, 4, 3), (64, 192, 65536)),
    (pooled("max_pool2d", 4, 1, 1), (32, 64, 512, 512)),
    (pooled("max_pool3d", 3, 2, 1, 3), (16, 32, 128, 128, 128)),
    (pooled("avg_pool2d", 11), (16, 64, 2048, 2048)),
    (pooled("avg_pool3d", 3, 2, 1), (16, 32, 128, 128, 256)),
    (pooled("max_pool2d", 2), (8, 128, 14, 14)),
]


def emitted(nest: Nest) -> Emission:
    schedule = next(schedule for schedule in schedules(task_pb2.TARGET_CUDA) if schedule.accepts(nest))
    assert schedule.name == "cuda_window"
    return schedule.emit(nest, schedule.defaults(nest))


@pytest.mark.parametrize(("function", "shape"), SHAPES)
def test_large_pools_compile_for_sm_90a_without_spilling(
    function: Pool, shape: tuple[int, ...], compile_cuda: Callable[[Emission], str]
) -> None:
    report = compile_cuda(emitted(nest_of(function, torch.empty(shape, device="meta"))))
    assert "0 bytes spill stores" in report


def test_every_schedule_of_windows_is_legal_and_compiles(compile_cuda: Callable[[Emission], str]) -> None:
    for function, shape in (CASES[2], CASES[6], MEANS[5]):
        nest, schedule = nest_of(function, torch.empty(shape)), CudaWindow(H200)
        for parameters in list(schedule.alternatives(nest, schedule.defaults(nest)))[::4]:
            compile_cuda(schedule.emit(nest, parameters))


def test_the_generated_cuda_of_a_pool_stays_as_it_was_read() -> None:
    text = emitted(nest_of(pooled("max_pool2d", 3, 2, 1), torch.empty(8, 64, 56, 56))).text
    golden = Path(__file__).parent.parent / "golden" / "max_pool2d.cu"
    assert text == golden.read_text()


def test_packs_that_do_not_lie_together_are_refused() -> None:
    nest, schedule = nest_of(pooled("max_pool2d", 3), torch.empty(2, 2, 9, 17)), CudaWindow(H200)
    default = schedule.defaults(nest)
    with pytest.raises(IllegalMove, match="do not lie together"):
        schedule.emit(nest, replace(default, vector_width=4))
