"""The steps of eager and of ours on one axis of time.

The one idea: it says what was measured and what is worked out. A final times our steps one by one; of eager only the
whole is timed, so the parts of its bar are what the bytes and operations of its calls would take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.commands import report
from orchestrator.pages import scales
from orchestrator.pages.rendering import words
from warpsmith.contract import words as contract
from warpsmith.v1 import analysis_pb2, run_pb2, timing_pb2, trial_pb2

MOST_STEPS = 400
"""Of one program, that are listed; all are drawn."""
LANE, TITLE, BAR = 66, 24, 28
"""Pixels that the steps of one program take, of these its title, and their bar."""
NARROW = 2.0
"""Pixels below which steps are drawn together: a network has more of them than a picture has pixels."""
_OURS, _LIBRARY = analysis_pb2.ENGINE_AUTHORED, analysis_pb2.ENGINE_LIBRARY


@dataclass(frozen=True)
class Part:
    """A step as it is listed."""

    name: str
    group: str
    by: str
    time: str
    rate: str


@dataclass(frozen=True)
class Segment:
    """A step, or several that are too short to be seen alone, as it is drawn."""

    x: float
    y: float
    width: float
    height: float
    by: str
    """By what most of its time is spent."""
    text: str


@dataclass(frozen=True)
class Lane:
    """The steps of one program one after another."""

    title: str
    is_measured: bool
    kind: str
    whole: str
    parts: Sequence[Part]
    left_out: int
    segments: Sequence[Segment]
    y: float


@dataclass(frozen=True)
class Timeline:
    """Programs side by side on one axis of time."""

    lanes: Sequence[Lane]
    ticks: Sequence[scales.Tick]
    plot: scales.Plot


def of(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Timeline | None:
    """Eager's calls above our steps; None where neither is known."""
    arms_found, zero = report.arms_of(run), plan_zero(trials)
    eager = arms_found.get(report.EAGER)
    steps = run.best.timing.steps if run.HasField("best") else []
    ours_ns = sum(step.median_ns for step in steps)
    eager_ns = eager.median_ns if eager is not None and not eager.failure else 0.0
    if not (steps or (zero and eager_ns)):
        return None
    count = bool(zero and eager_ns) + bool(steps)
    plot = scales.Plot(height=LANE * count + 30, left=24, right=736, top=0, below=20)
    axis = scales.from_zero(max(eager_ns, ours_ns), plot.left, plot.right)
    lanes = []
    if zero and eager_ns:
        rows = list(_estimated(zero.candidate.analysis.groups, run.device, eager_ns))
        lanes.append(_lane("eager", "baseline", False, eager_ns, rows, axis, 0))
    if steps:
        rows = [(words(s.name, 80), words(s.group, 80), s.computed_by, s.median_ns, s.bytes_per_second) for s in steps]
        lanes.append(_lane("ours", "ours", True, ours_ns, rows, axis, len(lanes)))
    return Timeline(lanes, axis.ticks(report.time_text), plot)


def plan_zero(trials: Sequence[trial_pb2.Trial]) -> trial_pb2.Trial | None:
    """The trial of the module as library calls, with its groups."""
    return next((t for t in trials if not t.candidate.moves and t.candidate.analysis.groups), None)


_Row = tuple[str, str, "analysis_pb2.Engine.ValueType", float, float]
"""Name, group, by what it is computed, ns, bytes a second."""


def _estimated(groups: Sequence[analysis_pb2.Group], device: timing_pb2.Device, whole_ns: float) -> Iterator[_Row]:
    """The whole shared out over eager's calls by what each has to move and to compute."""
    least = [least_ns(group.cost, device) for group in groups]
    total = sum(least)
    for group, ns in zip(groups, least, strict=True):
        name = words(", ".join(group.operations), 80)
        yield name, words(group.name, 80), group.computed_by, whole_ns * (ns / total if total else 1 / len(groups)), 0.0


def least_ns(cost: analysis_pb2.Cost, device: timing_pb2.Device) -> float:
    """What a work would take at the ceilings of a device, launches included."""

    def at(amount: int, rate: float) -> float:
        return 1e9 * amount / rate if rate > 0 else 0.0

    memory = at(cost.read_bytes + cost.write_bytes + cost.extra_bytes, device.copy_bytes_per_second)
    products = at(cost.product_flop_count, device.product_flops) + at(cost.tensor_flop_count, device.tensor_flops)
    return (
        max(memory, at(cost.operation_count, device.operation_flops) + products) + cost.launch_count * device.launch_ns
    )


def _lane(
    title: str, kind: str, is_measured: bool, whole_ns: float, rows: Sequence[_Row], axis: scales.Axis, number: int
) -> Lane:
    parts = [
        Part(name, group, contract.engine(engine), report.time_text(ns), f"{rate / 1e9:.3g} GB/s" if rate else "")
        for name, group, engine, ns, rate in rows[:MOST_STEPS]
    ]
    y = LANE * number + TITLE
    segments = list(_segments(rows, axis, y))
    return Lane(title, is_measured, kind, report.time_text(whole_ns), parts, len(rows) - len(parts), segments, y)


def _segments(rows: Sequence[_Row], axis: scales.Axis, y: int) -> Iterator[Segment]:
    begin_ns = end_ns = 0.0
    together: list[_Row] = []
    for number, row in enumerate(rows, 1):
        together.append(row)
        end_ns += row[3]
        x, width = axis.at(begin_ns), axis.at(end_ns) - axis.at(begin_ns)
        if width < NARROW and number < len(rows):
            continue
        yield _segment(together, x, width, y, end_ns - begin_ns)
        together, begin_ns = [], end_ns


def _segment(together: Sequence[_Row], x: float, width: float, y: int, ns: float) -> Segment:
    authored_ns = sum(row[3] for row in together if row[2] == _OURS)
    by = contract.engine(together[0][2] if len(together) == 1 else _OURS if 2 * authored_ns > ns else _LIBRARY)
    lowered = 0 if by == contract.engine(_OURS) else BAR // 3  # by its height as well as by its colour
    name = together[0][0] if len(together) == 1 else f"{len(together)} steps"
    drawn = round(max(0.0, width - (0.8 if width > NARROW else 0.0)), 1)  # a gap to the next
    return Segment(x, y + lowered, drawn, BAR - lowered, by, f"{name}: {report.time_text(ns)}")
