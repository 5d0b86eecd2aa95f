"""Services that are stopped for longer than an answer is waited for, and go on: the run ends as if they had not.

`HOLD=60` in the environment has them stand still for so many seconds more.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import AGENTS, Place, hold, optimize, place, require_result, require_uncharged, up, wait_until

pytestmark = pytest.mark.faults

SILENCES = 3
"""Answers that are waited for in vain before the service goes on."""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, FAKE_CALL_SECONDS="0.03", DEADLINE_SECONDS="1") as made:
        yield made


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_that_is_stopped_beyond_its_deadlines_costs_a_run_time_and_no_candidate(
    here: Place, name: str
) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    services.kill_service(name, signal.SIGSTOP)
    log = here.path / "runs" / "logs" / "orchestrator.log"
    wait_until(lambda: log.read_text().count("DEADLINE_EXCEEDED") >= SILENCES, lambda: search.said + log.read_text())
    hold()
    services.kill_service(name, signal.SIGCONT)
    require_result(here, search)
    require_uncharged(here)


def test_an_orchestrator_that_is_stopped_goes_on_and_whoever_watches_it_misses_nothing(here: Place) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    services.kill_service("orchestrator", signal.SIGSTOP)
    hold()
    late = here.start("runs", "--server", "runs")
    services.kill_service("orchestrator", signal.SIGCONT)
    require_result(here, search)
    assert late.process.wait(60) == 0, late.said
