"""Starts services again that have ended by themselves, each time a little later.

The one idea: a service that has served for a while has met an accident, and runs under way wait for it; one that ends
again and again as soon as it has started has a reason, with which all end. It looks when it is asked to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.serving.local import LocalServices
from warpsmith import printable
from warpsmith.errors import WarpsmithError

PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before a service that has ended starts again, the first time, the second time in a row, and so on."""
STEADY_SECONDS = 60.0
"""A service that ends after so long begins a new row."""


@dataclass
class _Row:
    """Ends of a service one soon after the other."""

    count: int = 0
    begun: float = float("-inf")
    """When it last started again."""
    due: float | None = None
    """When it is to start again; None while it is up."""


@dataclass
class Reviving:
    """Keeps services up. `note` hears of each end; `clock` gives seconds."""

    services: LocalServices
    note: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _rows: dict[str, _Row] = field(default_factory=dict)

    def look(self) -> None:
        """Starts what has ended and has waited long enough.

        Raises:
            Infrastructure, BadInput: a service ends again and again; its log's last line is in the message.
        """
        for name, how in self.services.ended().items():
            row = self._rows.setdefault(name, _Row())
            if row.due is None:
                self._plan(row, how)
            if row.due is not None and row.due <= self.clock():
                row.due = None
                with contextlib.suppress(WarpsmithError):  # it has ended once more, which the next look finds
                    self.services.restart(name)
                row.begun = self.clock()

    def _plan(self, row: _Row, how: Exception) -> None:
        row.count = row.count + 1 if self.clock() < row.begun + STEADY_SECONDS else 1
        if row.count > len(PAUSES_S):
            raise how
        pause = PAUSES_S[row.count - 1]
        when = f"in {pause:.0f} s" if pause else "now"
        self.note(f"{printable.line(str(how))}; it is started again {when}")
        row.due = self.clock() + pause
