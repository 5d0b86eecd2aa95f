"""docs/limits.md has every row where PyTorch is at the floor or ours is slower, and no other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import limits_page  # noqa: E402


def line(*, floor_percent: float | None, speedup: float | None, message: str = "") -> dict[str, Any]:
    """A line of results with what the page reads."""
    ratio = None if speedup is None else {"median": speedup, "low": speedup - 0.01, "high": speedup + 0.01}
    return {"name": "tanh", "fastest_baseline": "compile", "arms_ns": {"compile": 3_018_700.0}, "message": message,
            "floor_percent": floor_percent, "speedup_fastest": ratio}  # fmt: skip


def test_the_page_is_as_the_results_are() -> None:
    text = limits_page.PAGE.read_text(encoding="utf-8")
    assert limits_page.written(text) == text, "write it again with: python docs/limits_page.py"


def test_the_share_of_a_baseline_is_ours_divided_by_our_speedup() -> None:
    row = limits_page.read(line(floor_percent=96.0, speedup=1.5))
    assert row.floor_percent == 64.0
    assert not row.at_floor
    assert not row.is_slower


def test_a_run_that_was_not_searched_is_at_the_floor_by_its_message() -> None:
    told = "compile takes 3018.7 us and the floor of this machine is 2895.7 us: at most 1.04x could be won"
    row = limits_page.read(line(floor_percent=None, speedup=None, message=told))
    assert row.at_floor
    assert not row.is_slower
    assert row.text == "| tanh | compile | 3018.7 | 96 % | not searched |"


def test_a_module_without_a_time_of_ours_counts_as_slower() -> None:
    row = limits_page.read(line(floor_percent=None, speedup=None, message="no faster kernel found"))
    assert row.is_slower
    assert row.text.endswith("|  | no time of ours |")


def test_what_is_a_little_slower_is_shown_with_its_interval() -> None:
    row = limits_page.read(line(floor_percent=80.0, speedup=0.99))
    assert row.is_slower
    assert row.text.endswith("| 81 % | 0.99x [0.98, 1.00] |")
