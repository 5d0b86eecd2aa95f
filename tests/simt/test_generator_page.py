"""The walk-through of the generator shows what the generator makes today, and its examples run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from one_thread_an_element import OneThreadAnElement
from simulated import Subject, simulation, wrong_values

from agent_correctness.simulation.simt import Sanitizer, Simulator
from agent_synthesis.testing import transposed
from warpsmith.hardware import H200

DOCS = Path(__file__).parent.parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import generator_page  # noqa: E402


def test_the_excerpts_are_what_the_generator_makes() -> None:
    text = generator_page.PAGE.read_text()
    assert "<!-- made: " in text
    assert generator_page.written(text) == text, "write it again with: python docs/generator_page.py"


def test_the_files_that_the_page_names_are_there() -> None:
    for name in generator_page.files(generator_page.PAGE.read_text()):
        assert (DOCS.parent / name).exists(), name


def test_the_example_schedule_computes() -> None:
    simulator = Simulator()
    if simulator.missing():
        pytest.skip(simulator.missing())
    subject = Subject("one_thread", "example", "transposed", replace(transposed(24, 20), name="one_thread"),
                      OneThreadAnElement(H200))  # fmt: skip
    try:
        execution = simulator.execute(simulation(subject), Sanitizer.ADDRESS)
    finally:
        simulator.close()
    assert not execution.findings
    assert not wrong_values(subject.nest, execution.outputs)
