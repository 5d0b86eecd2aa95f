"""The tables of an archive, as this release writes them.

The one idea: a change here is a revision in `migrations/versions`, which does the same to an archive that is there.
"""

from __future__ import annotations

import sqlalchemy as sa

TABLES = sa.MetaData()
RUNS = sa.Table(
    "runs",
    TABLES,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("task_digest", sa.String(64), nullable=False, index=True),
    sa.Column("task_name", sa.Text, nullable=False),
    sa.Column("target", sa.Integer, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("state", sa.Integer, nullable=False, index=True),
    sa.Column("created_at", sa.Float, nullable=False, index=True),
    sa.Column("speedup", sa.Float, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
    sa.Column("shape_digest", sa.String(64), nullable=False, server_default="", index=True),
    sa.Column("owner", sa.String(40), nullable=False, server_default=""),
    sa.Column("attempt_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("stop_asked", sa.Integer, nullable=False, server_default="0"),
    sa.Column("project", sa.Text, nullable=False, server_default=""),
    sa.Column("device_day", sa.String(10), nullable=False, server_default="", index=True),
    sa.Column("device_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("client", sa.Text, nullable=False, server_default=""),
)
"""`owner`: who writes the run; `epoch`: how often it has changed hands; `attempt_count`: how often it was taken up
since a trial last ended; `stop_asked`: 1 once its user wanted no more of it; `client`: who that is;
`device_seconds`: what it has used of devices on `device_day`, its last such day."""
TRIALS = sa.Table(
    "trials",
    TABLES,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("program_digest", sa.String(64), nullable=False),
    sa.Column("verdict", sa.Integer, nullable=False),
    sa.Column("speedup", sa.Float, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
    sa.Column("texts", sa.Text, nullable=False, server_default=""),
)
"""`texts`: digests of the sources after the first, whose texts the message leaves out; empty where it has all."""
TEXTS = sa.Table(
    "texts",
    TABLES,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
)
"""Sources that many programs share, each once."""
EVENTS = sa.Table(
    "events",
    TABLES,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("message", sa.LargeBinary, nullable=False),
)
GROUPS = sa.Table(
    "groups",
    TABLES,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("form", sa.String(64), primary_key=True, index=True),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("median_ns", sa.Float, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
)
OWNERS = sa.Table(
    "owners",
    TABLES,
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("seen_at", sa.Float, nullable=False),
)
"""Orchestrators of a database on a server, and when each was last heard of, by the database's clock."""
VERSION = sa.Table(
    "schema_version",
    TABLES,
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="schema_version_pkc"),
)
"""One row: the last revision that was applied."""
