"""Results as CSV and OpenMetrics text: what stands in them, and what others' words cannot do there."""

from __future__ import annotations

import contextlib
import csv
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from orchestrator import testing
from orchestrator.commands import cli, client, report
from orchestrator.interchange import tables
from warpsmith.v1 import run_pb2, timing_pb2


def result(name: str = "softmax", **more: Any) -> dict[str, Any]:
    run = run_pb2.Run(id=f"run of {name}", task=testing.task(name), state=run_pb2.RUN_STATE_FASTER)
    arm = timing_pb2.Arm(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=2_000.0)
    run.best.timing.arms.append(arm)
    run.best.timing.speedup_fastest.CopyFrom(timing_pb2.Speedup(median=1.5, low=1.4, high=1.6))
    run.best.timing.floor_percent = 80.0
    run.best.timing.faster = True
    return report.as_json(run) | more


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def samples(text: str, family: str) -> dict[tuple[str, ...], float]:
    """Values of a family by their labels, in the order of their names."""
    found = {each.name: each for each in text_string_to_metric_families(text)}
    return {tuple(v for _, v in sorted(each.labels.items())): each.value for each in found[family].samples}


def test_a_row_has_the_names_of_the_json() -> None:
    first, second = read_csv(tables.csv_text([result(), {"name": "other", "verdict": "FAILED", "message": "gone"}]))
    assert (first["name"], first["verdict"], first["labels"]) == ("softmax", "PASS", "kernelbench_check_fails")
    assert (first["speedup_fastest.median"], first["arms_ns.candidate"]) == ("1.5", "2000.0")
    assert (second["speedup_fastest.median"], second["message"]) == ("", "gone")


def test_words_by_names_that_are_not_ours_share_a_column() -> None:
    row = read_csv(tables.csv_text([result(arms_failed={"compile": "no\nmemory", "eager": "none"}, options={})]))[0]
    assert row["arms_failed"] == "compile: no memory; eager: none"
    assert "options" not in row


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+1", "-1", "@sum", "\n=1", "＝1"])
def test_no_text_of_others_is_a_formula(text: str) -> None:
    assert read_csv(tables.csv_text([result(message=text)]))[0]["message"] == f"'{text.strip()}"


def test_no_text_of_others_acts_in_a_terminal() -> None:
    name = 'n\x1b[2K\n"} 1\n# EOF\nx'
    texts = [tables.csv_text([result(name)]), tables.openmetrics_text([result(name)])]
    assert "\x1b" not in "".join(texts)
    assert len(read_csv(texts[0])) == 1
    assert len(samples(texts[1], "warpsmith_result_verdict")) == 1


def test_gauges_are_in_base_units_by_name_and_run() -> None:
    text = tables.openmetrics_text([result(), result("gelu", file="a/gelu.py")])
    assert text.endswith("# EOF\n")
    assert samples(text, "warpsmith_result_verdict") == {
        ("", "softmax", "run of softmax", "PASS"): 1.0,
        ("", "a/gelu.py", "run of gelu", "PASS"): 1.0,
    }
    assert samples(text, "warpsmith_result_time_seconds")["candidate", "softmax", "run of softmax"] == 2e-6
    assert samples(text, "warpsmith_result_floor_ratio")["softmax", "run of softmax"] == 0.8
    speedups = samples(text, "warpsmith_result_speedup_ratio")
    assert speedups["fastest", "low", "softmax", "run of softmax"] == 1.4


def test_no_results_are_a_table_without_rows() -> None:
    assert tables.csv_text([]).strip() == ""
    assert samples(tables.openmetrics_text([]), "warpsmith_result_verdict") == {}


def test_a_bench_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.py").write_text("def get_inputs(:\n")
    files = {"--csv": tmp_path / "out.csv", "--openmetrics": tmp_path / "out.txt", "--runs": tmp_path / "runs"}
    arguments = ["bench", tmp_path, *(part for pair in files.items() for part in pair)]
    monkeypatch.setattr(sys, "argv", ["warpsmith", *map(str, arguments)])
    nobody: Any = client.Serving(None, lambda: None)  # type: ignore[arg-type]
    monkeypatch.setattr(client, "searching", lambda *_: contextlib.nullcontext(nobody))
    with pytest.raises(SystemExit):
        cli.main()
    assert [row["verdict"] for row in read_csv(files["--csv"].read_text())] == ["BAD_INPUT"]
    assert list(samples(files["--openmetrics"].read_text(), "warpsmith_result_verdict")) == [
        ("", "bad.py", "", "BAD_INPUT")
    ]
