"""Convolutions as products on tensor cores, executed here: values as in float64, whatever lies beside a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from convolutions import Case, Convolve, Shapes, convolved
from tensor_cores import program_with_tensor_cores

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import CudaConvolutionProduct
from agent_synthesis.nests.element_types import TORCH
from warpsmith.hardware import H200

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]
SCHEDULE = CudaConvolutionProduct(replace(H200, sm_count=2))
"""Of few multiprocessors, so that blocks take several tiles."""

F32, BF16 = torch.float32, torch.bfloat16

Kind = tuple[Convolve, Shapes, torch.dtype]
KINDS: dict[str, Kind] = {
    "3x3": (convolved("conv2d", padding=1), ((2, 40, 9, 10), (24, 40, 3, 3)), F32),
    "3x3 of bf16": (convolved("conv2d", padding=1), ((1, 70, 9, 10), (24, 70, 3, 3)), BF16),
    "few channels": (convolved("conv2d", padding=(2, 0)), ((1, 3, 9, 18), (8, 3, 5, 3)), torch.float16),
    "groups": (convolved("conv2d", groups=2), ((1, 12, 8, 8), (8, 6, 3, 3)), F32),
    "a stride of whole windows": (convolved("conv2d", stride=2), ((1, 9, 12, 12), (8, 9, 4, 2)), F32),
    "three dimensions": (convolved("conv3d", padding=1), ((1, 5, 4, 5, 6), (7, 5, 3, 3, 3)), F32),
    "transposed": (convolved("conv_transpose2d", padding=1), ((1, 9, 7, 8), (9, 7, 3, 3)), F32),
    "a stride": (convolved("conv2d", stride=2, padding=1), ((2, 9, 11, 14), (8, 9, 3, 3)), F32),
    "a stride of few channels": (convolved("conv2d", stride=4, padding=2), ((1, 3, 29, 33), (8, 3, 11, 11)), F32),
    "a stride and a dilation": (convolved("conv1d", stride=3, dilation=4), ((2, 40, 61), (9, 40, 3)), F32),
    "strides and dilations": (
        convolved("conv2d", stride=(2, 3), padding=(4, 1), dilation=(3, 2)), ((2, 4, 17, 21), (3, 4, 3, 4)), BF16,
    ),
    "phases": (
        convolved("conv_transpose2d", stride=2, padding=1, output_padding=1), ((2, 9, 6, 5), (9, 4, 3, 3)), F32,
    ),
    "phases apart": (
        convolved("conv_transpose2d", stride=2, output_padding=1), ((1, 9, 6, 5), (9, 4, 3, 3)), F32,
    ),
    "phases of as many": (convolved("conv_transpose2d", stride=2, padding=1), ((1, 9, 6, 5), (9, 4, 4, 4)), BF16),
    "phases without elements": (convolved("conv_transpose2d", stride=3), ((1, 9, 6, 5), (9, 4, 2, 2)), F32),
    "phases of a dilation": (
        convolved("conv_transpose2d", stride=(4, 3), dilation=(6, 2), padding=(3, 1)),
        ((1, 9, 5, 4), (9, 5, 3, 4)), F32,
    ),
    "phases of groups": (
        convolved("conv_transpose3d", stride=2, padding=(1, 2, 1), groups=2), ((1, 6, 3, 4, 3), (6, 4, 3, 5, 4)), F32,
    ),
}  # fmt: skip


def shuffled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of two groups whose channels come by turns."""
    return F.conv2d(x.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2), weight, groups=2)


KINDS["groups of shuffled channels"] = (shuffled, ((2, 12, 7, 8), (8, 6, 1, 1)), F32)


def drawn(shapes: Shapes, dtype: torch.dtype, seed: int = 7) -> list[torch.Tensor]:
    """Values that every type has, so that sums differ from those in float64 by their own rounding alone."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).div(8).to(dtype) for shape in shapes]


def run(
    simulator: Simulator,
    cases: Sequence[Case],
    changes: dict[str, int] | None = None,
    sanitizer: Sanitizer = Sanitizer.ADDRESS,
) -> None:
    simulations = []
    for number, case in enumerate(cases):
        nest = replace(case.nest, name=f"{case.nest.name}_{number}")
        assert SCHEDULE.accepts(nest)
        emission = SCHEDULE.emit(nest, replace(SCHEDULE.defaults(nest), columns=64, stages=2, **changes or {}))
        sources = {name: bytes(held.contiguous().view(torch.uint8).numpy()) for name, held in case.inputs.items()}
        simulations.append(Simulation(program_with_tensor_cores(nest, emission), sources))
    for case, execution in zip(cases, simulator.execute_all(simulations, sanitizer), strict=True):
        assert not execution.findings
        types = {buffer.name: TORCH[buffer.type] for buffer in case.nest.buffers if buffer.written}
        written = {n: torch.frombuffer(bytearray(execution.outputs[n]), dtype=dtype) for n, dtype in types.items()}
        case.check(written, 1e-5 if torch.float32 in types.values() else 1e-2)


def test_every_kind_is_computed(simulator: Simulator) -> None:
    run(simulator, [Case.of(function, drawn(shapes, dtype)) for function, shapes, dtype in KINDS.values()])


def test_channels_that_are_neighbours_are_copied_as_they_lie(simulator: Simulator) -> None:
    last = torch.channels_last
    cases = []
    for options, shapes, dtype, laid in (
        ({"padding": (1, 2)}, ((2, 12, 6, 7), (8, 12, 3, 3)), F32, 1),
        ({"padding": 1, "groups": 2}, ((1, 64, 5, 6), (8, 32, 3, 3)), F32, 1),
        ({"dilation": 2}, ((1, 136, 6, 9), (6, 136, 3, 3)), BF16, 1),
        ({}, ((2, 72, 5, 6), (8, 72, 1, 1)), BF16, 0),
        ({"stride": 2}, ((2, 72, 5, 6), (8, 72, 1, 1)), BF16, 1),
    ):
        x, weight = drawn(shapes, dtype)
        case = Case.of(convolved("conv2d", **options), [x.to(memory_format=last), weight])
        settings = replace(SCHEDULE.defaults(case.nest), split_k=1)
        assert len(SCHEDULE.emit(case.nest, settings).launches) == 1 + laid
        cases.append(case)
    phases = convolved("conv_transpose2d", stride=2, padding=1)
    x, weight = drawn(((1, 12, 4, 5), (12, 8, 3, 3)), F32)
    cases.append(Case.of(phases, [x.to(memory_format=last), weight]))
    run(simulator, cases)


def test_rows_of_whole_vectors_are_laid_out_in_vectors(simulator: Simulator) -> None:
    cases = []
    for name, options, shapes, dtype in (
        ("conv2d", {"padding": 1}, ((2, 40, 6, 8), (8, 40, 3, 3)), F32),
        ("conv2d", {"padding": (0, 2), "dilation": 2}, ((1, 70, 7, 16), (6, 70, 3, 3)), BF16),
        ("conv3d", {"padding": 1, "groups": 2}, ((1, 10, 3, 5, 4), (6, 5, 3, 3, 3)), F32),
        ("conv1d", {}, ((2, 9, 120), (5, 9, 4)), torch.float16),
        ("conv_transpose2d", {"stride": 2, "padding": 1}, ((1, 12, 4, 8), (12, 5, 3, 3)), F32),
    ):
        case = Case.of(convolved(name, **options), drawn(shapes, dtype))
        assert "kInRows = true" in SCHEDULE.emit(case.nest, SCHEDULE.defaults(case.nest)).text
        cases.append(case)
    run(simulator, cases)


def test_slices_of_the_depth_are_added(simulator: Simulator) -> None:
    def last(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.to(memory_format=torch.channels_last), weight, stride=2, padding=1)

    kinds = [KINDS["3x3"], KINDS["a stride and a dilation"], (last, KINDS["3x3"][1], F32)]
    kinds.append((KINDS["phases"][0], ((1, 40, 5, 4), (40, 3, 3, 3)), F32))
    run(simulator, [Case.of(function, drawn(shapes, dtype)) for function, shapes, dtype in kinds], {"split_k": 2})


def test_threads_wait_for_what_others_copy_and_lay_out(simulator: Simulator) -> None:
    kinds = [KINDS["a stride"], KINDS["phases"], (convolved("conv1d"), ((2, 40, 120), (9, 40, 4)), BF16)]
    cases = [Case.of(function, drawn(shapes, dtype)) for function, shapes, dtype in kinds]
    run(simulator, cases, sanitizer=Sanitizer.THREAD)


def test_what_lies_beside_a_window_reaches_no_sum(simulator: Simulator) -> None:
    cases = []
    for name in ("a stride", "a stride of few channels", "a stride and a dilation", "phases", "phases of as many"):
        function, shapes, dtype = KINDS[name]
        x, weight = drawn(shapes, dtype)
        generator = torch.Generator().manual_seed(3)
        for value in (torch.inf, -torch.inf, torch.nan):
            places = torch.randint(0, x.numel(), (2,), generator=generator)
            x.view(-1)[places] = value
        cases.append(Case.of(function, [x, weight.where(weight != 0, 1.0)]))
    run(simulator, cases)
    assert all(case.truth.isfinite().any() and not case.truth.isfinite().all() for case in cases)
