"""Whose turn it is with a device, and who loses his: without a device, and on a real service whose caller goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from agent_correctness.judge import Judge
from agent_correctness.servicer import CorrectnessServicer, RemoteComparer
from gpu_bench import metrics
from gpu_bench.servicer import BenchmarkServicer
from gpu_bench.workers.leases import Kind, Leases, Loss, Work
from warpsmith import service
from warpsmith.errors import LeaseLost, ServiceDied, WarpsmithError
from warpsmith.service import serving
from warpsmith.settings import Settings
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    benchmark_service_pb2_grpc,
    candidate_pb2,
    correctness_service_pb2,
    correctness_service_pb2_grpc,
    lease_pb2,
    task_pb2,
    timing_pb2,
)


def work(owner: str = "", kind: Kind = Kind.ALONE, task: str = "t", **lease: Any) -> Work:
    piece = lease.pop("piece", "")
    return Work(kind, task, lease_pb2.Lease(owner=owner, **lease), piece)


async def asked(leases: Leases, *works: Work) -> list[asyncio.Task[None]]:
    """Calls that wait for their turns, in this order."""
    tasks = []
    for each in works:
        tasks.append(asyncio.ensure_future(leases.begin(each)))
        await asyncio.sleep(0)  # it has asked
    return tasks


async def in_turns(leases: Leases, waiting: dict[Work, asyncio.Task[None]]) -> list[str]:
    """Whose turn it is, one after the other."""
    order = []
    while waiting:
        await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        (ended,) = [each for each, task in waiting.items() if task.done()]
        order.append(ended.lease.owner)
        del waiting[ended]
        leases.end(ended)
    return order


def test_turns_go_round_the_orchestrators_however_much_one_asks_for() -> None:
    async def order() -> list[str]:
        leases = Leases()
        works = [work("greedy") for _ in range(6)] + [work("modest"), work("late"), work("modest")]
        return await in_turns(leases, dict(zip(works, await asked(leases, *works), strict=True)))

    assert asyncio.run(order()) == ["greedy", "modest", "late", "greedy", "modest", *["greedy"] * 4]


def test_who_asks_for_one_thing_after_the_other_does_not_come_first_each_time() -> None:
    async def order() -> list[str]:
        leases, served = Leases(), []
        first = work("quick")
        await asked(leases, first)
        waiting = {each: (await asked(leases, each))[0] for each in (work("a"), work("b"))}
        leases.end(first)
        for _ in range(4):  # it is back before the one whose turn it is has ended
            again = work("quick")
            waiting[again] = (await asked(leases, again))[0]
            (now,) = leases._active
            served.append(now.lease.owner)
            del waiting[now]
            leases.end(now)
        for task in waiting.values():
            task.cancel()
        return served

    assert asyncio.run(order())[:3] == ["a", "b", "quick"]


@pytest.mark.parametrize(
    ("first", "second", "at_once"),
    [
        (Kind.ALONE, Kind.ALONE, False),
        (Kind.ALONE, Kind.BESIDE, False),
        (Kind.BESIDE, Kind.ALONE, False),
        (Kind.BESIDE, Kind.BESIDE, True),
        (Kind.ALONE, Kind.AHEAD, True),
        (Kind.AHEAD, Kind.ALONE, True),
    ],
)
def test_what_is_timed_is_alone_with_the_device(first: Kind, second: Kind, at_once: bool) -> None:
    async def begins(task: str) -> bool:
        leases = Leases()
        await asked(leases, one := work(kind=first, task="t"), other := work(kind=second, task=task))
        began = other in leases._active
        leases.end(one)
        assert other in leases._active, "it begins at the latest when the first one has ended"
        return began

    assert asyncio.run(begins("another")) == at_once
    assert not asyncio.run(begins("t")), "of one task one thing at a time"


def test_checks_do_not_keep_a_measurement_waiting_for_ever() -> None:
    async def scenario() -> None:
        leases = Leases()
        checks = [work("a", Kind.BESIDE, f"t{number}") for number in range(3)]
        await asked(leases, checks[0], timing := work("b"), checks[1], checks[2])
        assert leases._active == [checks[0]], "a check that came later does not go before it"
        leases.end(checks[0])
        assert leases._active == [timing]
        leases.end(timing)
        assert leases._active == checks[1:]

    asyncio.run(scenario())


def test_an_earlier_epoch_is_ended_and_refused_once_a_later_one_is_known() -> None:
    async def scenario() -> None:
        leases, stopped = Leases(), threading.Event()
        old = work("paused", run_id="r", epoch=1, number=7)
        waiting = work("paused", run_id="r", epoch=1, number=8)
        tasks = await asked(leases, old, waiting, new := work("next", run_id="r", epoch=2, number=1))
        assert new in leases._waiting, "the device is not free yet"

        def body() -> None:
            with old.under_way(stopped.set):
                assert stopped.wait(30)

        with pytest.raises(LeaseLost, match="another orchestrator has taken up run r"):
            await asyncio.to_thread(body)
        leases.end(old)
        assert leases._active == [new]
        with pytest.raises(LeaseLost):
            await tasks[1]
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(leases.begin(work("paused", run_id="r", epoch=1, number=9)), 5)
        other = asyncio.ensure_future(leases.begin(work("paused", task="u", kind=Kind.AHEAD, run_id="other", epoch=1)))
        await asyncio.wait_for(other, 5)

    asyncio.run(scenario())


def test_of_two_askings_for_one_program_the_later_one_counts() -> None:
    async def scenario() -> None:
        leases = Leases()
        first = work(run_id="r", number=1, piece="measure p")
        (one,) = await asked(leases, blocker := work())
        first_task, same_run = await asked(leases, first, work(run_id="r", number=2, piece="measure q"))
        again = await asked(leases, work(run_id="r", number=3, piece="measure p"))
        with pytest.raises(LeaseLost, match="asked for again"):
            await first_task
        await one
        assert not same_run.done()
        assert not again[0].done()
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(leases.begin(work(run_id="r", number=1, piece="measure p")), 5)
        leases.end(blocker)
        await asyncio.wait_for(same_run, 5)
        again[0].cancel()

    asyncio.run(scenario())


def test_a_call_that_is_left_before_its_turn_leaves_the_queue() -> None:
    async def scenario() -> None:
        leases = Leases()
        tasks = await asked(leases, blocker := work(), work("gone"), last := work("last"))
        tasks[1].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[1]
        leases.end(blocker)
        assert leases._active == [last]
        leases.lose(last, Loss.CALLER_LEFT)
        leases.end(last)
        assert last._has_ended.wait(5), "who ends work that never began does not look for it for ever"

    asyncio.run(scenario())


# ---- on a real service ----------------------------------------------------------------------------------


class Slow:
    """Sessions whose work lasts until somebody ends it; those of task "quick" answer at once."""

    def __init__(self) -> None:
        self.begun, self.abandoned, self.free = threading.Semaphore(0), threading.Event(), threading.Event()

    def is_described(self, _: object) -> bool:
        return True

    def describe(self, _: object) -> benchmark_service_pb2.DescribeDeviceResponse:
        return benchmark_service_pb2.DescribeDeviceResponse(device=timing_pb2.Device(name="slow"))

    def probe(self) -> timing_pb2.Device:
        raise AssertionError

    @contextmanager
    def using(self, task: task_pb2.Task, _form: object = None) -> Iterator[Slow]:
        self._is_quick = task.name == "quick"
        yield self

    def abandon(self) -> None:
        self.abandoned.set()

    def _work(self) -> None:
        self.begun.release()
        if not self._is_quick:
            assert self.abandoned.wait(60), "nobody ended it"

    def measure(self, _: object) -> benchmark_service_pb2.MeasureArtifactResponse:
        self._work()
        return benchmark_service_pb2.MeasureArtifactResponse(timing=timing_pb2.Timing())

    def compare(self, *_: object) -> benchmark_service_pb2.CompareOutputsResponse:
        self._work()
        return benchmark_service_pb2.CompareOutputsResponse()

    def settle(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Slow, str]]:
    """A service that pings its callers, and ends who does not answer within a second."""
    monkeypatch.setattr(
        serving,
        "KEEPALIVE",
        (
            ("grpc.keepalive_time_ms", 500),
            ("grpc.keepalive_timeout_ms", 500),
            ("grpc.http2.ping_timeout_ms", 500),
            ("grpc.http2.max_pings_without_data", 0),
        ),
    )
    sessions = Slow()
    running = service.start(
        "benchmark",
        benchmark_service_pb2_grpc.add_BenchmarkServiceServicer_to_server,
        BenchmarkServicer(sessions),  # type: ignore[arg-type]
        Settings(port=0, drain_seconds=0.1),
    )
    yield sessions, f"127.0.0.1:{running.port}"
    running.stop()


def request(name: str = "slow", **lease: Any) -> benchmark_service_pb2.MeasureArtifactRequest:
    return benchmark_service_pb2.MeasureArtifactRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CPU, name=name),
        program=candidate_pb2.Program(digest=name),
        lease=lease_pb2.Lease(owner="o", **lease),
    )


def stub_of(address: str) -> benchmark_service_pb2_grpc.BenchmarkServiceStub:
    return service.dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, address)


def require_free(address: str) -> None:
    """The device is had by the next one at once."""
    assert stub_of(address).MeasureArtifact(request("quick"), timeout=30).HasField("timing")


CALLER = """
import sys
sys.path[:0] = {paths!r}
from test_leases import request, stub_of
stub_of({address!r}).MeasureArtifact(request(run_id="r", epoch=1, number=1))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_killed_or_stopped_holds_no_device(slow: tuple[Slow, str], number: signal.Signals) -> None:
    """The call is the heartbeat: gRPC asks its peer whether it lives, and ends the calls of one that says nothing."""
    sessions, address = slow
    paths = [os.path.dirname(__file__), *filter(None, sys.path)]
    caller = subprocess.Popen([sys.executable, "-c", CALLER.format(paths=paths, address=address)])
    try:
        assert sessions.begun.acquire(timeout=60)
        caller.send_signal(number)
        assert sessions.abandoned.wait(30)
        require_free(address)
    finally:
        caller.kill()
        caller.wait()


def test_the_answer_to_who_has_lost_the_run_is_a_refusal(slow: tuple[Slow, str]) -> None:
    sessions, address = slow
    said: list[WarpsmithError] = []

    def ask() -> None:
        try:
            stub_of(address).MeasureArtifact(request(run_id="r", epoch=1, number=1))
        except WarpsmithError as error:
            said.append(error)

    paused = threading.Thread(target=ask)
    paused.start()
    assert sessions.begun.acquire(timeout=30)
    assert (
        stub_of(address).MeasureArtifact(request("quick", run_id="r", epoch=2, number=1), timeout=30).HasField("timing")
    )
    paused.join(30)
    assert [type(each) for each in said] == [LeaseLost]
    ask()
    assert [type(each) for each in said] == [LeaseLost] * 2


def test_a_comparison_ends_with_the_verification_that_asked_for_it(slow: tuple[Slow, str]) -> None:
    sessions, address = slow
    judge = service.start(
        "correctness",
        correctness_service_pb2_grpc.add_CorrectnessServiceServicer_to_server,
        CorrectnessServicer(Judge(RemoteComparer(address))),
        Settings(port=0, drain_seconds=0.1),
    )
    program = candidate_pb2.Program(digest="p")
    asked_for = correctness_service_pb2.VerifyArtifactRequest(
        task=request().task, program=program, artifact=artifact_pb2.Artifact(program_digest="p")
    )
    stub = service.dial(correctness_service_pb2_grpc.CorrectnessServiceStub, f"127.0.0.1:{judge.port}")
    try:
        with pytest.raises(WarpsmithError):
            stub.VerifyArtifact(asked_for, timeout=1.0)
        assert sessions.begun.acquire(timeout=30)
        assert sessions.abandoned.wait(30), "the device works on for nobody"
        require_free(address)
    finally:
        judge.stop()


def test_a_service_that_died_of_a_comparison_is_not_asked_again_by_who_compares() -> None:
    class Dying:
        count = 0

        def compare(self, _: object) -> benchmark_service_pb2.CompareOutputsResponse:
            self.count += 1
            raise ServiceDied("Socket closed")

    comparer = Dying()
    judge = service.start(
        "correctness",
        correctness_service_pb2_grpc.add_CorrectnessServiceServicer_to_server,
        CorrectnessServicer(Judge(comparer)),
        Settings(port=0, drain_seconds=0.1),
    )
    asked_for = correctness_service_pb2.VerifyArtifactRequest(
        task=request().task,
        program=candidate_pb2.Program(digest="p"),
        artifact=artifact_pb2.Artifact(program_digest="p"),
    )
    stub = service.dial(correctness_service_pb2_grpc.CorrectnessServiceStub, f"127.0.0.1:{judge.port}")
    try:
        with pytest.raises(ServiceDied):
            stub.VerifyArtifact(asked_for, timeout=30.0)
        assert comparer.count == 1
    finally:
        judge.stop()


def test_calls_that_wait_for_a_turn_hold_no_thread(slow: tuple[Slow, str]) -> None:
    sessions, address = slow
    stub, ended = stub_of(address), Counter[str]()

    def ask(number: int) -> None:
        answer = stub.MeasureArtifact(request("quick" if number else "slow", run_id=f"r{number}"), timeout=60)
        ended[answer.WhichOneof("outcome")] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    threads[0].start()
    assert sessions.begun.acquire(timeout=30)
    for each in threads[1:]:
        each.start()
    while metrics.WAITING._value.get() < 39:
        pass
    assert stub.DescribeDevice(benchmark_service_pb2.DescribeDeviceRequest(), timeout=30).device.name == "slow"
    sessions.abandoned.set()
    for each in threads:
        each.join(60)
    assert ended == {"timing": 40}
