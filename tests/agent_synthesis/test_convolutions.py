"""Convolutions: what their nests mean, which are tried, and that the schedules compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from convolutions import (
    BY_CHANNEL,
    EVERY,
    OTHERS,
    Case,
    Convolve,
    Job,
    Memory,
    Shapes,
    causal,
    channels_last,
    convolved,
    drawn,
    lowered,
    nest_of,
    random_cases,
)
from torch import nn

from agent_synthesis.emit.cpu.convolution import CpuConvolution
from agent_synthesis.emit.cpu.cpu_settings import ConvolutionSettings
from agent_synthesis.emit.cuda.windows.convolution import CudaConvolution
from agent_synthesis.emit.registry import schedules
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.analysis.convolution import is_hopeful
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero, schedules_for
from agent_synthesis.schedule import Emission, Schedule
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

CPU, CUDA = task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA
CompileJobs = Callable[[Sequence[Job]], list[Callable[[Memory], Memory]]]
AUTHOR, FUSE = analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE


@pytest.mark.parametrize(("function", "shapes"), EVERY)
def test_a_convolution_means_what_pytorch_means(function: Convolve, shapes: Shapes) -> None:
    case = Case.of(function, drawn(shapes))
    written = {b.name: torch.full((b.element_count,), 77).to(TORCH[b.type]) for b in case.nest.buffers if b.written}
    interpreter.run(case.nest, {**case.inputs, **written})
    case.check(written)


def test_what_is_no_sum_of_products_of_floats_is_refused() -> None:
    whole = torch.ones(1, 2, 9, dtype=torch.int32), torch.ones(2, 2, 3, dtype=torch.int32)
    assert isinstance(lowered(convolved("conv1d"), whole)[1], Refusal)
    _, one = lowered(convolved("conv1d", padding=1, groups=2), drawn(((1, 2, 9), (2, 1, 1))))
    assert one == Refusal("a window of one element that may lie outside is not lowered")
    _, empty = lowered(convolved("conv1d"), (torch.empty(0, 2, 9), torch.empty(2, 2, 3)))
    assert empty == Refusal("a tensor is empty")


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_of_another_mode_is_a_call_in_front(mode: str) -> None:
    module, x = nn.Conv2d(6, 6, 3, padding=1, padding_mode=mode, groups=6), torch.randn(2, 6, 5, 7)
    plan = moves.apply(plan_of(module, x), analysis_pb2.Move(kind=AUTHOR, group="conv2d"))
    assert [group.engine for group in plan.groups] == ["library", "authored"]
    named = dict(module.named_parameters())
    values = {name: named.get(source.qualified_name, x).detach() for name, source in plan.index.sources.items()}
    (found,) = interpreter.run_plan(plan, values)
    torch.testing.assert_close(found.double(), module.double()(x.double()), rtol=1e-5, atol=1e-5)


# ---- which are tried ---------------------------------------------------------------------------------


def plan_of(module: nn.Module, *inputs: torch.Tensor, target: task_pb2.Target.ValueType = CPU) -> Plan:
    return plan_zero(GraphIndex(capture(module, inputs)), target)


def test_few_multiply_adds_for_each_byte_are_hopeful_and_many_are_not() -> None:
    image = torch.empty(8, 64, 56, 56, device="meta")
    for function, weight, wanted in (
        (convolved("conv2d", padding=1, groups=64), (64, 1, 3, 3), True),
        (convolved("conv2d", padding=3, groups=64), (64, 1, 7, 7), True),
        (convolved("conv2d", padding=1, groups=16), (64, 4, 3, 3), True),
        (convolved("conv2d", padding=1), (64, 64, 3, 3), False),
        (convolved("conv2d"), (256, 64, 1, 1), False),
        (convolved("conv_transpose2d", stride=2), (64, 64, 4, 4), False),
    ):
        nest = nest_of(function, image, torch.empty(weight, device="meta"))
        assert is_hopeful(nest) is wanted, weight
        assert bool(schedules_for(CPU, nest)) is wanted, weight


def test_a_convolution_is_the_librarys_until_a_move_makes_it_ours_and_its_neighbours_join_it() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU())
    plan = plan_of(module, torch.randn(2, 8, 12, 12))
    assert {group.engine for group in plan.groups} == {"library"}
    library = cost.of_group(plan, plan.group("conv2d"))
    plan = moves.apply(plan, analysis_pb2.Move(kind=AUTHOR, group="conv2d"))
    ours = cost.of_group(plan, plan.group("conv2d"))
    assert ours.product_flop_count == library.product_flop_count == 2 * 9 * 2 * 8 * 12 * 12
    assert (ours.read_bytes, ours.write_bytes) == (library.read_bytes, library.write_bytes)
    plan = moves.apply(plan, analysis_pb2.Move(kind=AUTHOR, group="silu"))
    plan = moves.apply(plan, analysis_pb2.Move(kind=FUSE, group="silu", choice="*"))
    assert [group.schedule for group in plan.groups] == ["cpu_convolution"]
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LIBRARY, group="silu"))
    assert len(plan.groups) == 3


def test_ours_is_predicted_to_gain_on_a_gpu_where_the_librarys_is_far_from_the_floor() -> None:
    x = torch.randn(2, 8, 12, 12)
    plan = plan_of(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), x, target=CUDA)
    library = cost.of_group(plan, plan.group("conv2d"))
    assert library.extra_bytes == 2 * (library.write_bytes + 4 * x.numel())
    (legal,) = (each for each in moves.legal(plan) if each.move.choice == "cuda_convolution")
    assert (legal.before.extra_bytes, legal.after.extra_bytes) == (library.extra_bytes, 0)
    dense = plan_of(nn.Conv2d(8, 8, 3, bias=False), x.contiguous(memory_format=torch.channels_last), target=CUDA)
    assert cost.of_group(dense, dense.group("conv2d")).extra_bytes < library.extra_bytes


def test_a_window_too_long_for_registers_is_walked_by_each_output() -> None:
    shapes = (2, 8, 400), (8, 1, 120)
    nest = nest_of(convolved("conv1d", groups=8), *(torch.empty(shape, device="meta") for shape in shapes))
    assert [each.name for each in schedules_for(CUDA, nest)] == ["cuda_window"]
    assert [each.name for each in schedules_for(CPU, nest)] == ["cpu_convolution"]


def test_two_convolutions_are_two_kernels() -> None:
    def both(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, first, groups=8) + F.conv1d(x, second, groups=8)

    nest = nest_of(both, torch.empty(2, 8, 20), torch.empty(8, 1, 3), torch.empty(8, 1, 3))
    assert not schedules_for(CUDA, nest)
    assert not schedules_for(CPU, nest)


def test_a_dense_convolution_is_no_move() -> None:
    plan = plan_of(nn.Conv2d(64, 64, 3, padding=1), torch.randn(2, 64, 14, 14))
    assert not [each for each in moves.legal(plan) if each.move.kind == AUTHOR]
    with pytest.raises(IllegalMove, match="no schedule of the target takes"):
        moves.apply(plan, analysis_pb2.Move(kind=AUTHOR, group="conv2d"))


def test_a_convolution_is_not_computed_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(4, 4, 3, groups=4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.convolution(x)
            return torch.relu(y), torch.softmax(y, -1)

    plan = plan_of(Twice(), torch.randn(2, 4, 12))
    for name in ("relu", "softmax"):
        plan = moves.apply(plan, analysis_pb2.Move(kind=AUTHOR, group=name))
    with pytest.raises(IllegalMove):
        moves.apply(plan, analysis_pb2.Move(kind=FUSE, group="softmax", choice="conv1d"))


# ---- the schedule of processors ----------------------------------------------------------------------


def takes(nest: Nest, target: task_pb2.Target.ValueType) -> Schedule:
    made = next(each.made for each in schedules(target) if each.accepts(nest))
    return cast(Schedule, made)


def test_the_cpu_computes_every_kind_in_every_way(compile_jobs: CompileJobs) -> None:
    jobs: list[Job] = []
    cases: list[Case] = []
    for function, shapes in EVERY:
        case = Case.of(function, drawn(shapes))
        schedule = takes(case.nest, CPU)
        default = schedule.defaults(case.nest)
        variants = [default]
        if isinstance(default, ConvolutionSettings):
            variants += [*schedule.alternatives(case.nest, default)[::2], replace(default, made=3, rows=3, block=5)]
        for settings in variants:
            jobs.append(case.job(len(jobs), schedule, settings))
            cases.append(case)
    assert sum(schedule.name == "cpu_convolution" for _, schedule, _ in jobs) > 80
    for kernel, case in zip(compile_jobs(jobs), cases, strict=True):
        case.check(kernel(case.inputs))


def test_short_floats_are_summed_in_float_and_doubles_in_double(compile_jobs: CompileJobs) -> None:
    tolerances = {torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    found = [
        (Case.of(function, drawn(shapes, dtype)), tolerance)
        for dtype, tolerance in tolerances.items()
        for function, shapes in (BY_CHANNEL[0], BY_CHANNEL[10], OTHERS[0])
    ]
    jobs = [case.job(number, CpuConvolution()) for number, (case, _) in enumerate(found)]
    for kernel, (case, tolerance) in zip(compile_jobs(jobs), found, strict=True):
        case.check(kernel(case.inputs), tolerance)


def test_random_convolutions_are_computed(compile_jobs: CompileJobs) -> None:
    cases = random_cases(60)
    jobs = [case.job(number, takes(case.nest, CPU)) for number, case in enumerate(cases)]
    for kernel, case in zip(compile_jobs(jobs), cases, strict=True):
        case.check(kernel(case.inputs))


# ---- the schedule of GPUs ----------------------------------------------------------------------------

LARGE: list[tuple[Convolve, Shapes]] = [
    (convolved("conv2d", padding=1, groups=64), ((32, 64, 112, 112), (64, 1, 3, 3), (64,))),
    (convolved("conv2d", padding=3, groups=96), ((32, 96, 56, 56), (96, 1, 7, 7))),
    (convolved("conv2d", padding=2, stride=2, groups=64), ((32, 64, 112, 112), (64, 1, 5, 5))),
    (convolved("conv3d", padding=1, groups=32), ((4, 32, 32, 57, 57), (32, 1, 3, 3, 3))),
    (causal, ((8, 2048, 2048), (2048, 1, 4), (2048,))),
    (channels_last, ((32, 64, 112, 112), (64, 1, 3, 3), (64,))),
    (convolved("conv2d", padding=1, stride=2), ((32, 3, 224, 224), (32, 3, 3, 3), (32,))),
]


@pytest.mark.parametrize(("function", "shapes"), LARGE)
def test_large_convolutions_compile_for_sm_90a_without_spilling(
    function: Convolve, shapes: Shapes, compile_cuda: Callable[[Emission], str]
) -> None:
    nest = nest_of(function, *(torch.empty(shape, device="meta") for shape in shapes))
    schedule = CudaConvolution(H200)
    assert "0 bytes spill stores" in compile_cuda(schedule.emit(nest, schedule.defaults(nest)))


def test_a_search_may_try_blocks_strips_and_shared_memory_and_each_compiles(
    compile_cuda: Callable[[Emission], str],
) -> None:
    nest = nest_of(LARGE[0][0], *(torch.empty(shape, device="meta") for shape in LARGE[0][1]))
    schedule = CudaConvolution(H200)
    default = schedule.defaults(nest)
    assert (default.rows, default.outputs, default.vector_width) == (4, 4, 4)
    tried = schedule.alternatives(nest, default)
    for name in default.declared():
        assert any(getattr(each, name) != getattr(default, name) for each in tried), name
    for settings in tried[::3]:
        compile_cuda(schedule.emit(nest, settings))


def test_elements_that_do_not_lie_together_are_not_read_at_once() -> None:
    schedule = CudaConvolution(H200)
    nest = nest_of(convolved("conv2d", padding=1, groups=8), torch.empty(2, 8, 13, 13), torch.empty(8, 1, 3, 3))
    with pytest.raises(IllegalMove, match="do not lie together"):
        schedule.emit(nest, replace(schedule.defaults(nest), vector_width=4))
    with pytest.raises(IllegalMove, match="rows of"):
        schedule.emit(nest, replace(schedule.defaults(nest), rows=32))


def test_the_generated_cuda_of_a_convolution_stays_as_it_was_read() -> None:
    shapes = ((8, 64, 56, 56), (64, 1, 3, 3), (64,))
    nest = nest_of(convolved("conv2d", padding=1, groups=64), *map(torch.empty, shapes))
    schedule = CudaConvolution(H200)
    golden = Path(__file__).parent.parent / "golden" / "conv2d_by_channel.cu"
    assert schedule.emit(nest, schedule.defaults(nest)).text == golden.read_text()


def test_offsets_beyond_31_bits_are_counted_in_64(compile_cuda: Callable[[Emission], str]) -> None:
    nest = nest_of(
        convolved("conv1d", padding=1, groups=4), torch.empty(8, 4, 1 << 27, device="meta"), torch.empty(4, 1, 3)
    )
    schedule = CudaConvolution(H200)
    emission = schedule.emit(nest, schedule.defaults(nest))
    assert "using Offset = ws::int64;" in emission.text
    compile_cuda(emission)
