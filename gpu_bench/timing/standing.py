"""Has OpenMP's threads of this process stand still while another process is timed on the processors.

The one idea: they look for work for up to 30 ms after a loop, where a kernel's threads would run. A signal holds them
where they are (`standing.cpp`), so a library step behind the kernel finds them awake, as in a user's process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from pathlib import Path

from gpu_bench import native
from warpsmith.errors import Infrastructure

_SOURCE = Path(__file__).with_name("standing.cpp")
_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-pthread")
_SIGNAL = signal.SIGRTMIN + 5
_PATIENCE_SECONDS = 0.05
"""For all of them to stand. A machine with other work lets a thread take its signal later: that one stands then."""


def begin() -> int:
    """Has them stand until as many calls of `end` as there were of this; returns how many were told.

    A thread that was stopped with a lock in its hands goes on by itself after a second. Raises Infrastructure.
    """
    library = _library()
    library.hold()
    try:
        told = sum(_tell(library, task) for task in _looking_for_work())
        end = time.perf_counter() + _PATIENCE_SECONDS
        while library.standing_now() < told and time.perf_counter() < end:
            os.sched_yield()  # they may wait for this processor
    except BaseException:
        library.let_go()
        raise
    return told


def end() -> None:
    """Lets them go on."""
    _library().let_go()


def _looking_for_work() -> list[int]:
    """Threads that run or wait for a processor, are none of Python's, and have the name of the one that calls: OpenMP
    gives its own none, others do (`grpc_global_timer`)."""
    caller = threading.get_native_id()
    pythons = {thread.native_id for thread in threading.enumerate()} | {caller}
    tasks = [task for task in map(int, os.listdir("/proc/self/task")) if task not in pythons]
    name, _ = _name_and_state(caller)
    return [task for task in tasks if _name_and_state(task) == (name, "R")]


def _name_and_state(task: int) -> tuple[str, str]:
    try:
        with open(f"/proc/self/task/{task}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(") ")
    except OSError:
        return "", ""  # it has ended
    return name, rest[:1]


def _tell(library: ctypes.CDLL, task: int) -> bool:
    return bool(library.tgkill(os.getpid(), task, int(_SIGNAL)) == 0)  # else it has ended


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(native.built(_SOURCE, _FLAGS, {}))
    library.prepare.restype = ctypes.c_bool
    if not library.prepare(int(_SIGNAL)):
        raise Infrastructure("the system gives the bench no signal for threads that have to stand")
    return library
