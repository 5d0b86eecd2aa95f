"""A benchmark service whose GPU is out of service: the others go on, and no candidate is charged."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from orchestrator import testing
from orchestrator.agents import Agents
from orchestrator.archive import Archive
from orchestrator.search_run import SearchRun
from orchestrator.serving import device_gate
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith import plugins
from warpsmith.errors import DeviceQuarantined
from warpsmith.v1 import run_pb2, task_pb2, verdict_pb2


class Failing(testing.World):
    """A device that is out of service after so many calls, and answers nothing after them."""

    sound_calls = 0

    def _called(self, method: str, *, timed: bool = False) -> None:
        super()._called(method, timed=timed)
        if self.calls.total() > self.sound_calls:
            raise DeviceQuarantined("the GPU is out of service (memory)")


def run_on(benchmarks: Sequence[Any], directory: Path, trials: int = 20) -> run_pb2.Run:
    """One run over so many devices, with agents that never fail."""
    names = [f"m{number}" for number in range(5)]
    world = testing.World(
        gains={name: 1.1 + 0.01 * number for number, name in enumerate(names)},
        choices={name: ["a", "b", "c"] for name in names},
        floor_ns=1.0,
    )
    agents = Agents(world, world, world, world, [world if each is None else each for each in benchmarks])
    for each in benchmarks:
        if each is not None:
            each.gains, each.floor_ns = world.gains, 1.0
    budget = run_pb2.Budget(wall_seconds=30, trial_count=trials)
    run = run_pb2.Run(id="one", task=testing.task(target=task_pb2.TARGET_CUDA), budget=budget)
    archive = Archive.in_directory(directory)
    archive.put_run(run)
    effort = Effort(parallel_trials=4, refill_at=4, proposal_count=8, retry_pause_seconds=0.01)
    story = Story(archive, run)
    gate = DeviceGate(agents.benchmarks)
    return SearchRun(run, agents, gate, plugins.load("search", "beam"), story, effort=effort).execute()


@pytest.mark.parametrize("sound_calls", [0, 1, 5])
def test_a_run_goes_on_with_the_other_devices_and_charges_nobody(sound_calls: int, tmp_path: Path) -> None:
    bad = Failing()
    bad.sound_calls = sound_calls
    ended = run_on([bad, None, None], tmp_path)
    assert ended.state == run_pb2.RUN_STATE_FASTER, ended.message
    assert (ended.trial_count, ended.pass_count) == (20, 20)
    assert bad.calls.total() == sound_calls + 1, "it is put aside at its first refusal"
    kept = Archive.reading(tmp_path).trials("one")
    assert {trial.verdict.state for trial in kept} == {verdict_pb2.VERDICT_STATE_PASS}


def test_a_run_whose_only_device_is_out_of_service_says_so(tmp_path: Path) -> None:
    ended = run_on([Failing()], tmp_path)
    assert ended.state == run_pb2.RUN_STATE_FAILED
    assert "out of service (memory)" in ended.message
    assert ended.trial_count == 0


def test_a_device_put_aside_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_gate, "ASIDE_SECONDS", 2.0)
    world = testing.World()
    gate = DeviceGate([world])

    def refused() -> None:
        with gate.timing():
            raise DeviceQuarantined("the GPU is out of service")

    with pytest.raises(DeviceQuarantined):
        refused()
    assert REGISTRY.get_sample_value("warpsmith_devices_aside") == 1
    timed = threading.Event()

    def measure() -> None:
        with gate.timing() as benchmark:
            assert benchmark is world
            timed.set()

    threading.Thread(target=measure, daemon=True).start()
    assert not timed.wait(0.05)
    assert timed.wait(30)
    assert REGISTRY.get_sample_value("warpsmith_devices_aside") == 0
