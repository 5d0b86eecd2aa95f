"""Processes that wait for a task: they serve one session, and unused ones end with their lot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_bench.machine import BENCH, JUDGE, Machine
from gpu_bench.pytorch.compiler_cache import CompilerCache
from gpu_bench.session import Session
from gpu_bench.workers import reserve
from gpu_bench.workers.reserve import Lot, Reserve, SharedFiles
from warpsmith.v1 import benchmark_service_pb2, task_pb2, verdict_pb2


class QuickMachine(Machine):
    """Knows nothing of torch.compile, which takes seconds to find out."""

    def compiled(self, target: task_pb2.Target.ValueType) -> CompilerCache:
        """An empty cache."""
        del target
        return CompilerCache()


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = QuickMachine()
    yield machine
    machine.close()


def test_a_session_takes_the_processes_that_wait_and_leaves_none_behind(small: Any, machine: Machine) -> None:
    files = SharedFiles()
    lot = Lot(task_pb2.TARGET_CPU, machine, None, files)
    session = Session(small.task(), lot=lot)
    program = small.kernel_program(small.softmax)
    case = benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_TASK, seed=3)
    response = session.compare(program, small.compiled(program), [case])
    assert not response.HasField("fault")
    assert response.comparisons[0].outputs[0].rms_ratio <= 4
    waiting = lot.take(BENCH)  # the one for the final measurement
    assert waiting is not None
    assert waiting.alive
    waiting.close()
    assert (lot.take(JUDGE), lot.take(BENCH)) == (None, None)
    session.close()
    assert files.take() == lot.descriptor
    os.close(lot.descriptor)


def test_shared_memory_goes_from_session_to_session_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    files = SharedFiles()
    first, second = files.take(), files.take()
    assert first != second
    files.give_back(first)
    assert files.take() == first
    monkeypatch.setattr(reserve, "MOST_KEPT_BYTES", 10)
    os.ftruncate(first, 11)
    files.give_back(first)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    files.give_back(second)
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(second)


def test_nothing_waits_where_the_processor_is_the_target(machine: Machine) -> None:
    waiting = Reserve(machine)
    assert waiting.take(task_pb2.TARGET_CPU) is None
    waiting.close()


def test_lots_are_made_before_anybody_takes_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Quick:
        """A lot without processes."""

        def __init__(self, *given: object) -> None:
            made.append(given)

        def close(self) -> None:
            """Nothing is held."""

    monkeypatch.setattr(reserve, "Lot", Quick)
    monkeypatch.setattr(reserve.os, "cpu_count", lambda: reserve.LEAST_PROCESSORS)
    waiting = Reserve(machine)
    waiting.begin(task_pb2.TARGET_CPU)
    assert not waiting._coming
    waiting.begin(task_pb2.TARGET_CUDA)
    first = waiting._coming[0]
    waiting.begin(task_pb2.TARGET_CUDA)  # they are begun already
    assert waiting.take(task_pb2.TARGET_CUDA) is first.result()
    waiting.close()
    assert len(made) == reserve.AHEAD + 1


def test_a_cache_learns_without_touching_what_processes_work_in() -> None:
    other, cache = CompilerCache(), CompilerCache()
    (other.directory / "known").write_text("of the machine")
    other.keep()
    cache.learn(other)
    assert not list(cache.directory.iterdir())
    cache.renew()
    assert (cache.directory / "known").read_text() == "of the machine"
    for each in (other, cache):
        each.close()


def test_a_cache_is_emptied_in_place_because_a_jail_may_have_it_mounted() -> None:
    cache = CompilerCache()
    inode = cache.directory.stat().st_ino
    (cache.directory / "left").write_text("by a candidate")
    cache.renew()
    assert cache.directory.stat().st_ino == inode
    assert not list(cache.directory.iterdir())
    cache.close()
