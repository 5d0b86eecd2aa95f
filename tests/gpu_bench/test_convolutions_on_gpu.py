"""Convolutions of every kind through plan, NVRTC and executor on a GPU, by each schedule that takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import EVERY, Convolve, Shapes, convolved, drawn, random_case

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import CudaConvolutionProduct
from agent_synthesis.emit.cuda.windows.convolution import CudaConvolution
from agent_synthesis.emit.cuda.windows.window import CudaWindow
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.testing import Applied
from benchmarks.plans import into_one
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import candidate_pb2, task_pb2

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TF32_TOLERANCE = 2e-3


def tailed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return F.silu(F.conv2d(torch.relu(x), weight, bias, padding=1)) * 2.0 + other


def beside(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), weight, bias, padding=1)


def lying(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Of channels that lie last."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=weight.shape[-1] // 2)


DENSE: list[tuple[Convolve, Shapes]] = [
    (convolved("conv2d", padding=1), ((3, 64, 30, 28), (96, 64, 3, 3), (96,))),
    (convolved("conv2d", padding=1), ((2, 48, 17, 19), (200, 48, 3, 3), (200,))),
    (convolved("conv2d", stride=2, padding=3), ((4, 3, 61, 64), (64, 3, 8, 8), (64,))),
    (convolved("conv2d", padding=(4, 1), dilation=(3, 2)), ((3, 40, 33, 37), (72, 40, 3, 2))),
    (convolved("conv2d", padding=1, groups=2), ((2, 96, 20, 20), (130, 48, 3, 3))),
    (convolved("conv3d", stride=(1, 2, 1), padding=1), ((2, 33, 7, 12, 10), (65, 33, 3, 4, 3), (65,))),
    (convolved("conv1d", padding=2, dilation=2), ((5, 64, 333), (128, 64, 3), (128,))),
    (convolved("conv_transpose2d", padding=1), ((2, 64, 14, 15), (64, 32, 3, 3), (32,))),
    (convolved("conv_transpose3d"), ((1, 32, 6, 7, 8), (32, 48, 3, 5, 3))),
    (convolved("conv_transpose2d", stride=2), ((3, 64, 14, 15), (64, 32, 4, 4), (32,))),
    (convolved("conv_transpose1d", stride=3), ((3, 64, 50), (64, 40, 6))),
    (convolved("conv2d"), ((70, 32, 7, 7), (64, 32, 3, 3))),
    (convolved("conv2d", stride=4, padding=2), ((3, 3, 63, 70), (96, 3, 8, 12), (96,))),
    (convolved("conv2d", stride=2, padding=1), ((3, 40, 33, 37), (72, 40, 4, 2))),
    (convolved("conv2d", stride=2, padding=1), ((3, 72, 33, 37), (72, 72, 3, 3), (72,))),
    (convolved("conv2d", stride=4, padding=2), ((3, 3, 63, 70), (96, 3, 11, 11), (96,))),
    (convolved("conv1d", stride=3, dilation=4), ((3, 64, 999), (128, 64, 3))),
    (convolved("conv2d", padding=1), ((8, 512, 7, 7), (512, 512, 3, 3), (512,))),
    (convolved("conv_transpose2d", stride=2, padding=1, output_padding=1), ((3, 64, 14, 15), (64, 32, 3, 3), (32,))),
    (convolved("conv_transpose3d", stride=2, padding=(1, 2, 1), groups=2), ((1, 64, 6, 7, 8), (64, 24, 3, 5, 4))),
    (convolved("conv_transpose2d", stride=(2, 3), dilation=(2, 1)), ((3, 64, 14, 15), (64, 32, 3, 5), (32,))),
    (lying, ((2, 30, 32, 64), (64, 64, 3, 3), (64,))),
    (lying, ((2, 30, 32, 72), (64, 72, 1, 1), (64,))),
    (beside, ((2, 64, 30, 32), (64, 64, 3, 3), (64,))),
    (tailed, ((2, 64, 32, 30), (64, 64, 3, 3), (64,), (2, 64, 32, 30))),
]
"""Deeper and wider than a box, or not; images that share a tile."""


@dataclass(frozen=True)
class Made:
    """A function's program, compiled later."""

    function: Convolve
    args: Sequence[torch.Tensor]
    program: candidate_pb2.Program
    settings: str
    tolerance: float


def ways(function: Convolve, args: Sequence[torch.Tensor]) -> Iterator[Made]:
    """The program of each schedule with what it begins with, and with every third change of it."""
    plan = plan_zero(GraphIndex(capture(Applied(function), tuple(args))), task_pb2.TARGET_CUDA)
    try:
        plan = moves.apply(plan, into_one(plan))
    except IllegalMove:
        return
    if len(plan.groups) > 1:  # a bias, beside a convolution that nothing takes
        return
    (group,) = plan.groups
    nest = plan.nest(group)
    assert isinstance(nest, Nest)
    schedules: list[Any] = [CudaConvolution(H200), CudaConvolutionProduct(H200), CudaWindow(H200)]
    for schedule in schedules:
        if not schedule.accepts(nest):
            continue
        default = schedule.defaults(nest)
        is_rounded = schedule.name == "cuda_convolution_product" and args[0].dtype == torch.float32
        tolerance = TF32_TOLERANCE if is_rounded else TOLERANCES[args[0].dtype]
        for settings in (default, *schedule.alternatives(nest, default)[::3]):
            changed = plan.exchanged(replace(group, schedule=schedule.name, settings=settings))
            words = f"{schedule.name} {settings.words()}"
            yield Made(function, args, generator.generate(changed), words, tolerance)


def check(found: Sequence[Made]) -> None:
    with ThreadPoolExecutor(16) as pool:
        artifacts = list(pool.map(lambda made: cubin_of(made.program), found))
    device = torch.device("cuda", 0)
    wrong = []
    for made, artifact in zip(found, artifacts, strict=True):
        args = [arg.to(device) for arg in made.args]
        call = CudaExecutor().load(made.program, artifact, device).bind(Sources(args, {}, {}))
        (first,), (second,) = call(), call()
        torch.cuda.synchronize()
        truth = made.function(*(arg.double() for arg in made.args))
        scale = truth.abs().max().item() or 1.0  # zeros, where every window lies beside the data
        error = (first.cpu().double() - truth).abs().max().item() / scale
        if not (error <= made.tolerance and torch.equal(first, second)):
            shapes = [tuple(arg.shape) for arg in made.args]
            wrong.append(f"{error:.2g}: {shapes} {made.settings} {made.program.steps[-1].launch.entry}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_ones_are_computed(dtype: torch.dtype) -> None:
    found = [made for function, shapes in DENSE for made in ways(function, drawn(shapes, dtype))]
    assert {made.program.steps[-1].launch.entry.rpartition("_")[2] for made in found} >= {"product"}
    check(found)


def test_every_kind_is_computed() -> None:
    check([made for function, shapes in EVERY for made in ways(function, drawn(shapes))])


def test_random_ones_are_computed() -> None:
    cases = [(function, drawn(shapes, seed=n)) for n in range(60) for function, shapes in (random_case(n),)]
    check([made for function, args in cases for made in ways(function, args)])
