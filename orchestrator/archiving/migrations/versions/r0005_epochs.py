"""How often a run has changed hands goes with its work for devices; whose it is, is counted over all orchestrators."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0005", "0004"


def upgrade() -> None:
    """Runs that are there begin to count at 0, and are nobody's among those of a client that are under way."""
    op.add_column("runs", sa.Column("epoch", sa.Integer, nullable=False, server_default="0"))
    op.add_column("runs", sa.Column("client", sa.Text, nullable=False, server_default=""))
