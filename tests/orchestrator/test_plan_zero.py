"""The sweep of plan zero: how a module is made to fit, what a line says, how lines become a table."""
# ruff: noqa: ARG002 (the protocols fix the signatures)

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.testing import World
from orchestrator.testing import task as fake_task
from warpsmith.errors import BadInput
from warpsmith.v1 import synthesis_service_pb2, task_pb2, tensor_pb2, timing_pb2

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernelbench" / "plan_zero.py"
SCREENING = timing_pb2.TIER_SCREENING


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_zero", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_zero"] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


MODULE = "class Model: ...\nbatch_size = {batch}\nwidth = {width}\ndef get_inputs(): ...\n"


def sized(accepts: Callable[[int, int], bool]) -> Callable[[task_pb2.Task], task_pb2.Task]:
    """An inspection that reads batch and width from the source, and refuses what `accepts` does not."""

    def inspect(task: task_pb2.Task) -> task_pb2.Task:
        scope: dict[str, int] = {}
        exec(task.sources[0].content, scope)
        batch, width = scope["batch_size"], scope["width"]
        if not accepts(batch, width):
            raise BadInput(f"a width of {width} does not divide")
        task.inputs.append(tensor_pb2.TensorSpec(shape=[batch, width, width]))
        return task

    return inspect


def test_the_first_reduction_that_runs_and_is_small_is_taken(script: ModuleType, tmp_path: Path) -> None:
    path, copy = tmp_path / "square.py", tmp_path / "copy.py"
    path.write_text(MODULE.format(batch=4096, width=8192))
    fitted = script.fit(sized(lambda _, width: width % 3 != 1 or width < 1000), path, copy, "cpu")
    assert fitted.changes == ("batch_size 4096 → 8", "width 8192 → 64")
    assert fitted.elements == 8 * 64 * 64
    assert copy.read_text() == MODULE.format(batch=8, width=64)


def test_where_none_is_small_the_smallest_that_runs_is_taken(script: ModuleType, tmp_path: Path) -> None:
    path, copy = tmp_path / "square.py", tmp_path / "copy.py"
    path.write_text(MODULE.format(batch=100, width=1000))
    fitted = script.fit(sized(lambda _, width: width == 1000), path, copy, "cpu")
    assert fitted.changes == ("batch_size 100 → 2",)
    assert copy.read_text() == MODULE.format(batch=2, width=1000)
    with pytest.raises(BadInput, match="a width of 1000 does not divide"):
        script.fit(sized(lambda *_: False), path, copy, "cpu")


def test_a_line_tells_verdict_and_steps_without_timing_anything(script: ModuleType) -> None:
    world = World()
    row = script.walk(world.agents(), fake_task(), SCREENING)
    assert (row["verdict"], row["kernelbench_pass"], row["worst_rms_ratio"]) == ("PASS", True, 1.0)
    assert script.exported(row)
    assert not world.calls["MeasureArtifact"]


def test_a_timed_line_holds_eager_and_plan_zero(script: ModuleType) -> None:
    row = script.walk(World().agents(), fake_task(), SCREENING, timed=True)
    assert (row["eager_ns"], row["plan_zero_ns"]) == (1e6, 1e6)
    assert row["ratio"] == {"median": 1.0, "low": 0.99, "high": 1.01}


class _Unexportable(World):
    def SynthesizeCandidate(
        self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
        raise BadInput("the module does not export")


def test_a_module_that_does_not_export_does_not_count_against_the_bar(script: ModuleType) -> None:
    row = script.walk(_Unexportable().agents(), fake_task(), SCREENING)
    assert (row["verdict"], row["detail"]) == ("NOT_EXPORTED", "the module does not export")
    assert not script.exported(row)


def test_a_service_that_fails_twice_is_no_verdict_on_the_module(script: ModuleType) -> None:
    world = World()
    world.faults["VerifyArtifact"] = 2
    row = script.walk(world.agents(), fake_task(), SCREENING)
    assert row["verdict"] == "INFRA"
    assert "out of order" in row["detail"]
    assert script.exported(row)


def test_the_table_counts_by_level_and_lists_what_did_not_pass(script: ModuleType, tmp_path: Path) -> None:
    passed = {"verdict": "PASS", "tier": "final", "steps": {"library": 1}, "comparisons": 13, "kernelbench_pass": True}
    lines = [
        {"name": "level2/10_B", "verdict": "INFRA", "tier": "final", "steps": {}},
        {"name": "level2/9_A", **passed},
        {"name": "level2/10_B", **passed, "kernelbench_pass": False},
        {"name": "level3/1_C", "verdict": "NOT_EXPORTED", "tier": "final", "detail": "it loops"},
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, lines)))
    rows = script.read_rows([results])
    assert [row["name"] for row in rows] == ["level2/9_A", "level2/10_B", "level3/1_C"]
    text = script.table(rows)
    assert "| 2 | 2 | 2 | 2 | 2 | 1 | final (2) |" in text
    assert "| 3 | 1 | 0 | 0 | 0 | 0 | final (1) |" in text
    assert "Not PASS: 1 of 3." in text
    assert "- `level3/1_C`: NOT_EXPORTED: it loops" in text


def test_times_are_a_table_of_their_own_with_the_bar(script: ModuleType) -> None:
    machine = {"device": "NVIDIA H200", "torch": "2.11.0"}
    timed = {"verdict": "PASS", "target": "cuda", "eager_ns": 9e4, "noise_floor": 0.01, "flags": [], "machine": machine}
    rows = [
        {"name": "level2/1_A", **timed, "plan_zero_ns": 9e4, "ratio": {"median": 1.0, "low": 0.99, "high": 1.01}},
        {"name": "level2/11_B", **timed, "plan_zero_ns": 1e5, "ratio": {"median": 0.9, "low": 0.89, "high": 0.91}},
    ]
    text = script.table(rows)
    assert "| level2/11_B | PASS | 90.0 | 100.0 | 0.900 [0.890, 0.910] | 0.010 | - |" in text
    assert "At 0.95 times eager's speed or more: 1 of 2. device NVIDIA H200, torch 2.11.0" in text


def test_tasks_come_in_the_order_of_their_numbers(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "level2").mkdir()
    for name in ("11_B", "2_A", "1_C"):
        (tmp_path / "level2" / f"{name}.py").write_text("")
    found = script.modules(tmp_path, [2], [])
    assert [name for name, _ in found] == ["level2/1_C", "level2/2_A", "level2/11_B"]
    assert [name for name, _ in script.modules(tmp_path, [2], ["level2/1_"])] == ["level2/1_C"]
    with pytest.raises(BadInput, match="no level3"):
        script.modules(tmp_path, [3], [])
