"""Shows runs while they go: one live table in a terminal or a notebook, plain lines without one. On stderr, always.

The one idea: all are fed the same events, and none knows where they come from.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.commands.report import error_text, funnel, speedup_text, state_name, trial_line
from orchestrator.commands.terminal import cell
from orchestrator.ledger import wall_seconds
from orchestrator.pipeline import passed
from orchestrator.search import score
from orchestrator.search_run import ENDED
from warpsmith import printable
from warpsmith.v1 import run_pb2, trial_pb2

_PHASES = (run_pb2.RUN_STATE_PREPARING, run_pb2.RUN_STATE_SEARCHING, run_pb2.RUN_STATE_FINISHING)
_REFRESHES_A_SECOND = 2.0
_NOTEBOOK_COLUMNS = 100

Usual = Mapping[run_pb2.RunState.ValueType, float]
"""Seconds that a phase mostly takes."""


def usual_seconds(runs: Iterable[run_pb2.Run]) -> Usual:
    """How long runs mostly prepared and finished, by the median of `runs` that did; nothing where none has.

    A phase of no second had nothing to do, as finishing where no kernel was promising.
    """
    whole = [run.phase_seconds for run in runs if len(run.phase_seconds) == len(_PHASES)]
    spent = {state: [each[place] for each in whole if each[place] >= 1.0] for place, state in enumerate(_PHASES)}
    spent.pop(run_pb2.RUN_STATE_SEARCHING)  # as long as its budget
    return {state: median(seconds) for state, seconds in spent.items() if seconds}


@dataclass
class _Seen:
    """What events have said of one run."""

    name: str
    usual: Usual
    begun: float
    """When the state began, by the clock of `Progress`."""
    state: run_pb2.RunState.ValueType = run_pb2.RUN_STATE_QUEUED
    message: str = ""
    trials: list[trial_pb2.Trial] = field(default_factory=list)
    best: trial_pb2.Trial | None = None

    def take(self, event: run_pb2.RunEvent, now: float) -> None:
        if event.HasField("run"):
            run = event.run
            if run.state != self.state:
                self.state, self.begun = run.state, now
            # The command itself says at its end what went wrong, once for all of its modules.
            self.message = "" if error_text(run) else run.message
            self.usual = {**self.usual, run_pb2.RUN_STATE_SEARCHING: wall_seconds(run.budget)}
            if run.HasField("best"):
                self.best = run.best
        elif event.HasField("trial"):
            self.trials.append(event.trial)
            if passed(event.trial) and (self.best is None or score(event.trial) > score(self.best)):
                self.best = event.trial

    @property
    def state_name(self) -> str:
        return state_name(self.state).lower()

    def doing(self, now: float) -> str:
        """What is under way, since when and how long that mostly takes; empty before and after."""
        if self.state in ENDED or self.state == run_pb2.RUN_STATE_QUEUED:
            return ""
        generation = max((trial.generation for trial in self.trials), default=0)
        what = self.message or (f"generation {generation}" if generation else "")
        usual = f" of about {self.usual[self.state]:.0f}" if self.state in self.usual else ""
        return f"{self.state_name} for {now - self.begun:.0f}{usual} s{': ' if what else ''}{what}"

    def entered(self) -> str:
        """The same as a state begins, or goes on with something else."""
        usual = f", about {self.usual[self.state]:.0f} s" if self.state in self.usual else ""
        return f"{self.state_name}{usual}{': ' if self.message else ''}{self.message}"


class _Cell:
    """A notebook's output that is drawn again with each event, as plain text."""

    def __init__(self, drawn: Callable[[], Group]) -> None:
        self._drawn = drawn
        self._handle: Any = None

    def start(self) -> None:
        from IPython import display  # a notebook has it

        show: Any = display.display
        self._handle = show(self._bundle(), raw=True, display_id=True)

    def refresh(self) -> None:
        self._handle.update(self._bundle(), raw=True)

    stop = refresh

    def _bundle(self) -> dict[str, str]:
        console = Console(file=io.StringIO(), width=_NOTEBOOK_COLUMNS, force_jupyter=False, color_system=None)
        with console.capture() as captured:
            console.print(self._drawn())
        return {"text/plain": captured.get()}


class Progress:
    """Takes the events of several runs; a context manager. `clock` gives seconds."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console or Console(stderr=True), clock
        self._runs: dict[str, _Seen] = {}
        self._usual: Usual = {}
        self._live: Live | _Cell | None = None
        if self._console.is_jupyter:
            self._live = _Cell(self._drawn)
        elif self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._drawn, refresh_per_second=_REFRESHES_A_SECOND)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def learn(self, runs: Iterable[run_pb2.Run]) -> None:
        """Takes from earlier runs how long a phase mostly takes."""
        self._usual = usual_seconds(runs)

    def expect(self, run: run_pb2.Run) -> None:
        """Makes a row for a run."""
        self._runs[run.id] = _Seen(run.task.name, self._usual, self._clock())

    def take(self, run_id: str, event: run_pb2.RunEvent) -> None:
        """Shows an event."""
        seen = self._runs.setdefault(run_id, _Seen(run_id, self._usual, self._clock()))
        before = (seen.state, seen.message)
        seen.take(event, self._clock())
        if isinstance(self._live, _Cell):
            self._live.refresh()
        elif self._live is None:
            if event.HasField("trial"):
                self.note(f"{seen.name} {trial_line(event.trial)}")
            elif (seen.state, seen.message) != before:
                self.note(f"{seen.name}: {seen.entered()}")

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        self._console.print(Text(printable.line(text)), soft_wrap=True)

    def _drawn(self) -> Group:
        """A row for each run, in 80 columns, and below what each that is under way does."""
        table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("module", overflow="fold")
        table.add_column("state", no_wrap=True)
        for title in ("tried", "compiled", "right", "timed"):
            table.add_column(title, justify="right")
        table.add_column("best (screened)", no_wrap=True)
        runs = list(self._runs.values())
        for seen in runs:
            counts = [str(count) for count in funnel(seen.trials).values()]
            best = speedup_text(seen.best.timing.speedup_fastest) if seen.best is not None else "-"
            table.add_row(*map(cell, (seen.name, seen.state_name, *counts, best)))
        now = self._clock()
        doing = [f"{seen.name}: {what}" for seen in runs if (what := seen.doing(now))]
        return Group(table, *map(cell, doing))
