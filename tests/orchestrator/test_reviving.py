"""Services that end by themselves are started again, later each time; what does nothing but end, ends all."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.serving.local import METRICS, TARGETS_FILE, LocalServices
from orchestrator.serving.reviving import PAUSES_S, STEADY_SECONDS, Reviving
from warpsmith.errors import Infrastructure
from warpsmith.service import is_reachable

SERVICE = """
import os, subprocess
from pathlib import Path
from orchestrator.serving.fake_service import serve_role

print("begins as", os.getpid(), flush=True)
if Path({stop!r}).exists():
    raise SystemExit("the disk is on fire")
print("worker", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
serve_role("benchmark")
"""


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def stop(tmp_path: Path) -> Path:
    """A file; where it exists no service starts."""
    return tmp_path / "stop"


@pytest.fixture
def services(tmp_path: Path, stop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServices]:
    (tmp_path / "mortal.py").write_text(SERVICE.format(stop=str(stop)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    modules = {"benchmark": "mortal", "orchestrator": "mortal"}
    with LocalServices(tmp_path / "runs", modules=modules, environment={METRICS: "0"}) as started:
        yield started


def kill(services: LocalServices, name: str = "benchmark") -> int:
    """Kills a service, and gives what its process was."""
    child = services._children[name].process
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child.pid


def test_a_service_that_was_killed_serves_again_at_its_address_and_its_log_goes_on(
    tmp_path: Path, services: LocalServices
) -> None:
    told: list[str] = []
    reviving = Reviving(services, told.append, Clock())
    reviving.look()
    assert told == []
    address, before = services.address("benchmark"), kill(services)
    reviving.look()
    assert len(told) == 1
    assert told[0].startswith("the benchmark service ended with code -9: ")
    assert told[0].endswith("; it is started again now")
    assert services.address("benchmark") == address
    assert is_reachable(address, 20)
    log = (tmp_path / "runs" / "logs" / "benchmark.log").read_text()
    after = services._children["benchmark"].process.pid
    assert f"begins as {before}\n" in log
    assert f"begins as {after}\n" in log
    for target in json.loads((tmp_path / "runs" / TARGETS_FILE).read_text()):
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=10) as reply:
            assert reply.status == 200
    reviving.look()
    assert len(told) == 1


def is_running(pid: int) -> bool:
    """Whether a process does more than wait to be forgotten."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_service_that_was_killed_had_started_ends_before_it_starts_again(
    tmp_path: Path, services: LocalServices
) -> None:
    worker = int((tmp_path / "runs" / "logs" / "benchmark.log").read_text().partition("worker ")[2].split()[0])
    kill(services)
    assert is_running(worker)
    Reviving(services, lambda _: None, Clock()).look()
    end = time.monotonic() + 20
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(worker)


def test_a_service_that_ends_again_and_again_waits_longer_each_time_and_then_ends_all(
    services: LocalServices, stop: Path
) -> None:
    told: list[str] = []
    clock = Clock()
    reviving = Reviving(services, told.append, clock)
    stop.touch()
    kill(services)
    for pause in PAUSES_S:
        if pause:
            reviving.look()
            clock.seconds += 0.9 * pause
            count = len(told)
            reviving.look()
            assert len(told) == count, "it waits"
            clock.seconds += 0.2 * pause
        reviving.look()
    with pytest.raises(Infrastructure, match=r"the benchmark service ended with code 1: the disk is on fire \(log: "):
        reviving.look()
    assert [each.rpartition("again ")[2] for each in told] == ["now", "in 1 s", "in 2 s", "in 4 s", "in 8 s"]


def test_a_service_that_has_served_for_a_while_begins_a_new_row(services: LocalServices) -> None:
    told: list[str] = []
    clock = Clock()
    reviving = Reviving(services, told.append, clock)
    for _ in range(3):
        kill(services)
        reviving.look()
        clock.seconds += STEADY_SECONDS + 1.0
    assert [each.rpartition("again ")[2] for each in told] == ["now"] * 3
