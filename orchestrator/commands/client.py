"""The command line's way to an orchestrator: one that it starts, one that runs elsewhere, or the archive alone.

The one idea: every command is a client of OptimizationService, so that local and remote are one code path. What only
reads past runs needs no process: the servicer answers in this one. Interrupting a watched run asks it to stop and
goes on watching, so that the best so far is judged.
"""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

from orchestrator.agents import Agents, Benchmark, Correctness
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.commands.options import DEFAULT_RUNS
from orchestrator.commands.terminal import note
from orchestrator.search_run import SearchRun
from orchestrator.servicer import OptimizationServicer
from orchestrator.serving import ownership
from orchestrator.serving.dialing import agents_at, judges_at, orchestrator_at
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.local import MODULES, LocalServices, published_address
from orchestrator.serving.ownership import Owner
from warpsmith import settings
from warpsmith.errors import BadInput, Infrastructure, LimitReached, NotFound, ServiceGone, ServiceLate
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2, trial_pb2

Watcher = Callable[[run_pb2.RunEvent], None]

PAGE_TRIALS = 256
"""Trials that are asked for at once."""
PAUSES_S = (0.2, 0.5, 1.0, 2.0, *(4.0,) * 29)
"""Before each further try to watch a run whose connection broke, two minutes in all; an event begins them anew."""
CHANGE_SECONDS = 360.0
"""Longest wait for what changes the archive: an orchestrator waits five minutes for one that is locked or full."""


class Optimization(Protocol):
    """What a command calls: a stub of OptimizationService, or `InProcess`."""

    def GetRun(self, request: messages.GetRunRequest, /, timeout: float | None = None) -> messages.GetRunResponse:
        """Gives one run."""
        ...

    def ListRuns(self, request: messages.ListRunsRequest, /, timeout: float | None = None) -> messages.ListRunsResponse:
        """Lists runs."""
        ...

    def ListTrials(
        self, request: messages.ListTrialsRequest, /, timeout: float | None = None
    ) -> messages.ListTrialsResponse:
        """Lists the trials of a run."""
        ...

    def ExportBest(
        self, request: messages.ExportBestRequest, /, timeout: float | None = None
    ) -> messages.ExportBestResponse:
        """Writes the best kernel."""
        ...

    def WatchRun(
        self, request: messages.WatchRunRequest, /, timeout: float | None = None
    ) -> Iterable[messages.WatchRunResponse]:
        """Streams events."""
        ...

    def CreateRun(
        self, request: messages.CreateRunRequest, /, timeout: float | None = None
    ) -> messages.CreateRunResponse:
        """Starts a run."""
        ...

    def CancelRun(
        self, request: messages.CancelRunRequest, /, timeout: float | None = None
    ) -> messages.CancelRunResponse:
        """Asks a run to stop."""
        ...

    def ResumeRun(
        self, request: messages.ResumeRunRequest, /, timeout: float | None = None
    ) -> messages.ResumeRunResponse:
        """Takes up a run again."""
        ...

    def GetSigningKey(
        self, request: messages.GetSigningKeyRequest, /, timeout: float | None = None
    ) -> messages.GetSigningKeyResponse:
        """Gives the public key of results."""
        ...

    def DescribeQueue(
        self, request: messages.DescribeQueueRequest, /, timeout: float | None = None
    ) -> messages.DescribeQueueResponse:
        """Says what is under way, and what devices do."""
        ...


class InProcess:
    """Past runs through the same nine methods, without a server. It starts nothing; an owner stops what was left."""

    def __init__(self, archive: Archive, owner: Owner | None = None) -> None:
        self._archive, self._host = archive, RunHost(archive, _no_agents, owner=owner)
        self._servicer: Any = OptimizationServicer(self._host)

    def WatchRun(self, request: messages.WatchRunRequest, **_: object) -> Iterator[messages.WatchRunResponse]:
        """What happened in a run, and no more."""
        events = self._archive.events(self._host.run(request.run_id).id, request.after)
        return (messages.WatchRunResponse(event=event) for event in events)

    def close(self) -> None:
        """Closes the archive."""
        self._host.close()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        answer = getattr(self._servicer, method)
        return lambda request, **_: answer(request, None)


def _no_agents(*_: object) -> SearchRun:
    raise NotFound("no agents are connected here")


@contextmanager
def reading(server: str, runs: Path) -> Iterator[Optimization]:
    """A client for what is kept: of a server, or of a directory.

    Raises:
        BadInput: nothing is kept there.
    """
    if server:
        yield _at(server)
        return
    with closing(InProcess(Archive.reading(runs))) as orchestrator:
        yield cast("Optimization", orchestrator)


@contextmanager
def connected(server: str, runs: Path) -> Iterator[Optimization]:
    """A client of a server: the named one, or the one that a command under way in `runs` has started.

    Raises:
        BadInput: no command is under way there.
    """
    yield _at(server or str(runs))


@contextmanager
def stopping(server: str, runs: Path) -> Iterator[Optimization]:
    """A client that stops runs: of a server, of the command under way in `runs`, or, where none is, of what one left.

    Raises:
        BadInput: nothing is kept there.
    """
    if server or ownership.somebody_lives(runs) or not (runs / FILE_NAME).exists():
        yield _at(server or str(runs))
        return
    archive = Archive.in_directory(runs)
    with closing(InProcess(archive, Owner(archive, stays=False))) as orchestrator:
        yield cast("Optimization", orchestrator)


def _at(server: str) -> Optimization:
    """A client of a server by its address, or by the runs directory of a command under way, such as `warpsmith up`.

    Raises:
        BadInput: no command is under way there, or its socket is not our own.
    """
    return _calling(server) if ":" in server else cast("Optimization", _Published(Path(server)))


def _calling(address: str) -> Optimization:
    known = settings.read()
    return cast("Optimization", orchestrator_at(address, known.tls, known.token_file, waits=note))


class _Published:
    """The orchestrator that a runs directory names. Looked up for each call: the next one has another address."""

    def __init__(self, runs: Path) -> None:
        self._runs, self._address = runs, published_address(runs)
        self._orchestrator = _calling(self._address)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._now(), method)

    def _now(self) -> Optimization:
        try:
            if (address := published_address(self._runs)) != self._address:
                self._orchestrator, self._address = _calling(address), address
        except BadInput as error:  # there was one
            raise ServiceGone(str(error)) from error
        return self._orchestrator


@dataclass(frozen=True)
class Serving:
    """A client that can start runs, and those who serve it."""

    orchestrator: Optimization
    check: Callable[[], None]
    """Raises Infrastructure when a service that this command has started has ended."""
    goes_on: str = "resume {}"
    """The command that goes on with a run, {}, that this one leaves."""


def where(server: str, runs: Path) -> str:
    """The option, after a space, by which a further command finds what this one has; empty where it needs none."""
    given = ("--server", server) if server else ("--runs", str(runs))
    return "" if given == ("--runs", str(DEFAULT_RUNS)) else f" {shlex.join(given)}"


@contextmanager
def searching(server: str, runs: Path, environment: Mapping[str, str]) -> Iterator[Serving]:
    """A client that can start runs: of a server, or of six services that live as long as the block.

    Raises:
        BadInput: the runs directory cannot be written; Infrastructure: a service does not start, or ended.
    """
    with ending_on_sigterm():
        if server:
            yield Serving(_at(server), lambda: None, f"watch {{}}{where(server, runs)}")
            return
        with LocalServices(runs, environment=environment) as services:
            try:
                orchestrator = cast("Optimization", orchestrator_at(services.address("orchestrator")))
                yield Serving(orchestrator, services.check, f"resume {{}}{where(server, runs)}")
            except Infrastructure:
                services.check()  # a service that ended explains more than a call that failed
                raise


@contextmanager
def judging(runs: Path, environment: Mapping[str, str]) -> Iterator[tuple[Correctness, Benchmark]]:
    """The two services that judge, for as long as the block.

    Raises:
        BadInput: the runs directory cannot be written; Infrastructure: a service does not start, or ended.
    """
    modules = {name: MODULES[name] for name in ("benchmark", "correctness")}
    with ending_on_sigterm(), LocalServices(runs, modules=modules, environment=environment) as services:
        try:
            yield judges_at(services.address("correctness"), services.address("benchmark"))
        except Infrastructure:
            services.check()
            raise


@contextmanager
def verifying(runs: Path, environment: Mapping[str, str]) -> Iterator[Agents]:
    """The five services that make and judge kernels, for as long as the block; raises as `judging`."""
    modules = {name: MODULES[name] for name in MODULES if name != "orchestrator"}
    with ending_on_sigterm(), LocalServices(runs, modules=modules, environment=environment) as services:
        try:
            yield agents_at(services.address)
        except Infrastructure:
            services.check()
            raise


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM unwind the stack, so that what the block started is stopped. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def create(
    client: Optimization, task: task_pb2.Task, budget: run_pb2.Budget, search: str = "", *, fresh: bool = False
) -> run_pb2.Run:
    """Starts a run of a task."""
    request = messages.CreateRunRequest(task=task, budget=budget, search=search, fresh=fresh)
    return client.CreateRun(request, timeout=CHANGE_SECONDS).run


def latest(
    client: Optimization, count: int, *, task_digest: str = "", before: float = 0.0, light: bool = False
) -> list[run_pb2.Run]:
    """At most so many runs, newest first, a page at a time; the rest as `ListRunsRequest` has it."""
    found: dict[str, run_pb2.Run] = {}
    while len(found) < count:
        request = messages.ListRunsRequest(
            limit=count - len(found), task_digest=task_digest, before=before, light=light
        )
        page = client.ListRuns(request, timeout=30.0).runs
        if all(run.id in found for run in page):
            break
        found |= {run.id: run for run in page}
        before = page[-1].created_at
    return list(found.values())


def cancel(client: Optimization, run_id: str) -> run_pb2.Run:
    """Asks a run to stop."""
    return client.CancelRun(messages.CancelRunRequest(run_id=run_id), timeout=CHANGE_SECONDS).run


def trials(client: Optimization, run_id: str) -> Iterator[trial_pb2.Trial]:
    """The trials of a run, without sources, a page at a time; all at once from a server that knows no pages."""
    after = 0
    while True:
        request = messages.ListTrialsRequest(run_id=run_id, after=after, limit=PAGE_TRIALS)
        page = client.ListTrials(request, timeout=30.0).trials
        if not page or page[0].number <= after:
            return
        yield from page
        after = page[-1].number


def trial(client: Optimization, run_id: str, number: int) -> trial_pb2.Trial | None:
    """One trial of a run with its sources; None where there is none of that number."""
    request = messages.ListTrialsRequest(run_id=run_id, with_sources=True, after=number - 1, limit=1)
    page = client.ListTrials(request, timeout=30.0).trials
    return next((each for each in page if each.number == number), None)


def resume(client: Optimization, run_id: str) -> run_pb2.Run:
    """Takes up a run again that was left, cancelled or failed."""
    return client.ResumeRun(messages.ResumeRunRequest(run_id=run_id), timeout=CHANGE_SECONDS).run


def follow(
    client: Optimization,
    run_id: str,
    watcher: Watcher,
    *,
    after: int = 0,
    to_cancel: Sequence[str] = (),
    on_interrupt: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda _: None,
    check: Callable[[], None] = lambda: None,
) -> run_pb2.Run:
    """Watches a run past an event to its end and returns it whole; where the connection breaks, from the last event on.

    The first Ctrl-C asks the runs of `to_cancel` to stop, and watching goes on; the second one passes through. `note`
    hears, once each time, that the orchestrator is away and that it is back; `check` is called while it is away.
    Raises ServiceGone or ServiceLate where none of `PAUSES_S` more tries brings an event, and what `check` raises.
    """
    pauses, pause, failed_count = iter(PAUSES_S), 0.0, 0
    interrupted, asked = False, list[str]()
    while True:
        try:
            time.sleep(pause)
            while asked:
                cancel(client, asked[0])
                asked.pop(0)
            for reply in client.WatchRun(messages.WatchRunRequest(run_id=run_id, after=after)):
                if failed_count > 1:
                    note("the orchestrator is back")
                after, pauses, pause, failed_count = reply.event.number, iter(PAUSES_S), 0.0, 0
                watcher(reply.event)
            return client.GetRun(messages.GetRunRequest(run_id=run_id), timeout=30.0).run
        except LimitReached as refused:
            pause = refused.retry_seconds
            if not pause:
                raise
            check()
            note(f"{refused} (waiting for {pause:.0f} s)")
        except (ServiceGone, ServiceLate):  # a connection that the server ends by its age may take a new watch with it
            failed_count += 1
            pause = next(pauses, -1.0)
            if pause < 0:
                raise
            check()
            if failed_count == 2:
                note(f"the orchestrator is away: waiting for it, {sum(PAUSES_S):.0f} s at most")
        except KeyboardInterrupt:
            if interrupted or not to_cancel:
                raise
            interrupted, asked = True, list(to_cancel)
            on_interrupt()
