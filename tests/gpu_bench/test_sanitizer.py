"""compute-sanitizer without a GPU: a script that talks like it, in the real jail."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpu_bench.sanitizing import sanitizer
from gpu_bench.sanitizing.sanitized_run import is_told, kernels_alone
from warpsmith.sandbox import jail
from warpsmith.sandbox.jail import Rung
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, task_pb2, tensor_pb2, verdict_pb2

CUBIN = artifact_pb2.Artifact(format=artifact_pb2.BINARY_FORMAT_CUBIN)
NAMESPACED = [rung for rung in jail.probe() if rung is not Rung.LANDLOCK]


def said(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: Rung | None = None
) -> verdict_pb2.Inspection:
    """What the tool racecheck is taken to say where the sanitizer is this shell script."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sanitizer, "installed", lambda: fake)
    (only,) = sanitizer.sanitize(candidate_pb2.Program(), CUBIN, rung or NAMESPACED[0], ("racecheck",))
    assert only.tool == "compute-sanitizer racecheck"
    return only


needs_namespaces = pytest.mark.skipif(not NAMESPACED, reason="no rung with namespaces works here")


@needs_namespaces
def test_a_finding_is_a_fault_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(
        "echo '========= COMPUTE-SANITIZER'; echo '========= Race at run0+0x10'; exit 77", tmp_path, monkeypatch
    )
    assert (found.finding, found.skipped) == ("Race at run0+0x10", "")
    fault = sanitizer.fault([verdict_pb2.Inspection(tool="compute-sanitizer memcheck"), found])
    assert fault is not None
    assert fault.kind == verdict_pb2.FAILURE_KIND_WRONG_RACE


@needs_namespaces
def test_nothing_found_is_said_only_where_the_kernels_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = said("echo 'the kernels ran'", tmp_path, monkeypatch)
    assert (ran.finding, ran.skipped) == ("", "")
    assert "Error 304" in said("echo '========= Error 304' >&2; exit 255", tmp_path, monkeypatch).skipped
    named = "echo 'torch.AcceleratorError: CUDA error: too many blocks'; echo 'Compile with advice.'; exit 1"
    assert said(named, tmp_path, monkeypatch).skipped.endswith(
        "here: torch.AcceleratorError: CUDA error: too many blocks"
    )
    ours = "echo 'Traceback:'; echo '  File \"/a/place\", line 7'; echo 'gpu_bench.executor.ProgramFault: x0'; exit 1"
    assert said(ours, tmp_path, monkeypatch).skipped == "it does not run here: gpu_bench.executor.ProgramFault: x0"


@needs_namespaces
def test_a_tool_sees_the_gpu_that_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services beside these may time something on another."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    script = '[ "$CUDA_VISIBLE_DEVICES" = 3 ] && echo "the kernels ran"'
    assert said(script, tmp_path, monkeypatch).skipped == ""


def test_a_tool_that_found_no_memory_is_asked_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, ran = "echo 'torch.AcceleratorError: CUDA error: out of memory'; exit 1", "echo 'the kernels ran'"
    runs: list[str] = []
    real = sanitizer._run

    def run(installed: Path, tool: str, *rest: Any) -> verdict_pb2.Inspection:
        runs.append(tool)
        installed.write_text(f"#!/bin/sh\n{short if len(runs) == 1 else ran}\n")
        return real(installed, tool, *rest)

    monkeypatch.setattr(sanitizer, "_run", run)
    second = said("", tmp_path, monkeypatch)
    assert (second.finding, second.skipped, runs) == ("", "", ["racecheck"] * 2)


@needs_namespaces
def test_what_a_tool_says_of_itself_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("Error: Device not supported. Please refer to", "Target application returned an error")
    own = "; ".join(f"echo '========= {line}'" for line in lines)
    lost = said(f"{own}; exit 77", tmp_path, monkeypatch)
    assert (lost.finding, lost.skipped) == ("", "it does not run here: Error: Device not supported. Please refer to")
    both = said(f"echo '========= Race at run0+0x10'; {own}; exit 77", tmp_path, monkeypatch)
    assert both.finding.startswith("Race at run0+0x10")
    named = "echo '========= Race reported between Write access at out_of_memory+0x10'; exit 77"
    assert "Race reported" in said(named, tmp_path, monkeypatch).finding, "a kernel may be called so"
    warned = "echo '========= Unable to read some symbols'; echo 'the kernels ran'"
    assert said(warned, tmp_path, monkeypatch).skipped == ""


@needs_namespaces
def test_a_tool_that_does_not_end_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "DEADLINE_SECONDS", 0.5)
    monkeypatch.setattr(sanitizer, "LEAST_SECONDS", 0.0)
    assert "no end within" in said("sleep 60", tmp_path, monkeypatch).skipped


WAITING = """
for last; do :; done
while [ ! -e "$last/go" ] && [ ! -e "$last/stop" ]; do sleep 0.02; done
[ -e "$last/stop" ] || echo 'the kernels ran'
"""
"""A sanitizer whose program waits to be told, as the real one does; its last argument is the programs' directory."""


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f"#!/bin/sh\n{WAITING}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sanitizer, "installed", lambda: fake)
    monkeypatch.setattr(sanitizer, "DEADLINE_SECONDS", 0.5)


@needs_namespaces
@pytest.mark.usefixtures("waiting")
def test_kernels_run_when_asked_for_however_long_the_comparing_took() -> None:
    with sanitizer.begin(candidate_pb2.Program(), CUBIN, NAMESPACED[0], ("memcheck", "synccheck")) as inspecting:
        time.sleep(1.0)
        assert not any(each.done() for each in inspecting._running)
        assert [(each.finding, each.skipped) for each in inspecting.answer()] == [("", "")] * 2


@needs_namespaces
@pytest.mark.usefixtures("waiting")
def test_kernels_of_a_program_that_failed_do_not_run_and_nothing_stays() -> None:
    with sanitizer.begin(candidate_pb2.Program(), CUBIN, NAMESPACED[0], ("memcheck",)) as inspecting:
        (running,), place = inspecting._running, Path(inspecting._place.name)
    assert "it does not run here" in running.result().skipped
    assert not place.exists()


def task_of(elements: int) -> task_pb2.Task:
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[elements], strides=[1])
    return task_pb2.Task(target=task_pb2.TARGET_CUDA, inputs=[spec], outputs=[spec])


@needs_namespaces
@pytest.mark.usefixtures("waiting")
def test_tools_load_before_there_is_a_finalist_and_take_the_one_that_comes() -> None:
    ahead = sanitizer.Ahead(task_of(8), NAMESPACED[0])
    ahead.load()
    waiting = ahead._waiting
    assert waiting is not None
    place = Path(waiting._place.name)
    time.sleep(1.0)  # longer than a tool may take that has something to do
    with ahead.begin(candidate_pb2.Program(), CUBIN) as inspecting:
        assert inspecting is waiting
        assert {each.name for each in place.iterdir()} == {"0.program", "0.artifact", sanitizer.LOAD}
        assert [(each.finding, each.skipped) for each in inspecting.answer()] == [("", "")] * 4
    assert not place.exists()
    with ahead.begin(candidate_pb2.Program(), CUBIN) as other:  # of another finalist
        assert other is not waiting
        assert not any(each.skipped for each in other.answer())


@needs_namespaces
@pytest.mark.usefixtures("waiting")
def test_tools_that_ended_or_that_a_program_does_not_need_are_made_anew() -> None:
    ahead = sanitizer.Ahead(task_of(1 << 28), NAMESPACED[0])
    ahead.load()
    waiting = ahead._waiting
    assert waiting is not None
    assert "racecheck" not in waiting._tools
    with ahead.begin(candidate_pb2.Program(), CUBIN) as inspecting:  # small, so that racecheck looks at it too
        assert inspecting is not waiting
        assert len(inspecting.answer()) == 4
    ahead = sanitizer.Ahead(task_of(8), NAMESPACED[0])
    ahead.load()
    waiting = ahead._waiting
    assert waiting is not None
    (Path(waiting._place.name) / sanitizer.STOP).touch()
    for each in waiting._running:
        each.result()
    with ahead.begin(candidate_pb2.Program(), CUBIN) as inspecting:
        assert not any(each.skipped for each in inspecting.answer())


@needs_namespaces
@pytest.mark.usefixtures("waiting")
def test_tools_that_nobody_took_end_with_the_session() -> None:
    ahead = sanitizer.Ahead(task_of(8), NAMESPACED[0])
    ahead.load()
    waiting = ahead._waiting
    assert waiting is not None
    running = list(waiting._running)
    ahead.close()
    assert all(each.done() for each in running)
    nowhere = sanitizer.Ahead(task_pb2.Task(target=task_pb2.TARGET_CPU), NAMESPACED[0])
    nowhere.load()
    assert nowhere._waiting is None


def test_a_process_waits_for_a_word_and_ends_where_none_can_come(tmp_path: Path) -> None:
    place = tmp_path / "programs"
    place.mkdir()
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(is_told, place, sanitizer.GO)
        time.sleep(0.05)
        assert not told.done()
        (place / sanitizer.GO).touch()
        assert told.result()
    (place / sanitizer.STOP).touch()
    assert not is_told(place, sanitizer.GO)
    assert not is_told(tmp_path / "gone", sanitizer.LOAD)


def test_racecheck_is_skipped_at_once_where_it_would_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "installed", lambda: None)
    quarter = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[1 << 28], strides=[1])
    program = candidate_pb2.Program(buffers=[candidate_pb2.Buffer(spec=quarter)] * 3)
    said = {each.tool: each.skipped for each in sanitizer.sanitize(program, CUBIN, Rung.LANDLOCK)}
    assert said.pop("compute-sanitizer racecheck") == "buffers of 3.0 GiB take it longer than 10 s"
    assert set(said.values()) == {"it is not installed"}
    assert len(said) == 3


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "landlock" in said("exit 1", tmp_path, monkeypatch, Rung.LANDLOCK).skipped
    monkeypatch.setattr(sanitizer, "installed", lambda: None)
    several = sanitizer.sanitize(candidate_pb2.Program(), CUBIN, Rung.UNSHARE)
    assert [each.skipped for each in several] == ["it is not installed"] * 4
    assert sanitizer.fault(several) is None


def test_a_program_without_kernels_is_not_inspected() -> None:
    assert sanitizer.sanitize(candidate_pb2.Program(), artifact_pb2.Artifact(), Rung.UNSHARE) == []


def test_results_of_library_steps_become_inputs(small: Any) -> None:
    alone = kernels_alone(small.library_program())
    assert not alone.steps
    sources = [buffer.source for buffer in alone.buffers if buffer.role == candidate_pb2.ROLE_SOURCE]
    assert [source.input_index for source in sources] == list(range(len(sources)))
    assert all(source.origin == graph_pb2.ORIGIN_INPUT for source in sources)
    assert kernels_alone(small.kernel_program(small.softmax)) == small.kernel_program(small.softmax)
