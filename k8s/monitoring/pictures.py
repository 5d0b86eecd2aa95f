"""Draws a dashboard as an SVG of what Prometheus answered: `make monitoring-pictures` makes those of docs/images.

The one idea: a picture is the dashboard's own JSON with the series of its expressions, so that it can show nothing
that Grafana would not. Four kinds of panel are known, as in `dashboards.py`; it asks Prometheus nothing itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, GAP, COLUMNS = 460, 250, 10, 3
"""Of a panel, in pixels; and how many stand side by side."""
_TOP, _LEFT, _RIGHT, _BOTTOM = 34, 52, 12, 58
"""Room around a plot, for title, ticks and legend."""
_COLOURS = (
    "#1f77b4",
    "#e6862a",
    "#2c9f5b",
    "#c8414b",
    "#8059b3",
    "#8c6d54",
    "#d65fa5",
    "#64748b",
    "#a3a829",
    "#2aa5b8",
)
_INK, _FAINT, _GRID = "#1f2933", "#6b7785", "#e3e7ec"
_LEGENDS = 9
"""Entries of a legend; more are counted."""


@dataclass(frozen=True)
class Series:
    """One line of a panel: legend and (seconds since the beginning, value), gaps left out."""

    legend: str
    points: Sequence[tuple[float, float]]

    @property
    def last(self) -> float:
        """Its last value."""
        return self.points[-1][1]


Ask = Callable[[str, bool], Sequence[tuple[dict[str, str], Sequence[tuple[float, float]]]]]
"""(expression, only at the end) → labels and points of each series."""


def picture(dashboard: dict[str, Any], ask: Ask, caption: str) -> str:
    """The dashboard as SVG."""
    panels = dashboard["panels"]
    rows = math.ceil(len(panels) / COLUMNS)
    width, height = COLUMNS * (WIDTH + GAP) + GAP, rows * (HEIGHT + GAP) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#f1f3f6"/>',
        _text(GAP + 2, 24, dashboard["title"], 18, weight="bold"),
        _text(GAP + 2, 42, caption, 12, _FAINT),
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        x, y = GAP + column * (WIDTH + GAP), 54 + row * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({x},{y})">{_panel(panel, ask)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: dict[str, Any], ask: Ask) -> str:
    series = [
        Series(_legend("{{module}} {{run}}" if panel["type"] == "table" else target["legendFormat"], labels), points)
        for target in panel["targets"]
        for labels, points in ask(target["expr"], bool(target["instant"]))
        if points
    ]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    stacked = "stacking" in panel["fieldConfig"]["defaults"]["custom"]
    draw = {"timeseries": _lines, "bargauge": _bars, "stat": _numbers, "table": _rows}[panel["type"]]
    body = draw(series, unit, stacked) if series else _text(WIDTH / 2, HEIGHT / 2, "no data", 13, _FAINT, "middle")
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="3" fill="#fff" stroke="{_GRID}"/>'
    return frame + _text(10, 20, panel["title"], 13, weight="bold") + body


def _legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), pattern).strip() or "value"


def _lines(series: Sequence[Series], unit: str, stacked: bool) -> str:
    if stacked:
        series = [each for each in series if any(value for _, value in each.points)] or series[:1]
    tops = _stacked(series) if stacked else [list(each.points) for each in series]
    start = min(points[0][0] for points in tops)
    end = max(start + 1, *(points[-1][0] for points in tops))
    ticks = _ticks(min(0.0, *(v for points in tops for _, v in points)), max(v for points in tops for _, v in points))
    low, high = ticks[0], ticks[-1]

    def place(at: float, value: float) -> tuple[float, float]:
        x = _LEFT + (at - start) / (end - start) * (WIDTH - _LEFT - _RIGHT)
        return x, HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in ticks:
        _, y = place(start, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 5, y + 4, shown(tick, unit), 10, _FAINT, "end"))
    for share in range(5):
        at = start + share / 4 * (end - start)
        parts.append(
            _text(place(at, low)[0], HEIGHT - _BOTTOM + 14, f"{at // 60:.0f}:{at % 60:02.0f}", 10, _FAINT, "middle")
        )
    for number, points in reversed(list(enumerate(tops))):
        colour, path = _COLOURS[number % len(_COLOURS)], [place(*point) for point in points]
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        if stacked:
            base = f"{path[-1][0]:.1f},{place(start, low)[1]:.1f} {path[0][0]:.1f},{place(start, low)[1]:.1f}"
            parts.append(f'<polygon points="{outline} {base}" fill="{_paler(colour)}"/>')
        if len(path) == 1:
            parts.append(f'<circle cx="{path[0][0]:.1f}" cy="{path[0][1]:.1f}" r="2.5" fill="{colour}"/>')
        parts.append(f'<polyline points="{outline}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return "".join(parts) + _legends(series)


def _stacked(series: Sequence[Series]) -> list[list[tuple[float, float]]]:
    sums: dict[float, float] = {at: 0.0 for each in series for at, _ in each.points}
    tops = []
    for each in series:
        own = dict(each.points)
        sums = {at: total + own.get(at, 0.0) for at, total in sums.items()}
        tops.append(sorted(sums.items()))
    return tops


def _legends(series: Sequence[Series]) -> str:
    names = [each.legend for each in series]
    shown_names = names if len(names) <= _LEGENDS else [*names[: _LEGENDS - 1], f"and {len(names) - _LEGENDS + 1} more"]
    parts, x, y = [], 12.0, HEIGHT - 28
    for number, name in enumerate(shown_names):
        width = 20 + 5.6 * len(name)
        if x + width > WIDTH and x > 12:
            x, y = 12.0, y + 13
        parts.append(f'<rect x="{x}" y="{y - 4}" width="9" height="3" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
        parts.append(_text(x + 12, y, name, 10))
        x += width
    return "".join(parts)


def _bars(series: Sequence[Series], unit: str, _stacked: bool) -> str:
    kept = sorted(series, key=lambda each: each.legend)[:12]
    most = max(*(abs(each.last) for each in kept), 1e-12)
    step = min(26.0, (HEIGHT - 44) / len(kept))
    parts = []
    for number, each in enumerate(kept):
        y = 36 + number * step
        length = abs(each.last) / most * 190
        parts.append(_text(176, y + step / 2 + 3, each.legend[:30], 11, anchor="end"))
        parts.append(f'<rect x="184" y="{y:.1f}" width="190" height="{step - 5:.1f}" fill="#f1f3f6"/>')
        parts.append(f'<rect x="184" y="{y:.1f}" width="{length:.1f}" height="{step - 5:.1f}" fill="{_COLOURS[0]}"/>')
        parts.append(_text(382, y + step / 2 + 3, shown(each.last, unit), 11))
    return "".join(parts)


def _numbers(series: Sequence[Series], unit: str, _stacked: bool) -> str:
    columns = min(3, len(series))
    rows = math.ceil(len(series) / columns)
    size = 44 if len(series) == 1 else 26
    parts = []
    for number, each in enumerate(series):
        row, column = divmod(number, columns)
        x, y = (column + 0.5) * WIDTH / columns, 34 + (row + 0.5) * (HEIGHT - 50) / rows
        parts.append(_text(x, y, shown(each.last, unit), size, _COLOURS[2], "middle", "bold"))
        parts.append(_text(x, y + 22, each.legend, 11, _FAINT, "middle"))
    return "".join(parts)


def _rows(series: Sequence[Series], unit: str, _stacked: bool) -> str:
    kept = sorted(series, key=lambda each: -each.last)[:8]
    parts = []
    for number, each in enumerate(kept):
        y = 50 + 23 * number
        parts.append(f'<line x1="10" x2="{WIDTH - 10}" y1="{y + 7}" y2="{y + 7}" stroke="{_GRID}"/>')
        parts.append(_text(14, y, each.legend, 12) + _text(WIDTH - 14, y, shown(each.last, unit), 12, anchor="end"))
    return "".join(parts)


def shown(value: float, unit: str) -> str:
    """A value with its unit, short."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "x":
        return f"{value:.2f}x"
    if unit == "bytes":
        return f"{value / 2**20:.0f} MiB" if value < 2**30 else f"{value / 2**30:.1f} GiB"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"
    for bound, suffix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if suffix == ' k' else bound):.3g}{suffix}" + ("Hz" if unit == "hertz" else "")
    return f"{value:.3g}" + {"reqps": "/s", "hertz": " Hz"}.get(unit, "")


def _ticks(low: float, high: float) -> list[float]:
    """Four or so round numbers that enclose the values."""
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (factor * step) <= 4)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _paler(colour: str) -> str:
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) * 2 // 5:02x}" for part in parts)


def _text(
    x: float, y: float, text: str, size: int, colour: str = _INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
