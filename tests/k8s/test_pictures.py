"""Pictures of dashboards: each panel is drawn from the series of its expressions, and says so when there are none."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import dashboards
import pictures
import pytest

Points = Sequence[tuple[float, float]]
IMAGES = Path(__file__).parents[2] / "docs" / "images"


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def two_series(expression: str, at_the_end: bool) -> list[tuple[dict[str, str], Points]]:
    del expression, at_the_end
    points = [(0.0, 1.0), (60.0, 3.0)]
    return [
        ({"outcome": "timed", "module": "a<b", "run": "1"}, points),
        ({"outcome": "fault", "module": "c", "run": "2"}, points[1:]),
    ]


@pytest.mark.parametrize("name", dashboards.BOARDS)
def test_every_panel_is_drawn_with_its_title_and_legends(name: str) -> None:
    board = dashboards.dashboard(name)
    said = texts(pictures.picture(board, two_series, "a run"))
    assert {panel["title"] for panel in board["panels"]} <= set(said)
    assert "no data" not in said
    if name == "throughput":
        assert "a<b 1" in said, "labels are text and no markup"


def test_a_panel_without_series_says_so() -> None:
    board = dashboards.dashboard("model")
    said = texts(pictures.picture(board, lambda *_: [], "a run"))
    assert said.count("no data") == len(board["panels"])


def test_a_line_stands_where_its_values_are() -> None:
    board = {"title": "t", "panels": [dashboards.dashboard("throughput")["panels"][3]]}
    svg = ET.fromstring(
        pictures.picture(board, lambda *_: [({"task": "t"}, [(0.0, 0.0), (30.0, 1.0), (60.0, 2.0)])], "")
    )
    line = next(svg.iter("{http://www.w3.org/2000/svg}polyline"))
    (x0, y0), (x1, y1), (x2, y2) = (map(float, place.split(",")) for place in line.attrib["points"].split())
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2) != 0


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1234, "percentunit", "12.3 %"),
        (1.5, "x", "1.50x"),
        (0.0042, "s", "4.2 ms"),
        (12.0, "s", "12 s"),
        (3.4e9, "hertz", "3.4 GHz"),
        (300 * 2**20, "bytes", "300 MiB"),
        (25000.0, "short", "25 k"),
        (1.25, "reqps", "1.25/s"),
    ],
)
def test_values_are_shown_with_their_unit(value: float, unit: str, text: str) -> None:
    assert pictures.shown(value, unit) == text


def test_the_pictures_of_the_docs_show_every_panel_with_data() -> None:
    for name in dashboards.BOARDS:
        said = texts((IMAGES / f"{name}.svg").read_text())
        titles = {panel["title"] for panel in dashboards.dashboard(name)["panels"]}
        assert titles <= set(said), f"{name}: make monitoring-pictures"
        assert "no data" not in said
