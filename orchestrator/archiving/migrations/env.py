"""Runs revisions in the transaction of whoever asked for them. Alembic loads it by its path."""

from __future__ import annotations

from alembic import context

from orchestrator.archiving.tables import VERSION

context.configure(connection=context.config.attributes["connection"], version_table=VERSION.name)
context.run_migrations()
