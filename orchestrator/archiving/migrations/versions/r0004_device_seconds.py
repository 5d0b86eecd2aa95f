"""What a project has used of devices in a day is a sum over its runs, whose messages need not be read for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    """Runs that are there have used nothing: they are older than quotas."""
    op.add_column("runs", sa.Column("project", sa.Text, nullable=False, server_default=""))
    op.add_column("runs", sa.Column("device_day", sa.String(10), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("device_seconds", sa.Float, nullable=False, server_default="0"))
    op.create_index("ix_runs_device_day", "runs", ["device_day"])
