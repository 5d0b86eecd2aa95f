"""How long an event takes from the orchestrator to the screen, with many watchers of one run, and what that costs.

`python -m benchmarks.timing.live_page --watchers 50` has the orchestrator and its page in a process of their own, reads
the news as browsers do, and with `--browser` looks at a real Chromium among them. Times are of one machine's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.web.guard import Access
from orchestrator.web.testing import told_orchestrator, web_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LAST_SECONDS = 20.0
"""Longest wait for the last event."""
ARRIVALS = """
() => {
  window.arrived = {};
  const look = () => {
    for (const each of document.querySelectorAll('[id^="newest-"]')) window.arrived[each.id] ??= Date.now() / 1000;
  };
  new MutationObserver(look).observe(document.getElementById("part-now"), { childList: true, subtree: true });
}
"""
Arrivals = dict[int, float]
"""By trial, when a watcher had it, in seconds since the epoch."""


def main() -> None:
    """Prints a table of the times and what they cost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--watchers", type=int, default=50)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--rate", type=float, default=5.0, help="events a second")
    parser.add_argument("--browser", action="store_true", help="one more watcher is a real Chromium")
    asked = parser.parse_args()
    here, there = multiprocessing.Pipe()
    served = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, asked.events, asked.rate))
    served.start()
    url, token, run_id = here.recv()
    with _chromium(url, token, run_id, asked.browser) as seen_on_screen:
        watching = _watch_all(url, token, run_id, asked.watchers, asked.events, here)
        with ThreadPoolExecutor(1) as pool:  # the browser's library has an event loop in this thread
            watched = pool.submit(asyncio.run, watching).result()
        times, cpu_seconds, wall_seconds = here.recv()
        on_screen = seen_on_screen()
    served.join()
    print(f"{asked.watchers} watchers, {asked.events} events, {asked.rate:g} a second, {os.cpu_count()} processors")
    print("| seen by | events | median ms | p99 ms | longest ms |\n|---|---|---|---|---|")
    print(_row("watchers", times, watched))
    if asked.browser:
        print(_row("Chromium", times, [on_screen]))
    share = cpu_seconds / wall_seconds
    print(f"orchestrator and page: {cpu_seconds:.1f} s of a processor in {wall_seconds:.0f} s, {share:.0%} of one")


def _row(who: str, times: Arrivals, watched: Sequence[Arrivals]) -> str:
    took = sorted(1000 * (at - times[number]) for each in watched for number, at in each.items() if number in times)
    p99 = took[min(len(took) - 1, int(0.99 * len(took)))]
    return f"| {who} | {len(took)} | {statistics.median(took):.0f} | {p99:.0f} | {took[-1]:.0f} |"


def _serve(parent: Connection, events: int, rate: float) -> None:
    """In a process of its own: the orchestrator, its page, and a run whose trials end at a rate."""
    access = Access.new()
    with told_orchestrator() as told, web_page(told.orchestrator, access) as shown:
        run = told.begin()
        parent.send((shown.url, access.token, run.run.id))
        parent.recv()  # all watch
        begin, cpu = time.monotonic(), time.process_time()
        pause = threading.Event()
        for number in range(events):
            pause.wait(max(0.0, begin + number / rate - time.monotonic()))
            run.trial(parent=number // 2)
        parent.recv()  # all have seen the last
        cost, wall = time.process_time() - cpu, time.monotonic() - begin
        times = {event.trial.number: event.at for event in run.story.events if event.HasField("trial")}
        run.end()
        parent.send((times, cost, wall))


async def _watch_all(
    url: str, token: str, run_id: str, watchers: int, events: int, served: Connection
) -> list[Arrivals]:
    ready = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(_watch(url, token, run_id, events, ready)) for _ in range(watchers)]
    for _ in range(watchers):
        await ready.acquire()
    served.send("all watch")
    seen = await asyncio.gather(*tasks)
    served.send("all have seen the last")
    return seen


async def _watch(url: str, token: str, run_id: str, events: int, ready: asyncio.Semaphore) -> Arrivals:
    """Reads the news of a run until its last event, as a browser does."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    lines = (
        f"GET /runs/{run_id}/events HTTP/1.1",
        f"Host: {host}:{port}",
        f"Authorization: Bearer {token}",
        "Accept: text/event-stream",
    )
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    seen: Arrivals = {}
    is_ready = False
    while events not in seen:
        line = await asyncio.wait_for(reader.readuntil(b"\n"), LAST_SECONDS)
        if not line.startswith(b"data: "):
            continue
        now, part = time.time(), json.loads(line.removeprefix(b"data: "))
        if part["name"] == "now":
            for number in _numbers(part["html"]):
                seen.setdefault(number, now)
            if not is_ready:
                is_ready = True
                ready.release()
    writer.close()
    return seen


def _numbers(html: str) -> Iterator[int]:
    """Of the trials that a part lists."""
    for piece in html.split('id="newest-')[1:]:
        number = piece.partition('"')[0]
        if number.isdecimal():
            yield int(number)


@contextmanager
def _chromium(url: str, token: str, run_id: str, is_asked: bool) -> Iterator[Any]:
    """A page of a real browser that notes when trials are in it; gives what reads the notes."""
    if not is_asked:
        yield dict
        return
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]).new_page()
        page.goto(f"{url}/login?token={token}")
        page.goto(f"{url}/runs/{run_id}")
        page.evaluate(ARRIVALS)

        def read() -> Arrivals:
            found = page.evaluate("window.arrived")
            return {int(key.removeprefix("newest-")): at for key, at in found.items() if key != "newest-none"}

        yield read


if __name__ == "__main__":
    main()
