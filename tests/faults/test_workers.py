"""Processes of the judge that somebody kills or stops in the midst of a run on real services: no candidate is charged.

`HOLD=60` in the environment has them stand still for so many seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import HOLD_SECONDS, hold, wait_until

from orchestrator.commands import client
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.local import METRICS, MODULES, TARGETS_FILE, LocalServices
from warpsmith import digest
from warpsmith.sandbox import jail_init
from warpsmith.testing import softmax_task
from warpsmith.v1 import run_pb2, task_pb2, trial_pb2, verdict_pb2

pytestmark = [pytest.mark.services, pytest.mark.timeout(600 + 4 * HOLD_SECONDS)]

BUDGET = run_pb2.Budget(wall_seconds=300, trial_count=2)
ENDS = (run_pb2.RUN_STATE_FASTER, run_pb2.RUN_STATE_NO_FASTER, run_pb2.RUN_STATE_AT_FLOOR)


@dataclass
class Judged:
    """A run on real services, whose benchmark service has processes of its own."""

    services: LocalServices
    runs: Path
    trials: list[trial_pb2.Trial] = field(default_factory=list)
    ended: run_pb2.Run | None = None

    @property
    def benchmark(self) -> int:
        """The service's process."""
        return self.services._children["benchmark"].process.pid

    def workers(self) -> set[int]:
        """All that it has started."""
        return set(jail_init.descendants(self.benchmark))

    def is_called(self, method: str) -> bool:
        """Whether it works on such a call."""
        targets = json.loads((self.runs / TARGETS_FILE).read_text())
        (address,) = next(each["targets"] for each in targets if each["labels"]["service"] == "benchmark")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        found = re.search(rf'^warpsmith_grpc_calls_active{{method="{method}".*}} (\S+)$', text, re.MULTILINE)
        return found is not None and float(found[1]) > 0

    def begin(self) -> threading.Thread:
        """Begins the run; who watches it to its end."""
        orchestrator = orchestrator_at(self.services.address("orchestrator"))
        run = client.create(orchestrator, quick_task(), BUDGET, fresh=True)

        def hear(event: run_pb2.RunEvent) -> None:
            if event.HasField("trial"):
                self.trials.append(event.trial)

        def watch() -> None:
            self.ended = client.follow(orchestrator, run.id, hear)

        watching = threading.Thread(target=watch)
        watching.start()
        return watching


def quick_task() -> task_pb2.Task:
    """A task on which torch.compile takes no time."""
    task = softmax_task()
    (source,) = task.sources
    source.content = source.content.replace(b"    def forward", b"    @torch.compiler.disable\n    def forward")
    task.digest = digest.of_task(task)
    return task


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    with LocalServices(tmp_path / "runs", modules=MODULES, environment={METRICS: "0"}) as services:
        yield Judged(services, tmp_path / "runs")


def signal_all(processes: set[int], number: int) -> None:
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_of_the_judge_that_are_killed_or_stopped_cost_a_run_time_and_no_candidate(
    judged: Judged, number: int
) -> None:
    watching = judged.begin()
    for method in ("RunReference", "CompareOutputs", "MeasureArtifact"):
        wait_until(lambda called=method: judged.is_called(called) or not watching.is_alive())  # type: ignore[misc]
        assert watching.is_alive(), "the run outlasts the fault"
        struck = judged.workers()
        assert struck
        signal_all(struck, number)
        if number == signal.SIGSTOP:
            hold()
            signal_all(struck, signal.SIGCONT)
    watching.join()  # the test has a limit of its own
    assert judged.ended is not None
    assert judged.ended.state in ENDS, judged.ended.message
    assert "ended early" not in judged.ended.message
    assert [trial.number for trial in judged.trials] == [1, 2]
    assert {trial.verdict.state for trial in judged.trials} == {verdict_pb2.VERDICT_STATE_PASS}, judged.trials
    assert all(trial.HasField("timing") for trial in judged.trials)
