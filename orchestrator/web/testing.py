"""An orchestrator whose runs do what they are told, for tests of the page and for what measures it.

The one idea: everything but the search is real (archive, events, gRPC), so what is seen on the page went the whole way.
Trials are those of a fake world, under other numbers.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.commands.client import Optimization
from orchestrator.search import Search
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.servicer import OptimizationServicer
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.story import Story
from orchestrator.web import serving
from orchestrator.web.guard import Access
from warpsmith import service
from warpsmith.settings import Settings
from warpsmith.v1 import optimization_service_pb2_grpc, run_pb2, task_pb2, trial_pb2

BEGIN_SECONDS = 10.0
_Step = Callable[[], bool]
"""Does something in a run's thread; whether the run goes on."""


@dataclass
class ToldRun:
    """A run that happens as it is told. What a search run has for its host, and more for who tells it."""

    run: run_pb2.Run
    story: Story
    pattern: list[trial_pb2.Trial]
    was_asked_to_stop: threading.Event = field(default_factory=threading.Event)
    _steps: queue.SimpleQueue[_Step] = field(default_factory=queue.SimpleQueue)
    _count: int = 0

    def execute(self) -> None:
        """Does what it is told until that is an end."""
        while self._steps.get()():
            pass

    def cancel(self) -> None:
        """Ends, as who asks it to stop expects."""
        self.was_asked_to_stop.set()
        self.end(run_pb2.RUN_STATE_CANCELLED, "stopped by the user")

    def leave(self) -> None:
        """Does nothing more."""
        self._steps.put(lambda: False)

    def trial(self, parent: int = 0) -> int:
        """A trial ends now; gives its number."""
        self._count += 1
        number = self._count
        made = trial_pb2.Trial()
        made.CopyFrom(self.pattern[(number - 1) % len(self.pattern)])
        made.number, made.parent = number, parent

        def step() -> bool:
            self.run.trial_count = number
            self.story.trial_ended(made)
            return True

        self._steps.put(step)
        return number

    def state(self, state: run_pb2.RunState.ValueType, message: str = "") -> None:
        """The run is in another state from now on."""

        def step() -> bool:
            self.run.state, self.run.message = state, message
            self.story.run_changed(self.run)
            return True

        self._steps.put(step)

    def end(self, state: run_pb2.RunState.ValueType = run_pb2.RUN_STATE_NO_FASTER, message: str = "nothing") -> None:
        """The run ends."""
        self.state(state, message)
        self._steps.put(lambda: False)


@dataclass
class ToldOrchestrator:
    """Its client, and its runs by identifier."""

    orchestrator: Optimization
    pattern: list[trial_pb2.Trial]
    address: str = ""
    created: queue.SimpleQueue[ToldRun] = field(default_factory=queue.SimpleQueue)

    def begin(self, name: str = "softmax") -> ToldRun:
        """A run under way."""
        client.create(self.orchestrator, testing.task(name), run_pb2.Budget(wall_seconds=60))
        return self.next()

    def next(self) -> ToldRun:
        """The next run that somebody has asked for, once it is under way."""
        return self.created.get(timeout=BEGIN_SECONDS)

    def make_run(self, run: run_pb2.Run, _: Search, story: Story, __: bool) -> SearchRun:
        """What a host makes a run with."""
        made = ToldRun(run, story, self.pattern)
        made.state(run_pb2.RUN_STATE_SEARCHING)
        self.created.put(made)
        return cast("SearchRun", made)


@contextmanager
def told_orchestrator(at_once: int = 4) -> Iterator[ToldOrchestrator]:
    """One over gRPC, on a port of its own, with an archive that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Archive.in_directory(Path(folder, "runs"))
        agents = testing.World().agents()
        gate = DeviceGate(agents.benchmarks)
        made = ToldOrchestrator(cast("Optimization", None), _pattern())
        servicer = OptimizationServicer(RunHost(archive, made.make_run, at_once=at_once), gate=gate)
        add: Any = optimization_service_pb2_grpc.add_OptimizationServiceServicer_to_server
        served = service.start("orchestrator", add, servicer, Settings(port=0, thread_count=64, drain_seconds=0.1))
        try:
            made.address = f"127.0.0.1:{served.port}"
            made.orchestrator = cast("Optimization", orchestrator_at(made.address))
            yield made
        finally:
            served.stop()


@contextmanager
def web_page(orchestrator: Optimization, access: Access | None = None) -> Iterator[serving.WebServer]:
    """Its page at a port of its own."""
    bound = serving.listening("127.0.0.1:0", is_guarded=False)
    with serving.WebServer(orchestrator, bound, access or Access.new()) as shown:
        yield shown


class _Kept:
    """Takes what a run says of itself."""

    def __init__(self) -> None:
        self.trials: list[trial_pb2.Trial] = []

    def run_changed(self, run: run_pb2.Run) -> None:
        """Nothing is kept of it."""

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        """Keeps it."""
        self.trials.append(trial)


def _pattern() -> list[trial_pb2.Trial]:
    """Trials of a run in a fake world."""
    agents, kept = testing.World().agents(), _Kept()
    run = run_pb2.Run(id="pattern", task=testing.task("softmax"), created_at=time.time())
    run.task.target = task_pb2.TARGET_CPU
    SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), kept).execute()
    return kept.trials
