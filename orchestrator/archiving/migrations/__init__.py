"""Revisions of the archive's schema, for alembic: `env.py` runs them, `versions/` has a module for each.

A new one takes the next number, says what it changes in `upgrade`, and imports nothing of ours: what was, stays as it
was. `archiving.versions.LATEST` and `archiving.tables` follow it; a test holds them together. A table or an index has
to be plain (`archive.refuse_programs`).
"""
