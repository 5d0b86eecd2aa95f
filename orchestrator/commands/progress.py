"""Shows runs while they go: one live table in a terminal, plain lines without one. On stderr, always.

The one idea: both are fed the same events, and neither knows where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.commands.report import error_text, funnel, speedup_text, state_name, trial_line
from orchestrator.commands.terminal import cell
from orchestrator.pipeline import passed
from orchestrator.search import score
from warpsmith import printable
from warpsmith.v1 import run_pb2, trial_pb2


@dataclass
class _Seen:
    """What events have said of one run."""

    name: str
    state: str = "QUEUED"
    message: str = ""
    generation: int = 0
    trials: list[trial_pb2.Trial] = field(default_factory=list)
    best: trial_pb2.Trial | None = None

    def take(self, event: run_pb2.RunEvent) -> None:
        if event.HasField("run"):
            # The command itself says at its end what went wrong, once for all of its modules.
            self.state, self.message = state_name(event.run.state), "" if error_text(event.run) else event.run.message
            if event.run.HasField("best"):
                self.best = event.run.best
        elif event.HasField("trial"):
            self.trials.append(event.trial)
            self.generation = max(self.generation, event.trial.generation)
            if passed(event.trial) and (self.best is None or score(event.trial) > score(self.best)):
                self.best = event.trial


class Progress:
    """Takes the events of several runs; a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._runs: dict[str, _Seen] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def expect(self, run: run_pb2.Run) -> None:
        """Makes a row for a run."""
        self._runs[run.id] = _Seen(run.task.name)
        self._refresh()

    def take(self, run_id: str, event: run_pb2.RunEvent) -> None:
        """Shows an event."""
        seen = self._runs.setdefault(run_id, _Seen(run_id))
        before = seen.state
        seen.take(event)
        self._refresh()
        if self._live is None:
            if event.HasField("trial"):
                self.note(f"{seen.name} {trial_line(event.trial)}")
            elif seen.state != before:
                self.note(f"{seen.name}: {seen.state.lower()}{': ' if seen.message else ''}{seen.message}")

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        self._console.print(Text(printable.line(text)), soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is None:
            return
        table = Table(header_style="bold")
        for title in ("module", "state", "generation", "tried", "compiled", "right", "timed", "best (screened)"):
            table.add_column(title)
        for seen in self._runs.values():
            counts = [str(count) for count in funnel(seen.trials).values()]
            best = speedup_text(seen.best.timing.speedup_fastest) if seen.best is not None else "-"
            shown = (seen.name, seen.state.lower(), str(seen.generation), *counts, best)
            table.add_row(*map(cell, shown))
        self._live.update(table, refresh=True)
