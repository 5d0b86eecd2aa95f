"""Whose turn it is with the device, and who has lost his.

The one idea: whoever owns the device says whose work is done, because it alone can end it. A lease is held from a
call's turn until its work has ended; that the call is open is its heartbeat, since gRPC ends the calls of a caller that
is stopped or cut off. Turns go round the orchestrators that wait, and of one first come, first served: before a call
each other one has at most one turn. A lease is lost to a later one of the run, or of the program, and with its caller;
its work is ended then, and what it says is refused. Waiting holds no thread. It knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from gpu_bench import metrics
from warpsmith.errors import LeaseLost
from warpsmith.v1 import lease_pb2

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

MOST_KNOWN = 10_000
"""Runs, programs and orchestrators that are remembered, each; those that were heard of last."""
_AGAIN_SECONDS = 0.2
"""Pause before work that goes on is ended once more: it may just have begun a process."""


class Kind(enum.Enum):
    """What else may be under way."""

    ALONE = "alone"
    """Nothing that uses the device: something is timed."""
    BESIDE = "beside"
    """Nothing that is timed, and nothing of its task."""
    AHEAD = "ahead"
    """Nothing of its task: it prepares, and uses the device next to not at all."""


class Loss(enum.StrEnum):
    """Why a lease was lost; also a label of a metric."""

    CALLER_LEFT = "caller_left"
    TAKEN_UP = "taken_up"
    """Another orchestrator has taken up the run."""
    ASKED_AGAIN = "asked_again"


_SAID = {
    Loss.CALLER_LEFT: "nobody waits for its answer any more",
    Loss.TAKEN_UP: "another orchestrator has taken up run {run}",
    Loss.ASKED_AGAIN: "the same was asked for again for run {run}",
}


@dataclass(eq=False)
class Work:
    """A piece of work for the device."""

    kind: Kind
    task: str
    """Digest of the task, of whose work one piece is done at a time."""
    lease: lease_pb2.Lease
    piece: str = ""
    """What of a run's work it is, such as the timing of a program: there is one such piece at a time."""
    waited_seconds: float = 0.0
    """Until its turn came."""
    lost: str = ""
    """Why its lease is lost; empty while it is not."""
    _stop: Callable[[], None] | None = None
    _has_ended: threading.Event = field(default_factory=threading.Event)
    _ending: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def under_way(self, stop: Callable[[], None]) -> Iterator[None]:
        """Around the work; `stop` ends it, from another thread, as often as it is called, and nobody else's.

        Raises:
            LeaseLost: instead of whatever the block gives or raises, where the lease was lost meanwhile.
        """
        self._stop = stop
        try:
            if not self.lost:
                yield
        finally:
            self.ended()
            if self.lost:
                raise LeaseLost(self.lost)

    def ended(self) -> None:
        """Nothing of it is under way any more."""
        with self._ending:  # whose work comes next must not be ended in its place
            self._has_ended.set()

    def end_early(self) -> None:
        """Ends it, and returns when it has ended."""
        while not self._has_ended.is_set():
            with self._ending:
                if self._stop is not None and not self._has_ended.is_set():
                    self._stop()
            self._has_ended.wait(_AGAIN_SECONDS)

    def is_before(self, other: Work) -> bool:
        """Whether its lease is lost to that of other work: of the run's next owner, or for the same piece."""
        if not self.lease.run_id or self.lease.run_id != other.lease.run_id:
            return False
        mine, theirs = self.lease, other.lease
        is_same = bool(self.piece) and self.piece == other.piece and mine.epoch == theirs.epoch
        return mine.epoch < theirs.epoch or (is_same and mine.number <= theirs.number)


class Leases:
    """On one device. From any thread, but for `begin`, which is for an event loop."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._active: list[Work] = []
        self._waiting: dict[Work, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        """In the order in which they came."""
        self._turns = itertools.count(1)
        self._last_turns = _Known[str, int]()
        """By orchestrator, when it had its last turn."""
        self._epochs = _Known[str, int]()
        """By run, the latest."""
        self._numbers = _Known[tuple[str, int, str], int]()
        """By run, its epoch and piece, the latest."""

    async def begin(self, work: Work) -> None:
        """Returns when it is the work's turn, which `end` gives back.

        Raises:
            LeaseLost: a later lease is known, or came meanwhile. CancelledError: its caller waits no more.
        """
        loop, begin = asyncio.get_running_loop(), time.monotonic()
        turn: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._require_latest(work)
            for each in [*self._active, *self._waiting]:
                if each.is_before(work):
                    is_taken_up = each.lease.epoch < work.lease.epoch
                    self.lose(each, Loss.TAKEN_UP if is_taken_up else Loss.ASKED_AGAIN)
            self._waiting[work] = loop, turn
            self._begin_what_may()
        try:
            await turn
            work.waited_seconds = time.monotonic() - begin
        except asyncio.CancelledError:
            self.end(work)
            raise

    def end(self, work: Work) -> None:
        """Its turn is over, or it waits no more."""
        work.ended()
        with self._lock:
            self._waiting.pop(work, None)
            if work in self._active:
                self._active.remove(work)
            self._begin_what_may()

    def lose(self, work: Work, why: Loss) -> None:
        """Takes the work's lease away: it is ended if it is under way, and refused if it waits. Returns at once."""
        with self._lock:
            if work.lost or not (work in self._active or work in self._waiting):
                return
            work.lost = _SAID[why].format(run=work.lease.run_id)
            metrics.LEASES_LOST.labels(why.value).inc()
            if waiting := self._waiting.pop(work, None):
                loop, turn = waiting
                loop.call_soon_threadsafe(_refuse, turn, work.lost)
                return
        threading.Thread(target=work.end_early, name="lost-lease", daemon=True).start()

    def _require_latest(self, work: Work) -> None:
        lease = work.lease
        if not lease.run_id:
            return
        if lease.epoch < self._epochs.get(lease.run_id, lease.epoch):
            metrics.LEASES_LOST.labels(Loss.TAKEN_UP.value).inc()
            raise LeaseLost(_SAID[Loss.TAKEN_UP].format(run=lease.run_id))
        self._epochs.note(lease.run_id, lease.epoch)
        key = lease.run_id, lease.epoch, work.piece
        if work.piece and lease.number < self._numbers.get(key, lease.number):
            metrics.LEASES_LOST.labels(Loss.ASKED_AGAIN.value).inc()
            raise LeaseLost(_SAID[Loss.ASKED_AGAIN].format(run=lease.run_id))
        self._numbers.note(key, lease.number)

    def _begin_what_may(self) -> None:
        """Begins work in the order of turns, until some has to be waited for that wants to be alone."""
        while (work := self._next()) is not None:
            loop, turn = self._waiting.pop(work)
            self._active.append(work)
            self._last_turns.note(work.lease.owner, next(self._turns))
            loop.call_soon_threadsafe(_grant, turn)
        metrics.WAITING.set(len(self._waiting))

    def _next(self) -> Work | None:
        is_held_up = False  # by work that waits until it is alone
        for work in sorted(self._waiting, key=lambda each: self._last_turns.get(each.lease.owner, 0)):  # it is stable
            if self._may_begin(work) and (work.kind is Kind.AHEAD or not is_held_up):
                return work
            is_held_up = is_held_up or work.kind is Kind.ALONE
        return None

    def _may_begin(self, work: Work) -> bool:
        others = [each for each in self._active if each.kind is not Kind.AHEAD]
        if any(each.task == work.task for each in self._active):
            return False
        if work.kind is Kind.ALONE:
            return not others
        return work.kind is Kind.AHEAD or all(each.kind is not Kind.ALONE for each in others)


class _Known(OrderedDict[KeyT, ValueT]):
    """What was noted last."""

    def note(self, key: KeyT, value: ValueT) -> None:
        """Keeps it, and forgets what was noted longest ago."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > MOST_KNOWN:
            self.popitem(last=False)


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _refuse(turn: asyncio.Future[None], why: str) -> None:
    if not turn.done():
        turn.set_exception(LeaseLost(why))
