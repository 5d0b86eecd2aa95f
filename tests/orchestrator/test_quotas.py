"""What projects use of devices: told of runs, kept with them, and bounded by the day."""

from __future__ import annotations

import calendar
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from orchestrator import metrics, testing
from orchestrator.archive import Archive
from orchestrator.commands import report
from orchestrator.ledger import DEVICE_STAGES, day_of
from orchestrator.search import Search
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.ownership import Owner
from orchestrator.serving.quotas import Quotas
from orchestrator.serving.story import Story
from orchestrator.walks import Effort
from warpsmith import tokens
from warpsmith.errors import BadInput, LimitReached
from warpsmith.permissions import Caller, Right
from warpsmith.v1 import run_pb2

NOON = float(calendar.timegm((2026, 12, 3, 12, 0, 0)))
BUDGET = run_pb2.Budget(wall_seconds=20)


def used(archive: Archive, run_id: str, project: str, **days: float) -> run_pb2.Run:
    """Keeps a run that had a device so long: `on_2026_12_03=60.0`."""
    run = run_pb2.Run(id=run_id, task=testing.task(), project=project, created_at=NOON - 1e6)
    for day, seconds in days.items():
        run.device_day_seconds[day.removeprefix("on_").replace("_", "-")] = seconds
    archive.put_run(run)
    return run


@pytest.fixture
def quota(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "quotas").write_text(text)
        return tmp_path / "quotas"

    return write


def test_a_project_that_has_used_up_its_day_is_told_so_and_when_it_may_again(
    database_url: str, quota: Callable[[str], Path]
) -> None:
    archive, file = Archive(database_url), quota("vision 100\n")
    used(archive, "a", "vision", on_2026_12_02=5000.0, on_2026_12_03=60.0)
    used(archive, "b", "vision", on_2026_12_02=5000.0)
    used(archive, "c", "speech", on_2026_12_03=5000.0)
    quotas = Quotas(archive, file, clock=lambda: NOON)
    quotas.require_room("vision")
    used(archive, "d", "vision", on_2026_12_03=40.0)
    archive.close()
    again = Archive(database_url)  # as the next orchestrator, or another one, finds it
    said = (
        rf"^project vision has used 100 s of devices today and may use 100 \({file}\): "
        r"try again at 2026-12-04 00:00 UTC, in 12\.0 h$"
    )
    with pytest.raises(LimitReached, match=said) as refused:
        Quotas(again, file, clock=lambda: NOON).require_room("vision")
    assert refused.value.retry_seconds == 43_200.0
    Quotas(again, file, clock=lambda: NOON + 43_200).require_room("vision")
    again.close()


def test_a_star_is_every_project_that_is_not_named_and_a_changed_file_needs_no_restart(
    database_url: str, quota: Callable[[str], Path]
) -> None:
    archive = Archive(database_url)
    for project in ("vision", "speech", ""):
        used(archive, f"of-{project}", project, on_2026_12_03=50.0)
    quotas = Quotas(archive, quota("vision 60\n* 40\n"), clock=lambda: NOON)
    quotas.require_room("vision")
    for project, said in (("speech", "project speech has used 50 s"), ("", "project of no name has used 50 s")):
        with pytest.raises(LimitReached, match=said):
            quotas.require_room(project)
    quota("vision 10\nspeech 1e4\n")
    quotas.require_room("speech")
    quotas.require_room("")
    with pytest.raises(LimitReached, match="may use 10 "):
        quotas.require_room("vision")
    quota("vision a lot")  # just being written, or wrong: the last one counts
    quotas.require_room("speech")
    archive.close()


@pytest.mark.parametrize("text", ["", "vision", "vision much", "vision -1", "vision nan", "vision 1 2"])
def test_a_file_of_quotas_that_says_nothing_is_refused_by_name(
    database_url: str, quota: Callable[[str], Path], text: str
) -> None:
    file = quota(text)
    archive = Archive(database_url)
    with pytest.raises(BadInput, match=rf"^{file}: .*; see WARPSMITH_QUOTA_FILE$"):
        Quotas(archive, file)
    archive.close()


def test_a_run_counts_for_the_project_of_its_token_and_tells_what_it_cost_by_stage(
    database_url: str, quota: Callable[[str], Path]
) -> None:
    archive = Archive(database_url)
    ann = tokens.Token.read("t" * 20 + " run ann vision").holder
    assert ann == Caller("ann", Right.RUN, "vision")

    def told(name: str) -> float:
        return REGISTRY.get_sample_value(name, {"project": "vision"}) or 0.0

    def spent(purpose: str) -> float:
        return REGISTRY.get_sample_value("warpsmith_device_purpose_seconds_total", {"purpose": purpose}) or 0.0

    already = {purpose: spent(purpose) for purpose in metrics.PURPOSES}

    before = told("warpsmith_device_seconds_total")
    agents = testing.World(seconds=0.002).agents()
    gate = DeviceGate(agents.benchmarks)

    def make_run(run: run_pb2.Run, search: Search, story: Story, _: bool) -> SearchRun:
        return SearchRun(run, agents, gate, search, story, effort=Effort(retry_pause_seconds=0.0))

    quotas = Quotas(archive, quota("vision 0.001"))
    host = RunHost(
        archive, make_run, 1, Owner(archive, stays=False), lambda caller, _: quotas.require_room(caller.project)
    )
    try:
        run = host.create(testing.task(), BUDGET, "", True, ann)
        list(testing.heard(host.watch(run.id, 0)))
        ended = archive.run(run.id)
        stages = {stage: ended.stage_seconds[stage] for stage in DEVICE_STAGES}
        assert all(seconds > 0 for seconds in stages.values()), stages
        assert list(ended.device_day_seconds) == [day_of(ended.created_at)]
        assert report.device_seconds(ended) == pytest.approx(sum(stages.values()))
        assert told("warpsmith_device_seconds_total") - before == pytest.approx(sum(stages.values()))
        by_purpose = {purpose: spent(purpose) - already[purpose] for purpose in metrics.PURPOSES}
        assert by_purpose == pytest.approx(
            {
                "prepare": stages["describe"] + stages["reference"],
                "screen": stages["verify"] + stages["measure"],
                "final": stages["final verify"] + stages["final measure"],
            }
        )
        (cost,) = report.costs(ended)
        assert cost.startswith("device: ")
        assert "reference " in cost
        for begin in (lambda: host.create(testing.task(), BUDGET, "", True, ann), lambda: host.resume(run.id)):
            with pytest.raises(LimitReached, match=r"^project vision has used 0 s"):
                begin()
        assert told("warpsmith_project_quota_used_ratio") == pytest.approx(sum(stages.values()) / 0.001)
    finally:
        host.close()
