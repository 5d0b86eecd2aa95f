"""What the suite itself finds of work that goes on behind a case."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import hostile_traces
import pytest

pytestmark = pytest.mark.hostile


@pytest.fixture
def spinning() -> Iterator[None]:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    child.kill()
    child.wait()


@pytest.mark.usefixtures("spinning")
def test_a_process_that_spins_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_traces, "SETTLE_SECONDS", 1.0)
    with hostile_traces.own_place() as traces, pytest.raises(AssertionError, match="descendants want"):
        traces.assert_at_rest()


def test_without_one_all_is_at_rest() -> None:
    with hostile_traces.own_place() as traces:
        traces.assert_at_rest()
