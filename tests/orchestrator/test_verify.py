"""Records: what is written, what contradicts itself, and what judging again finds to differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import finalists, testing
from orchestrator.archive import Archive
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.story import Story
from orchestrator.trust import record, verify
from warpsmith.errors import BadInput, NotFound
from warpsmith.v1 import run_pb2, timing_pb2


@pytest.fixture
def world() -> testing.World:
    return testing.World()


@pytest.fixture
def run(world: testing.World, tmp_path: Path) -> run_pb2.Run:
    """A run that found something faster."""
    archive = Archive.in_directory(tmp_path / "runs")
    agents = world.agents()
    made = run_pb2.Run(id="20260101-000000-abc", task=testing.task("softmax"), created_at=1.0)
    archive.put_run(made)
    SearchRun(made, agents, DeviceGate(agents.benchmarks), Beam(), Story(archive, made)).execute()
    archive.close()
    return made


def written(tmp_path: Path, run: run_pb2.Run, change: Callable[[Any], object] = lambda _: None) -> Path:
    file = tmp_path / "softmax.record.json"
    held = json.loads(record.text(run))
    change(held)
    file.write_text(json.dumps(held))
    return file


def test_a_record_comes_back_whole_and_without_contradictions(tmp_path: Path, run: run_pb2.Run) -> None:
    again, contradictions = record.read(written(tmp_path, run))
    assert again == run
    assert contradictions == []
    assert again.task.sources


def test_a_speedup_over_a_better_time_of_the_search_is_no_contradiction(
    tmp_path: Path, world: testing.World, run: run_pb2.Run
) -> None:
    before = timing_pb2.Timing()
    before.CopyFrom(run.best.timing)
    for arm in before.arms:
        arm.median_ns /= 2.0
    finalists.hold_to(run.best.timing, before)
    assert finalists.BASELINE_WAS_FASTER in run.best.timing.raised
    held, contradictions = record.read(written(tmp_path, run))
    assert contradictions == []
    found = again(world, held)
    assert not any("over eager" in sentence for sentence in found.differences)
    assert any("a baseline in its search" in note for note in found.notes)
    held.best.timing.speedup_eager.median *= 10
    assert any("over eager" in sentence for sentence in record.contradictions(held))


def _without_speedup(held: Any) -> None:
    del held["run"]["best"]["timing"]["speedup_eager"]


def _faster(held: Any) -> None:
    held["run"]["best"]["timing"]["speedup_fastest"]["median"] *= 3


def _quicker_candidate(held: Any) -> None:
    arm = next(arm for arm in held["run"]["best"]["timing"]["arms"] if arm["kind"] == "ARM_KIND_CANDIDATE")
    arm["median_ns"] /= 2


def _other_module(held: Any) -> None:
    held["run"]["task"]["sources"][0]["content"] = "cGFzcw=="


def _other_kernel(held: Any) -> None:
    held["run"]["best"]["candidate"]["program"].setdefault("outputs", []).append("forged")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_faster, "but the recorded times give"),
        (_without_speedup, "tells no speedup over eager"),
        (_quicker_candidate, "but the recorded times give"),
        (_other_module, "the module was changed"),
        (_other_kernel, "the kernel was changed"),
    ],
)
def test_a_tampered_record_says_what_was_changed(
    change: Callable[[Any], None], words: str, tmp_path: Path, run: run_pb2.Run
) -> None:
    _, contradictions = record.read(written(tmp_path, run, change))
    assert "changed after it was written" in contradictions[0]
    assert any(words in sentence for sentence in contradictions[1:]), contradictions


@pytest.mark.parametrize(
    "text", ["", "{}", '{"format": "other", "digest": "", "run": {}}'], ids=["empty", "no", "other"]
)
def test_what_is_no_record_is_bad_input(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BadInput, match="record"):
        record.read(file)


def test_a_run_without_a_result_has_no_record() -> None:
    with pytest.raises(NotFound, match="no result"):
        record.text(run_pb2.Run(id="x"))


def again(world: testing.World, run: run_pb2.Run, contradictions: list[str] | None = None) -> verify.Verification:
    agents = world.agents()
    return verify.verify(agents, DeviceGate(agents.benchmarks), run, contradictions or [])


def test_a_record_that_is_true_holds(world: testing.World, run: run_pb2.Run) -> None:
    found = again(world, run)
    assert (found.exit_code, found.differences) == (0, [])
    assert "the record holds" in verify.rows(found)[0]


def test_another_speedup_and_another_program_are_differences(world: testing.World, run: run_pb2.Run) -> None:
    run.best.timing.speedup_eager.median *= 5
    run.best.candidate.program.sources.add(name="kernel.cpp", text="forged")
    run.best.candidate.program.digest = "other"
    found = again(world, run)
    assert found.exit_code == 1
    assert any("the moves give" in sentence for sentence in found.differences)
    assert any("farther apart than" in sentence for sentence in found.differences)


def test_a_number_of_another_machine_is_told_and_not_compared(world: testing.World, run: run_pb2.Run) -> None:
    run.device.name = "another"
    run.best.timing.speedup_eager.median *= 5
    found = again(world, run)
    assert found.differences == []
    assert "speedups are not compared" in found.notes[0]
