"""Where baselines and ours stand under the ceilings of the machine.

The one idea (Williams, Waterman, Patterson 2009): what a program may reach is the least of a rate of operations and of
a bandwidth times its operations for each byte. Every arm is counted as if it did the module's least work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.commands import report
from orchestrator.pages import scales
from orchestrator.pages.steps import plan_zero
from warpsmith.contract import words as contract
from warpsmith.v1 import analysis_pb2, run_pb2, timing_pb2, trial_pb2

PLOT = scales.Plot(height=300, left=70, right=740, top=15, below=40)


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
    plot: scales.Plot


def of(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> Roofline | None:
    """Where baseline and ours stand under the machine's ceilings; None where work or ceilings are not known."""
    zero, device = plan_zero(trials), run.device
    least = zero.candidate.analysis.minimum if zero else analysis_pb2.Cost()
    moved, flops = least.read_bytes + least.write_bytes, _operations(least)
    top, slope = _top(least, device), device.copy_bytes_per_second
    arms_found = report.arms_of(run).values()
    times = {arm.kind: arm.median_ns for arm in arms_found if scales.is_drawable(arm.median_ns) and not arm.failure}
    if not (times and scales.is_drawable(moved, flops, top, slope)):
        return None
    intensity, ridge = flops / moved, top / slope
    rates = {kind: 1e9 * flops / ns for kind, ns in times.items()}
    if not scales.is_drawable(intensity, ridge, slope * intensity, *rates.values()):
        return None
    x = scales.Axis(min(intensity, ridge) / 10, 10 * max(intensity, ridge), PLOT.left, PLOT.right, is_log=True)
    roof_there = min(top, slope * intensity)
    y = scales.Axis(
        min(roof_there, *rates.values()) / 3, 3 * max(top, *rates.values()), PLOT.bottom, PLOT.top, is_log=True
    )
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
        plot=PLOT,
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
