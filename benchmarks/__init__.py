"""Measurements: scripts whose tables are committed under `docs/results`, run as `python -m benchmarks.ROOM.NAME`."""
