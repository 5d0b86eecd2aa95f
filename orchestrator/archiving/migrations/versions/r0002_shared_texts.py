"""Sources that many programs share are kept once: a trial took 45 kB, of which its own were 4."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    """Trials that are there stay whole."""
    op.create_table(
        "texts",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.add_column("trials", sa.Column("texts", sa.Text, nullable=False, server_default=""))
