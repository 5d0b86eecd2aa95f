"""What the clock said of the whole: every arm beside the floor, and where the gain comes from.

The one idea: an arm that could not run stands among the others with its reason. `roofline` and `steps` look closer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.commands import report
from orchestrator.pages import explained, scales
from orchestrator.pages.rendering import words
from warpsmith.contract import words as contract
from warpsmith.v1 import run_pb2, timing_pb2

ROW = 30
"""Pixels that each bar takes."""
_FEWEST_SAMPLES = 4
"""From which quartiles are taken."""
NOT_BASELINES = (report.CANDIDATE, report.REWRITTEN, timing_pb2.ARM_KIND_AA_COPY)


@dataclass(frozen=True)
class Bar:
    """One arm, and where its bar lies."""

    name: str
    what: str
    kind: str
    """"ours", "baseline" or "other"."""
    time: str
    middle: str
    """Between which times the middle half of its readings lies; empty when they were not kept."""
    of_floor: str
    prepare: str
    failure: str
    y: float
    width: float


@dataclass(frozen=True)
class Bars:
    """All arms, the fastest first, those that could not run last."""

    bars: Sequence[Bar]
    ticks: Sequence[scales.Tick]
    floor_x: float | None
    floor: str
    plot: scales.Plot


@dataclass(frozen=True)
class Gain:
    """Where a gain comes from."""

    told: str
    algebra: str
    kernels: str
    whole: str
    beside: str
    authored_percent: float | None


def gain(run: run_pb2.Run) -> Gain | None:
    """Where the gain of the best comes from; None where there is no best."""
    if not run.HasField("best"):
        return None
    split, share = report.gain_split(run), report.authored_share(run.best.timing)
    percent, timing = None if share is None else round(100 * share, 1), run.best.timing
    if split is None:
        return Gain(report.gain_text(run), "", "", "", "", percent)
    whole, beside = timing.speedup_fastest, "the fastest baseline"
    if split.is_over_eager:
        whole, beside = timing.speedup_eager, "eager"
    factors = f"{split.algebra:.2f}x", f"{split.kernels:.2f}x"
    return Gain(report.gain_text(run), *factors, report.speedup_text(whole), beside, percent)


def floor_ns(run: run_pb2.Run) -> float:
    """Least time at the measured ceilings; 0 where it is not known."""
    return (run.best.timing.floor_ns if run.HasField("best") else 0.0) or run.reference.floor_ns


def arms(run: run_pb2.Run) -> Bars | None:
    """Every arm; None where nothing was timed."""
    found = sorted(report.arms_of(run).values(), key=lambda arm: (bool(arm.failure), arm.median_ns))
    if not found:
        return None
    floor = floor_ns(run)
    plot = scales.Plot(height=ROW * len(found) + 40, left=190, right=670, top=0, below=40)
    axis = scales.from_zero(
        max(floor, *(arm.median_ns for arm in found if not arm.failure), 0.0), plot.left, plot.right
    )
    bars = [_bar(arm, number, axis, floor) for number, arm in enumerate(found)]
    place = axis.at(floor) if floor else None
    return Bars(bars, axis.ticks(report.time_text), place, report.time_text(floor) if floor else "", plot)


def _bar(arm: timing_pb2.Arm, number: int, axis: scales.Axis, floor: float) -> Bar:
    name, ran = contract.arm(arm.kind) or "unknown", not arm.failure and arm.median_ns > 0
    kind = "ours" if arm.kind == report.CANDIDATE else "other" if arm.kind in NOT_BASELINES else "baseline"
    return Bar(
        name="ours" if kind == "ours" else name,
        what=explained.ARMS.get(arm.kind, ""),
        kind=kind,
        time=report.time_text(arm.median_ns) if ran else "could not run",
        middle=_middle(arm.samples_ns),
        of_floor=f"{100 * floor / arm.median_ns:.0f} %" if ran and floor else "",
        prepare=f"{arm.prepare_seconds:.1f} s" if arm.prepare_seconds >= 0.05 else "",
        failure=words(arm.failure),
        y=ROW * number + 8,
        width=max(1.0, round(axis.at(arm.median_ns) - axis.first, 1)) if ran else 0.0,
    )


def _middle(samples: Sequence[float]) -> str:
    if len(samples) < _FEWEST_SAMPLES:
        return ""
    low, _, high = statistics.quantiles(samples, n=4)
    return f"{report.time_text(low)} to {report.time_text(high)}"
