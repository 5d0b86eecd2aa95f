"""What both ends of a call know: sizes, connections, and how an exception crosses the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

MESSAGE_BYTES = 64 << 20
"""Largest message in either direction; a program with its headers and a binary is well below."""

OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second listener
)

LIVENESS = "liveness"
"""Name under which the health service says that the process lives, also while it is not ready for calls."""

KIND = "warpsmith-error"
"""Trailing metadata: the class of the exception that a servicer raised. A status without it is gRPC's own."""
BEGUN = "warpsmith-begun"
"""Initial metadata of a call for whose work there are turns: it is this one's now. Where the connection then breaks,
the service ended in the midst of the work, or was cut off."""
RETRY_MS = "grpc-retry-pushback-ms"
"""Trailing metadata of gRPC's own ("server pushback"): in how many milliseconds to ask again; absent where it is
nothing to wait for."""
TOKENS = "warpsmith-model-tokens"
"""Trailing metadata: tokens that a language model took before that exception; absent where there are none."""


class Left(Protocol):
    """A call that is being served, whose caller may leave it."""

    def when_left(self, tell: Callable[[], object]) -> None:
        """Has `tell` called when nobody waits for the answer any more; at once where nobody does."""
        ...


serving: ContextVar[Left | None] = ContextVar("serving", default=None)
"""The call that a thread serves; None outside of one."""
