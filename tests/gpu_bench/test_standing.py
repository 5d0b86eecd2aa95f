"""Threads that look for work stand still while another process is timed, and go on afterwards."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_bench import standing

SPINNER = r"""
#include <pthread.h>
static volatile int over, turns;
static pthread_t thread;
static void* spin(void* _) { while (!over) ++turns; return _; }
void begin(void) { over = 0; pthread_create(&thread, 0, spin, 0); }
int turned(void) { return turns; }
void end(void) { over = 1; pthread_join(thread, 0); }
"""


@pytest.fixture
def spinner(tmp_path: Path) -> Iterator[ctypes.CDLL]:
    """A thread that Python knows nothing of, which spins."""
    (tmp_path / "spinner.c").write_text(SPINNER)
    library = tmp_path / "spinner.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-pthread", "-o", library, tmp_path / "spinner.c"], check=True)
    made = ctypes.CDLL(str(library))
    made.begin()
    while not made.turned():
        pass
    yield made
    made.end()


def changes(spinner: ctypes.CDLL, calls: int = 1_000_000) -> bool:
    """Whether it turns within so many looks."""
    before = spinner.turned()
    return any(spinner.turned() != before for _ in range(calls))


def test_a_thread_that_looks_for_work_stands_until_it_may_go_on(spinner: ctypes.CDLL) -> None:
    for _ in range(20):
        stood = standing.stand()
        assert stood
        assert not changes(spinner, 20_000)
        standing.go_on(stood)
        assert changes(spinner)


def test_pythons_own_threads_and_sleeping_ones_are_left_alone() -> None:
    over = threading.Event()
    turns = [0]

    def turn() -> None:
        while not over.is_set():
            turns[0] += 1

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        stood = standing.stand()
        standing.go_on(stood)
        assert thread.native_id not in stood
        before = turns[0]
        while turns[0] == before:
            pass
    finally:
        over.set()
        thread.join()


def test_a_thread_that_took_its_signal_late_goes_on_all_the_same(
    spinner: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with other work, where nobody waits until it stands; both signals then come at once."""
    monkeypatch.setattr(standing, "_PATIENCE_SECONDS", 0.0)
    for _ in range(200):
        standing.go_on(standing.stand())
        assert changes(spinner)


def test_a_thread_that_has_ended_is_no_error(spinner: ctypes.CDLL) -> None:
    stood = standing.stand()
    standing.go_on(stood)
    spinner.end()
    standing.go_on(stood)
    assert str(os.getpid()) in os.listdir("/proc/self/task")
    spinner.begin()
