"""Has the other threads of this process stand still while another process is timed on the processors.

The one idea: OpenMP's threads look for work for up to 30 ms after a loop, where a kernel's threads would run. A signal
whose handler is the C library's `pause` holds one where it is, another signal lets it go on: so a library step behind
the kernel finds them awake, as it does in a user's process, and nobody waits until they sleep.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

_STAND, _GO_ON = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6
_PATIENCE_SECONDS = 0.05
"""For all of them to stand. A machine with other work lets a thread take its signal later: that one stands then."""


def stand() -> list[int]:
    """Tells every other thread that runs, but Python's, to stand still; returns whom it told when they do.

    Whoever was told has to be given to `go_on`, or stands for ever.
    """
    _prepare()
    own = {thread.native_id for thread in threading.enumerate()} | {threading.get_native_id()}
    tasks = [task for task in map(int, os.listdir("/proc/self/task")) if task not in own]
    told = [
        task for task in tasks if (look := _look(task)).is_running and not look.has_to_stand and _tell(task, _STAND)
    ]
    end = time.perf_counter() + _PATIENCE_SECONDS
    for task in told:
        while _look(task).is_running and time.perf_counter() < end:
            os.sched_yield()  # it may wait for this processor
    return told


def go_on(told: Iterable[int]) -> None:
    """Lets them go on; returns when none of them stands or is about to.

    One word may be lost: a thread that takes both signals at once is told to go on before it stands. The first is
    always taken before the second, so once that is no longer on its way it shows whether the thread stands.
    """
    told = list(told)
    for task in told:
        _tell(task, _GO_ON)
    for task in told:
        while (look := _look(task)).has_to_stand or look.may_go_on:
            if not look.may_go_on:
                _tell(task, _GO_ON)
            os.sched_yield()


@functools.cache
def _prepare() -> None:
    libc = _libc()
    for number, handler in ((_STAND, libc.pause), (_GO_ON, libc.getpid)):  # the second only ends the first
        libc.signal(int(number), ctypes.cast(handler, ctypes.c_void_p))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    return libc


def _tell(task: int, number: int) -> bool:
    return bool(_libc().tgkill(os.getpid(), task, int(number)) == 0)  # else it has ended


@dataclass(frozen=True)
class _Look:
    """A thread as the kernel tells it."""

    is_running: bool = False
    """Or waits for a processor."""
    has_to_stand: bool = False
    """Whether the signal to stand is on its way or handled now: meanwhile it is blocked."""
    may_go_on: bool = False
    """Whether the other signal is on its way."""


def _look(task: int) -> _Look:
    try:
        with open(f"/proc/self/task/{task}/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return _Look()  # it has ended
    pending, blocked = (int(fields[name], 16) for name in ("SigPnd", "SigBlk"))
    return _Look(
        is_running=fields["State"].strip().startswith("R"),
        has_to_stand=bool((pending | blocked) & _bit(_STAND)),
        may_go_on=bool(pending & _bit(_GO_ON)),
    )


def _bit(number: int) -> int:
    return 1 << int(number) - 1
