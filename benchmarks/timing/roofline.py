"""Draws what was measured on an H200 under the ceilings of the same machine: before and after, a mark for each module.

    python -m benchmarks.timing.roofline [--out docs/results/roofline_h200.svg]

needs neither GPU nor checkout: times come from `products_h200.jsonl`, `level2_h200.jsonl` and `level1_h200.jsonl`, each
module's least work from `baseline_floors.jsonl`, ceilings from where `baseline_floors.py` has them. Left, modules that
multiply: operations a second against operations for each byte that must move. Right, all others: bytes a second.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import baseline_floors

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FILES = ("products_h200.jsonl", "level2_h200.jsonl", "level1_h200.jsonl")
WIDTH, HEIGHT, TOP, BOTTOM = 980, 520, 66, 56
OURS, BASELINE, CEILING = "#1f6feb", "#6e7781", "#d1242f"


@dataclass(frozen=True)
class Mark:
    """One module: seconds of our kernels and of the fastest baseline, and the least that it must do."""

    name: str
    flops: int
    """Of products that no algebra removes; 0 for a module that multiplies no matrices."""
    bytes: int
    ours_s: float
    baseline_s: float


@dataclass(frozen=True)
class Panel:
    """A part of the picture with logarithmic axes, in the units of its labels."""

    left: int
    right: int
    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies; outside it is at the edge."""
        across, up = _share(x, *self.x), _share(y, *self.y)
        return self.left + (self.right - self.left) * across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - up)


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, math.log(value / low) / math.log(high / low)))


def marks() -> Iterator[Mark]:
    """Every row that has a time of ours and a least work; of a module in several files the last."""
    works, found = baseline_floors.works(), {}
    for file in FILES:
        for line in (RESULTS / file).read_text().splitlines():
            row = json.loads(line)
            arms, work = row.get("arms_ns", {}), works.get(row["source"])
            if work is None or "candidate" not in arms or row.get("fastest_baseline") not in arms:
                continue
            flops = work.product_flops + work.reduced_product_flops
            times = (arms["candidate"] / 1e9, arms[row["fastest_baseline"]] / 1e9)
            found[row["source"]] = Mark(row["name"], flops, work.total_bytes, *times)
    yield from found.values()


def picture(found: Sequence[Mark]) -> str:
    """The SVG."""
    machine = baseline_floors.ceilings()
    multiplying = [mark for mark in found if mark.flops]
    moving = [mark for mark in found if not mark.flops]
    left, right = Panel(70, 600, (0.3, 20000), (1.5, 1400)), Panel(680, 950, (1e8, 2e10), (0.05, 8))
    bandwidth = machine.device.copy_bytes_per_second / 1e12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="70" y="24" font-size="15">KernelBench on an NVIDIA H200: {len(multiplying)} modules that multiply '
        f"and {len(moving)} others</text>",
        f'<circle cx="76" cy="42" r="4" fill="{OURS}"/><text x="86" y="46">ours</text>',
        f'<circle cx="136" cy="42" r="4" fill="none" stroke="{BASELINE}"/><text x="146" y="46">fastest baseline</text>',
        f'<text x="270" y="46" fill="{CEILING}">ceilings, measured</text>',
        *_frame(left, (1, 10, 100, 1000, 10000), (10, 100, 1000), "operations for each byte that must move", "TFLOP/s"),
        *_frame(right, (1e8, 1e9, 1e10), (0.1, 1), "bytes that must move", "TB/s"),
    ]
    rates = (
        (machine.device.product_flops, "fp32, library"),
        (machine.fp32_product_rate, "fp32, three products of halves"),
        (machine.reduced_product_rate, "16 bits"),
    )
    top = max(rate for rate, _ in rates) / 1e12
    parts += _line(left, left.x[0], bandwidth * left.x[0], top / bandwidth, top)
    for rate, name in rates:
        height = rate / 1e12
        parts += _line(left, height / bandwidth, height, left.x[1], height)
        x, y = left.place(left.x[1], height)
        parts.append(f'<text x="{x - 4:.0f}" y="{y - 5:.0f}" text-anchor="end" fill="{CEILING}">{name}</text>')
    parts += _line(right, right.x[0], bandwidth, right.x[1], bandwidth)
    parts += _pairs(left, multiplying, lambda mark: mark.flops / mark.bytes, lambda mark, s: mark.flops / s / 1e12)
    parts += _pairs(right, moving, lambda mark: mark.bytes, lambda mark, s: mark.bytes / s / 1e12)
    return "\n".join([*parts, "</svg>", ""])


def _frame(panel: Panel, across: Sequence[float], up: Sequence[float], below: str, above: str) -> Iterator[str]:
    low, high = panel.place(panel.x[0], panel.y[0]), panel.place(panel.x[1], panel.y[1])
    for value in up:
        _, y = panel.place(panel.x[0], value)
        yield f'<line x1="{low[0]:.0f}" y1="{y:.1f}" x2="{high[0]:.0f}" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield f'<text x="{low[0] - 8:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for value in across:
        x, _ = panel.place(value, panel.y[0])
        text = f"{value:g}" if value < 1e6 else f"{value / 1e9:g} GB"
        yield f'<line x1="{x:.1f}" y1="{low[1]:.0f}" x2="{x:.1f}" y2="{high[1]:.0f}" stroke="#eaeef2"/>'
        yield f'<text x="{x:.1f}" y="{low[1] + 18:.0f}" text-anchor="middle">{text}</text>'
    middle = (panel.left + panel.right) / 2
    yield f'<text x="{middle:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{below}</text>'
    yield f'<text x="{panel.left - 8}" y="{TOP - 6}" text-anchor="end">{above}</text>'


def _line(panel: Panel, *ends: float) -> Iterator[str]:
    (x1, y1), (x2, y2) = panel.place(*ends[:2]), panel.place(*ends[2:])
    yield f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{CEILING}" stroke-dasharray="5 3"/>'


def _pairs(
    panel: Panel, found: Sequence[Mark], across: Callable[[Mark], float], up: Callable[[Mark, float], float]
) -> Iterator[str]:
    """A baseline's mark, ours, and a line between; a viewer shows the name of the module that it points at."""
    for mark in found:
        x, before = panel.place(across(mark), up(mark, mark.baseline_s))
        _, after = panel.place(across(mark), up(mark, mark.ours_s))
        gain = mark.baseline_s / mark.ours_s
        yield f"<g><title>{mark.name}: {gain:.2f}x</title>"
        yield f'<line x1="{x:.1f}" y1="{before:.1f}" x2="{x:.1f}" y2="{after:.1f}" stroke="{OURS}" opacity="0.4"/>'
        yield f'<circle cx="{x:.1f}" cy="{before:.1f}" r="4" fill="white" fill-opacity="0.6" stroke="{BASELINE}"/>'
        yield f'<circle cx="{x:.1f}" cy="{after:.1f}" r="4" fill="{OURS}" fill-opacity="0.8"/></g>'


def main() -> None:
    """Writes the picture and says what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "roofline_h200.svg")
    out = parser.parse_args().out
    found = list(marks())
    out.write_text(picture(found))
    print(f"{len(found)} modules, {sum(bool(mark.flops) for mark in found)} of them multiply: {out}")


if __name__ == "__main__":
    main()
