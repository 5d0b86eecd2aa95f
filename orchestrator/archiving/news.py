"""What happens in an archive on a server, told at once to all orchestrators that share it.

The one idea: a transaction that changes a run says so by PostgreSQL's own NOTIFY, which is sent when it is committed
and not before, so whoever hears it finds it in the archive. What is missed is found a little later by looking. An
SQLite file tells nothing: one orchestrator uses it at a time.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

log = logging.getLogger("warpsmith.orchestrator")

CHANNEL = "warpsmith"
PAUSE_SECONDS = 1.0
"""Before who listens looks whether to go on, or connects anew."""


class Topic(enum.StrEnum):
    """What a piece of news is about."""

    EVENT = "event"
    """Something happened in a run."""
    RUN = "run"
    """A run has come, or ended."""
    STOP = "stop"
    """A run's user wants no more of it."""
    LEFT = "left"
    """An orchestrator has ended, and leaves what it had."""
    MISSED = "missed"
    """Nobody knows: it was not listened for a while."""


Heard = Callable[[Topic, str], None]
"""(topic, the run's identifier or nothing)"""


def tell(connection: sa.Connection, topic: Topic, run_id: str = "") -> None:
    """Tells it with the transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_notify(CHANNEL, f"{topic} {run_id}")))


def listen(engine: sa.Engine, heard: Heard, ended: threading.Event) -> None:
    """Has `heard` called, in a thread, with what is told until `ended`, and first with `MISSED`; nothing of SQLite."""
    if engine.dialect.name == "postgresql":
        threading.Thread(target=_listen, args=(engine, heard, ended), name="news", daemon=True).start()


def _listen(engine: sa.Engine, heard: Heard, ended: threading.Event) -> None:
    assert engine.dialect.dbapi is not None
    while not ended.is_set():
        try:
            with engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(f"LISTEN {CHANNEL}")
                driver = connection.connection.driver_connection
                assert driver is not None
                try:
                    heard(Topic.MISSED, "")
                    while not ended.is_set():
                        for notice in driver.notifies(timeout=PAUSE_SECONDS):
                            topic, _, run_id = notice.payload.partition(" ")
                            if topic in {*Topic}:  # a later release may know others
                                heard(Topic(topic), run_id)
                finally:
                    connection.invalidate()  # it is no connection for anybody else
        except (sa.exc.SQLAlchemyError, engine.dialect.dbapi.Error) as error:
            log.warning("the archive's news are not heard for a while: %s", error)
            ended.wait(PAUSE_SECONDS)


class Bell:
    """Wakes one coroutine, from any thread."""

    def __init__(self) -> None:
        self._loop, self._rung = asyncio.get_running_loop(), asyncio.Event()

    def ring(self) -> None:
        """Ends its `wait`, or the next one."""
        self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self, seconds: float) -> None:
        """Returns when it has been rung since the last time, after so long at the latest."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()


class Bells:
    """Of those who wait for news of runs. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bells: dict[str, set[Bell]] = {}

    @contextmanager
    def of(self, run_id: str) -> Iterator[Bell]:
        """A bell that is rung with news of a run, within the block."""
        bell = Bell()
        with self._lock:
            self._bells.setdefault(run_id, set()).add(bell)
        try:
            yield bell
        finally:
            with self._lock:
                self._bells[run_id].discard(bell)
                if not self._bells[run_id]:
                    del self._bells[run_id]

    def ring(self, run_id: str = "") -> None:
        """Wakes who waits for news of a run; without one, everybody."""
        with self._lock:
            groups = [self._bells.get(run_id, set())] if run_id else list(self._bells.values())
            found = [bell for bells in groups for bell in bells]
        for bell in found:
            bell.ring()
