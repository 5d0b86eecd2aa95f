"""Concatenations of large parts: a nest for each part, which give together what the whole does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis.emit.registry import PIECES, schedules
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.analysis import pieces
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import concatenation
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

CUDA = task_pb2.TARGET_CUDA
LARGE = (8, 32, 64, 64)


class Made(nn.Module):
    """A function of tensors, and what it holds, as a module."""

    def __init__(self, forward: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self._forward = nn.ModuleList(parts), forward

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._forward(*self.parts, *inputs)


def plan(module: nn.Module, *shapes: Sequence[int]) -> Plan:
    inputs = tuple(torch.randn(list(shape)) for shape in shapes)
    return plan_zero(GraphIndex(capture(module, inputs)), CUDA)


def move(kind: str, group: str, choice: str = "") -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=analysis_pb2.MoveKind.Value(f"MOVE_KIND_{kind}"), group=group, choice=choice)


def memory_of(nest: Nest) -> dict[str, torch.Tensor]:
    generator, drawn = torch.Generator().manual_seed(3), {}
    for buffer in nest.buffers:
        dtype = TORCH[buffer.type]
        values = torch.randn(buffer.element_count, generator=generator)
        drawn[buffer.name] = values.to(dtype) if dtype.is_floating_point else (values.abs() * 3).to(dtype)
    return drawn


def check(nest: Nest) -> Sequence[Nest]:
    """The parts, which write what the nest does."""
    whole, apart, found = memory_of(nest), memory_of(nest), pieces.pieces(nest)
    interpreter.run(nest, whole)
    for piece in found:
        interpreter.run(piece, apart)
    for name, tensor in whole.items():
        torch.testing.assert_close(apart[name], tensor, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("channels", [(2, 3), (1, 4, 2), (3, 1, 1, 5)])
@pytest.mark.parametrize("normalised", [False, True])
def test_parts_give_what_the_whole_gives_and_look_nothing_up(channels: tuple[int, ...], normalised: bool) -> None:
    nest = concatenation(2, channels, 6, normalised=normalised)
    found = check(nest)
    axes = [next(axis for axis in piece.parallel if axis.name == "c") for piece in found]
    assert [axis.extent for axis in axes] == list(channels)
    assert [[buffer.name for buffer in piece.buffers] for piece in found] == [
        [f"x{number}", "y"] for number in range(len(channels))
    ]
    assert all(pieces.pieces(piece) == () for piece in found), "nothing is left to choose"


def cat(*tensors: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return torch.cat(tensors, dim)


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """A rotary embedding, whose halves read the same."""
    first, second = x.chunk(2, -1)
    return x * cosine + cat(-second, first, dim=-1) * sine


PIECEWISE: dict[str, tuple[nn.Module, list[Sequence[int]], list[int]]] = {
    "activated": (Made(lambda *x: torch.relu(cat(*x))), [LARGE, LARGE, (8, 16, 64, 64)], [32, 32, 16]),
    "along the batch": (Made(lambda *x: cat(*x, dim=0).exp()), [LARGE, (3, 32, 64, 64)], [8, 3]),
    "normed in training": (Made(lambda n, *x: n(cat(*x)), nn.BatchNorm2d(48)), [LARGE, (8, 16, 64, 64)], [32, 16]),
    "summed over pixels": (Made(lambda *x: cat(*x).square().sum((2, 3))), [LARGE, (8, 35, 64, 64)], [32, 35]),
    "part by part": (Made(lambda *x: cat(x[0].relu(), x[1] * 2, x[2])), [LARGE] * 3, [32, 32, 32]),
    "two of which read the same": (Made(lambda *x: cat(x[0].relu(), x[1] * 2, x[0])), [LARGE, LARGE], [32, 32]),
    "halves turned against each other": (Made(rotated), [(8, 16, 64, 64), (64, 64), (64, 64)], [32]),
    "short halves turned against each other": (Made(rotated), [(2, 8, 16, 32), (16, 32), (16, 32)], [16]),
    "halves that each read most of the other": (
        Made(lambda a, b, y: cat(a * b * y, b.tanh() * y, dim=-1)), [(64, 256)] * 3, [256],
    ),
    "turned": (
        Made(lambda *x: cat(*x).contiguous(memory_format=torch.channels_last)), [LARGE, LARGE], [32, 32],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECEWISE)
def test_a_large_concatenation_is_a_kernel_for_each_part(name: str, compile_cuda: Callable[[Emission], str]) -> None:
    module, shapes, extents = PIECEWISE[name]
    zero = plan(module, *shapes)
    last = zero.groups[-1].name
    made = moves.apply(zero, move("AUTHOR", last))
    if made.producers(made.group(last)):
        made = moves.apply(made, move("FUSE", last, "*"))
    group = made.group(last)
    assert group.schedule == PIECES, "also where a part came in by fusion"
    nest, schedule = made.nest(group), made.schedule(group)
    assert isinstance(nest, Nest)
    found = check(nest)
    cut = [axis.name for axis in nest.parallel if [p.extents[axis.name] for p in found] != [axis.extent] * len(found)]
    assert [piece.extents[cut[0]] for piece in found] == extents
    emission = schedule.emit(nest, group.settings)
    assert len(emission.launches) == schedule.footprint(nest, group.settings).launch_count >= len(extents)
    assert {name for launch in emission.launches for name in launch.writes} >= {store.buffer for store in nest.stores}
    compile_cuda(emission)


WHOLE: dict[str, tuple[nn.Module, list[Sequence[int]]]] = {
    "small": (Made(lambda *x: torch.relu(cat(*x))), [(2, 4, 8, 8), (2, 4, 8, 8)]),
    "small, and of parts that read little of each other": (
        Made(lambda x, y, z: cat(x * z, y * z)),
        [(2, 4, 8, 8), (2, 4, 8, 8), (1, 4, 8, 8)],
    ),
    "of many parts": (Made(lambda *x: torch.relu(cat(*x))), [(8, 16, 64, 64)] * 9),
    "along what is reduced": (Made(lambda *x: cat(*x, dim=-1).softmax(-1)), [(4096, 512), (4096, 512)]),
    "padded on both sides": (Made(lambda x: nn.functional.pad(x, (1, 1, 1, 1)).relu()), [(8, 32, 128, 128)]),
    "padded behind": (Made(lambda x: nn.functional.pad(x, (0, 0, 0, 64)).relu()), [(8, 32, 128, 128)]),
    "padded channels that are summed": (
        Made(lambda x: nn.functional.pad(x, (0, 0, 0, 0, 0, 16)).sum((2, 3))),
        [(16, 32, 128, 128)],
    ),
    "of a few columns beside many": (Made(lambda *x: cat(*x, dim=-1).exp()), [(16384, 256), (16384, 1)]),
    "of a small share": (Made(lambda *x: cat(*x).exp()), [(8, 128, 64, 64), (8, 1, 64, 64)]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_others_stay_in_one_kernel(name: str) -> None:
    module, shapes = WHOLE[name]
    zero = plan(module, *shapes)
    last = zero.groups[-1].name
    made = moves.apply_all(zero, [move("AUTHOR", last), move("FUSE", last, "*")])
    assert made.group(last).schedule != PIECES


def test_a_table_that_is_looked_into_stays_one_while_its_neighbour_is_read_in_vectors() -> None:
    module = Made(lambda table, i, x: cat(table(i), x).relu(), nn.Embedding(100, 64))
    inputs = (torch.randint(0, 100, (4096, 256)), torch.randn(4096, 128, 64))
    zero = plan_zero(GraphIndex(capture(module, inputs)), CUDA)
    last = zero.groups[-1].name
    made = moves.apply_all(zero, [move("AUTHOR", last), move("FUSE", last, "*")])
    group = made.group(last)
    assert group.schedule == PIECES
    nest = made.nest(group)
    assert isinstance(nest, Nest)
    assert [pieces._look_ups(piece) for piece in pieces.pieces(nest)] == [1, 0]


def test_a_part_that_a_fusion_leaves_too_small_has_another_schedule() -> None:
    """What is stored for nobody any more counts no more."""

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = cat(x, y)
        return joined.softmax(-1), joined.amax((1, 2, 3))

    zero = plan(Made(both), (8, 12, 64, 64), (8, 12, 64, 64))
    first = moves.apply_all(zero, [move("AUTHOR", "softmax"), move("FUSE", "softmax", "cat")])
    assert first.group("softmax").schedule == PIECES
    then = moves.apply_all(first, [move("AUTHOR", "amax"), move("FUSE", "amax", "softmax")])
    if "softmax" in {group.name for group in then.groups}:
        assert then.group("softmax").schedule != PIECES


def test_norms_of_channels_side_by_side_are_taken_apart_within_a_whole_plan() -> None:
    module = Made(lambda n, x, y: n(cat(x, y)), nn.BatchNorm2d(96))
    inputs = tuple(
        torch.randn(8, channels, 56, 56).contiguous(memory_format=torch.channels_last) for channels in (64, 32)
    )
    zero = plan_zero(GraphIndex(capture(module, inputs)), CUDA)
    made = moves.apply_all(zero, [move("AUTHOR", "batch_norm"), move("FUSE", "batch_norm", "*")])
    group = made.group("batch_norm")
    assert ("cat" in group.nodes, group.schedule) == (True, PIECES)


def test_what_was_demanded_stays() -> None:
    zero = plan(Made(lambda *x: torch.relu(cat(*x))), LARGE, LARGE)
    last = zero.groups[-1].name
    asked = moves.apply(plan(Made(cat), LARGE, LARGE), move("AUTHOR", "cat", "cuda_pointwise"))
    assert asked.group("cat").schedule == "cuda_pointwise"
    again = moves.apply(asked, move("AUTHOR", "cat", "cuda_pointwise"))
    assert again.group("cat").schedule == "cuda_pointwise"
    assert schedules(CUDA)[0].name == PIECES
    assert moves.apply_all(zero, [move("AUTHOR", last), move("FUSE", last, "*")]).group(last).schedule == PIECES
