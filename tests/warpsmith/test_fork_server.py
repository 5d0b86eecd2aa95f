"""Workers that are forked: what they share with the fork server is what was imported, and nothing else."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from warpsmith.sandbox import fork_server, jail
from warpsmith.sandbox.jail import Policy, Rung
from warpsmith.sandbox.worker import Worker

ENTRY = """
import os, threading, time
from google.protobuf.wrappers_pb2 import StringValue

IMPORTED = f"{time.monotonic_ns()} {os.environ.get('TORCH_MARK')}"

def evaluate(request):
    names = {"IMPORTED": IMPORTED}
    exec(request.value, names)
    return StringValue(value=str(names.get("out")))

METHODS = {"evaluate": (StringValue, evaluate)}
"""
FORKING = [rung for rung in jail.probe() if rung is not Rung.BUBBLEWRAP]

Start = Callable[..., Worker]


@pytest.fixture(params=FORKING, ids=lambda rung: rung.value)
def rung(request: pytest.FixtureRequest) -> Rung:
    chosen: Rung = request.param
    return chosen


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the entry that these tests start."""
    path = tmp_path / "entry" / "forked_entry.py"
    path.parent.mkdir()
    path.write_text(ENTRY)
    monkeypatch.syspath_prepend(path.parent)
    return path


@pytest.fixture
def start(entry: Path, rung: Rung) -> Iterator[Start]:
    assert entry.exists()
    workers: list[Worker] = []

    def start_worker(**options: object) -> Worker:
        workers.append(Worker("forked_entry:METHODS", Policy(), rung=rung, **options))  # type: ignore[arg-type]
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.close()


def evaluated(worker: Worker, source: str) -> str:
    request = StringValue(value=textwrap.dedent(source))
    return worker.call("evaluate", request, StringValue, deadline_s=30.0).value


def becomes(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_what_workers_import_is_imported_once(start: Start) -> None:
    first, second = (evaluated(start(), "out = IMPORTED") for _ in range(2))
    assert first == second


def test_variables_that_are_read_while_loading_have_a_server_of_their_own(start: Start) -> None:
    marked = [evaluated(start(env={"TORCH_MARK": mark}), "out = IMPORTED") for mark in ("a", "b", "a")]
    assert [each.split()[1] for each in marked] == ["a", "b", "a"]
    assert marked[0] == marked[2]


def test_a_worker_has_the_environment_that_it_was_given_and_no_other(start: Start) -> None:
    source = "import os, tempfile; out = sorted(os.environ), os.environ['TMPDIR'] == tempfile.gettempdir()"
    given = evaluated(start(env={"WARPSMITH_MARK": "x"}), source)
    known = ["HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONPATH", "PYTHONUNBUFFERED",
             "TMPDIR", "WARPSMITH_MARK"]  # fmt: skip
    assert given == str((known, True))


def test_a_worker_holds_its_own_descriptors_and_no_others(start: Start) -> None:
    reader, writer = os.pipe()
    worker = start(shared_fds=(reader,))
    held = evaluated(worker, "import os; out = [n for n in os.listdir('/proc/self/fd') if int(n) > 2]")
    numbers = sorted(map(int, ast.literal_eval(held)))
    for each in (reader, writer):
        os.close(each)
    assert reader in numbers
    assert len(numbers) == 4  # that, its two pipes, and the folder that it lists


def test_a_worker_finds_nothing_of_what_an_earlier_one_was_told(start: Start) -> None:
    mark = f"told-{time.monotonic_ns()}"
    search = f"""
        begin, end = {mark[:9]!r}, {mark[9:]!r}
        found = 0
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
            for line in maps:
                low, high = (int(each, 16) for each in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    memory.seek(low)
                    content = memory.read(high - low)
                    position = content.find(begin.encode())
                    while position >= 0:
                        found += content[position + 9:].startswith(end.encode())
                        position = content.find(begin.encode(), position + 1)
        out = found
        """
    assert int(evaluated(start(env={"WARPSMITH_MARK": mark}), search)) > 0  # its own: the search finds what is there
    assert evaluated(start(), search) == "0"


def test_random_numbers_of_workers_differ(start: Start) -> None:
    source = "import random; out = random.random()"
    assert len({evaluated(start(), source) for _ in range(3)}) == 3


def test_a_worker_has_no_more_rights_than_a_new_process(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        names = "CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp SigIgn SigBlk SigCgt".split()
        out = [line.split() for line in open("/proc/self/status") if line.partition(":")[0] in names]
        """
    forked = evaluated(start(), source)
    monkeypatch.setattr(fork_server.ForkServer, "fork", lambda *_: None)
    assert forked == evaluated(start(), source)


@pytest.mark.parametrize("rung", FORKING[:1], indirect=True)
def test_the_next_server_takes_the_place_of_one_that_was_killed(start: Start) -> None:
    start()
    for server in list(fork_server._servers.values()):
        server._process.kill()
    assert evaluated(start(), "out = 1 + 1") == "2"


@pytest.mark.parametrize("rung", FORKING[:1], indirect=True)
def test_a_worker_alone_has_nothing_that_other_entries_import(start: Start, entry: Path) -> None:
    large = entry.with_name("large_entry.py")
    large.write_text(f"HELD = bytearray(64 << 20)\n{ENTRY}")
    Worker("large_entry:METHODS", Policy(), rung=FORKING[0]).close()
    source = """
        out = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize")][0]
        """
    beside, alone = (int(evaluated(start(alone=alone), source)) for alone in (False, True))
    assert beside - alone > 60 << 10


@pytest.mark.parametrize("rung", FORKING[:1], indirect=True)
@pytest.mark.parametrize("text", ["threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 / 0"])
def test_a_module_that_cannot_be_forked_is_served_by_a_new_process(
    start: Start, entry: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    entry.write_text(f"{ENTRY}\ndef preload():\n    {text}\n")
    assert evaluated(start(), "out = 1 + 1") == "2"
    assert evaluated(start(), "out = 1 + 1") == "2"
    assert capfd.readouterr().err.count("is started as a new process") == 1  # said once


def test_a_killed_first_process_is_told_as_killed(start: Start) -> None:
    worker = start()
    os.kill(worker._jailed.process.pid, signal.SIGKILL)
    assert worker._jailed.process.wait(20) == -signal.SIGKILL
    assert becomes(lambda: not worker.alive)


@pytest.mark.parametrize("rung", FORKING[:1], indirect=True)
def test_a_server_ends_with_its_service(entry: Path, rung: Rung) -> None:
    source = f"""
        import time
        from warpsmith.sandbox import fork_server
        from warpsmith.sandbox.jail import Policy, Rung
        from warpsmith.sandbox.worker import Worker
        worker = Worker("forked_entry:METHODS", Policy(), rung=Rung({rung.value!r}))
        print(next(iter(fork_server._servers.values()))._process.pid, worker._jailed.process.pid, flush=True)
        time.sleep(600)
        """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(entry.parent), *sys.path])}
    service = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert service.stdout is not None
    pids = list(map(int, service.stdout.readline().split()))
    service.kill()
    service.wait()
    service.stdout.close()
    assert len(pids) == 2
    assert becomes(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
