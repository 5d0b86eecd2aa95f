"""Convolutions whose result is reduced where it is made: which are, what a plan makes of them, how they compile."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from convolutions import Case, Convolve, Shapes, drawn, lowered, nest_of
from torch import nn

from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.convolutions.reduced_convolution import CudaReducedConvolution
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.tailed import Tailed
from agent_synthesis.plans import cost, whole
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from gpu_bench import policy
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import artifact_pb2, task_pb2


def scaled_by_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made = F.conv2d(x, weight)
    return (made * made[:, :, :1, :1]).sum((2, 3))


SCHEDULE = CudaReducedConvolution(H200)
X, W = (8, 16, 30, 30), (48, 16, 3, 3)
OF_CHANNELS: list[Convolve] = [
    lambda x, w: (F.mish(F.conv2d(x, w)) * 2).amin(1, keepdim=True).tanh(),
    lambda x, w: F.conv2d(x, w, padding=1).logsumexp(1),
    lambda x, w: F.conv2d(x, w).softmax(1).sigmoid(),
    lambda x, w: F.conv2d(x, w).argmax(1),
    lambda x, w: F.conv2d(x, w).mean(1),
    lambda x, w: F.layer_norm(F.conv2d(x, w).permute(0, 2, 3, 1), (48,)).permute(0, 3, 1, 2),
    lambda x, w: F.conv2d(x, w, stride=2).sum(1) + F.pad(x, (0, 0, 0, 0))[:, 0, 1:15, 1:15],
]
OF_WINDOWS: list[Convolve] = [
    lambda x, w: F.max_pool2d(F.relu(F.conv2d(x, w)), 2),
    lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=1), 3, 2, 1),
    lambda x, w: F.avg_pool2d(F.conv2d(x, w), 4, ceil_mode=True).sigmoid(),
    lambda x, w: F.max_pool2d(F.conv2d(x, w), (1, 5), dilation=2),
]
OVER_SPACE: list[Convolve] = [
    lambda x, w: F.gelu(F.conv2d(x, w)).mean((2, 3), keepdim=True),
    lambda x, w: F.conv2d(x, w).amax((1, 2, 3)).tanh(),
    lambda x, w: F.group_norm(F.silu(F.conv2d(x, w)), 8),
    lambda x, w: F.instance_norm(F.conv2d(x, w)).sigmoid(),
    lambda x, w: F.batch_norm(F.conv_transpose2d(x, w.transpose(0, 1), stride=2), None, None, training=True).relu(),
    lambda x, w: F.conv2d(x, w).var((0, 2, 3)),
]
APART: list[Convolve] = [
    lambda x, w: F.conv2d(x, w).softmax(3),
    lambda x, w: F.avg_pool2d(F.conv2d(x, w), 20),
    lambda x, w: F.max_pool2d(F.conv2d(x, w), 7, 1),  # a tile would have few whole windows
    lambda x, w: F.conv2d(x, w.repeat(8, 1, 1, 1)).amax(1),
    lambda x, w: F.conv2d(x, w).cumsum(1),
    scaled_by_first,
]


def empty(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("function", [*OF_CHANNELS, *OF_WINDOWS])
def test_what_a_tile_has_whole_is_reduced_there(function: Convolve) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        nest = nest_of(function, *empty(X, W, dtype=dtype))
        assert isinstance(nest, Tailed)
        assert SCHEDULE.accepts(nest)
        settings = SCHEDULE.defaults(nest)
        written = {buffer.name for buffer in nest.buffers if buffer.written}
        launch = SCHEDULE.emit(nest, settings).launches[-1]
        assert {*launch.writes} == written
        assert nest.result.name not in {argument.buffer for argument in launch.arguments}
        for other in SCHEDULE.alternatives(nest, settings):
            SCHEDULE.emit(nest, other)


@pytest.mark.parametrize("function", OVER_SPACE)
def test_tiles_leave_states_of_what_goes_beyond_them(function: Convolve) -> None:
    nest = nest_of(function, *empty(X, W))
    assert isinstance(nest, Tailed)
    assert SCHEDULE.accepts(nest)
    settings = SCHEDULE.defaults(nest)
    emission = SCHEDULE.emit(nest, settings)
    assert len(emission.launches) == SCHEDULE.footprint(nest, settings).launch_count
    named = {buffer.name for buffer in nest.buffers} | {buffer.name for buffer in emission.workspaces}
    for launch in emission.launches:
        assert {a.tensor_map.buffer or a.buffer for a in launch.arguments} | {*launch.writes} <= named
    results = [each for each in emission.workspaces if each.name.endswith("_result")]
    assert len(results) == (
        nest.result.element_count in {b.element_count for b in nest.buffers} or "var" in nest.comment
    )


@pytest.mark.parametrize("function", APART)
def test_other_reductions_stay_apart(function: Convolve) -> None:
    assert not SCHEDULE.accepts(nest_of(function, *empty(X, W)))


def test_a_gradient_of_a_convolution_has_no_tail() -> None:
    def gradient(of_result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shape = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        return torch.ops.aten.convolution_backward(of_result, x, weight, *shape)[0].amax(1)

    _, nest = lowered(gradient, empty((8, 48, 28, 28), X, W))
    assert isinstance(nest, Refusal)


@pytest.mark.parametrize("function", [OF_CHANNELS[1], OF_WINDOWS[1], OVER_SPACE[2]])
def test_both_nests_together_mean_what_the_calls_do(function: Convolve) -> None:
    case = Case.of(function, drawn(((1, 3, 7, 6), (8, 3, 3, 3))))
    memory = {b.name: torch.zeros(b.element_count, dtype=TORCH[b.type]) for b in case.nest.buffers if b.written}
    interpreter.run(case.nest, {**case.inputs, **memory})
    case.check(memory)


def plan_of(function: Convolve, *args: torch.Tensor) -> Plan:
    """The whole plan, all of whose programs are let run."""
    plan = whole.authored(plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA), "")
    program = generator.generate(plan)
    assert not policy.objections(program, artifact_pb2.Artifact(program_digest=program.digest), lambda _: False)
    return plan


def test_a_whole_plan_does_not_store_what_is_reduced_at_once() -> None:
    x, w, b = torch.empty(8, 16, 30, 30), torch.empty(48, 16, 3, 3), torch.empty(48)
    for tail in (
        lambda y: F.hardswish(y).amin(1),
        lambda y: F.max_pool2d(y.relu(), 2).sigmoid(),
        lambda y: y.mean((2, 3)),
    ):
        plan = plan_of(lambda x, w, b, tail=tail: tail(F.conv2d(x, w, b)), x, w, b)
        assert [group.schedule for group in plan.groups] == ["cuda_convolution_reduced"]
        found = cost.of_group(plan, plan.groups[0])
        moved = [t.numel() * 4 for t in (x, w, b, tail(torch.empty(8, 48, 28, 28)))]
        assert found.read_bytes + found.write_bytes == sum(moved)


def test_a_norm_with_its_statistics_kept_is_one_group() -> None:
    x = torch.empty(8, 16, 30, 30)
    for norm in (nn.GroupNorm(4, 48), nn.BatchNorm2d(48), nn.InstanceNorm2d(48)):
        module = nn.Sequential(nn.Conv2d(16, 48, 3), nn.SiLU(), norm, nn.ReLU()).train()
        plan = plan_of(module, x)
        assert "cuda_convolution_reduced" in {group.schedule for group in plan.groups}
        assert not {"cuda_row_reduction", "cuda_column_reduction"} & {group.schedule for group in plan.groups}


def test_a_result_that_others_read_is_stored() -> None:
    x, w = torch.empty(8, 16, 30, 30), torch.empty(48, 16, 3, 3)
    for function in (
        lambda x, w: (y := F.conv2d(x, w), y.amax(1)),
        lambda x, w: (y := F.conv2d(x, w), F.max_pool2d(y, 2)),
    ):
        assert "cuda_convolution_reduced" not in {group.schedule for group in plan_of(function, x, w).groups}


@pytest.mark.parametrize(
    ("function", "shapes", "dtype", "spilled"),
    [
        (OF_CHANNELS[0], ((64, 64, 256, 256), (128, 64, 3, 3)), torch.float32, 96),
        (OF_CHANNELS[2], ((32, 64, 128, 128), (64, 64, 3, 3)), torch.bfloat16, 16),
        (OVER_SPACE[2], ((128, 64, 128, 128), (64, 64, 3, 3)), torch.float32, 16),
        (OF_WINDOWS[0], ((128, 64, 128, 128), (128, 64, 3, 3)), torch.float32, 16),
        (
            lambda x, w: F.max_pool3d(F.conv_transpose3d(x, w, stride=2, padding=2), 2),
            ((16, 32, 32, 32, 32), (32, 64, 5, 5, 5)), torch.float32, 160,
        ),
    ],
)  # fmt: skip
def test_large_ones_compile_for_sm_90a_and_spill_little(
    function: Convolve, shapes: Shapes, dtype: torch.dtype, spilled: int, compile_cuda: Callable[[Emission], str]
) -> None:
    nest = nest_of(function, *empty(*shapes, dtype=dtype))
    told = compile_cuda(SCHEDULE.emit(nest, SCHEDULE.defaults(nest)))
    found = [int(each) for each in re.findall(r"(\d+) bytes spill stores", told)]
    assert len(found) >= 2
    assert max(found) <= spilled


def test_settings_by_which_a_tile_has_no_whole_are_refused() -> None:
    channels = nest_of(OF_CHANNELS[0], *empty((8, 16, 30, 30), (96, 16, 3, 3)))
    settings = SCHEDULE.defaults(channels)
    for change, reason in (
        ({"columns": 64}, "tiles of 64 channels, of 96 that are reduced"),
        ({"split_k": 2}, "in one slice"),
        ({"warpgroups": 4}, "by two warpgroups"),
    ):
        with pytest.raises(IllegalMove, match=reason):
            SCHEDULE.emit(channels, replace(settings, **change))
    phases = nest_of(
        lambda x, w: F.max_pool3d(F.conv_transpose3d(x, w, stride=2, padding=1), 2),
        *empty((8, 16, 8, 8, 8), (16, 32, 3, 3, 3)),
    )
    with pytest.raises(IllegalMove, match="8 phases are pooled together, of 4 rows of tiles"):
        SCHEDULE.emit(phases, replace(SCHEDULE.defaults(phases), raster=4))
