"""Ends the process of a program that does not come back while it is timed.

The one idea: a measurement with all its baselines takes minutes, so its caller cannot tell a hang from work; the
process itself knows what a call may take. A kernel cannot be interrupted; the end of its process frees the device.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HUNG = 75
"""Exit code of a process that ended itself so."""
_LOOK_SECONDS = 0.25


class Watchdog:
    """Ends the process where what is expected of a program takes longer than `seconds`.

    A context manager; watches only inside. What waits for the program must let other threads run.
    """

    def __init__(self, seconds: float, end: Callable[[], object] = lambda: os._exit(HUNG)) -> None:
        self._seconds, self._end = seconds, end
        self._deadline = math.inf
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Around a call of the program, or a group of short ones, and the wait for its end."""
        self._deadline = time.monotonic() + self._seconds
        try:
            yield
        finally:
            self._deadline = math.inf

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if time.monotonic() > self._deadline:
                self._end()
