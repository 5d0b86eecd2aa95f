"""Which schema an archive has, and how an older one is brought up to date.

The one idea: revisions are numbered, an archive says which was its last, and one that says nothing is older than all of
them. A new archive gets the tables of now at once; alembic, which carries revisions out, is loaded only where there
are some to apply. All is one transaction that one process has at a time, so a schema is the old one or the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

import warpsmith
from orchestrator.archiving.tables import RUNS, TABLES, VERSION
from warpsmith import printable
from warpsmith.errors import BadInput

log = logging.getLogger("warpsmith.orchestrator")

LATEST = "0005"
"""The last revision in `migrations/versions`; `TABLES` are what it leaves."""
UNVERSIONED = ""
"""Of an archive that is older than versions."""
KNOWN = frozenset({UNVERSIONED, *(f"{number:04}" for number in range(1, int(LATEST) + 1))})
UPGRADING_LOCK = 0x7761727073  # "warps"
"""The lock of a PostgreSQL database under which its schema is made or brought up to date."""


def bring_up_to_date(connection: sa.Connection, place: str) -> None:
    """Makes the tables of a new archive, or applies the revisions that an older one lacks; in the caller's transaction.

    Raises:
        BadInput: a later release has made it.
    """
    if connection.dialect.name == "postgresql":  # SQLite's transaction has the whole file
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(UPGRADING_LOCK)))
    tables = sa.inspect(connection)
    if not tables.has_table(RUNS.name):
        TABLES.create_all(connection)
        connection.execute(sa.insert(VERSION).values(version_num=LATEST))
        return
    found = UNVERSIONED
    if tables.has_table(VERSION.name):
        found = _told(connection.execute(sa.select(VERSION.c.version_num)).all())
    require_known(found, place)
    if found != LATEST:
        _upgrade(connection)
        log.info("the archive's schema was %s and is %s now", found or "older than versions", LATEST)


def of_sqlite(cursor: Any) -> str:
    """The schema version of an SQLite file. Raises what SQLite raises where it cannot be read."""
    cursor.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VERSION.name,))
    if cursor.fetchone() is None:
        return UNVERSIONED
    cursor.execute(f"SELECT version_num FROM {VERSION.name}")
    return _told(cursor.fetchall())


def _told(rows: Sequence[Sequence[Any]]) -> str:
    return " and ".join(str(row[0]) for row in rows)


def require_known(version: str, place: str) -> None:
    """Raises BadInput where this release does not know the version of an archive: a later one has written it."""
    if version not in KNOWN:
        raise BadInput(
            f"{place}: its schema has version {printable.quotation(version, 40)}, of a later release; Warpsmith "
            f"{warpsmith.__version__} knows {LATEST} at most: open it with that release, or name another archive "
            "(--runs, WARPSMITH_DATABASE_URL)"
        )


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command  # 120 ms, which no archive that is up to date has to wait
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", "orchestrator.archiving:migrations")
    command.upgrade(config, "head")
