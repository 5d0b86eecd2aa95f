"""Kernels of whole plans of training steps, executed here: values as the interpreter computes them, nothing found."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from simulated import Subject, simulation, wrong_values
from training_steps import KERNELS, Tried

from agent_correctness.simulation.simt import Execution, Sanitizer, Simulator
from agent_synthesis.emit.registry import PRODUCTS
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from warpsmith.v1 import analysis_pb2, task_pb2

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]  # the first test compiles and runs all

WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
STEPS = (
    "gate", "layer norm", "residual and norm", "group norm", "cross-entropy, smoothed", "gathered",
    "cross-entropy of images", "rotary embedding", "max-pooling", "average pooling of what is inside",
    "repeated elements", "convolution by channel", "slices", "cross-entropy of what comes next",
    "rows added up: embedding with padding",
    "rows added up: embedding among others", "rows added up: columns", "rows added up: added to",
)  # fmt: skip


def subjects() -> list[Subject]:
    """Every kernel of their whole plans that the machine can run: it has no tensor cores."""
    found = []
    for step in STEPS:
        plan = moves.apply(Tried.of(KERNELS[step], task_pb2.TARGET_CUDA).plan, WHOLE)
        for group in plan.groups:
            nest = plan.nest(group)
            if group.engine == "authored" and isinstance(nest, Nest) and group.schedule not in PRODUCTS:
                name = f"ws_{re.sub(r'[^a-z]+', '_', step)}_{nest.name}"
                schedule: Any = plan.schedule(group).made
                found.append(Subject(name, step, "", replace(nest, name=name), schedule, group.settings))
    return found


SUBJECTS = subjects()


@pytest.fixture(scope="module")
def executed(simulator: Simulator) -> dict[str, Execution]:
    executions = simulator.execute_all([simulation(subject) for subject in SUBJECTS], Sanitizer.ADDRESS)
    return {subject.name: execution for subject, execution in zip(SUBJECTS, executions, strict=True)}


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_kernel_of_a_step_computes_what_the_interpreter_says(
    executed: dict[str, Execution], subject: Subject
) -> None:
    assert not executed[subject.name].findings
    assert not wrong_values(subject.nest, executed[subject.name].outputs)
