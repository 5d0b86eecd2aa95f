"""The search: how the best grew from trial to trial, and every trial under the one that it grew from.

The one idea: a branch that ended says why in the same line as one that won. A tree deeper than `MOST_LEVELS` goes on
at that depth, and each trial names its parent, for browsers close elements that lie too deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from orchestrator.commands import report
from orchestrator.pages import explained, scales
from orchestrator.pages.rendering import words
from orchestrator.search import moves_of, score
from warpsmith.contract import words as contract
from warpsmith.v1 import trial_pb2

MOST_LEVELS = 12
MOST_MOVES = 6
"""New moves of a trial that are explained one by one."""
PLOT = scales.Plot(height=260, left=60, right=740, top=15, below=40)


@dataclass(frozen=True)
class Node:
    """A trial and those that grew from it."""

    number: int
    did: str
    ended: str
    is_timed: bool
    is_best: bool
    told: str
    """Why it was tried, what was predicted, why it ended: sentences."""
    moves: Sequence[str]
    children: list[Node] = field(default_factory=list)

    @property
    def leads_to_timed(self) -> bool:
        """Whether it, or one that grew from it, was timed."""
        return self.is_timed or any(child.leads_to_timed for child in self.children)


@dataclass(frozen=True)
class Dot:
    """A timed trial in the picture."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Progress:
    """The best speedup over the number of trials."""

    dots: Sequence[Dot]
    steps: str
    """Points of the line."""
    one: float | None
    """Where as fast as the baseline lies; None where it is not in the picture."""
    x_ticks: Sequence[scales.Tick]
    y_ticks: Sequence[scales.Tick]
    rows: Sequence[tuple[int, str]]
    """Trials that were the best so far, with their speedup."""
    plot: scales.Plot


def progress(trials: Sequence[trial_pb2.Trial]) -> Progress | None:
    """The picture; None where no trial was timed."""
    timed = [(trial.number, score(trial)) for trial in trials if trial.ended_at == trial_pb2.STAGE_TIMED]
    timed = [(number, value) for number, value in timed if value > 0]
    if not timed:
        return None
    last = max(trial.number for trial in trials)
    x = scales.Axis(0, max(last, 1), PLOT.left, PLOT.right)
    y = scales.from_zero(max(value for _, value in timed), PLOT.bottom, PLOT.top)
    best, rows = 0.0, []
    steps: list[tuple[float, float]] = []
    for number, value in timed:
        if value > best:
            if steps:
                steps.append((x.at(number), y.at(best)))
            best = value
            steps.append((x.at(number), y.at(best)))
            rows.append((number, f"{value:.2f}x"))
    steps.append((x.at(last), y.at(best)))
    return Progress(
        dots=[Dot(x.at(number), y.at(value), f"#{number}: {value:.2f}x") for number, value in timed],
        steps=" ".join(f"{a},{b}" for a, b in steps),
        one=y.at(1.0) if y.high > 1.0 else None,
        x_ticks=[tick for tick in x.ticks(lambda value: f"{value:g}") if "." not in tick.label],
        y_ticks=y.ticks(lambda value: f"{value:g}x"),
        rows=rows,
        plot=PLOT,
    )


def tree(trials: Sequence[trial_pb2.Trial], best: int) -> list[Node]:
    """The trials that grew from plan zero, each with its own below it."""
    roots: list[Node] = []
    places: dict[int, tuple[int, list[Node]]] = {}
    for trial in trials:
        level, siblings = places.get(trial.parent, (0, roots))
        node = _node(trial, best)
        siblings.append(node)
        below = (level + 1, node.children) if level + 1 < MOST_LEVELS else (level, siblings)
        places.setdefault(trial.number, below)
    return roots


def _node(trial: trial_pb2.Trial, best: int) -> Node:
    hypothesis, moves = trial.hypothesis, moves_of(trial)
    new = moves[len(moves) - hypothesis.new_move_count :] if hypothesis.new_move_count else []
    is_timed = trial.ended_at == trial_pb2.STAGE_TIMED
    told = [explained.move(each) for each in new[:MOST_MOVES]]
    if len(new) > MOST_MOVES:
        told.append(f"and {len(new) - MOST_MOVES} moves more: {words(contract.moves(new))}")
    return Node(
        number=trial.number,
        did=words(contract.moves(new) or hypothesis.source or "plan zero", 160),
        ended=_speed(trial) if is_timed else _failure(trial),
        is_timed=is_timed,
        is_best=bool(best) and trial.number == best,
        told=" ".join(_sentences(trial)),
        moves=told,
    )


def _sentences(trial: trial_pb2.Trial) -> Iterator[str]:
    hypothesis, detail = trial.hypothesis, words(trial.verdict.detail).rstrip(".")
    if trial.ended_at != trial_pb2.STAGE_TIMED:
        yield f"It ended because of this: {detail or 'no reason given'}."
    if hypothesis.rationale:
        yield f"Why it was tried ({words(hypothesis.source, 60)}): {words(hypothesis.rationale).rstrip('.')}."
    if hypothesis.predicted_speedup:
        yield f"Predicted {hypothesis.predicted_speedup:.2f}x of its parent."
    if trial.seconds:
        yield f"It took {trial.seconds:.1f} s."
    if trial.parent:
        yield f"It grew from #{trial.parent}."


def _speed(trial: trial_pb2.Trial) -> str:
    return f"{report.speedup_text(trial.timing.speedup_fastest)} against {contract.arm(trial.timing.fastest_arm)}"


def _failure(trial: trial_pb2.Trial) -> str:
    kind, where = contract.failure_kind(trial.verdict.kind), explained.stage(trial.ended_at)
    return f"{where} ({kind})" if kind else where
