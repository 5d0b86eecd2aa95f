"""The floor guard over every baseline that stands in the results of the H200."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.timing import baseline_floors
from gpu_bench.timing import floor


def test_the_guard_rejects_no_baseline_that_was_measured() -> None:
    found = list(baseline_floors.asked())
    assert len(found) > 400
    assert [each for each in found if floor.FLOOR_REJECT in each.flags] == []
    assert min(each.of_floor for each in found) > floor.REJECT_BELOW
    assert f"{len(found)} baselines" in baseline_floors.report(found)


def test_the_least_work_of_every_measured_task_is_known() -> None:
    assert baseline_floors.unknown() == []


def test_the_guard_would_reject_baselines_of_half_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved() -> list[dict[str, Any]]:
        return [row | {"arms_ns": {name: ns / 2 for name, ns in row.get("arms_ns", {}).items()}} for row in rows]

    rows = baseline_floors.rows()
    monkeypatch.setattr(baseline_floors, "rows", halved)
    rejected = [each for each in baseline_floors.asked() if floor.FLOOR_REJECT in each.flags]
    assert len(rejected) > 100
