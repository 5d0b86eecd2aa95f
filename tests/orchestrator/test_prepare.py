"""What ends a run before its search: a baseline at the floor, unless algebra may go below what the floor counts."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import testing
from orchestrator.prepare import KnownReference, at_floor, has_algebra, nothing_known
from orchestrator.search.beam import Beam
from orchestrator.search.memory import Memory
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith.v1 import analysis_pb2, run_pb2, task_pb2, timing_pb2, trial_pb2

AT_FLOOR = timing_pb2.ReferenceReport(
    fastest_arm=timing_pb2.ARM_KIND_COMPILE,
    floor_ns=100.0,
    arms=[timing_pb2.Arm(kind=timing_pb2.ARM_KIND_COMPILE, median_ns=104.0)],
)


def plan_with(name: str, before: analysis_pb2.Cost, after: analysis_pb2.Cost) -> analysis_pb2.Analysis:
    legal = analysis_pb2.LegalMove(move=testing.move(name), before=before, after=after)
    return analysis_pb2.Analysis(legal_moves=[legal])


PRODUCT, NONE = analysis_pb2.Cost(product_flop_count=10**9), analysis_pb2.Cost(product_flop_count=10**6)


def test_a_baseline_at_the_floor_is_searched_where_a_rewrite_spares_products() -> None:
    assert "at most 1.04x" in at_floor(AT_FLOOR, analysis_pb2.Analysis())
    assert at_floor(AT_FLOOR, plan_with("rewrite", PRODUCT, NONE)) == ""


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("author", PRODUCT, NONE),
        ("rewrite", PRODUCT, PRODUCT),
        ("rewrite", analysis_pb2.Cost(read_bytes=800, write_bytes=400), analysis_pb2.Cost(read_bytes=400)),
    ],
)
def test_what_saves_only_what_the_floor_does_not_count_is_no_reason_to_search(
    name: str, before: analysis_pb2.Cost, after: analysis_pb2.Cost
) -> None:
    plan = plan_with(name, before, after)
    assert not has_algebra(plan)
    assert at_floor(AT_FLOOR, plan)


class Deaf:
    """An observer that remembers nothing."""

    def run_changed(self, run: run_pb2.Run) -> None:
        pass

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        pass


def ended_run(world: testing.World, known: KnownReference = nothing_known) -> run_pb2.Run:
    agents = world.agents()
    run = run_pb2.Run(id="r", task=testing.task(), budget=run_pb2.Budget(wall_seconds=20))
    effort = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)
    gate = DeviceGate(agents.benchmarks)
    return SearchRun(run, agents, gate, Beam(), Deaf(), effort=effort, memory=Memory(reference=known)).execute()


def test_a_run_at_the_floor_of_its_products_ends_faster_by_algebra() -> None:
    world = testing.World(
        gains={"rewrite": 5.0}, choices={"rewrite": ["linear_row_sum"]}, floor_ns=0.79 * testing.EAGER_NS
    )
    ended = ended_run(world)
    assert ended.state == run_pb2.RUN_STATE_FASTER
    assert [move.choice for move in ended.best.candidate.moves] == ["linear_row_sum"]


class Multiplying(testing.World):
    """Its floor is one of products: no bytes worth mention."""

    def DescribeDevice(self, request: Any, /, timeout: float | None = None) -> Any:
        reply = super().DescribeDevice(request, timeout)
        reply.device.copy_bytes_per_second = 4e12
        return reply

    def AnalyzePlan(self, request: Any, /, timeout: float | None = None) -> Any:
        reply = super().AnalyzePlan(request, timeout)
        reply.analysis.minimum.product_flop_count = 10**9
        return reply


@pytest.mark.parametrize(("kind", "goes_on"), [(testing.World, False), (Multiplying, True)])
def test_a_kernel_near_the_floor_ends_a_search_where_the_floor_is_a_ceiling(
    kind: type[testing.World], goes_on: bool
) -> None:
    world = kind(floor_ns=0.97 * testing.EAGER_NS / 2.4, choices={"tile": [str(size) for size in range(20)]})
    ended = ended_run(world)
    assert (ended.trial_count > 20) == goes_on
    assert ended.message.endswith("which ended the search") != goes_on


def test_the_benchmark_is_told_what_an_earlier_run_found_on_its_device() -> None:
    asked: list[tuple[str, str]] = []

    def known(task: task_pb2.Task, device: timing_pb2.Device) -> timing_pb2.ReferenceReport:
        asked.append((task.digest, device.name))
        return AT_FLOOR

    world = testing.World(gains={"author": 2.0})
    ended_run(world, known)
    assert asked == [(testing.task().digest, "fake processor")]
    assert world.known_references == [AT_FLOOR]
    ended_run(fresh := testing.World(gains={"author": 2.0}))
    assert fresh.known_references == []
