"""The tasks of level 1 that are measured, and what becomes of one whose shapes are changed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernelbench import level1

GROUP_NORM = """
batch_size = 112  # scaled up
features = 64
num_groups = 8
dim1 = 512
dim = 1


def get_inputs():
    x = torch.rand(batch_size, features, dim1)
    return [x]
"""


def test_every_task_is_in_one_class_and_thirty_five_are_in_the_first_five() -> None:
    numbers = [number for each in level1.CLASSES.values() for number in each]
    assert len(numbers) == len(set(numbers)) == 48
    assert sum(len(level1.CLASSES[kind]) for kind in level1.TOGETHER) == 35
    assert set(level1.CLASSES) == {*level1.TOGETHER, "pooling", "scan", "arg-reduction"}


def test_a_changed_task_has_odd_small_sizes_and_normal_inputs() -> None:
    names: dict[str, Any] = {}
    text = level1.changed(GROUP_NORM)
    exec(text.split("def ")[0], names)
    assert (names["batch_size"], names["dim1"], names["dim"]) == (35, 107, 1)
    assert names["features"] == 24  # whole groups, not a power of two of them
    assert "torch.randn(batch_size, features, dim1)" in text


def test_sizes_written_otherwise_are_changed_too_and_probabilities_stay_some() -> None:
    text = level1.changed("input_shape = (8192 * 2,)\nM = 16384 * 4\nx = torch.rand(M, *input_shape).softmax(dim=-1)\n")
    assert "input_shape = (1449,)" in text
    assert "M = 4097" in text
    assert "torch.rand(" in text


def test_a_row_without_a_right_kernel_is_named() -> None:
    rows = [
        {"name": "19_ReLU", "verdict": "NO_FASTER", "speedup_fastest": None, "labels": []},
        {"name": "20_LeakyReLU", "verdict": "AT_FLOOR", "speedup_fastest": None, "labels": []},
        {"name": "23_Softmax", "verdict": "PASS", "labels": [], "floor_percent": 89.0, "gain": "",
         "speedup_fastest": {"median": 1.44}, "speedup_eager": {"median": 1.9}},
    ]  # fmt: skip
    said = "\n".join(level1.bars(rows))
    assert "1.20x (bar 1.15x), 1 at the floor before a search as 1.00x; 1.44x without those" in said
    assert "without a right kernel: 19_ReLU (nothing right)" in said


def test_time_under_way_counts_tasks_that_overlap_once_and_gaps_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level1, "MANY", 2)
    runs = [("101500", 60.0, 0.0), ("101530", 20.0, 40.0), ("101620", 5.0, 0.0), ("111500", 30.0, 0.0)]
    rows = [
        {"name": f"{number}_x", "run": f"20261122-{clock}-abcdef", "seconds": seconds, "stage_seconds": {"wait": wait}}
        for number, (clock, seconds, wait) in enumerate(runs)
    ]
    rows.append({"name": "4_bad", "seconds": 1.0})
    assert level1.stretches(rows) == ["- under way from 2026-11-22 10:15 on: 3 tasks in 90 s"]
