"""A small task (row softmax) and programs for it compiled with g++, as the fixture `small`."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_desk import BenchDesk, MakeDesk
from unusual_modules import Desk

from gpu_bench.timing import interleaving, measurement
from warpsmith import digest
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, task_pb2, tensor_pb2

ROWS, COLUMNS = 16, 33

MODULE = f"""
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)

def get_inputs():
    return [torch.rand({ROWS}, {COLUMNS})]

def get_init_inputs():
    return []
"""

SOFTMAX = """
    for (long i = 0; i < ROWS; ++i) {
        const float* row = x + i * COLUMNS;
        float m = -INFINITY;
        double s = 0;
        for (long j = 0; j < COLUMNS; ++j) m = std::isnan(row[j]) ? row[j] : (row[j] > m ? row[j] : m);
        for (long j = 0; j < COLUMNS; ++j) s += std::exp(row[j] - m);
        for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = std::exp(row[j] - m) / s;
    }
"""


def task(source: str = MODULE) -> task_pb2.Task:
    """A cpu task of one file."""
    made = task_pb2.Task(
        name="softmax",
        sources=[task_pb2.SourceFile(path="model.py", content=source.encode())],
        entry_path="model.py",
        class_name="Model",
        target=task_pb2.TARGET_CPU,
        precision=task_pb2.PRECISION_FP32,
    )
    made.digest = digest.of_task(made)
    return made


def spec(*shape: int, dtype: tensor_pb2.Dtype.ValueType = tensor_pb2.DTYPE_FLOAT32) -> tensor_pb2.TensorSpec:
    """A contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return tensor_pb2.TensorSpec(dtype=dtype, shape=shape, strides=strides)


def source_buffer(name: str, layout: tensor_pb2.TensorSpec, position: int = 0) -> candidate_pb2.Buffer:
    """A buffer bound to an input."""
    return candidate_pb2.Buffer(
        name=name,
        role=candidate_pb2.ROLE_SOURCE,
        spec=layout,
        source=graph_pb2.Source(name=name, origin=graph_pb2.ORIGIN_INPUT, input_index=position, spec=layout),
    )


def kernel_program(body: str, *, rows: int = ROWS, columns: int = COLUMNS) -> candidate_pb2.Program:
    """A program of one launch over input `x`, output `y` and a workspace `w` of one row."""
    text = (
        "#include <cmath>\n#include <cstdint>\n#include <cstdlib>\n"
        f"constexpr long ROWS = {rows}, COLUMNS = {columns};\n"
        'extern "C" void run(void* const* arguments) {\n'
        "    float* x = static_cast<float*>(arguments[0]);\n"
        "    float* y = static_cast<float*>(arguments[1]);\n"
        "    float* w = static_cast<float*>(arguments[2]);\n"
        f"    (void)x; (void)y; (void)w;\n{body}\n}}\n"
    )
    arguments = [candidate_pb2.LaunchArgument(buffer=name) for name in ("x", "y", "w")]
    launch = candidate_pb2.Launch(entry="run", arguments=arguments, writes=["y", "w"])
    program = candidate_pb2.Program(
        target=task_pb2.TARGET_CPU,
        sources=[candidate_pb2.DeviceSource(name="kernel.cpp", text=text)],
        buffers=[
            source_buffer("x", spec(rows, columns)),
            candidate_pb2.Buffer(name="y", role=candidate_pb2.ROLE_OUTPUT, spec=spec(rows, columns)),
            candidate_pb2.Buffer(name="w", role=candidate_pb2.ROLE_WORKSPACE, spec=spec(columns)),
        ],
        steps=[candidate_pb2.Step(group="softmax", launch=launch)],
        outputs=["y"],
    )
    program.digest = digest.of_program(program)
    return program


def library_program(*, target: str = "aten.softmax.int") -> candidate_pb2.Program:
    """Plan zero of the task."""
    call = candidate_pb2.LibraryCall(
        target=target, args=[tensor_pb2.Value(tensor="x"), tensor_pb2.Value(integer=-1)], results=["y"]
    )
    program = candidate_pb2.Program(
        target=task_pb2.TARGET_CPU,
        buffers=[
            source_buffer("x", spec(ROWS, COLUMNS)),
            candidate_pb2.Buffer(name="y", role=candidate_pb2.ROLE_LIBRARY, spec=spec(ROWS, COLUMNS)),
        ],
        steps=[candidate_pb2.Step(group="softmax", library=call)],
        outputs=["y"],
    )
    program.digest = digest.of_program(program)
    return program


def plan_zero(graph: graph_pb2.Graph) -> candidate_pb2.Program:
    """Every call of a captured graph as a library step."""
    buffers = [
        candidate_pb2.Buffer(name=s.name, role=candidate_pb2.ROLE_SOURCE, spec=s.spec, source=s) for s in graph.sources
    ]
    steps = []
    for node in graph.nodes:
        buffers += [
            candidate_pb2.Buffer(name=result.name, role=candidate_pb2.ROLE_LIBRARY, spec=result.spec)
            for result in node.results
            if result.name
        ]
        call = candidate_pb2.LibraryCall(
            target=node.target, args=node.args, kwargs=node.kwargs, results=[result.name for result in node.results]
        )
        steps.append(candidate_pb2.Step(group=node.name, library=call))
    program = candidate_pb2.Program(
        target=task_pb2.TARGET_CPU, buffers=buffers, steps=steps, outputs=graph.outputs,
        output_tree=graph.output_tree, output_leaves=graph.output_leaves,
    )  # fmt: skip
    program.digest = digest.of_program(program)
    return program


@functools.cache
def _compiled(text: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory, "kernel.cpp"), Path(directory, "kernel.so")
        source.write_text(text)
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *flags, str(source), "-o", str(output)]
        subprocess.run(command, check=True, timeout=60)
        return output.read_bytes()


def compiled(program: candidate_pb2.Program, flags: Sequence[str] = ()) -> artifact_pb2.Artifact:
    """The program through g++; no code for a program of library steps."""
    if not program.sources:
        return artifact_pb2.Artifact(
            program_digest=program.digest, format=artifact_pb2.BINARY_FORMAT_NONE, digest=program.digest
        )
    content = _compiled(program.sources[0].text, tuple(flags))
    return artifact_pb2.Artifact(
        digest=digest.digest(content),
        program_digest=program.digest,
        format=artifact_pb2.BINARY_FORMAT_SHARED_OBJECT,
        content=content,
    )


@pytest.fixture
def short_finals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A final has a few blocks, for tests that ask what it does and not how well it tells times apart."""
    whole = measurement.plan_for

    def short(*args: Any) -> interleaving.Plan:
        plan = whole(*args)
        return dataclasses.replace(plan, budget_s=0.1, least_blocks=min(plan.least_blocks, 4), extra_count=1)

    monkeypatch.setattr(measurement, "plan_for", short)
    monkeypatch.setattr(measurement, "FRESH_READINGS", 1)


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """Everything above, for tests: they cannot import one another."""
    return SimpleNamespace(
        rows=ROWS, columns=COLUMNS, module=MODULE, softmax=SOFTMAX, task=task, spec=spec, source_buffer=source_buffer,
        kernel_program=kernel_program, library_program=library_program, plan_zero=plan_zero, compiled=compiled,
    )  # fmt: skip


@pytest.fixture
def references(small: SimpleNamespace) -> Iterator[Callable[[str], Desk]]:
    """Makes the desk of a reference from its text."""
    made: list[Desk] = []

    def make(text: str) -> Desk:
        made.append(Desk(small, text))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def desk(small: Any) -> Iterator[MakeDesk]:
    made: list[BenchDesk] = []

    def make(expression: str, inputs: str = "[torch.rand(16, 32)]", setup: str = "pass") -> BenchDesk:
        made.append(BenchDesk(small, expression, inputs, setup))
        return made[-1]

    yield make
    for each in made:
        os.close(each.descriptor)
