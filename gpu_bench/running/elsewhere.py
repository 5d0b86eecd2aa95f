"""A process of its own that makes a program's calls: what a stopwatch and a program have to know of it.

The one idea: calls are queued here and made there, all at once, and when that ends nothing there runs. What that
process is, `runner` says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Elsewhere(Protocol):
    """A process of its own in which a program's kernels run."""

    handshake_ns: float
    """What having it make a call takes that does nothing."""

    def batch(self) -> AbstractContextManager[None]:
        """Around calls that it makes at once; when it ends they have ended, and nothing of that process runs."""
        ...

    def forced_switches(self) -> int:
        """How often the system took a processor away from it."""
        ...

    def kill(self) -> None:
        """Ends it, from any thread: the call under way is a fault of the program."""
        ...


@dataclass(frozen=True)
class Queue:
    """Launches that are made later than they are called."""

    flush: Callable[[], object]
    """Makes them now: the caller is about to read what they write, or to write what they read."""
    settle: Callable[[], object]
    """At the end of a call: makes them now, unless the caller has more to come."""
