"""Hostile sources do not become binaries, hostile plans are refused unread, hostile modules are bad input."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hostile_tasks as tasks
import pytest
from hostile_sources import MODULES, PLANS, SOURCES, BadModule, Plan, Source

from agent_compile.compiler import Compiler
from agent_compile.toolchains.toolchain import Rejected
from gpu_bench.policy import objections
from gpu_bench.session import Session
from orchestrator.tasks import intake
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.v1 import artifact_pb2, benchmark_service_pb2, candidate_pb2, task_pb2, verdict_pb2

pytestmark = pytest.mark.hostile


def program_of(text: str, file: str = "kernel.cpp") -> candidate_pb2.Program:
    made = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
    made.sources.add(name=file, text=text)
    made.steps.add(group="y", launch=candidate_pb2.Launch(entry="run0"))
    return made


HONEST = tasks.program(tasks.SOFTMAX, [tasks.SOFTMAX.honest])


@pytest.mark.parametrize("case", SOURCES, ids=lambda case: case.name)
def test_a_hostile_source_becomes_no_binary(
    case: Source, compiler: Compiler, hasty_compiler: Compiler, traces: Any
) -> None:
    used = hasty_compiler if "COMPILE_LIMIT" in case.kinds else compiler
    assert isinstance(used.compile(HONEST).outcome, artifact_pb2.Artifact)  # its worker is there
    before = traces.now()
    begin = time.monotonic()
    outcome = used.compile(program_of(case.text, case.file)).outcome
    assert time.monotonic() - begin < case.seconds
    assert isinstance(outcome, Rejected)
    kind = verdict_pb2.FailureKind.Name(outcome.kind).removeprefix("FAILURE_KIND_")
    assert kind in case.kinds, outcome.diagnostics
    assert "root:" not in outcome.diagnostics  # nothing of a file of the host is told either
    assert isinstance(used.compile(HONEST).outcome, artifact_pb2.Artifact)
    traces.assert_same(before)


@pytest.mark.parametrize("case", PLANS, ids=lambda case: case.name)
def test_a_hostile_plan_is_refused_unread(case: Plan) -> None:
    program = tasks.program(tasks.SOFTMAX, [tasks.SOFTMAX.honest])
    assert objections(program, artifact_pb2.Artifact(), aten.is_allowed, input_count=1) == []
    case.spoil(program)
    found = objections(program, artifact_pb2.Artifact(), aten.is_allowed, input_count=1)
    assert any(case.words in objection for objection in found), found


def inspected(file: Path) -> task_pb2.Task:
    return intake.inspect(intake.read(intake.Request(str(file), target="cpu")))


def accept(file: Path, case: BadModule) -> None:
    """Raises BadInput where the intake refuses the file or, if it is for the judge to say, the judge does."""
    task = inspected(file)
    assert case.is_judged, "accepted"
    session = Session(task)
    try:
        of_task = benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_TASK, seed=1)
        session.compare(program_of(""), artifact_pb2.Artifact(), [of_task])
    finally:
        session.close()


@pytest.mark.parametrize("case", MODULES, ids=lambda case: case.name)
def test_a_hostile_module_is_bad_input(case: BadModule, bench: Any, traces: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(bench.filled(case.text))
    before = traces.now()
    begin = time.monotonic()
    with pytest.raises(BadInput) as refused:
        accept(file, case)
    assert case.words in str(refused.value)
    assert time.monotonic() - begin < case.seconds
    file.write_text(tasks.SOFTMAX.text())
    assert inspected(file).class_name == "Model"
    traces.assert_same(before)
    assert not Path(bench.places["escaped"]).exists()
