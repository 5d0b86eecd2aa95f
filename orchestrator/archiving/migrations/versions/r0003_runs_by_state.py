"""Runs under way are found without a look at all: every orchestrator asks for them every few seconds."""

from __future__ import annotations

from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    """Adds the index."""
    op.create_index("ix_runs_state", "runs", ["state"])
