"""Convolutions whose result is reduced in their tiles, executed here: values as in float64, of every kind at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from convolutions import Case, Convolve, Shapes
from tensor_cores import program_with_tensor_cores
from test_convolution_products import BF16, F32, drawn

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.products.convolutions.reduced_convolution import CudaReducedConvolution
from agent_synthesis.nests.element_types import TORCH
from warpsmith.hardware import H200

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]
SCHEDULE = CudaReducedConvolution(replace(H200, sm_count=2))
"""Of few multiprocessors, so that blocks take several tiles."""


def softmax_beside_a_maximum(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    made = F.conv2d(x, weight, bias)
    return F.softmax(F.mish(made), 1) + made.amax(1, keepdim=True) * bias.view(-1, 1, 1)


def scaled_by_a_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made = F.conv2d(x.to(memory_format=torch.channels_last), weight)
    return made * made.argmax(1, keepdim=True)


CHANNELS: list[tuple[Convolve, Shapes, torch.dtype]] = [
    (
        softmax_beside_a_maximum,
        ((1, 16, 7, 10), (20, 16, 3, 1), (20,)), F32,
    ),
    (lambda x, w: F.conv_transpose2d(x, w, stride=2).logsumexp(1), ((1, 16, 3, 5), (16, 16, 4, 4)), F32),
    (
        lambda x, w: F.conv2d(x, w, groups=2).view(1, 2, 20, 5, 8).var(2, correction=0).sqrt(),
        ((1, 32, 5, 10), (40, 16, 1, 3)), F32,
    ),
    (
        scaled_by_a_place, ((1, 72, 5, 6), (24, 72, 1, 1)), BF16,
    ),
]  # fmt: skip
POOLED: list[tuple[Convolve, Shapes, torch.dtype]] = [
    (
        lambda x, w: F.avg_pool2d(F.mish(F.conv2d(x, w)), 3, 2, 1, count_include_pad=False, ceil_mode=True).tanh(),
        ((1, 16, 11, 10), (70, 16, 2, 2)), BF16,
    ),
    (
        lambda x, w, b: F.max_pool2d(F.conv_transpose2d(x, w, b, stride=2, output_padding=1), 4, 2, 2),
        ((1, 16, 5, 7), (16, 20, 3, 3), (20,)), F32,
    ),
]  # fmt: skip


SPREAD: list[tuple[Convolve, Shapes, torch.dtype]] = [
    (
        lambda x, w, b: F.gelu(F.conv_transpose2d(x, w, b, stride=2, padding=1)).mean((2, 3), keepdim=True) * 2,
        ((2, 16, 8, 15), (16, 66, 3, 3), (66,)), BF16,
    ),
    (
        lambda x, w, b: F.group_norm(F.silu(F.conv2d(x, w, b) + 99), 4, b, b),
        ((2, 16, 9, 13), (24, 16, 3, 1), (24,)), F32,
    ),
    (
        lambda x, w, b: F.batch_norm(F.conv2d(x, w), None, None, b, training=True).relu(),
        ((2, 16, 9, 13), (24, 16, 3, 1), (24,)), F32,
    ),
]  # fmt: skip


@pytest.mark.parametrize("kinds", [CHANNELS, POOLED, SPREAD], ids=["channels", "pooled", "spread"])
def test_every_kind_is_computed(simulator: Simulator, kinds: list[tuple[Convolve, Shapes, torch.dtype]]) -> None:
    cases, simulations = [], []
    for number, (function, shapes, dtype) in enumerate(kinds):
        case = Case.of(function, drawn(shapes, dtype))
        nest = replace(case.nest, name=f"{case.nest.name}_{number}")
        assert SCHEDULE.accepts(nest), number
        emission = SCHEDULE.emit(nest, replace(SCHEDULE.defaults(nest), columns=64, stages=2))
        sources = {name: bytes(held.contiguous().view(torch.uint8).numpy()) for name, held in case.inputs.items()}
        simulations.append(Simulation(program_with_tensor_cores(nest, emission), sources))
        cases.append(case)
    for case, execution in zip(cases, simulator.execute_all(simulations, Sanitizer.ADDRESS), strict=True):
        assert not execution.findings
        types = {buffer.name: TORCH[buffer.type] for buffer in case.nest.buffers if buffer.written}
        written = {n: torch.frombuffer(bytearray(execution.outputs[n]), dtype=dtype) for n, dtype in types.items()}
        case.check(written, 1e-5 if torch.float32 in types.values() else 1e-2)
