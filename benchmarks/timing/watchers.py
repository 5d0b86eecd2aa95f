"""What many watchers of many runs wait for: an event, health, a run's state, a stop.

`python -m benchmarks.timing.watchers --watchers 500 --runs 64` has the orchestrator in a process of its own, with its
archive, events and gRPC; its runs do what they are told. Times are of one machine's clock, from the moment in which
an event happens, before it is archived, to the moment in which the last of its watchers has it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.web.testing import told_orchestrator
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import optimization_service_pb2_grpc

CONNECTIONS = 50
"""Of all watchers together: a browser's page, a notebook or a command has one for what it watches."""
STOPS = 50
"""Runs that nobody watches and that are stopped one after another."""
PAUSE_SECONDS = 0.2
"""Between two questions of one kind."""


def main() -> None:
    """Prints a table of the times, and what they cost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--watchers", type=int, default=500)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10.0, help="events a second of all runs together")
    parser.add_argument("--seconds", type=float, default=30.0)
    asked = parser.parse_args()
    here, there = multiprocessing.Pipe()
    arguments = (there, asked.runs, asked.rate, asked.seconds)
    served = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments)
    served.start()
    arrivals, answers, (cpu, wall) = asyncio.run(_measure(here, asked.watchers))
    served.join()
    print(
        f"{asked.watchers} watchers of {asked.runs} runs, {asked.rate:g} events a second, {os.cpu_count()} processors\n"
        "| what | times | median ms | p99 ms | longest ms |\n|---|---|---|---|---|"
    )
    print(_row("an event, at the last of its watchers", arrivals))
    for what, times in answers.items():
        print(_row(what, times))
    print(f"orchestrator: {cpu:.1f} s of a processor in {wall:.0f} s, {cpu / wall:.0%} of one")


def _row(what: str, seconds: Sequence[float]) -> str:
    took = sorted(1000 * each for each in seconds)
    p99 = took[min(len(took) - 1, int(0.99 * len(took)))]
    return f"| {what} | {len(took)} | {statistics.median(took):.0f} | {p99:.0f} | {took[-1]:.0f} |"


def _serve(parent: Connection, run_count: int, rate: float, seconds: float) -> None:
    """In a process of its own: the orchestrator, and runs whose trials end one after another at a rate."""
    with told_orchestrator(at_once=run_count + STOPS) as told:
        runs, to_stop = ([told.begin() for _ in range(count)] for count in (run_count, STOPS))
        parent.send((told.address, *([run.run.id for run in each] for each in (runs, to_stop))))
        parent.recv()  # all watch
        begin, cpu = time.monotonic(), time.process_time()
        pause = threading.Event()
        for number in range(int(seconds * rate)):
            pause.wait(max(0.0, begin + number / rate - time.monotonic()))
            runs[number % run_count].trial()
        parent.send((time.process_time() - cpu, time.monotonic() - begin))
        for run in runs:
            run.end()
        parent.recv()  # all have seen the end


async def _measure(
    served: Connection, watcher_count: int
) -> tuple[list[float], dict[str, list[float]], tuple[float, float]]:
    address, run_ids, to_stop = await asyncio.to_thread(served.recv)
    channels = [grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(CONNECTIONS)]
    last: dict[tuple[str, int], float] = {}
    ready = asyncio.Semaphore(0)
    watchers = [
        asyncio.create_task(_watch(channels[number % CONNECTIONS], run_ids[number % len(run_ids)], last, ready))
        for number in range(watcher_count)
    ]
    for _ in watchers:
        await ready.acquire()
    served.send("all watch")
    over = asyncio.Event()
    questions = _questions(address, run_ids[0], iter(to_stop))
    asking = {what: asyncio.create_task(_ask(call, over)) for what, call in questions.items()}
    cost = await asyncio.to_thread(served.recv)
    over.set()
    answers = {what: await task for what, task in asking.items()}
    await asyncio.gather(*watchers)
    served.send("all have seen the end")
    return list(last.values()), answers, cost


async def _watch(channel: Any, run_id: str, last: dict[tuple[str, int], float], ready: asyncio.Semaphore) -> None:
    """Watches a run until its end; of each trial, notes how late its last watcher so far has it."""
    is_ready = False
    stub: Any = optimization_service_pb2_grpc.OptimizationServiceStub(channel)
    async for reply in stub.WatchRun(messages.WatchRunRequest(run_id=run_id)):
        if not is_ready:
            is_ready = True
            ready.release()
        if reply.event.HasField("trial"):
            key = run_id, reply.event.number
            last[key] = max(last.get(key, 0.0), time.time() - reply.event.at)


def _questions(address: str, run_id: str, to_stop: Iterator[str]) -> dict[str, Callable[[], Awaitable[Any]]]:
    channel = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
    health: Any = health_pb2_grpc.HealthStub(channel)
    stub: Any = optimization_service_pb2_grpc.OptimizationServiceStub(channel)
    return {
        "health": lambda: health.Check(health_pb2.HealthCheckRequest()),
        "GetRun": lambda: stub.GetRun(messages.GetRunRequest(run_id=run_id)),
        "ListRuns": lambda: stub.ListRuns(messages.ListRunsRequest(limit=20, light=True)),
        "CancelRun": lambda: stub.CancelRun(messages.CancelRunRequest(run_id=next(to_stop))),
    }


async def _ask(call: Callable[[], Awaitable[Any]], over: asyncio.Event) -> list[float]:
    """Seconds that each answer took."""
    took = []
    while not over.is_set():
        begin = time.perf_counter()
        try:
            await call()
        except StopIteration:  # all runs that may be stopped are
            break
        took.append(time.perf_counter() - begin)
        await asyncio.sleep(PAUSE_SECONDS)
    return took


if __name__ == "__main__":
    main()
