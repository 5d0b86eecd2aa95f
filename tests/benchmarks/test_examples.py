"""The command that measures every example, and the page that it writes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from benchmarks import module_tables
from benchmarks.timing import examples

ROOT = Path(__file__).parents[2]
FOUND = {"median": 2.0, "low": 1.9, "high": 2.1}


def line(name: str, **more: Any) -> examples.Row:
    """A line of `warpsmith bench`."""
    arms = {"candidate": 1e3, "eager": 3e3, "compile": 2e3}
    told = {"speedup_fastest": FOUND, "speedup_eager": FOUND, "fastest_baseline": "compile", "labels": ["FEW_BLOCKS"]}
    return {
        "name": name,
        "verdict": "PASS",
        "arms_ns": arms,
        "options": {"target": "cpu", "budget": 10.0},
        **told,
        **more,
    }


def test_every_example_and_the_llama_is_measured_and_explained() -> None:
    names = {*examples.sources(), examples.LLAMA}
    explained = (ROOT / "examples" / "README.md").read_text()
    assert len(names) >= 12
    assert not [name for name in names if f"`{name}.py`" not in explained]


def test_only_the_modules_wanted_are_benched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(
        module_tables.subprocess, "run", lambda command, **_: called.append(command) or CompletedProcess(command, 0)
    )
    options = Namespace(out=tmp_path, target="cpu", budget="10s", only=["soft"])
    assert module_tables.bench({"softmax": "a", "rotary": "b"}, options) == 0
    assert [path.name for path in (tmp_path / "modules").iterdir()] == ["softmax.py"]
    options.only = ["rot"]
    module_tables.bench({"softmax": "a", "rotary": "b"}, options)
    assert [path.name for path in (tmp_path / "modules").iterdir()] == ["rotary.py"]
    options.only = [examples.LLAMA]
    module_tables.bench({"softmax": "a", "rotary": "b"}, options)
    assert [command[command.index("bench") + 1] for command in called] == [str(tmp_path / "modules")] * 2


def test_the_page_has_a_row_for_each_and_the_whole_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"speedup_fastest": None, "speedup_eager": None, "labels": [], "arms_ns": {"eager": 3e3}}
    under_way = {"file": "c.py", "verdict": "UNDER_WAY"}
    rows = [line("b"), line("a", verdict="NO_FASTER", fastest_baseline="eager", **none), under_way]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {"eager": 4.0, "compile": 3.0, "ours": 2.0}
    (tmp_path / "llama_layers.jsonl").write_text(json.dumps(line("llama_layers", model_ms=whole)) + "\n")
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(examples, "ROOT", tmp_path)
    examples.record(tmp_path, "Nobody else was there.")
    page = (tmp_path / "docs" / "results" / "examples_cpu.md").read_text()
    assert "| a | 3 | - | - | - | eager | - | - | NO_FASTER |\n" in page
    assert "| b | 3 | 2 | 1 | 2.00x [1.90, 2.10] | compile | 2.00x | FEW_BLOCKS | PASS |\n" in page
    assert "takes 4.00 ms in eager, 3.00 ms under `torch.compile`, 2.00 ms with its four layers swapped" in page
    assert "`python -m benchmarks.timing.examples --out FOLDER --budget 10s`" in page
    unswapped = examples.table([line("llama_layers", model_ms=whole, verdict="NO_FASTER")])
    assert "3.00 ms under `torch.compile`; none is swapped." in unswapped
    assert "10 seconds of search each. Nobody else was there." in page
    lines = (tmp_path / "docs" / "results" / "examples_cpu.jsonl").read_text().splitlines()
    assert [json.loads(each)["name"] for each in lines] == ["a", "b", "llama_layers"]
