"""The very source that runs on a GPU, executed here: values as the interpreter computes them, and nothing found.

A slice of every strategy and every class of shape; `make test-simt ALL=1` runs all of them.
"""

from __future__ import annotations

import re

import pytest
from simulated import Subject, simulation, wrong_values
from subjects import a_slice, every_subject

from agent_correctness.simulation.simt import INCLUDE_DIRECTORY as SIMT_INCLUDE
from agent_correctness.simulation.simt import Execution, Sanitizer, Simulator
from agent_synthesis.emit.registry import BACKWARDS, BUNDLES, INCLUDE_DIRECTORY, PRODUCTS, RECURRENT, TAILED, schedules
from warpsmith.v1 import task_pb2

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]  # the first test of each sanitizer compiles and runs all

SLICE = a_slice()
ORDERED = list({subject.strategy: subject for subject in reversed(SLICE)}.values())
"""One of each strategy: what orders threads is the same in all of its shapes."""


@pytest.fixture(scope="module")
def address(simulator: Simulator) -> dict[str, Execution]:
    return _executed(simulator, SLICE, Sanitizer.ADDRESS)


@pytest.fixture(scope="module")
def thread(simulator: Simulator) -> dict[str, Execution]:
    return _executed(simulator, ORDERED, Sanitizer.THREAD)


def _executed(simulator: Simulator, subjects: list[Subject], sanitizer: Sanitizer) -> dict[str, Execution]:
    executions = simulator.execute_all([simulation(subject) for subject in subjects], sanitizer)
    return {subject.name: execution for subject, execution in zip(subjects, executions, strict=True)}


@pytest.mark.parametrize("subject", SLICE, ids=lambda subject: subject.name)
def test_a_kernel_computes_what_the_interpreter_says_and_no_access_is_stray(
    address: dict[str, Execution], subject: Subject
) -> None:
    execution = address[subject.name]
    assert not execution.findings
    assert not wrong_values(subject.nest, execution.outputs)


@pytest.mark.parametrize("subject", ORDERED, ids=lambda subject: subject.name)
def test_a_kernel_has_no_race(thread: dict[str, Execution], subject: Subject) -> None:
    execution = thread[subject.name]
    assert not execution.findings
    assert not wrong_values(subject.nest, execution.outputs)


def test_the_slice_has_every_strategy_and_every_class_of_shape() -> None:
    everything = every_subject()
    assert {subject.strategy for subject in SLICE} == {subject.strategy for subject in everything}
    assert {subject.shape_class for subject in SLICE} == {subject.shape_class for subject in everything}


def test_every_emitter_of_memory_bound_nests_is_a_subject() -> None:
    elsewhere = PRODUCTS | RECURRENT | BACKWARDS | TAILED | BUNDLES  # test_bundles has these
    elsewhere |= {"cuda_convolution_product", "cuda_segments"}  # test_row_sums has parts in order
    emitters = {schedule.name for schedule in schedules(task_pb2.TARGET_CUDA)} - elsewhere
    assert {subject.schedule.name for subject in every_subject()} == emitters


def test_every_instruction_of_the_device_has_a_function_on_the_cpu() -> None:
    declared = re.compile(r"^(?:template <[^>]*> )?WS_INLINE [\w ]+? (\w+)\(", re.MULTILINE)
    device = declared.findall((INCLUDE_DIRECTORY / "ws_ptx.cuh").read_text())
    host = declared.findall((SIMT_INCLUDE / "simt" / "ptx.hpp").read_text())
    assert len(device) > 15
    assert set(device) <= set(host)
