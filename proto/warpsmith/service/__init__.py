"""Serves a gRPC servicer and dials one: health, reflection, metrics, limits, deadlines, retries, drain.

`serve` is all that a service's `__main__` calls. `dial` gives a stub whose calls have deadlines, are retried
when they are idempotent, and raise the exceptions of `warpsmith.errors`. Knows no particular service.
"""

from __future__ import annotations

from warpsmith.service.dialing import Patience, dial, is_reachable, wait_until_healthy
from warpsmith.service.serving import Serving, serve, start
from warpsmith.service.wire import LIVENESS, MESSAGE_BYTES, OPTIONS

__all__ = [
    "LIVENESS",
    "MESSAGE_BYTES",
    "OPTIONS",
    "Patience",
    "Serving",
    "dial",
    "is_reachable",
    "serve",
    "start",
    "wait_until_healthy",
]
