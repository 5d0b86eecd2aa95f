"""Who has a device: runs by turns, and timing before checks that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from orchestrator import testing
from orchestrator.serving.device_gate import DeviceGate, most_ahead
from warpsmith.errors import DeviceQuarantined
from warpsmith.v1 import task_pb2


def gate(devices: int = 1) -> DeviceGate:
    return DeviceGate(testing.World().agents(devices).benchmarks)


def await_that(condition: Callable[[], bool]) -> None:
    """Waits until other threads have come so far."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_runs_take_turns_in_the_order_in_which_they_ask() -> None:
    shared, order = gate(), []
    threads = []

    def run(name: str) -> None:
        with shared.turn():
            order.append(name)

    with shared.turn() as has_turn:
        assert has_turn
        for name in "abc":
            threads.append(threading.Thread(target=run, args=(name,)))
            threads[-1].start()
            await_that(lambda: len(shared._turns) == 1 + len(threads))
        assert order == []
    for thread in threads:
        thread.join(timeout=30)
    assert order == ["a", "b", "c"]


def test_as_many_runs_have_a_turn_as_there_are_devices() -> None:
    shared = gate(devices=2)
    with shared.turn() as first, shared.turn() as second, shared.turn(lambda: False) as third:
        assert (first, second, third) == (True, True, False)


def test_a_run_that_is_stopped_while_it_waits_gets_no_turn_and_blocks_nobody() -> None:
    shared = gate()
    with shared.turn(), shared.turn(lambda: False) as stopped:
        assert not stopped
    with shared.turn() as has_turn:
        assert has_turn


def test_a_verified_candidate_is_timed_before_a_third_one_is_checked() -> None:
    shared, order = gate(), []
    release = threading.Event()

    def check(name: str) -> None:
        with shared.checking(task_pb2.TARGET_CUDA):
            order.append(name)
            release.wait(60)

    def measure() -> None:
        with shared.timing():
            order.append("timed")

    threads = [threading.Thread(target=check, args=(name,)) for name in "abc"]
    threads[0].start()
    await_that(lambda: order == ["a"])
    threads[1].start()
    await_that(lambda: order == ["a", "b"])
    threads[2].start()
    time.sleep(0.05)  # enough for it to begin, were it let
    assert order == ["a", "b"]
    threads.append(threading.Thread(target=measure))
    threads[-1].start()
    await_that(lambda: shared._waiting_to_time == 1)
    release.set()
    for thread in threads:
        thread.join(timeout=30)
    assert order == ["a", "b", "timed", "c"]


def test_few_processors_prepare_nothing_ahead() -> None:
    assert [most_ahead(count) for count in (1, 2, 4, 8, 16, 64)] == [0, 0, 0, 1, 3, 3]


def test_a_service_that_goes_and_returns_while_it_times_is_not_asked_twice() -> None:
    world = testing.World()
    gate = DeviceGate([world])
    with gate.timing():
        gate.renew([])
        gate.renew([world])
        entered = threading.Event()

        def time_too() -> None:
            with gate.timing():
                entered.set()

        other = threading.Thread(target=time_too)
        other.start()
        assert not entered.wait(0.2)
    other.join(30)
    assert entered.is_set()
    with gate.timing() as only:
        assert only is world
        assert not gate._free


def test_a_service_that_goes_while_it_finds_itself_unfit_and_returns_is_free_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[threading.Timer] = []

    def start(timer: threading.Timer) -> None:
        timers.append(timer)

    monkeypatch.setattr(threading.Timer, "start", start)
    unfit, other = testing.World(), testing.World()
    gate = DeviceGate([unfit, other])

    def refused() -> None:
        with gate.timing() as benchmark:
            assert benchmark is unfit
            gate.renew([other])
            raise DeviceQuarantined("the GPU is out of service")

    with pytest.raises(DeviceQuarantined):
        refused()
    gate.renew([other, unfit])
    assert gate._aside == []
    for timer in timers:
        timer.function()
    assert list(map(id, gate._free)) == [id(other), id(unfit)]


def test_a_device_that_is_free_or_busy_is_not_freed_again() -> None:
    gate = DeviceGate([world := testing.World()])
    with gate._changed:
        gate._free_again(world)
    assert len(gate._free) == 1
    with gate.timing(), gate._changed:
        gate._free_again(world)
        assert gate._free == []
