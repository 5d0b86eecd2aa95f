"""Processes that are called: they stand still but while they are asked, on every rung, with all that they started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from gpu_bench.solutions.callee import CALL, DELIVER
from gpu_bench.solutions.caller import Called, CallFailed
from gpu_bench.workers import shared_file
from warpsmith.errors import WorkerCrashed, WorkerTimeout
from warpsmith.sandbox import jail
from warpsmith.sandbox.jail import Policy, Rung
from warpsmith.v1 import verdict_pb2

# What runs in the process: `before` once, `call` at each call.
ENTRY = """
import mmap, os, threading, time
from google.protobuf.wrappers_pb2 import StringValue
from gpu_bench.solutions import callee
from warpsmith.v1 import judging_pb2

names = {"os": os, "time": time, "threading": threading}
names["memory"] = mmap.mmap(int(os.environ["SHARED"]), 4096)

def begin(request):
    exec(request.value, names)
    return StringValue()

def calls(request):
    callee.serve({
        callee.CALL: lambda arm, number: names["call"](number),
        callee.DELIVER: lambda arm, number: bytes(names["memory"][:4]),
    })

METHODS = {"begin": (StringValue, begin), "calls": (judging_pb2.CallsRequest, calls)}
"""

Start = Callable[[str], tuple[Called, int]]


@pytest.fixture(params=jail.probe(), ids=lambda rung: rung.value)
def rung(request: pytest.FixtureRequest) -> Rung:
    chosen: Rung = request.param
    return chosen


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: Rung) -> Iterator[Start]:
    package = Path(__file__).parents[2] / "gpu_bench"
    (tmp_path / "called_entry.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[tuple[Called, int]] = []

    def start_called(code: str) -> tuple[Called, int]:
        memory = shared_file.made()
        shared_file.grow(memory, 4096)
        policy = Policy(readable=(package,), listable=(package.parent,))
        environment = {"SHARED": str(memory), "PYTHONPATH": os.pathsep.join([str(tmp_path), *PATHS])}
        called = Called("called_entry:METHODS", policy, rung=rung, env=environment, shared_fds=(memory,))
        made.append((called, memory))
        called.call("begin", StringValue(value=code), StringValue, deadline_s=20.0)
        called.begin_calls()
        return called, memory

    yield start_called
    for called, memory in made:
        called.close()
        os.close(memory)


PATHS = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "proto")]


def test_a_call_ends_with_its_answer_and_is_timed_outside(start: Start) -> None:
    called, _ = start("def call(number): time.sleep(number / 1000)")
    answer = called.ask(CALL, number=80, deadline_s=20.0)
    assert 0.08 <= answer.seconds < 10.0
    assert called.ask(CALL, number=0, deadline_s=20.0).seconds < answer.seconds


def test_what_is_delivered_comes_with_the_answer(start: Start) -> None:
    called, _ = start("def call(number): memory[:4] = bytes([number] * 4)")
    called.ask(CALL, number=7, deadline_s=20.0)
    assert called.ask(DELIVER, deadline_s=20.0).carried == bytes([7] * 4)


TAKING_AWAY = """
import ctypes
libc, shared = ctypes.CDLL(None), int(os.environ["SHARED"])
here = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
def truncated():
    try: os.ftruncate(shared, 0)
    except OSError: return -1
    return os.ftruncate(shared, 4096) or 0
def call(number):
    tried = [libc.madvise(here, ctypes.c_size_t(4096), advice) for advice in (9, 20, 21, 25)]
    tried += [libc.fallocate(shared, mode, ctypes.c_long(0), ctypes.c_long(4096)) for mode in (3, 8, 16)]
    memory[0] = tried.count(-1) + (truncated() == -1)
    memory[1] = libc.madvise(here, ctypes.c_size_t(4096), 3)  # WILLNEED, which is one's own
"""


def test_nothing_takes_pages_away_that_others_have_as_well(start: Start) -> None:
    """Else the next call of a process that is timed against it would have to fetch each page anew."""
    called, memory = start(TAKING_AWAY)
    called.ask(CALL, deadline_s=20.0)
    assert os.pread(memory, 2, 0) == bytes([8, 0])


COUNTING = """
def count():
    while True:
        memory[0] = (memory[0] + 1) % 256
        time.sleep(0)
def call(number):
    {begin}
    began = memory[0]
    while memory[0] == began: time.sleep(0)
"""
THREAD = COUNTING.format(begin="threading.Thread(target=count, daemon=True).start()")
PROCESS = COUNTING.format(begin="os.fork() or count()")


@pytest.mark.parametrize("code", [THREAD, PROCESS], ids=["thread", "process"])
def test_nothing_that_a_process_started_runs_while_nobody_asks(code: str, start: Start) -> None:
    called, memory = start(code)
    called.ask(CALL, deadline_s=20.0)  # in which it has counted
    before = os.pread(memory, 1, 0)
    time.sleep(0.2)
    assert os.pread(memory, 1, 0) == before
    called.ask(CALL, deadline_s=20.0)
    assert called.stopped


@pytest.mark.parametrize(
    ("forged", "asked"), [("b'..'", 1), (r"b'.\x01'", 1), (r"b'.\x01\0\0\0\0'", 2)], ids=["no word's", "half", "whole"]
)
def test_an_answer_that_nobody_asked_for_is_a_cheat(start: Start, forged: str, asked: int) -> None:
    """Without the number of its word or what it has to carry at once, with them when the real answer follows."""
    called, _ = start(f"def call(number): os.write(int(os.environ['WARPSMITH_CALL_FDS'].split()[1]), {forged})")
    for _ in range(asked - 1):
        called.ask(CALL, deadline_s=20.0)
    with pytest.raises(CallFailed) as failed:
        called.ask(CALL, deadline_s=20.0)
    assert failed.value.calls.fault == verdict_pb2.FAILURE_KIND_CHEAT


def test_a_call_that_does_not_come_back_ends_the_process(start: Start) -> None:
    called, _ = start("def call(number): time.sleep(1000)")
    with pytest.raises(WorkerTimeout):
        called.ask(CALL, deadline_s=0.5)
    assert not called.alive


def test_a_process_that_leaves_has_crashed(start: Start) -> None:
    called, _ = start("def call(number): os._exit(3)")
    with pytest.raises(WorkerCrashed) as crashed:
        called.ask(CALL, deadline_s=20.0)
    assert crashed.value.exit_code == 3


def test_a_process_takes_words_again_after_a_call_that_failed(start: Start) -> None:
    called, _ = start("def call(number): 1 / number")
    with pytest.raises(Exception, match="division by zero"):
        called.ask(CALL, number=0, deadline_s=20.0)
    called.begin_calls()
    called.ask(CALL, number=1, deadline_s=20.0)
