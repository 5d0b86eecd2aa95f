"""What releases wrote that knew no versions; what the earlier of them did not have yet is added."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None

_tables = sa.MetaData()
sa.Table(
    "runs",
    _tables,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("task_digest", sa.String(64), nullable=False, index=True),
    sa.Column("task_name", sa.Text, nullable=False),
    sa.Column("target", sa.Integer, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("state", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False, index=True),
    sa.Column("speedup", sa.Float, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
    sa.Column("shape_digest", sa.String(64), nullable=False, server_default="", index=True),
    sa.Column("owner", sa.String(40), nullable=False, server_default=""),
    sa.Column("attempt_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("stop_asked", sa.Integer, nullable=False, server_default="0"),
)
sa.Table(
    "trials",
    _tables,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("program_digest", sa.String(64), nullable=False),
    sa.Column("verdict", sa.Integer, nullable=False),
    sa.Column("speedup", sa.Float, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
)
sa.Table(
    "events",
    _tables,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("message", sa.LargeBinary, nullable=False),
)
sa.Table(
    "groups",
    _tables,
    sa.Column("run_id", sa.String(40), sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("form", sa.String(64), primary_key=True, index=True),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("median_ns", sa.Float, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
)
sa.Table(
    "owners",
    _tables,
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("seen_at", sa.Float, nullable=False),
)


def upgrade() -> None:
    """Adds tables, columns and indexes that are missing."""
    connection = op.get_bind()
    _tables.create_all(connection)
    for table in _tables.sorted_tables:
        present = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
        for column in table.columns:
            if column.name not in present:
                op.add_column(table.name, column)
        for index in table.indexes:
            index.create(connection, checkfirst=True)
