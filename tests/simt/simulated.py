"""Nests as programs of the SIMT machine, and what the interpreter says that they compute."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from agent_correctness.simulation.simt import Simulation
from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import CONTRACT, TORCH
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.schedule import Emission, Schedule
from agent_synthesis.settings import Settings
from warpsmith import digest
from warpsmith.hardware import H200
from warpsmith.v1 import candidate_pb2, task_pb2, tensor_pb2


@dataclass(frozen=True)
class Subject:
    """One kernel to run."""

    name: str
    """What the table calls it: also the entry of the kernel, so it differs from all others."""
    strategy: str
    """Family and strategy, such as "row cluster": a row of the table."""
    shape_class: str
    """What the emitter branches on: a column of the table."""
    nest: Nest
    schedule: Schedule
    parameters: Settings | None = None
    """None for the schedule's defaults."""

    def emission(self) -> Emission:
        """The source and launches."""
        # On a GPU that holds few blocks, so that blocks which stay take several of a few rows.
        blocks = {"row_pipelined_ctas": 2, "row_pipelined": 1, "row_prefetched": 1}
        held = next((count for start, count in blocks.items() if self.name.startswith(start)), None)
        card = replace(H200, sm_count=held, clusters=((2, held),)) if held else H200
        if self.name.startswith("row_prefetched_cluster"):
            # Blocks of a cluster take turns with the vectors of rows that exceed the second-level cache.
            card = replace(card, l2_bytes=0)
        schedule = replace(self.schedule, hardware=card)
        return schedule.emit(self.nest, self.parameters or schedule.defaults(self.nest))


def program_of(nest: Nest, emission: Emission) -> candidate_pb2.Program:
    """A program of the nest's own kernels alone."""
    program = candidate_pb2.Program(target=task_pb2.TARGET_CUDA)
    text = "".join(f'#include "{name}"\n' for name in emission.headers) + emission.text
    program.sources.add(name="kernel.cu", text=text)
    for name in emission.headers:
        program.sources.add(name=name, text=(INCLUDE_DIRECTORY / name).read_text())
    for buffer in nest.buffers:
        spec = tensor_pb2.TensorSpec(dtype=CONTRACT[buffer.type], shape=[buffer.element_count], strides=[1])
        role = candidate_pb2.ROLE_OUTPUT if buffer.written else candidate_pb2.ROLE_SOURCE
        program.buffers.add(name=buffer.name, role=role, spec=spec)
    program.buffers.extend(emission.workspaces)
    for launch in emission.launches:
        program.steps.add(group=nest.name, launch=launch)
    program.digest = digest.of_program(program)
    return program


def draw(nest: Nest) -> dict[str, torch.Tensor]:
    """Values of every buffer that is read, the same at every call."""
    generator = torch.Generator().manual_seed(zlib.crc32(nest.name.encode()))
    drawn = {}
    for buffer in nest.buffers:
        if buffer.written:
            continue
        dtype = TORCH[buffer.type]
        if dtype.is_floating_point:
            drawn[buffer.name] = torch.randn(buffer.element_count, generator=generator, dtype=torch.float64).to(dtype)
        else:
            most = 2 if buffer.type is Type.BOOL else 100
            drawn[buffer.name] = torch.randint(0, most, (buffer.element_count,), generator=generator).to(dtype)
    return drawn


def simulation(subject: Subject) -> Simulation:
    """The subject's program on its values."""
    return simulation_of(subject.nest, subject.emission())


def simulation_of(nest: Nest, emission: Emission) -> Simulation:
    """An emission's program on the nest's values."""
    sources = {name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in draw(nest).items()}
    return Simulation(program_of(nest, emission), sources)


def expected(nest: Nest) -> dict[str, torch.Tensor]:
    """What the nest writes, as the interpreter computes it."""
    memory = draw(nest)
    for buffer in nest.buffers:
        if buffer.written:
            memory[buffer.name] = torch.zeros(buffer.element_count, dtype=TORCH[buffer.type])
    interpreter.run(nest, memory)
    return {buffer.name: memory[buffer.name] for buffer in nest.buffers if buffer.written}


def wrong_values(nest: Nest, outputs: Mapping[str, bytes]) -> Sequence[str]:
    """Outputs that differ from the interpreter's beyond rounding; each with the first place and both values."""
    wrong = []
    for name, truth in expected(nest).items():
        got = torch.frombuffer(bytearray(outputs[name]), dtype=truth.dtype)
        if not truth.dtype.is_floating_point:
            close = got == truth
        else:
            relative = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-10}.get(truth.dtype, 2e-5)
            close = torch.isclose(got.double(), truth.double(), rtol=relative, atol=relative, equal_nan=True)
        if not bool(close.all()):
            at = int((~close).nonzero()[0])
            wrong.append(f"{name}[{at}] is {got[at].item()} and should be {truth[at].item()}")
    return wrong
