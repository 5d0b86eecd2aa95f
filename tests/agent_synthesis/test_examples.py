"""The examples that people recognise are captured, and kernels are offered for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_synthesis.graphs.capture_worker import capture_task
from agent_synthesis.plans import moves
from agent_synthesis.synthesizer import BuiltInSynthesizer
from orchestrator.tasks import intake
from warpsmith.v1 import analysis_pb2

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_captured_and_kernels_are_offered_for_it_on_a_gpu(example: Path) -> None:
    task = intake.read(intake.Request(str(example), target="cuda"))
    plan = BuiltInSynthesizer(capture_task).plan(task, [])
    offered = {legal.move.kind for legal in moves.legal(plan)}
    assert analysis_pb2.MOVE_KIND_AUTHOR in offered
