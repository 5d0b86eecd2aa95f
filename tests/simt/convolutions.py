"""Convolutions of every kind, and random ones, as nests on values with what they come to in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Schedule
from agent_synthesis.settings import Settings
from agent_synthesis.testing import Applied
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2

Convolve = Callable[..., torch.Tensor]
Shapes = tuple[tuple[int, ...], ...]
Memory = dict[str, torch.Tensor]
Job = tuple[Nest, Schedule, Settings | None]


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
    (convolved("conv_transpose2d", stride=2, dilation=2, padding=1), ((1, 2, 5, 4), (2, 2, 3, 3))),
    (convolved("conv_transpose2d", stride=(4, 3), dilation=(6, 2), padding=(3, 1)), ((1, 2, 5, 4), (2, 2, 3, 4), (2,))),
    (convolved("conv_transpose1d", stride=5, dilation=3, groups=2), ((1, 4, 6), (4, 1, 4))),
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
        torch.testing.assert_close(found.double(), self.truth, rtol=tolerance, atol=tolerance, equal_nan=True)


def lowered(function: Convolve, args: Sequence[torch.Tensor]) -> tuple[GraphIndex, Nest | Refusal]:
    index = GraphIndex(capture(Applied(function), tuple(args)))
    nodes = [node.name for node in index.graph.nodes if not index.is_view(node.name)]
    return index, lower(index, nodes, index.base_tensors(index.graph.outputs)[0])


def nest_of(function: Convolve, *args: torch.Tensor) -> Nest:
    _, nest = lowered(function, args)
    assert isinstance(nest, Nest), nest
    return nest


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
