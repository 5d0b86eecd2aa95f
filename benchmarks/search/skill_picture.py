"""Draws curves over trials as an SVG of our own: no plotting library is needed to make it, none to see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 60, 50, 40, 150
COLOURS = ("#1f6feb", "#d1242f", "#8250df", "#6e7781", "#1a7f37", "#bf8700")


@dataclass(frozen=True)
class Curve:
    """A name and its values after trial 1, 2, …"""

    name: str
    values: Sequence[float]


def picture(curves: Sequence[Curve], title: str) -> str:
    """The SVG: share of the best plan's speed against trials."""
    trials = max(len(curve.values) for curve in curves)
    least = min(min(curve.values) for curve in curves)
    low = max(0.0, int(10 * least) / 10)

    def place(trial: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (trial - 1) / max(trials - 1, 1)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (1 - low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{title}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">trials</text>',
    ]
    for step in range(round(10 * low), 11):
        x, y = place(1, step / 10)
        parts.append(f'<line x1="{x:.0f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10 * step} %</text>')
    for trial in range(1, trials + 1):
        if trial == 1 or trial % 4 == 0:
            x, y = place(trial, low)
            parts.append(f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{trial}</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*place(n, value)) for n, value in enumerate(curve.values, 1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 20 * (number + 1)
        parts.append(f'<line x1="{WIDTH - RIGHT + 16}" y1="{y}" x2="{WIDTH - RIGHT + 40}" y2="{y}" stroke="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 46}" y="{y + 4}">{curve.name}</text>')
    return "\n".join([*parts, "</svg>", ""])
