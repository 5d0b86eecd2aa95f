"""What runs cost: sums of device seconds by project and stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.archiving import costs
from orchestrator.commands import cli
from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2

DAY = 86400.0


@pytest.fixture
def kept(tmp_path: Path) -> str:
    """Three runs of two projects on three days."""
    archive = Archive.in_directory(tmp_path)
    for number, project in enumerate(("vision", "", "vision")):
        run = run_pb2.Run(id=f"run-{number}", task=testing.task(), created_at=DAY * (number + 1), project=project)
        run.stage_seconds.update({"reference": 2.0, "verify": 1.0, "final measure": 0.5, "wait": 99.0, "compile": 9.0})
        run.device_day_seconds["1970-01-02"] = 3.5
        archive.put_run(run, run_pb2.RunEvent(number=1, run=run))
    archive.close()
    return str(tmp_path)


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, ["archive", "costs", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*arguments: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(printed("--json", *arguments))["projects"]
    return found


def test_device_seconds_are_summed_by_project_and_stage(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "PAGE_RUNS", 2)
    found = told("--runs", kept)
    assert list(found) == ["-", "vision"]
    vision = {name: value for name, value in found["vision"].items() if value}
    assert vision == {"runs": 2, "total": 7.0, "reference": 4.0, "verify": 2.0, "final measure": 1.0}
    assert found["-"]["total"] == 3.5


def test_only_runs_since_a_day_count(kept: str) -> None:
    assert {name: each["runs"] for name, each in told("--runs", kept, "--since", "1970-01-04").items()} == {"vision": 1}


def test_people_get_a_table(kept: str) -> None:
    head, none, vision = printed("--runs", kept).splitlines()
    assert head.split()[:4] == ["runs", "total", "describe", "reference"]
    assert none.split()[:5] == ["-", "1", "3.5", "s", "0.0"]
    assert vision.split()[:4] == ["vision", "2", "7.0", "s"]


def test_a_day_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="is no day; write it as 20"):
        costs._day("yesterday")
