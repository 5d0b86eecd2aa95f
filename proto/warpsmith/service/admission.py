"""What one client may have of a service at once, and the refusal that says so.

The one idea: a client is the name behind its token, or the role in its certificate; those without a name are one client
together. A refusal says whose limit it is, what it is, and when to ask again. It knows nothing of gRPC.
"""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from warpsmith.errors import LimitReached
from warpsmith.permissions import Caller
from warpsmith.settings import ClientLimits

RETRY_SECONDS = 30.0
"""After which a client whose runs or watches are too many may ask again: nobody knows when one of them ends."""
LIMITS = ("runs", "watchers", "request_bytes", "project_seconds")
"""What can be too much, as labels of the metric."""

_refused = Counter("warpsmith_refused_total", "Calls refused because their client has all that it may have.", ["limit"])
for _limit in LIMITS:
    _refused.labels(_limit)


def refusal(limit: str, why: str, retry_seconds: float = 0.0) -> LimitReached:
    """The exception for a limit of `LIMITS`, which is counted; `retry_seconds`: 0 where asking again does not help."""
    _refused.labels(limit).inc()
    return LimitReached(why, retry_seconds=retry_seconds)


def called(caller: Caller) -> str:
    """A client as a sentence begins with it."""
    return caller.name or "who calls without a name"


class Admission:
    """Counts what each client has. From any thread."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._watches: Counts[str] = Counts()

    def require_size(self, caller: Caller, byte_count: int) -> None:
        """Refuses a request that is too large.

        Raises:
            LimitReached: it is.
        """
        most = self._limits.request_bytes
        if byte_count > most:
            raise refusal(
                "request_bytes",
                f"{called(caller)} has sent a request of {byte_count} bytes; one may have {most} "
                "(WARPSMITH_MOST_REQUEST_BYTES)",
            )

    def require_run(self, caller: Caller, run_count: int) -> None:
        """Refuses one more run of a client that has so many which have not ended.

        Raises:
            LimitReached: these are all that it may have.
        """
        if run_count >= self._limits.runs:
            raise refusal(
                "runs",
                f"{called(caller)} has as many runs that have not ended as one client may, {self._limits.runs} "
                f"(WARPSMITH_MOST_RUNS): try again in {RETRY_SECONDS:.0f} s, or cancel one",
                RETRY_SECONDS,
            )

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[None]:
        """Held while a client is sent a stream.

        Raises:
            LimitReached: it is sent as many as it may have.
        """
        name, most = caller.name, self._limits.watchers
        with self._lock:
            if self._watches[name] >= most:
                raise refusal(
                    "watchers",
                    f"{called(caller)} watches as often as one client may, {most} times (WARPSMITH_MOST_WATCHERS): "
                    f"try again in {RETRY_SECONDS:.0f} s",
                    RETRY_SECONDS,
                )
            self._watches[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._watches[name] -= 1
                self._watches += Counts()  # names that watch nothing are forgotten
