"""Agents that are away, silent, or of an earlier version: how often they are asked, and what a run does without."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from orchestrator import testing
from orchestrator.agents import asked
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith.errors import MethodMissing, ServiceFault, ServiceGone, ServiceLate
from warpsmith.v1 import benchmark_service_pb2, run_pb2, synthesis_service_pb2, trial_pb2


class Unwatched:
    """Hears nothing."""

    def run_changed(self, run: run_pb2.Run) -> None:
        del run

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        del trial


class Earlier(testing.World):
    """Agents of a version that has two methods less."""

    def RepairCandidate(self, *_: object, **__: object) -> synthesis_service_pb2.RepairCandidateResponse:
        self.calls["RepairCandidate"] += 1
        raise MethodMissing("RepairCandidate: UNIMPLEMENTED")

    def OpenTask(self, *_: object, **__: object) -> benchmark_service_pb2.OpenTaskResponse:
        self.calls["OpenTask"] += 1
        raise MethodMissing("OpenTask: UNIMPLEMENTED")


def test_a_run_does_without_repairs_and_what_is_opened_ahead_where_agents_know_neither() -> None:
    def faults() -> float:
        return REGISTRY.get_sample_value("warpsmith_trials_total", {"outcome": "fault"}) or 0.0

    world, before = Earlier(choices={"vector": ("broken", "")}), faults()
    agents = world.agents()
    run = run_pb2.Run(id="r", task=testing.task(), budget=run_pb2.Budget(wall_seconds=20))
    effort = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)
    SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), Unwatched(), effort=effort).execute()
    assert run.state == run_pb2.RUN_STATE_FASTER, run.message
    assert sorted(map(testing.name_of, run.best.candidate.moves)) == ["author", "vector"]
    assert world.calls["RepairCandidate"] >= 1
    assert world.calls["OpenTask"] == 1
    assert faults() == before


@pytest.mark.parametrize(("kind", "count"), [(ServiceGone, 4), (ServiceLate, 4), (ServiceFault, 2), (MethodMissing, 1)])
def test_an_agent_is_asked_again_while_it_is_away_or_silent_and_once_where_it_fails(
    kind: type[ServiceFault], count: int
) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        raise kind("no")

    with pytest.raises(kind):
        asked(call, go_on=lambda: calls < 4, pause_seconds=0.0)
    assert calls == count
    calls = 0
    with pytest.raises(kind):
        asked(call, pause_seconds=0.0, away_seconds=0.0)
    assert calls == min(count, 2)
