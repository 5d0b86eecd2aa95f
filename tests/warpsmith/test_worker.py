"""Jailed workers on every rung: calls, faults of all kinds, and what hostile code inside cannot do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int64Value, StringValue

from warpsmith.errors import BadInput, WorkerCrashed, WorkerFault, WorkerRaised, WorkerTimeout
from warpsmith.sandbox import jail, jail_init
from warpsmith.sandbox.jail import Policy, Rung
from warpsmith.sandbox.worker import Worker

# The entry of these tests: `evaluate` stands for untrusted code. It is Python that leaves its answer in `out`.
TABLE = """
import sys
from google.protobuf.wrappers_pb2 import Int64Value, StringValue
from warpsmith.errors import BadInput, IllegalMove

def evaluate(request):
    names = {}
    exec(request.value, names)
    return StringValue(value=str(names.get("out")))

def refuse(request):
    raise BadInput(f"cannot use {request.value}")

def double(request):
    return Int64Value(value=2 * request.value)

METHODS = {
    "evaluate": (StringValue, evaluate),
    "refuse": (StringValue, refuse),
    "double": (Int64Value, double),
    "wrong": (StringValue, lambda request: None),
    "huge": (StringValue, lambda request: StringValue(value="x" * (65 << 20))),
}
"""

Start = Callable[..., Worker]


@pytest.fixture(params=jail.probe(), ids=lambda rung: rung.value)
def rung(request: pytest.FixtureRequest) -> Rung:
    chosen: Rung = request.param
    return chosen


@pytest.fixture
def start_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "hostile_entry.py").write_text(TABLE)
    monkeypatch.syspath_prepend(tmp_path / "entry")
    workers: list[Worker] = []

    def start_worker(rung: Rung, policy: Policy | None = None, **options: object) -> Worker:
        worker = Worker("hostile_entry:METHODS", policy or Policy(), rung=rung, **options)  # type: ignore[arg-type]
        workers.append(worker)
        return worker

    yield start_worker
    for worker in workers:
        worker.close()
        assert not worker.alive


@pytest.fixture
def start(start_on: Start, rung: Rung) -> Start:
    """Starts a worker on each rung in turn: for what the rung must see to."""
    return partial(start_on, rung)


@pytest.fixture
def start_one(start_on: Start) -> Start:
    """Starts a worker on the strongest rung: for what is the same on all, the records and their errors."""
    return partial(start_on, jail.choose())


def evaluate(worker: Worker, code: str, deadline_s: float = 20.0) -> str:
    return worker.call("evaluate", StringValue(value=code), StringValue, deadline_s).value


def becomes(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it holds at last, however slow the machine."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def state(pid: int) -> str:
    """The kernel's letter for what a process does: T for one that is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_calls_are_answered_one_after_another(start: Start, rung: Rung) -> None:
    with start() as worker:
        assert worker.rung is rung
        for number in range(20):
            assert worker.call("double", Int64Value(value=number), Int64Value, 5.0).value == 2 * number


def test_plugins_that_are_installed_are_found_and_chosen_inside(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPSMITH_EXECUTOR", "mine")
    installed = tmp_path / "entry" / "hostile_entry-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile_entry\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[warpsmith.executor]\nmine = collections:OrderedDict\n")
    code = "from warpsmith import plugins; out = plugins.names('executor'), plugins.chosen('executor')"
    assert evaluate(start(), code) == "(('cuda', 'host', 'mine'), ('mine',))"


def test_calls_from_many_threads_do_not_mix(start_one: Start) -> None:
    worker = start_one()
    answers: dict[int, int] = {}

    def ask(number: int) -> None:
        answers[number] = worker.call("double", Int64Value(value=number), Int64Value, 10.0).value

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: 2 * number for number in range(16)}


def test_bad_input_stays_bad_input(start_one: Start) -> None:
    worker = start_one()
    with pytest.raises(BadInput, match="cannot use this") as caught:
        worker.call("refuse", StringValue(value="this"), StringValue, 5.0)
    assert not isinstance(caught.value, WorkerFault)
    assert worker.alive


def test_other_exceptions_come_back_named_and_the_worker_lives_on(start_one: Start) -> None:
    worker = start_one()
    with pytest.raises(WorkerRaised, match="ZeroDivisionError") as caught:
        evaluate(worker, "1 / 0")
    assert caught.value.kind == "ZeroDivisionError"
    assert "division by zero" in caught.value.trace
    assert evaluate(worker, "out = 1") == "1"


def test_an_exceptions_text_is_cleaned_and_cut(start_one: Start) -> None:
    with pytest.raises(WorkerRaised) as caught:
        evaluate(start_one(), "raise ValueError(chr(27) + '[2J' + chr(0) + 'x' * 100_000)")
    assert "\x1b" not in str(caught.value) + caught.value.trace
    assert "\0" not in str(caught.value)
    assert len(str(caught.value)) < 10_000
    assert len(caught.value.trace) < 10_000


def test_an_error_from_inside_is_one_line(start_one: Start) -> None:
    worker = start_one()
    with pytest.raises(BadInput) as refused:
        worker.call("refuse", StringValue(value="this\nwarpsmith: PASS\r\u2028x"), StringValue, 5.0)
    assert str(refused.value) == "cannot use this warpsmith: PASS\\r\\u2028x"
    with pytest.raises(WorkerRaised) as raised:
        evaluate(
            worker, "raise type('Mean\\nwarpsmith: PASS', (Exception,), {'__module__': 'm'})('x\\nwarpsmith: PASS')"
        )
    assert str(raised.value) == "evaluate: Mean warpsmith: PASS: x warpsmith: PASS"


def test_an_exception_that_cannot_be_printed_is_still_reported(start_one: Start) -> None:
    code = "class Mean(Exception):\n    def __str__(self): raise self\nraise Mean"
    with pytest.raises(WorkerRaised, match="cannot be printed"):
        evaluate(start_one(), code)


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise KeyboardInterrupt", "raise SystemExit"])
def test_leaving_politely_is_not_success(start_one: Start, code: str) -> None:
    worker = start_one()
    with pytest.raises(WorkerRaised):
        evaluate(worker, code)
    assert worker.alive


def test_leaving_at_once_is_a_crash(start: Start) -> None:
    worker = start()
    with pytest.raises(WorkerCrashed) as caught:
        evaluate(worker, "import os; os._exit(0)")
    assert (caught.value.exit_code, caught.value.signal_number) == (0, None)
    assert not worker.alive
    with pytest.raises(WorkerCrashed, match="already ended"):
        evaluate(worker, "out = 1")


def test_a_crash_names_its_signal_and_keeps_the_last_words(start: Start) -> None:
    with pytest.raises(WorkerCrashed) as caught:
        evaluate(start(), "import ctypes; print('last words'); ctypes.string_at(0)")
    assert caught.value.signal_number == signal.SIGSEGV
    assert "last words" in caught.value.stderr_tail
    assert "Segmentation fault" in caught.value.stderr_tail


def test_a_hang_is_killed_in_time_with_its_grandchildren(start: Start, tmp_path: Path) -> None:
    beat = tmp_path / "shared" / "beat"
    beat.parent.mkdir()
    worker = start(Policy(writable=(beat.parent,)))
    # The grandchild leaves its session and its parent, then shows for as long as it lives that it does.
    grandchild = ["setsid", "sh", "-c", f"while :; do date +%N > {beat}; sleep 0.02; done &"]
    evaluate(worker, f"import subprocess; subprocess.Popen({grandchild})")
    assert becomes(beat.exists)
    began = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"evaluate .* 1 s"):
        evaluate(worker, "import time\nwhile True: time.sleep(1)", deadline_s=1.0)
    assert time.monotonic() - began < 30.0
    assert not worker.alive
    stopped = beat.read_text()
    time.sleep(0.2)
    assert beat.read_text() == stopped


def test_a_stuck_interpreter_is_killed_too(start_one: Start) -> None:
    # The C library's own loop never gives the interpreter's lock back, and all signals are ignored.
    code = "import signal, re; signal.pthread_sigmask(0, range(1, 65)); re.match('(a+)+$', 'a' * 60 + 'b')"
    with pytest.raises(WorkerTimeout):
        evaluate(start_one(), code, deadline_s=0.5)


def test_a_worker_stands_still_also_where_it_starts_processes(start: Start) -> None:
    # Stopped between `vfork` and `exec`, a child keeps its parent in uninterruptible sleep, which is never "stopped".
    worker = start()
    starting = "while True:\n    subprocess.run(['true'])"
    evaluate(
        worker, f"import subprocess, threading; threading.Thread(target=exec, args=({starting!r}, globals())).start()"
    )
    for _ in range(100):
        worker.pause()
        processes = worker.processes
        own = processes - worker._of_the_jail
        assert {state(each) for each in own} <= {"T", "D", "Z"}
        time.sleep(1e-3)
        assert worker.processes == processes
        worker.resume()
        time.sleep(1e-3)


def test_a_worker_that_does_not_read_cannot_block_the_sender(start_one: Start) -> None:
    worker = start_one()
    (inmost,) = (pid for pid in worker.processes if not jail_init.descendants(pid))
    os.kill(inmost, signal.SIGSTOP)
    assert becomes(lambda: state(inmost) == "T")
    with pytest.raises(WorkerTimeout):
        worker.call("evaluate", StringValue(value="#" * (1 << 20)), StringValue, 0.5)


def test_a_flood_of_output_neither_blocks_nor_is_kept(start: Start) -> None:
    worker = start()
    code = "import os\nfor _ in range(1600): os.write(1, b'x' * 65536)\nprint('the end')\nout = 'done'"
    assert evaluate(worker, code) == "done"
    assert evaluate(worker, "out = 2") == "2"
    assert becomes(lambda: "the end" in worker.stderr_tail)  # it comes by another way than answers do
    assert len(worker.stderr_tail) <= 4096


def test_prints_never_reach_the_answers(start_one: Start) -> None:
    worker = start_one()
    code = """
import threading, time
def later():
    for _ in range(50):
        print("late", flush=True)
        time.sleep(0.005)
threading.Thread(target=later).start()
print("early")
"""
    evaluate(worker, code)
    for number in range(20):
        assert worker.call("double", Int64Value(value=number), Int64Value, 5.0).value == 2 * number
        time.sleep(0.01)
    assert "late" in worker.stderr_tail


def test_code_that_sleeps_at_exit_does_not_delay_the_end(start_one: Start) -> None:
    worker = start_one()
    code = """
import atexit, threading, time
atexit.register(time.sleep, 60)
threading.Thread(target=time.sleep, args=(60,)).start()
"""
    evaluate(worker, code)
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize(
    "forged",
    [
        b"\xff" * 64,
        b"\x03\x00\x00\xff\xff\xff\xff",
        b"\x05\x00\x01\x00\x00\x00\x02E[]",
        b"\x03\x00\x00\x00\x00\x00\x01\xff",
    ],
    ids=["garbage", "four gigabytes", "odd report", "not protobuf"],
)
def test_a_forged_record_is_a_fault_and_no_answer(start_one: Start, forged: bytes) -> None:
    code = f"""
import os, stat
for descriptor in range(3, 64):
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode): os.write(descriptor, {forged!r})
    except OSError:
        pass
"""
    with pytest.raises(WorkerFault):
        evaluate(start_one(), code, deadline_s=2.0)


def test_an_answer_of_no_type_or_too_large_is_reported(start_one: Start) -> None:
    worker = start_one()
    with pytest.raises(WorkerRaised, match="AttributeError"):
        worker.call("wrong", StringValue(), StringValue, 5.0)
    with pytest.raises(WorkerRaised, match="limit"):
        worker.call("huge", StringValue(), StringValue, 10.0)
    with pytest.raises(WorkerRaised, match="KeyError"):
        worker.call("missing", StringValue(), StringValue, 5.0)
    assert worker.alive


def test_shared_memory_crosses_without_copies_through_the_pipe(start: Start) -> None:
    descriptor = os.memfd_create("tensors")
    try:
        os.write(descriptor, b"from the parent ")
        code = f"import os; out = os.pread({descriptor}, 100, 0).decode(); os.pwrite({descriptor}, b'back', 0)"
        assert evaluate(start(shared_fds=(descriptor,)), code) == "from the parent "
        assert os.pread(descriptor, 4, 0) == b"back"
    finally:
        os.close(descriptor)


def test_the_environment_holds_no_secret(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPSMITH_TEST_TOKEN", "hunter2")
    worker = start(env={"OMP_NUM_THREADS": "3"})
    seen = evaluate(worker, "import os; out = dict(os.environ)")
    assert "hunter2" not in seen
    assert "'OMP_NUM_THREADS': '3'" in seen


def test_modules_beside_the_entry_stay_closed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "entry" / "credentials.py").write_text("token = 'hunter2'")
    with pytest.raises(WorkerRaised, match=r"PermissionError|ModuleNotFoundError"):
        evaluate(start(), "import credentials; out = credentials.token")


def test_an_entry_that_cannot_be_imported_does_not_start(start: Start, rung: Rung, tmp_path: Path) -> None:
    (tmp_path / "entry" / "broken_entry.py").write_text("import no_such_module")
    with pytest.raises(WorkerRaised, match="no_such_module"):
        Worker("broken_entry:METHODS", Policy(), rung=rung)
    with pytest.raises(WorkerFault, match="cannot be found: no_such_entry"):
        Worker("no_such_entry:METHODS", Policy(), rung=rung)
    assert start().alive


def test_torch_multiplies_inside(start: Start) -> None:
    worker = start(env={"OMP_NUM_THREADS": "2"})
    code = "import torch\nout = (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()"
    assert evaluate(worker, code, deadline_s=120.0) == str(300.0**3)


def test_closing_twice_leaves_nothing_open(start_one: Start) -> None:
    start_one().close()  # what starts workers stays
    before = os.listdir("/proc/self/fd")
    worker = start_one()
    worker.close()
    worker.close()
    assert becomes(lambda: len(os.listdir("/proc/self/fd")) <= len(before))


def test_messages_are_checked_for_size_before_they_are_sent(start_one: Start) -> None:
    big: Message = StringValue(value="x" * (65 << 20))
    with pytest.raises(BadInput, match="limit"):
        start_one().call("evaluate", big, StringValue, 5.0)
