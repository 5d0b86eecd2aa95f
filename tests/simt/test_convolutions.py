"""Convolutions of every kind, as they would run on a GPU: values as in float64, and nothing found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from convolutions import EVERY, Case, drawn, random_cases
from simulated import program_of

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from agent_synthesis.emit.registry import schedules
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.schedule import Emission
from warpsmith.v1 import task_pb2

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]


def check(simulator: Simulator, cases: Sequence[Case], *, alternatives: bool) -> None:
    ran: list[tuple[Case, Emission]] = []
    for case in cases:
        schedule = next(each for each in schedules(task_pb2.TARGET_CUDA) if each.accepts(case.nest))
        default = schedule.defaults(case.nest)
        others = schedule.alternatives(case.nest, default)
        for settings in (default, *(others[len(ran) % 3 :: 3] if alternatives else ())):
            nest = replace(case.nest, name=f"{case.nest.name}_{len(ran)}")
            ran.append((replace(case, nest=nest), schedule.emit(nest, settings)))
    simulations = []
    for case, emission in ran:
        sources = {name: bytes(tensor.contiguous().view(torch.uint8).numpy()) for name, tensor in case.inputs.items()}
        simulations.append(Simulation(program_of(case.nest, emission), sources))
    for (case, _), execution in zip(ran, simulator.execute_all(simulations, Sanitizer.ADDRESS), strict=True):
        assert not execution.findings
        types = {buffer.name: TORCH[buffer.type] for buffer in case.nest.buffers}
        case.check(
            {name: torch.frombuffer(bytearray(held), dtype=types[name]) for name, held in execution.outputs.items()}
        )


def test_every_kind_is_computed_in_every_way(simulator: Simulator) -> None:
    check(simulator, [Case.of(function, drawn(shapes)) for function, shapes in EVERY], alternatives=True)


def test_random_ones_are_computed(simulator: Simulator) -> None:
    check(simulator, random_cases(40), alternatives=False)
