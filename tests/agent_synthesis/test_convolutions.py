"""Convolutions: what their nests mean, which are tried, and that the schedules compute them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agent_synthesis.emit.cpu.convolution import CpuConvolution
from agent_synthesis.emit.cpu.cpu_settings import ConvolutionSettings
from agent_synthesis.emit.registry import schedules
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.analysis.convolution import is_hopeful
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero, schedules_for
from agent_synthesis.schedule import Schedule
from agent_synthesis.settings import Settings
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

CPU, CUDA = task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA
Convolve = Callable[..., torch.Tensor]
Shapes = tuple[tuple[int, ...], ...]
Memory = dict[str, torch.Tensor]
Job = tuple[Nest, Schedule, Settings | None]
CompileJobs = Callable[[Sequence[Job]], list[Callable[[Memory], Memory]]]
AUTHOR, FUSE = analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE


def convolved(name: str, **options: object) -> Convolve:
    def function(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(F, name)(*tensors, **options)
        return result

    return function


def causal(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    length = x.shape[-1]
    return F.silu(F.conv1d(x, weight, bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., :length])


def padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.pad(x, (3, 0)), weight, groups=x.shape[1])


def reflected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.pad(x, (2, 1, 1, 2), mode="reflect"), weight, groups=x.shape[1])


def block(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x + F.silu(F.conv2d(torch.relu(x) * scale, weight, padding="same", groups=x.shape[1])) * scale


def channels_last(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), weight, bias, padding=1, groups=weight.shape[0])


def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A sequence whose channels lie side by side."""
    return F.conv1d(x.transpose(1, 2), weight, padding=3, groups=x.shape[2]).transpose(1, 2) * 2.0


BY_CHANNEL: list[tuple[Convolve, Shapes]] = [
    (convolved("conv2d", padding=1, groups=6), ((2, 6, 9, 8), (6, 1, 3, 3), (6,))),
    (convolved("conv2d", padding=(1, 2), groups=3), ((2, 3, 7, 9), (6, 1, 3, 5), (6,))),
    (convolved("conv2d", stride=(2, 3), padding=2, dilation=(2, 1), groups=5), ((2, 5, 17, 13), (5, 1, 3, 4))),
    (convolved("conv1d", groups=7), ((3, 7, 37), (7, 1, 5))),
    (convolved("conv3d", stride=(1, 2, 1), padding=1, groups=4), ((1, 4, 5, 6, 7), (4, 1, 3, 3, 3), (4,))),
    (causal, ((2, 5, 21), (5, 1, 4), (5,))),
    (padded, ((2, 5, 21), (5, 1, 4))),
    (reflected, ((2, 3, 6, 7), (3, 1, 4, 4))),
    (block, ((2, 3, 6, 7), (3, 1, 4, 3), (3, 1, 1))),
    (channels_last, ((2, 6, 9, 8), (6, 1, 3, 3), (6,))),
    (turned, ((2, 11, 6), (6, 1, 4))),
]
OTHERS: list[tuple[Convolve, Shapes]] = [
    (convolved("conv2d", padding=1), ((2, 3, 9, 8), (5, 3, 3, 3), (5,))),
    (convolved("conv2d", stride=2, padding=3), ((1, 3, 23, 21), (4, 3, 7, 7))),
    (convolved("conv2d", padding=1, groups=3), ((2, 6, 9, 8), (9, 2, 3, 3), (9,))),
    (convolved("conv1d", stride=2, padding="valid"), ((2, 4, 20), (3, 4, 4))),
    (convolved("conv3d", padding=(0, 1, 2), dilation=(1, 2, 1)), ((1, 3, 6, 8, 7), (2, 3, 2, 3, 3))),
    (convolved("conv2d"), ((2, 6, 9, 8), (4, 6, 1, 1))),
    (convolved("conv2d", padding=1, stride=2), ((2, 6, 9, 8), (4, 6, 1, 1))),
    (channels_last, ((2, 6, 9, 8), (2, 3, 3, 3), (2,))),
]
TRANSPOSED: list[tuple[Convolve, Shapes]] = [
    (convolved("conv_transpose2d", padding=1), ((2, 3, 6, 5), (3, 4, 3, 3), (4,))),
    (convolved("conv_transpose2d", dilation=2), ((2, 3, 6, 5), (3, 4, 3, 2))),
    (convolved("conv_transpose2d", stride=2, padding=1, output_padding=1), ((2, 3, 6, 5), (3, 4, 3, 3), (4,))),
    (convolved("conv_transpose1d", stride=3, padding=2, groups=2), ((2, 6, 9), (6, 2, 5), (4,))),
    (convolved("conv_transpose1d", stride=3), ((2, 3, 5), (3, 2, 2))),
    (convolved("conv_transpose3d", stride=2, padding=1), ((1, 2, 4, 3, 4), (2, 3, 4, 4, 4))),
    (convolved("conv_transpose2d", padding=4), ((1, 2, 9, 9), (2, 2, 3, 3))),
]
AT_THE_EDGE: list[tuple[Convolve, Shapes]] = [
    (convolved("conv2d", padding=1, groups=3), ((2, 3, 1, 1), (3, 1, 3, 3))),
    (convolved("conv2d", groups=5), ((1, 5, 3, 3), (5, 1, 3, 3), (5,))),
    (convolved("conv2d", padding=6, dilation=5, groups=3), ((1, 3, 4, 3), (3, 1, 3, 3))),
    (convolved("conv1d", padding=9, groups=2), ((1, 2, 3), (2, 1, 4))),
    (convolved("conv2d", stride=5, padding=1, groups=3), ((2, 3, 11, 12), (3, 1, 2, 3))),
    (convolved("conv1d", stride=7), ((2, 3, 30), (2, 3, 2))),
    (convolved("conv2d", groups=3), ((2, 3, 5, 4), (3, 1, 1, 1), (3,))),
    (convolved("conv1d", groups=1), ((1, 1, 40), (1, 1, 33))),
    (convolved("conv2d", padding=(0, 15)), ((3, 2, 4), (1, 3, 1, 31))),
]
EVERY = [*BY_CHANNEL, *OTHERS, *TRANSPOSED, *AT_THE_EDGE]


def drawn(shapes: Shapes, dtype: torch.dtype = torch.float32, seed: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@dataclass(frozen=True)
class Case:
    """A convolution as a nest, on values, and what it comes to in float64."""

    index: GraphIndex
    nest: Nest
    inputs: Memory
    truth: torch.Tensor

    @staticmethod
    def of(function: Convolve, args: Sequence[torch.Tensor]) -> Case:
        index, nest = lowered(function, args)
        assert isinstance(nest, Nest), nest
        sources = {s.name: args[s.input_index] for s in index.graph.sources if s.origin == graph_pb2.ORIGIN_INPUT}
        read = {
            b.name: torch.as_strided(sources[b.name], (b.element_count,), (1,)) for b in nest.buffers if not b.written
        }
        return Case(index, nest, read, function(*(arg.double() for arg in args)))

    def job(self, number: int, schedule: Schedule, settings: Settings | None = None) -> Job:
        return replace(self.nest, name=f"{self.nest.name}_{number}"), schedule, settings

    def check(self, written: Memory, tolerance: float = 1e-5) -> None:
        (name,) = self.index.base_tensors(self.index.graph.outputs)[0]
        spec = self.index.spec(self.index.graph.outputs[0])
        found = torch.as_strided(written[name], list(spec.shape), list(spec.strides))
        torch.testing.assert_close(found.double(), self.truth, rtol=tolerance, atol=tolerance)


def lowered(function: Convolve, args: Sequence[torch.Tensor]) -> tuple[GraphIndex, Nest | Refusal]:
    index = GraphIndex(capture(Applied(function), tuple(args)))
    nodes = [node.name for node in index.graph.nodes if not index.is_view(node.name)]
    return index, lower(index, nodes, index.base_tensors(index.graph.outputs)[0])


def nest_of(function: Convolve, *args: torch.Tensor) -> Nest:
    _, nest = lowered(function, args)
    assert isinstance(nest, Nest), nest
    return nest


@pytest.mark.parametrize(("function", "shapes"), EVERY)
def test_a_convolution_means_what_pytorch_means(function: Convolve, shapes: Shapes) -> None:
    case = Case.of(function, drawn(shapes))
    written = {b.name: torch.full((b.element_count,), 77).to(TORCH[b.type]) for b in case.nest.buffers if b.written}
    interpreter.run(case.nest, {**case.inputs, **written})
    case.check(written)


def test_what_is_no_sum_of_products_of_floats_is_refused() -> None:
    whole = torch.ones(1, 2, 9, dtype=torch.int32), torch.ones(2, 2, 3, dtype=torch.int32)
    assert isinstance(lowered(convolved("conv1d"), whole)[1], Refusal)
    both = convolved("conv_transpose1d", stride=2, dilation=2)
    assert isinstance(lowered(both, drawn(((1, 2, 9), (2, 2, 3))))[1], Refusal)
    _, one = lowered(convolved("conv1d", padding=1, groups=2), drawn(((1, 2, 9), (2, 1, 1))))
    assert one == Refusal("a window of one element that may lie outside is not lowered")
    _, empty = lowered(convolved("conv1d"), (torch.empty(0, 2, 9), torch.empty(2, 2, 3)))
    assert empty == Refusal("a tensor is empty")


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
            variants += [*schedule.alternatives(case.nest, default)[::2], replace(default, rows=3, block=5)]
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


def random_case(number: int) -> tuple[Convolve, Shapes]:
    """A convolution of one to three dimensions whose windows have some output, and not too many elements."""
    draw = random.Random(number)
    rank, groups = draw.choice((1, 2, 2, 3)), draw.choice((1, 2, 3, 8))
    channels = draw.choice((1, 1, 2)) if groups > 1 else draw.choice((1, 2, 3))
    made, several = groups * draw.choice((1, 1, 2, 3)), draw.choice((1, 2))
    sizes = [draw.choice((2, 1, 3, 4, 5, 7)[: 8 - 2 * rank]) for _ in range(rank)]
    strides, dilations = ([draw.choice((1, 1, 2, 3)) for _ in range(rank)] for _ in range(2))
    paddings = [draw.randrange(size + 2) * (channels * math.prod(sizes) > 1) for size in sizes]
    reach = [(size - 1) * dilation + 1 for size, dilation in zip(sizes, dilations, strict=True)]
    data = [max(1, r - 2 * p) + draw.randrange(20 // rank) for r, p in zip(reach, paddings, strict=True)]
    options = {"stride": strides, "padding": paddings, "dilation": dilations, "groups": groups}
    shapes = ((several, groups * channels, *data), (made, channels, *sizes), (made,))
    return convolved(f"conv{rank}d", **options), shapes[: draw.choice((2, 3))]


def random_cases(count: int) -> list[Case]:
    cases = []
    for number in range(count):
        function, shapes = random_case(number)
        args = drawn(shapes, seed=number)
        if number % 3 == 2 and len(shapes[0]) == 4:
            args[0] = args[0].contiguous(memory_format=torch.channels_last)
        cases.append(Case.of(function, args))
    return cases


def test_random_convolutions_are_computed(compile_jobs: CompileJobs) -> None:
    cases = random_cases(60)
    jobs = [case.job(number, takes(case.nest, CPU)) for number, case in enumerate(cases)]
    for kernel, case in zip(compile_jobs(jobs), cases, strict=True):
        case.check(kernel(case.inputs))
