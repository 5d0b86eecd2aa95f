"""Waits for a database that is locked, full or away, instead of failing what is written to it.

The one idea: a transaction that such a database has refused has done nothing, so it is tried again whole, ever more
seldom, for as long as the user allows; the log says what is waited for, and when it has come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from prometheus_client import Counter, Gauge
from sqlalchemy.exc import InterfaceError, OperationalError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

from warpsmith.errors import ArchiveFault, RunLost

log = logging.getLogger("warpsmith.orchestrator")

LONGEST_PAUSE_S = 5.0

_waiting = Gauge("warpsmith_archive_waiting", "Transactions that wait for a database that is locked, full or away.")

_refused = Counter(
    "warpsmith_archive_refused_total", "Transactions that the archive did not take, however long they waited."
)


def attempts(patience_seconds: float) -> Iterator[AbstractContextManager[object]]:
    """Tries at a transaction: `for attempt in attempts(…): with attempt: …`. After so long the last fault is raised."""
    begin, is_waiting = time.monotonic(), False

    def told(state: RetryCallState) -> None:
        nonlocal is_waiting
        if not is_waiting:
            is_waiting = True
            _waiting.inc()
            log.warning(
                "%s; it is tried again for %.0f s", state.outcome and state.outcome.exception(), patience_seconds
            )

    try:
        yield from Retrying(
            retry=retry_if_exception(may_pass),
            stop=stop_after_delay(patience_seconds),
            wait=wait_exponential(multiplier=0.1, max=LONGEST_PAUSE_S),
            before_sleep=told,
            reraise=True,
        )
        if is_waiting:
            log.warning("the archive takes what is found again, after %.0f s", time.monotonic() - begin)
    except ArchiveFault as error:
        if not isinstance(error, RunLost):  # whose run is another's by now, and kept by that one
            _refused.inc()
        raise
    finally:
        if is_waiting:
            _waiting.dec()


def may_pass(error: BaseException) -> bool:
    """Whether time may mend it: not what a database thinks of a statement, nor a file that nobody may write."""
    cause = error.__cause__
    is_state = isinstance(cause, OperationalError | InterfaceError) and "readonly" not in str(cause.orig)
    return isinstance(error, ArchiveFault) and is_state
