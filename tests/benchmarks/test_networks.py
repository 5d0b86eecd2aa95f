"""Networks as they are measured: their classes, what is told first, and which are run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernelbench import networks


def row(name: str, median: float | None, verdict: str = "PASS") -> dict[str, Any]:
    found = None if median is None else {"median": median, "low": median, "high": median}
    return {
        "name": name, "verdict": verdict, "speedup_fastest": found, "speedup_eager": found, "labels": [], "gain": "",
        "message": "no candidate passed", "floor_percent": None, "seconds": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1_MLP", "products"), ("9_ResNet18", "convolution"), ("36_LSTMHn", "recurrent"),
        ("49_Mamba2ReturnFinalState", "state space"), ("50_ReLUSelfAttention", "attention"),
        ("resnet50_float32", "convolution"), ("unet_block_bfloat16", "convolution"),
        ("llama_layer_bfloat16", "attention"),
    ],
)  # fmt: skip
def test_every_network_is_in_a_class(name: str, kind: str) -> None:
    assert networks.class_of(name) == kind


def test_what_is_missing_or_slower_than_pytorch_is_told_first() -> None:
    rows = [
        row("9_ResNet18", 0.9, "NO_FASTER"),
        row("36_LSTMHn", 2.5),
        row("28_ViT", None, "NO_FASTER"),
        row("1_MLP", 4.0),
    ]
    said = networks.table(rows).splitlines()
    assert said[0] == "- without a time of ours: 28_ViT (NO_FASTER: no candidate passed)"
    assert said[1] == "- under 0.97x: 9_ResNet18 0.90x"
    assert "- recurrent: 2.50x over 1 (bar 2.0x)" in said
    assert "- without convolutions: 3.16x over 2 (bar 1.6x)" in said
    assert "- all: 2.08x over 3 (bar 1.3x)" in said
    assert "| convolution | 1 | 1 | 0 | 0.90x | 0.90x |" in said
    assert networks.bars([row("1_MLP", 4.0)])[:2] == ["- without a time of ours: none", "- under 0.97x: none"]


def test_the_last_line_of_each_counts_in_order_of_numbers(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = [
        '{"name": "10_A", "n": 1}',
        '{"name": "9_B", "n": 2}',
        '{"name": "10_A", "n": 3}',
        '{"name": "t5", "n": 4}',
    ]
    file.write_text("\n".join(lines))
    assert [each["n"] for each in networks.read(file)] == [4, 2, 3]
    assert networks.read(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ([], ["1_MLP.py", "36_LSTMHn.py", "3_Deep.py"]),
        (["3"], ["3_Deep.py"]),
        (["products"], ["1_MLP.py", "3_Deep.py"]),
        (["36", "1_M"], ["1_MLP.py", "36_LSTMHn.py"]),
    ],
)
def test_networks_are_chosen_by_class_number_or_name(tmp_path: Path, only: Sequence[str], names: Sequence[str]) -> None:
    (tmp_path / "level3").mkdir()
    for name in ("1_MLP", "3_Deep", "36_LSTMHn"):
        (tmp_path / "level3" / f"{name}.py").write_text(f"# {name}")
    found = networks.sources(tmp_path, "", tmp_path, only)
    assert sorted(found) == sorted(names)
    assert all(text == f"# {name.removesuffix('.py')}" for name, text in found.items())


def test_one_of_level_3_and_the_suite_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[argparse.Namespace] = []
    monkeypatch.setattr(networks, "measure", lambda _, options: measured.append(options) or 0)
    monkeypatch.setattr(networks.model_suite, "write", lambda folder: folder)
    monkeypatch.setattr("sys.argv", ["networks", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        networks.main()
    monkeypatch.setattr("sys.argv", ["networks", "--out", str(tmp_path), "--suite", "models"])
    assert networks.main() == 0
    assert (measured[0].trials, measured[0].budget) == (networks.TRIALS, networks.BUDGET)
