"""Products of floats of 8 bits on tensor cores, whose sums are promoted, on the simulated machine."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from quantised_forms import forms, scales, short, stepped
from simulated import draw
from tensor_cores import program_with_tensor_cores
from test_products import nest_of

from agent_correctness.simulation.simt import Execution, Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.products.scaled_product import CudaScaledProduct, ScaledSettings
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from gpu_bench.judging import comparison
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200

pytestmark = [pytest.mark.simt, pytest.mark.timeout(900)]
E5M2 = torch.float8_e5m2
TWICE = [name for name in forms() if name.startswith("fp8 twice")]
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], dict[str, int]]] = {
    name: (*forms(70, 80, 256 if "128" in name else 144)[name], {"columns": 64, "stages": 3}) for name in TWICE
} | {
    "e5m2 and halves": (
        lambda x, w: (x.half() @ w.half().T).sigmoid(), (short(65, 256, dtype=E5M2), short(130, 256, dtype=E5M2)),
        {"columns": 128, "stages": 3},
    ),
    "in slices": (
        lambda x, w, s: torch.relu((x.bfloat16() @ w.bfloat16().T) * s),
        (*(short(64, 4096, dtype=torch.float8_e4m3fn) for _ in range(2)), scales(64)),
        {"columns": 64, "stages": 4, "split_k": 4},
    ),
    "a long depth, all positive": (
        lambda x, w: x.bfloat16() @ w.bfloat16().T,
        tuple(short(64, 4096, dtype=torch.float8_e4m3fn) for _ in range(2)),
        {"columns": 64, "stages": 4},
    ),
    "blocks of tiles": (
        stepped,
        (
            short(64, 384, dtype=torch.float8_e4m3fn), short(128, 384, dtype=torch.float8_e4m3fn), torch.rand(64, 3),
            torch.rand(2, 3),
        ),
        {"columns": 64, "stages": 3},
    ),
    "a batch": (
        lambda x, w: torch.bmm(x.bfloat16(), w.bfloat16().mT),
        (short(2, 64, 128, dtype=torch.float8_e4m3fn), short(2, 80, 128, dtype=torch.float8_e4m3fn)),
        {"columns": 64, "stages": 3},
    ),
}  # fmt: skip

_ORDERED = ("blocks of tiles", "a batch")
"""What orders threads is the same in all others."""


def made(name: str) -> tuple[Nest, Emission]:
    function, args, settings = CASES[name]
    nest = nest_of(re.sub(r"\W+", " ", f"promoted {name}").strip(), function, *args)
    return nest, CudaScaledProduct(H200).emit(nest, ScaledSettings(**settings))


@pytest.mark.parametrize("sanitizer", list(Sanitizer), ids=lambda sanitizer: sanitizer.value)
def test_floats_of_8_bits_are_multiplied_as_accurately_as_eager_does(
    simulator: Simulator, sanitizer: Sanitizer
) -> None:
    chosen = _ORDERED if sanitizer is Sanitizer.THREAD else CASES
    cases = [made(name) for name in chosen]
    simulations = [
        Simulation(
            program_with_tensor_cores(nest, emission), {k: _bytes(each) for k, each in _drawn(name, nest).items()}
        )
        for name, (nest, emission) in zip(chosen, cases, strict=True)
    ]
    found = simulator.execute_all(simulations, sanitizer)
    assert not [each.findings for each in found if each.findings]
    ratios = {name: _ratio(name, *each) for name, each in zip(chosen, zip(cases, found, strict=True), strict=True)}
    assert max(ratios.values()) <= 1.1, ratios


def _drawn(name: str, nest: Nest) -> dict[str, torch.Tensor]:
    drawn = draw(nest)
    return {key: each.float().abs().to(each.dtype) for key, each in drawn.items()} if "positive" in name else drawn


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy())


def _ratio(name: str, case: tuple[Nest, Emission], execution: Execution) -> float:
    """How many times as far off the dequantised product in float64 as eager."""
    function, args, _ = CASES[name]
    drawn = _drawn(name, case[0])
    args = tuple(drawn[f"args_{k}"].reshape(each.shape) for k, each in enumerate(args))
    graph = capture(Applied(function), args)
    (truth,) = aten.interpret(graph, {f"args_{k}": each for k, each in enumerate(args)}, widen=True).values()
    output = execution.outputs[next(buffer.name for buffer in case[0].buffers if buffer.written)]
    eager = function(*args)
    candidate = torch.frombuffer(bytearray(output), dtype=eager.dtype).reshape(eager.shape)
    return comparison.compare(candidate, eager, truth).rms_ratio
