"""What the clock said, as bars: every arm, the times over the floor, the roofline, and the steps of eager and of ours.

The one idea: each picture has a table of the same numbers, and says what was measured and what is worked out: of eager
only the whole is timed, so the parts of its bar are what its calls' bytes and operations would take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.commands import report
from orchestrator.pages import explained, scales
from orchestrator.pages.rendering import words
from warpsmith.contract import words as contract
from warpsmith.v1 import analysis_pb2, run_pb2, timing_pb2, trial_pb2

WIDTH = 760
"""Of a picture, in pixels."""
LEFT, RIGHT, ROW = 190, 90, 30
"""Room beside bars for their names and numbers, and what each bar takes."""
MOST_STEPS = 400
"""Of one program, that are drawn and listed."""
_EDGE = 24
"""Beside bars of steps, for half of a tick's label."""
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
    height: float


@dataclass(frozen=True)
class Gain:
    """Where a gain comes from."""

    told: str
    algebra: str
    kernels: str
    whole: str
    authored_percent: float | None


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
    height: float


def gain(run: run_pb2.Run) -> Gain | None:
    """Where the gain of the best comes from; None where there is no best."""
    if not run.HasField("best"):
        return None
    split, share = report.gain_split(run), report.authored_share(run.best.timing)
    algebra, kernels = (f"{each:.2f}x" for each in split) if split is not None else ("", "")
    whole = report.speedup_text(run.best.timing.speedup_fastest)
    return Gain(report.gain_text(run), algebra, kernels, whole, None if share is None else round(100 * share, 1))


def floor_ns(run: run_pb2.Run) -> float:
    """Least time at the measured ceilings; 0 where it is not known."""
    return (run.best.timing.floor_ns if run.HasField("best") else 0.0) or run.reference.floor_ns


def arms(run: run_pb2.Run) -> Bars | None:
    """Every arm; None where nothing was timed."""
    found = sorted(report.arms_of(run).values(), key=lambda arm: (bool(arm.failure), arm.median_ns))
    if not found:
        return None
    floor = floor_ns(run)
    axis = scales.from_zero(max(floor, *(arm.median_ns for arm in found if not arm.failure), 0.0), LEFT, WIDTH - RIGHT)
    bars = [_bar(arm, number, axis, floor) for number, arm in enumerate(found)]
    place = axis.at(floor) if floor else None
    height = ROW * len(bars) + 40
    return Bars(bars, axis.ticks(report.time_text), place, report.time_text(floor) if floor else "", height)


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
        width=max(1.0, round(axis.at(arm.median_ns) - LEFT, 1)) if ran else 0.0,
    )


def _middle(samples: Sequence[float]) -> str:
    if len(samples) < _FEWEST_SAMPLES:
        return ""
    low, _, high = statistics.quantiles(samples, n=4)
    return f"{report.time_text(low)} to {report.time_text(high)}"


# ---- steps -------------------------------------------------------------------------------------------------------


def timeline(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Timeline | None:
    """Eager's calls above our steps; None where neither is known."""
    arms_found, zero = report.arms_of(run), plan_zero(trials)
    eager = arms_found.get(report.EAGER)
    steps = run.best.timing.steps if run.HasField("best") else []
    ours_ns = sum(step.median_ns for step in steps)
    eager_ns = eager.median_ns if eager is not None and not eager.failure else 0.0
    if not (steps or (zero and eager_ns)):
        return None
    axis = scales.from_zero(max(eager_ns, ours_ns), _EDGE, WIDTH - _EDGE)
    lanes = []
    if zero and eager_ns:
        rows = list(_estimated(zero.candidate.analysis.groups, run.device, eager_ns))
        lanes.append(_lane("eager", "baseline", False, eager_ns, rows, axis, 0))
    if steps:
        rows = [(words(s.name, 80), words(s.group, 80), s.computed_by, s.median_ns, s.bytes_per_second) for s in steps]
        lanes.append(_lane("ours", "ours", True, ours_ns, rows, axis, len(lanes)))
    return Timeline(lanes, axis.ticks(report.time_text), 66 * len(lanes) + 30)


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
    y = 66 * number + 24
    return Lane(title, is_measured, kind, report.time_text(whole_ns), shown, len(parts) - len(shown), y)


# ---- roofline ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A program under the roof."""

    name: str
    kind: str
    x: float
    y: float
    rate: str
    of_roof: str


@dataclass(frozen=True)
class Roofline:
    """Operations a second against operations for each byte that has to move, both as logarithms."""

    bound: str
    intensity: str
    roof: str
    """Points of the line."""
    marks: Sequence[Mark]
    x_ticks: Sequence[scales.Tick]
    y_ticks: Sequence[scales.Tick]
    ceilings: Mapping[str, str]
    has_algebra: bool
    """Whether ours spares work that the module's least counts, so that it may stand above the roof."""


HEIGHT = 300


def roofline(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Roofline | None:
    """Where baseline and ours stand under the machine's ceilings; None where work or ceilings are not known."""
    zero, device = plan_zero(trials), run.device
    least = zero.candidate.analysis.minimum if zero else analysis_pb2.Cost()
    moved, flops = least.read_bytes + least.write_bytes, _operations(least)
    top, slope = _top(least, device), device.copy_bytes_per_second
    arms_found = report.arms_of(run).values()
    times = {arm.kind: arm.median_ns for arm in arms_found if 0 < arm.median_ns < math.inf and not arm.failure}
    if not (moved > 0 and flops > 0 and 0 < top < math.inf and 0 < slope < math.inf and times):
        return None
    intensity, ridge = flops / moved, top / slope
    rates = {kind: flops / (1e-9 * ns) for kind, ns in times.items()}
    x = scales.Axis(min(intensity, ridge) / 10, 10 * max(intensity, ridge), 70, WIDTH - 20, is_log=True)
    roof_there = min(top, slope * intensity)
    y = scales.Axis(min(roof_there, *rates.values()) / 3, 3 * max(top, *rates.values()), HEIGHT - 40, 15, is_log=True)
    corner = [(x.low, min(top, slope * x.low)), (ridge, top), (x.high, top)]
    marks = [
        Mark(
            name="ours" if kind == report.CANDIDATE else contract.arm(kind),
            kind="ours" if kind == report.CANDIDATE else "baseline",
            x=x.at(intensity),
            y=y.at(rates[kind]),
            rate=_rate(rates[kind], "op/s"),
            of_roof=f"{100 * rates[kind] / roof_there:.0f} %",
        )
        for kind in _told(run)
        if kind in rates
    ]
    return Roofline(
        bound="memory" if slope * intensity <= top else "arithmetic",
        intensity=f"{intensity:.3g}",
        roof=" ".join(f"{x.at(a)},{y.at(b)}" for a, b in corner),
        marks=marks,
        x_ticks=x.ticks(lambda value: f"{value:g}"),
        y_ticks=y.ticks(lambda value: _rate(value, "op/s")),
        ceilings=ceilings(device),
        has_algebra=bool(run.best.candidate.rewrites),
    )


def _told(run: run_pb2.Run) -> Sequence[timing_pb2.ArmKind.ValueType]:
    timing = run.best.timing if run.HasField("best") else None
    fastest = timing.fastest_arm if timing is not None else run.reference.fastest_arm
    return list(dict.fromkeys((report.CANDIDATE, fastest, report.EAGER)))


def _operations(cost: analysis_pb2.Cost) -> int:
    return cost.operation_count + cost.product_flop_count + cost.tensor_flop_count


def _top(cost: analysis_pb2.Cost, device: timing_pb2.Device) -> float:
    """The rate of a mix of operations where each kind has its own ceiling."""
    kinds = (
        (cost.operation_count, device.operation_flops),
        (cost.product_flop_count, device.product_flops),
        (cost.tensor_flop_count, device.tensor_flops),
    )
    if any(count and rate <= 0 for count, rate in kinds):
        return 0.0
    seconds = sum(count / rate for count, rate in kinds if count)
    return _operations(cost) / seconds if seconds else 0.0


def ceilings(device: timing_pb2.Device) -> Mapping[str, str]:
    """What a device was measured to reach."""
    found = {
        "Copy, bytes read plus written": (device.copy_bytes_per_second, "B/s"),
        "Reading": (device.read_bytes_per_second, "B/s"),
        "Writing": (device.write_bytes_per_second, "B/s"),
        "Matrix products in fp32": (device.product_flops, "op/s"),
        "Matrix products in 16 bits": (device.tensor_flops, "op/s"),
        "Pointwise operations": (device.operation_flops, "op/s"),
    }
    told = {name: _rate(value, unit) for name, (value, unit) in found.items() if value}
    return told | ({"Empty launch": report.time_text(device.launch_ns)} if device.launch_ns else {})


def _rate(value: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
