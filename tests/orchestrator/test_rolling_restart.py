"""Services that are replaced while a run is under way, and devices that come and go: no candidate is charged."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import testing
from orchestrator.commands import client
from orchestrator.serving import dialing
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.local import METRICS, MODULES, TARGETS_FILE, LocalServices
from orchestrator.walks import Effort
from warpsmith import digest
from warpsmith.settings import Settings
from warpsmith.testing import softmax_task
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2, trial_pb2, verdict_pb2

AGENTS = ("reasoning", "synthesis", "compile", "correctness", "benchmark")


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServices]:
    """The real orchestrator, and fakes of the five others, each a process at a socket that stays its own."""
    for name in AGENTS:
        text = f"from orchestrator.serving.fake_service import serve_role\n\nserve_role({name!r})\n"
        (tmp_path / f"fake_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    modules = {"benchmark": "fake_benchmark", **{name: f"fake_{name}" for name in AGENTS if name != "benchmark"}}
    modules["orchestrator"] = "orchestrator"
    environment = {"FAKE_CALL_SECONDS": "0.02"}
    with LocalServices(tmp_path / "runs", modules=modules, environment=environment) as started:
        yield started


def run_of(
    services: LocalServices, task: task_pb2.Task | None = None, trial_count: int = 150
) -> tuple[run_pb2.Run, list[trial_pb2.Trial], threading.Thread]:
    """A run under way, the list that its trials come to, and who fills it."""
    orchestrator = orchestrator_at(services.address("orchestrator"))
    budget = run_pb2.Budget(wall_seconds=300, trial_count=trial_count)
    run = orchestrator.CreateRun(
        messages.CreateRunRequest(task=task or testing.task(), budget=budget, search="beam", fresh=True)
    ).run
    trials: list[trial_pb2.Trial] = []

    def heard(event: run_pb2.RunEvent) -> None:
        if event.HasField("trial"):
            trials.append(event.trial)

    watching = threading.Thread(target=client.follow, args=(orchestrator, run.id, heard))
    watching.start()
    return run, trials, watching


def finished(services: LocalServices, run: run_pb2.Run, watching: threading.Thread) -> run_pb2.Run:
    watching.join()  # the test has a limit of its own
    return orchestrator_at(services.address("orchestrator")).GetRun(messages.GetRunRequest(run_id=run.id)).run


def settings(trial: trial_pb2.Trial) -> set[str]:
    return set(map(testing.name_of, trial.candidate.moves))


def test_a_rolling_restart_of_every_agent_and_the_benchmark_charges_no_candidate(services: LocalServices) -> None:
    run, _, watching = run_of(services)
    undisturbed = finished(services, run, watching)
    run, trials, watching = run_of(services)
    while len(trials) < 5:
        watching.join(0.05)
    for name in AGENTS:
        services.restart(name)
    assert watching.is_alive(), "the run outlasts the restarts"
    ended = finished(services, run, watching)
    assert ended.state == undisturbed.state == run_pb2.RUN_STATE_FASTER, ended.message
    assert ended.trial_count == undisturbed.trial_count == 150
    assert {trial.verdict.state for trial in trials} == {verdict_pb2.VERDICT_STATE_PASS}
    # The values of a setting are alike in the fake space: the best is a set of settings.
    assert settings(ended.best) == settings(undisturbed.best)
    assert ended.best.timing.speedup_fastest.median == undisturbed.best.timing.speedup_fastest.median


def measurements_under_way(runs: Path) -> float:
    targets = json.loads((runs / TARGETS_FILE).read_text())
    (address,) = next(each["targets"] for each in targets if each["labels"]["service"] == "benchmark")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    found = re.search(r'^warpsmith_grpc_calls_active{method="MeasureArtifact".*} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.services
@pytest.mark.timeout(600)
def test_a_restart_of_the_real_benchmark_in_the_midst_of_a_measurement_charges_no_candidate(tmp_path: Path) -> None:
    task = softmax_task()  # torch.compile would take most of the test's time, twice
    (source,) = task.sources
    source.content = source.content.replace(b"    def forward", b"    @torch.compiler.disable\n    def forward")
    task.digest = digest.of_task(task)
    with LocalServices(tmp_path / "runs", modules=MODULES, environment={METRICS: "0"}) as services:
        run, trials, watching = run_of(services, task, trial_count=2)
        while not measurements_under_way(tmp_path / "runs"):
            assert watching.is_alive()
            time.sleep(0.02)
        services.restart("benchmark")
        assert watching.is_alive(), "the run outlasts the restart"
        ended = finished(services, run, watching)
    ends = run_pb2.RUN_STATE_FASTER, run_pb2.RUN_STATE_NO_FASTER, run_pb2.RUN_STATE_AT_FLOOR
    assert ended.state in ends, ended.message
    assert ended.trial_count == 2
    assert {trial.verdict.state for trial in trials} == {verdict_pb2.VERDICT_STATE_PASS}, trials
    assert all(trial.HasField("timing") for trial in trials)


def test_devices_that_come_and_go_are_found_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["10.0.0.1:50051", "10.0.0.2:50051"]
    monkeypatch.setattr(dialing, "endpoints", lambda _: list(there))
    gate = DeviceGate([])
    settings = Settings(addresses={"benchmark": "dns:///benchmark:50051"})
    devices = dialing.Devices(settings, {}, gate.renew, every_seconds=3600)
    devices.look()
    assert gate.device_count == 2
    with gate.timing() as gone, gate.timing() as stays:
        there[:] = ["10.0.0.2:50051", "10.0.0.3:50051", "10.0.0.4:50051"]
        devices.look()
        assert gate.device_count == 3
    with gate.timing() as one, gate.timing() as two, gate.timing() as three:
        assert gone not in (one, two, three)
        assert stays in (one, two, three)
    there[:] = there[:1]
    devices.look()
    assert gate.device_count == 1
    devices.close()


def test_a_run_keeps_two_trials_for_each_of_many_devices() -> None:
    assert Effort.of(task_pb2.TARGET_CUDA, 16).parallel_trials == 12
    assert Effort.of(task_pb2.TARGET_CUDA, 16, device_count=64).parallel_trials == 128
