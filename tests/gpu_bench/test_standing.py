"""Threads that look for work stand still while another process is timed, and go on afterwards."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_bench.timing import standing

SPINNER = r"""
#define _GNU_SOURCE
#include <pthread.h>
static volatile int over, turns;
static pthread_t thread;
static void* spin(void* _) { while (!over) ++turns; return _; }
void begin(void) { over = 0; pthread_create(&thread, 0, spin, 0); }
void rename_it(void) { pthread_setname_np(thread, "other"); }
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
        assert standing.begin()
        assert not changes(spinner, 20_000)
        standing.end()
        assert changes(spinner)


def test_it_stands_until_the_last_of_those_who_hold_it_lets_go(spinner: ctypes.CDLL) -> None:
    assert standing.begin()
    standing.begin()
    standing.end()
    assert not changes(spinner, 20_000)
    standing.end()
    assert changes(spinner)


def test_pythons_own_threads_and_others_by_name_are_left_alone() -> None:
    over = threading.Event()
    turns = [0]

    def turn() -> None:
        while not over.is_set():
            turns[0] += 1

    thread = threading.Thread(target=turn)
    thread.start()
    standing.begin()
    try:
        before = turns[0]
        while turns[0] == before:
            pass
    finally:
        standing.end()
        over.set()
        thread.join()


def test_a_thread_with_a_name_of_its_own_is_left_alone(spinner: ctypes.CDLL) -> None:
    spinner.rename_it()
    assert standing.begin() == 0
    standing.end()


def test_a_thread_that_took_its_signal_late_goes_on_all_the_same(
    spinner: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with other work: `begin` does not wait until the thread stands still."""
    monkeypatch.setattr(standing, "_PATIENCE_SECONDS", 0.0)
    for _ in range(200):
        standing.begin()
        standing.end()
        assert changes(spinner)


def test_a_thread_that_is_held_for_ever_goes_on_by_itself(spinner: ctypes.CDLL) -> None:
    assert standing.begin()
    try:
        before = spinner.turned()
        while spinner.turned() == before:
            pass
    finally:
        standing.end()


def test_a_forked_child_holds_nobody(spinner: ctypes.CDLL) -> None:
    assert standing.begin()
    child = os.fork()
    if not child:
        spinner.begin()
        standing.begin()
        standing.end()
        os._exit(0 if changes(spinner) else 1)
    standing.end()
    _, status = os.waitpid(child, 0)
    assert status == 0
