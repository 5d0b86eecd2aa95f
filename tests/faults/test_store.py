"""An archive that is locked or damaged, or whose disk is full, in the midst of a run: nothing is lost, no run fails.

Each is held until the orchestrator waits for it; `HOLD=60` in the environment has it held for so many seconds more.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from processes import (
    Command,
    Place,
    find,
    hold,
    module_of,
    optimize,
    place,
    require_result,
    require_uncharged,
    up,
    wait_until,
)

from orchestrator.archive import FILE_NAME, Archive
from orchestrator.archiving.spool import read
from orchestrator.search_run import ENDED
from orchestrator.serving.local import METRICS, TARGETS_FILE
from warpsmith.v1 import run_pb2, trial_pb2

pytestmark = pytest.mark.faults

DISK_BYTES = 64 << 20
"""Of a disk that is filled: room for the archive and logs of one run."""

Fault = Callable[[Place, Command], AbstractContextManager[None]]
"""What is wrong with the store of a place, with services that are up, for as long as the block lasts."""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, FAKE_CALL_SECONDS="0.03", **{METRICS: "0"}) as made:
        yield made


@contextmanager
def locked(here: Place, _: Command) -> Iterator[None]:
    """Another process has the archive for itself."""
    with closing(sqlite3.connect(here.path / "runs" / FILE_NAME, timeout=30, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def refused(_: Place, services: Command) -> Iterator[None]:
    """The orchestrator can write nothing more to any file."""
    process = find(services.process.pid, f"-m {module_of('orchestrator')}")
    _, most = resource.prlimit(process, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    yield
    resource.prlimit(process, resource.RLIMIT_FSIZE, (most, most))


@contextmanager
def full(here: Place, _: Command) -> Iterator[None]:
    """The disk of the runs directory has no byte left; logs of all services are on it too."""
    rest = here.path / "runs" / "rest"
    with rest.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    assert os.statvfs(rest).f_bavail == 0
    yield
    rest.unlink()


@pytest.fixture
def disk(here: Place) -> Iterator[None]:
    """A small disk of its own for the runs directory."""
    runs = here.path / "runs"
    runs.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "none", str(runs)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a disk of its own needs root and the right to mount")
    yield
    for command in here.commands:
        if command.process.poll() is None:
            command.end()
    subprocess.run(["umount", "--lazy", str(runs)], check=True)


def waiting(here: Place) -> float:
    """Transactions of the orchestrator that wait for the store."""
    targets = json.loads((here.path / "runs" / TARGETS_FILE).read_text())
    (address,) = next(each["targets"] for each in targets if each["labels"]["service"] == "orchestrator")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        lines: list[str] = reply.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("warpsmith_archive_waiting "))


@pytest.mark.parametrize("fault", [locked, refused])
def test_a_store_that_takes_nothing_for_a_while_costs_a_run_time_and_no_trial(here: Place, fault: Fault) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    with fault(here, services):
        wait_until(lambda: waiting(here) > 0, lambda: search.said)
        hold()
        assert waiting(here) > 0
        assert search.process.poll() is None, search.said
    require_result(here, search)
    require_uncharged(here)
    assert waiting(here) == 0


@pytest.mark.usefixtures("disk")
def test_a_disk_that_is_full_for_a_while_costs_a_run_time_and_no_trial(here: Place) -> None:
    test_a_store_that_takes_nothing_for_a_while_costs_a_run_time_and_no_trial(here, full)


def test_an_orchestrator_that_starts_while_the_store_is_locked_takes_up_its_run_when_it_is_free(here: Place) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    with locked(here, services):
        wait_until(lambda: waiting(here) > 0, lambda: search.said)
        services.kill_service("orchestrator", signal.SIGKILL)
        services.wait_for("it is started again now")
        hold()
    require_result(here, search)
    require_uncharged(here)


def spooled(here: Place) -> list[trial_pb2.Trial]:
    """Trials that wait for the archive in files, in order."""
    records = [
        record for file in sorted((here.path / "runs" / "spool").glob("*.spool")) for record in read(file).records
    ]
    return [record.message for record in records if isinstance(record.message, trial_pb2.Trial)]


def test_what_was_measured_while_the_store_was_locked_outlives_a_kill_of_the_orchestrator(here: Place) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    with locked(here, services):
        wait_until(lambda: len(spooled(here)) >= 5, lambda: search.said)
        hold()
        services.kill_service("orchestrator", signal.SIGKILL)
        waited = spooled(here)
        numbers = [trial.number for trial in waited]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert f"good #{numbers[0]} " not in search.said, "nobody is told before the archive has it"
        services.wait_for("it is started again now")
    require_result(here, search)
    require_uncharged(here)
    archive = Archive.in_directory(here.path / "runs")
    (run,) = archive.runs()
    kept = {trial.number: trial for trial in archive.trials(run.id)}
    archive.close()
    assert [kept[trial.number] for trial in waited] == waited
    assert spooled(here) == []


def test_an_up_on_a_damaged_store_says_the_way_out_and_after_it_goes_on_with_the_run(here: Place) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    services.end()
    search.end(signal.SIGKILL)
    file = here.path / "runs" / FILE_NAME
    os.truncate(file, file.stat().st_size // 2)
    refused = here.start("up")
    assert refused.process.wait(60) == 2
    assert len(refused.said.splitlines()) == 1
    assert "malformed; `warpsmith archive recover` saves what is readable" in refused.said
    recovered = here.start("archive", "recover")
    assert recovered.process.wait(60) == 0, recovered.said
    assert "what was damaged is now " in recovered.said
    up(here)
    archive = Archive.in_directory(here.path / "runs")
    wait_until(lambda: archive.runs()[0].state in ENDED)
    assert archive.runs()[0].state == run_pb2.RUN_STATE_FASTER, archive.runs()[0].message
    archive.close()


def test_who_asks_for_a_run_while_the_store_is_locked_gets_it_when_it_is_free(here: Place) -> None:
    services = up(here)
    with locked(here, services):
        arguments = ("good.py", "--target", "cpu", "--budget", "5m", "--trials", "60", "--fresh", "--server", "runs")
        search = here.start("optimize", *arguments)
        wait_until(lambda: waiting(here) > 0, lambda: search.said)
        hold()
    require_result(here, search)
    require_uncharged(here)
