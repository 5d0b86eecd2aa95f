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
"""Of one program, that are drawn and listed."""
LANE = 66
"""Pixels that the steps of one program take, with their title."""


@dataclass(frozen=True)
class Part:
    """A step, and its place in a bar of steps."""

    name: str
    group: str
    by: str
    time: str
    rate: str
    x: float
    width: float


@dataclass(frozen=True)
class Lane:
    """The steps of one program one after another."""

    title: str
    is_measured: bool
    kind: str
    whole: str
    parts: Sequence[Part]
    left_out: int
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
    parts, begin = [], 0.0
    for name, group, engine, ns, rate in rows:
        x, end = axis.at(begin), axis.at(begin + ns)
        begin += ns
        speed = f"{rate / 1e9:.3g} GB/s" if rate else ""
        parts.append(Part(name, group, contract.engine(engine), report.time_text(ns), speed, x, round(end - x, 1)))
    shown = parts[:MOST_STEPS]
    y = LANE * number + 24
    return Lane(title, is_measured, kind, report.time_text(whole_ns), shown, len(parts) - len(shown), y)
