"""What ends one process after the other: it is set aside with its evidence, and the run goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gpu_bench.servicer import BenchmarkServicer
from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.commands.cli import app
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.local import LocalServices
from orchestrator.serving.reviving import Reviving
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith.errors import ServiceDied, WorkerCrashed, WorkerKilled
from warpsmith.v1 import (
    benchmark_service_pb2,
    candidate_pb2,
    run_pb2,
    task_pb2,
    trial_pb2,
    verdict_pb2,
)

EFFORT = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)
SET_ASIDE = verdict_pb2.FAILURE_KIND_SET_ASIDE


def ran(archive: Archive, world: testing.World) -> tuple[run_pb2.Run, list[trial_pb2.Trial]]:
    agents = world.agents()
    run = run_pb2.Run(id="r", task=testing.task(), budget=run_pb2.Budget(wall_seconds=60), created_at=1.0)
    archive.put_run(run)
    SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), Story(archive, run), effort=EFFORT).execute()
    return run, archive.trials("r")


@pytest.mark.parametrize("method", ["MeasureArtifact", "VerifyArtifact"])
def test_a_program_over_which_the_service_ends_three_times_is_set_aside_and_the_run_goes_on(
    tmp_path: Path, method: str
) -> None:
    class Deadly(testing.World):
        count = 0

        def _meet(self, name: str, program: candidate_pb2.Program) -> None:
            if name == method and program.sources[0].text == "tile:":
                self.count += 1
                raise ServiceDied("Socket closed")

        def MeasureArtifact(self, request: Any, /, timeout: float | None = None) -> Any:
            self._meet("MeasureArtifact", request.program)
            return super().MeasureArtifact(request, timeout)

        def VerifyArtifact(self, request: Any, /, timeout: float | None = None) -> Any:
            self._meet("VerifyArtifact", request.program)
            return super().VerifyArtifact(request, timeout)

    archive, world = Archive.in_directory(tmp_path), Deadly()
    run, trials = ran(archive, world)
    archive.close()
    assert run.state == run_pb2.RUN_STATE_FASTER, run.message
    (set_aside,) = [trial for trial in trials if trial.verdict.kind == SET_ASIDE]
    assert world.count == 3
    assert [(end.worker, end.how) for end in set_aside.ends] == [("benchmark", "Socket closed")] * 3
    assert all(end.at > 0 for end in set_aside.ends)
    assert len(trials) == 8, "the others were all tried"
    shown = CliRunner().invoke(app, ["show", "r", "--runs", str(tmp_path)]).output
    assert "SET_ASIDE: set aside: the benchmark service ended 3 times over it" in shown
    assert shown.count("benchmark ended at ") == 3


def test_a_module_over_which_the_service_ends_three_times_is_bad_input(tmp_path: Path) -> None:
    class Deadly(testing.World):
        def RunReference(self, *_: object, **__: object) -> Any:
            self.calls["RunReference"] += 1
            raise ServiceDied("Socket closed")

    archive, world = Archive.in_directory(tmp_path), Deadly()
    run, _ = ran(archive, world)
    archive.close()
    assert run.state == run_pb2.RUN_STATE_BAD_INPUT
    assert run.message == "module fake is set aside: the benchmark service ended 3 times over it: Socket closed"
    assert world.calls["RunReference"] == 3


class Mortal:
    """Sessions whose judge ends at what the program's name says."""

    def probe(self) -> Any: ...

    @contextmanager
    def using(self, *_: object) -> Iterator[Mortal]:
        yield self

    def compare(self, program: candidate_pb2.Program, *_: object) -> Any:
        raise WorkerCrashed("gone", signal_number=9, stderr_tail="much memory", method=program.sources[0].name)

    def measure(self, _: object) -> Any:
        raise WorkerKilled("gone", signal_number=9, method="measure")

    def settle(self) -> None: ...

    def close(self) -> None: ...


def test_a_program_over_which_three_judges_end_is_set_aside_and_a_module_that_ends_them_is_not() -> None:
    servicer = BenchmarkServicer(Mortal())  # type: ignore[arg-type]

    def compare(digest: str, at: str) -> benchmark_service_pb2.CompareOutputsResponse:
        program = candidate_pb2.Program(digest=digest, sources=[candidate_pb2.DeviceSource(name=at)])
        task = task_pb2.Task(target=task_pb2.TARGET_CPU)
        return servicer.CompareOutputs(benchmark_service_pb2.CompareOutputsRequest(task=task, program=program), None)

    try:
        for _ in range(2):
            for digest in "ab":
                with pytest.raises(WorkerCrashed):
                    compare(digest, "judge")
        fault = compare("a", "judge").fault
        assert fault.kind == SET_ASIDE
        assert fault.detail.startswith("set aside: 3 processes of the judge ended over it, the last one by SIGKILL")
        assert [(end.worker, end.work, end.log_tail) for end in fault.ends] == [("judge", "judge", "much memory")] * 3
        for _ in range(4):
            with pytest.raises(WorkerCrashed):
                compare("c", "prepare")
    finally:
        servicer.close()


def test_a_program_whose_process_somebody_kills_three_times_is_set_aside_and_not_charged_before() -> None:
    servicer = BenchmarkServicer(Mortal())  # type: ignore[arg-type]
    program = candidate_pb2.Program(digest="a")
    task = task_pb2.Task(target=task_pb2.TARGET_CPU)
    request = benchmark_service_pb2.MeasureArtifactRequest(task=task, program=program)
    try:
        for _ in range(2):
            with pytest.raises(WorkerKilled):
                servicer.MeasureArtifact(request, None)
        fault = servicer.MeasureArtifact(request, None).fault
    finally:
        servicer.close()
    assert fault.kind == SET_ASIDE
    assert fault.detail == "set aside: 3 processes ended over it, the last one by SIGKILL from outside"
    assert [(end.worker, end.work, end.how) for end in fault.ends] == [
        ("candidate", "measure", "SIGKILL from outside")
    ] * 3


DEADLY = """
import os, signal
from orchestrator.serving import fake_service

class Deadly(fake_service._Fake):
    async def turn(self, method, request, call):
        return lambda: None

    def MeasureArtifact(self, request, context):
        if request.program.sources[0].text == "m0:c1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().MeasureArtifact(request, context)

fake_service._Fake = Deadly
fake_service.serve_role("benchmark")
"""


def test_a_program_that_kills_the_real_process_is_tried_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"benchmark": "deadly_benchmark"}
    (tmp_path / "deadly_benchmark.py").write_text(DEADLY)
    for name in ("reasoning", "synthesis", "compile", "correctness"):
        text = f"from orchestrator.serving.fake_service import serve_role\n\nserve_role({name!r})\n"
        (tmp_path / f"fake_{name}.py").write_text(text)
        modules[name] = f"fake_{name}"
    modules["orchestrator"] = "orchestrator"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ended = threading.Event()
    noted: list[str] = []

    def revive(services: LocalServices) -> None:
        reviving = Reviving(services, noted.append)
        while not ended.wait(0.1):
            reviving.look()

    with LocalServices(tmp_path / "runs", modules=modules, environment={"FAKE_SETTINGS": "1"}) as services:
        thread = threading.Thread(target=revive, args=(services,))
        thread.start()
        try:
            orchestrator = orchestrator_at(services.address("orchestrator"))
            run = client.create(orchestrator, testing.task(), run_pb2.Budget(wall_seconds=120), fresh=True)
            client.follow(orchestrator, run.id, lambda _: None)
        finally:
            ended.set()
            thread.join()
    archive = Archive.in_directory(tmp_path / "runs")
    found, trials = archive.run(run.id), archive.trials(run.id)
    archive.close()
    assert len(noted) == 3, noted
    assert found.state == run_pb2.RUN_STATE_NO_FASTER, found.message
    (set_aside,) = [trial for trial in trials if trial.verdict.kind == SET_ASIDE]
    assert [end.worker for end in set_aside.ends] == ["benchmark"] * 3
    assert len(trials) == 9, "plan zero and eight choices, of which one kills"
