"""Kernels that are faster, judged again on a busy machine: which are, and what is told of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing import honest_kernels


def row(name: str, median: float, *, faster: bool = True, verdict: str = "PASS") -> dict[str, Any]:
    speedup = {"median": median, "low": 0.9 * median, "high": 1.1 * median}
    return {
        "name": name, "load": 4, "recorded": 1.5, "verdict": verdict, "faster": faster,
        "labels": [] if faster else ["SLOWER_ON_FRESH_VALUES"], "speedup_fastest": speedup,
    }  # fmt: skip


def test_who_is_refused_is_told_with_the_reason() -> None:
    rows = [row("a", 1.4), row("b", 1.6, faster=False), row("a", 1.7), row("a", 1.5, verdict="FAIL WRONG_VALUE")]
    said = honest_kernels.table(rows)
    assert said.startswith("4 judged beside 4 processes that spin, 2 refused (bar 1 of 50).")
    assert "| a | 1.50x | 3 | 2 | 1.40x to 1.70x |" in said
    assert "Refused: b: PASS, 1.60x [1.44, 1.76] SLOWER_ON_FRESH_VALUES" in said
    assert "Refused: a: FAIL WRONG_VALUE" in said


@pytest.mark.parametrize(
    ("median", "faster", "is_chosen"), [(1.2, True, True), (2.0, True, True), (2.1, True, False), (1.5, False, False)]
)
def test_only_kernels_of_a_gain_that_load_might_hide_are_judged_again(
    tmp_path: Path, median: float, faster: bool, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(honest_kernels.cpu_examples, "modules", lambda: {"a": "", "b": ""})
    timing = {"faster": faster, "speedup_fastest": {"median": median}}
    (tmp_path / "a.record.json").write_text(json.dumps({"run": {"best": {"timing": timing}}}))
    (tmp_path / "b.record.json").write_text("")  # nothing was right
    found = honest_kernels.records(argparse.Namespace(out=tmp_path, budget="1s"))
    assert found == [tmp_path / "a.record.json"] * is_chosen
