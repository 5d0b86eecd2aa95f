"""An hour in which everything that can go wrong does, at random: `make chaos MINUTES=60 SEED=1`.

The one idea: `warpsmith up`, its archive and its clients are real, its agents those of `fake_service`; faults come in
an order that a seed draws, and every minute, between two of them, all that is promised is looked at (`promises`). The
first promise that is broken ends it with code 1 and says where to look.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from processes import AGENTS, Command, Place, find, module_of, up
from promises import BrokenError, Measured, Promises, Watched

from orchestrator import testing
from orchestrator.archive import FILE_NAME
from orchestrator.commands import client
from warpsmith.errors import NotFound, ServiceFault, WarpsmithError
from warpsmith.sandbox import trees
from warpsmith.v1 import run_pb2

SERVICES = (*AGENTS, "orchestrator")
WATCHERS = 2
"""Clients that ask for a run each and watch it, again and again."""
TRIALS = 60
BUDGET = run_pb2.Budget(wall_seconds=900, trial_count=TRIALS)
PAUSE_S = 3.0
"""Between two faults, on average."""
REST_S = 61.0
"""Least time between two deaths of one service: one that ends again and again ends `up`, as it should."""
CALL_S, DEADLINE_S = "0.03", "2"
"""What an agent takes for each answer, and what the orchestrator waits for one."""
MOST_STOPPED_S, MOST_LOCKED_S, MOST_FULL_S = 6.0, 15.0, 10.0
HEADINGS = ("minute", "killed", "stopped", "slowed", "locked", "full", "up again", *Measured.HEADINGS)


@dataclass
class Chaos:
    """Faults at one `up`, until told to end."""

    here: Place
    dice: random.Random
    services: Command
    counts: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)
    quiet: threading.Lock = field(default_factory=threading.Lock)
    """Held by a fault while it lasts, and by who looks at the promises."""
    died_at: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    """Why no fault could be made any more."""

    def run(self) -> None:
        """Makes one fault after the other, each for a while."""
        faults: tuple[tuple[Callable[[], None], int], ...] = (
            (self.kill, 4), (self.stop, 4), (self.slow, 3), (self.lock, 2), (self.fill, 2), (self.up_again, 1),
        )  # fmt: skip
        makers, weights = zip(*faults, strict=True)
        while not self.over.wait(self.dice.expovariate(1 / PAUSE_S)):
            (fault,) = self.dice.choices(makers, weights)
            with self.quiet:
                try:
                    fault()
                except (AssertionError, OSError) as error:
                    self.failed = f"{getattr(fault, '__name__', fault)}: {error!r}"
                    return

    def kill(self) -> None:
        """A service dies, or is asked to end."""
        rested = [name for name in SERVICES if time.monotonic() > self.died_at.get(name, -REST_S) + REST_S]
        if rested:
            name = self.dice.choice(rested)
            self.died_at[name] = time.monotonic()
            self._signal(name, self.dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            self.counts["killed"] += 1

    def stop(self) -> None:
        """A service stands still for a while."""
        name = self.dice.choice(SERVICES)
        process = self._signal(name, signal.SIGSTOP)
        self.over.wait(self.dice.uniform(0.2, MOST_STOPPED_S))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
        self.counts["stopped"] += 1

    def slow(self) -> None:
        """A service has a tenth of its time for a while: each of its answers comes late."""
        process = self._signal(self.dice.choice(SERVICES), signal.SIGSTOP)
        end = time.monotonic() + self.dice.uniform(1.0, MOST_STOPPED_S)
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end and not self.over.is_set():
                for number, seconds in ((signal.SIGCONT, 0.02), (signal.SIGSTOP, 0.18)):
                    os.kill(process, number)
                    self.over.wait(seconds)
            os.kill(process, signal.SIGCONT)
        self.counts["slowed"] += 1

    def lock(self) -> None:
        """Another process has the archive for itself for a while."""
        file = self.here.path / "runs" / FILE_NAME
        with contextlib.closing(sqlite3.connect(file, timeout=30, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            self.over.wait(self.dice.uniform(0.5, MOST_LOCKED_S))
            other.execute("ROLLBACK")
        self.counts["locked"] += 1

    def fill(self) -> None:
        """The orchestrator can write nothing more to any file for a while."""
        process = self._process("orchestrator")
        try:
            _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (0, most))
            self.over.wait(self.dice.uniform(0.5, MOST_FULL_S))
            resource.prlimit(process, resource.RLIMIT_FSIZE, (most, most))
        except ProcessLookupError:
            return
        self.counts["full"] += 1

    def up_again(self) -> None:
        """`up` dies, or is asked to end, and is started again."""
        self.services.end(self.dice.choice([signal.SIGKILL, signal.SIGTERM]))
        self.services = up(self.here)
        self.died_at = dict.fromkeys(SERVICES, time.monotonic() - REST_S / 2)
        self.counts["up again"] += 1

    def _process(self, name: str) -> int:
        """The service's process, once there is one that `up` says is served."""
        end = time.monotonic() + 60
        while not (found := find(self.services.process.pid, f"-m {module_of(name)}")):
            assert time.monotonic() < end, self.services.said[-2000:]
            assert self.services.process.poll() is None, self.services.said[-2000:]
            time.sleep(0.05)
        return found

    def _signal(self, name: str, number: int) -> int:
        process = self._process(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
        return process


def watch(runs: Path, promises: Promises, over: threading.Event) -> None:
    """A client that asks for a run and watches it to its end, again and again; what it hears is to be kept."""
    number = 0
    while not over.is_set():
        number += 1
        try:
            with client.connected("", runs) as orchestrator:
                task = testing.task(f"chaos{number}")
                run = client.create(orchestrator, task, BUDGET, fresh=True)
                watched = Watched(run.id)
                promises.begun(watched)
                watched.ended = client.follow(orchestrator, run.id, watched.hear)
        except ServiceFault:
            over.wait(0.5)  # none was promised: `up` is away, or the call broke
        except NotFound as error:
            promises.break_one(f"run {run.id} was promised and is not there: {error}")
            return
        except WarpsmithError as error:
            if "no command is under way" not in str(error):
                promises.break_one(f"a client heard {error!r}")
                return
            over.wait(0.5)


def main(arguments: list[str] | None = None) -> int:
    """Prints a row a minute; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two looks at all promises")
    asked = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "tmp").mkdir(mode=0o700)
    mark = f"{folder.name}-{os.getpid()}"
    environment = {
        "FAKE_CALL_SECONDS": CALL_S, "DEADLINE_SECONDS": DEADLINE_S, "TMPDIR": str(folder / "tmp"),
        "XDG_RUNTIME_DIR": "", "CHAOS": mark,
    }  # fmt: skip
    here = Place(folder, environment)
    print(f"chaos of {asked.minutes:g} minutes, seed {asked.seed}, in {folder}", flush=True)
    chaos = Chaos(here, random.Random(asked.seed), up(here))
    promises = Promises(folder, mark, TRIALS)
    clients = [
        threading.Thread(target=watch, args=(folder / "runs", promises, chaos.over), daemon=True)
        for _ in range(WATCHERS)
    ]
    making = threading.Thread(target=chaos.run, daemon=True)
    try:
        for thread in (*clients, making):
            thread.start()
        _look_until(chaos, promises, asked.minutes * 60, asked.every)
        chaos.over.set()
        making.join(120)
        promises.all_end(clients)
        chaos.services.end()
        promises.nothing_is_left()
    except BrokenError as broken:
        print(f"BROKEN after {dict(chaos.counts)} with seed {asked.seed}: {broken}", flush=True)
        print(f"look at {folder}: runs/logs/*.log, runs/{FILE_NAME}, said*", flush=True)
        return 1
    finally:
        chaos.over.set()
        if chaos.services.process.poll() is None:
            chaos.services.process.kill()
    print(f"every promise held: {promises.summary} through {dict(chaos.counts)} (seed {asked.seed})")
    trees.remove(str(folder))
    return 0


def _look_until(chaos: Chaos, promises: Promises, seconds: float, every: float) -> None:
    """Looks at all promises now and then, between two faults, and tells what there is."""
    print("| " + " | ".join(HEADINGS) + " |\n" + "|---" * len(HEADINGS) + "|", flush=True)
    begun = time.monotonic()
    count = 1
    while (due := begun + min(count * every, seconds)) > time.monotonic() or count * every <= seconds:
        while time.monotonic() < due:
            chaos.over.wait(min(1.0, max(0.0, due - time.monotonic())))
            promises.raise_broken()
        with chaos.quiet:
            if chaos.failed:
                raise BrokenError(chaos.failed)
            found = promises.look(chaos.services)
            row = [
                f"{(time.monotonic() - begun) / 60:.1f}",
                *(chaos.counts[name] for name in HEADINGS[1:7]),
                *found.row,
            ]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
        count += 1


if __name__ == "__main__":
    sys.exit(main())
