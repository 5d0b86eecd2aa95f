"""What a result says: the JSON of the design, the table's cells, the split of a gain, exit codes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator import testing
from orchestrator.commands import report
from orchestrator.commands.progress import Progress
from orchestrator.pages import report_page
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    hypothesis_pb2,
    run_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)


def faster_run() -> run_pb2.Run:
    run = run_pb2.Run(
        id="r1", task=testing.task("softmax"), state=run_pb2.RUN_STATE_FASTER, trial_count=9, pass_count=7
    )
    timing = timing_pb2.Timing(
        fastest_arm=timing_pb2.ARM_KIND_COMPILE,
        speedup_fastest=timing_pb2.Speedup(median=8.0, low=7.5, high=8.5),
        speedup_eager=timing_pb2.Speedup(median=10.0, low=9.0, high=11.0),
        floor_percent=71.5,
        faster=True,
        raised=[timing_pb2.FLAG_UNSTEADY_MACHINE],
    )
    for kind, median in (
        (report.EAGER, 1e6),
        (timing_pb2.ARM_KIND_COMPILE, 8e5),
        (report.REWRITTEN, 2e5),
        (report.CANDIDATE, 1e5),
    ):
        timing.arms.add(kind=kind, median_ns=median)
    timing.steps.add(group="a", computed_by=analysis_pb2.ENGINE_AUTHORED, name="k", median_ns=75)
    timing.steps.add(group="b", computed_by=analysis_pb2.ENGINE_LIBRARY, name="aten.mv", median_ns=25)
    run.best.timing.CopyFrom(timing)
    run.best.verdict.CopyFrom(verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS, kernelbench_pass=True))
    run.best.candidate.CopyFrom(candidate_pb2.Candidate(rewrites=["linear_row_sum"]))
    return run


def test_the_json_has_the_designs_shape() -> None:
    result = report.as_json(faster_run())
    assert result["name"] == "softmax"
    assert result["verdict"] == "PASS"
    assert result["speedup_fastest"] == {"median": 8.0, "low": 7.5, "high": 8.5}
    assert result["speedup_eager"]["median"] == 10.0
    assert result["floor_percent"] == 71.5
    assert result["labels"] == ["algebra:linear_row_sum", "UNSTEADY_MACHINE"]


def test_what_a_model_took_is_told_where_one_took_anything() -> None:
    run = faster_run()
    assert report.tokens_text(run) == ""
    assert "model:" not in report.row(run)[-1]
    run.model_tokens = 12345
    assert "model: 12345 tokens" in report.row(run)[-1]
    assert report.as_json(run)["model_tokens"] == 12345


def test_a_gain_is_split_into_algebra_and_kernels() -> None:
    run = faster_run()
    assert report.gain_split(run) == (4.0, 2.0, False)
    assert report.authored_share(run.best.timing) == 0.75
    text = report.gain_text(run)
    assert text == "algebra 4.00x × kernels 2.00x; 75% of the time in authored kernels, 25% in library calls"


def test_a_gain_is_split_beside_eager_where_a_compiled_baseline_is_ahead_of_the_rewritten_module() -> None:
    run = faster_run()
    run.best.timing.speedup_fastest.median = 1.6
    assert report.gain_split(run) == (5.0, 2.0, True)
    assert report.gain_text(run).startswith("over eager: algebra 5.00x × kernels 2.00x; ")


def test_a_gain_is_not_split_by_a_time_that_cannot_be() -> None:
    run = faster_run()
    next(arm for arm in run.best.timing.arms if arm.kind == report.REWRITTEN).median_ns = 5e-324
    assert report.gain_split(run) is None


def test_a_gain_without_a_kernel_of_ours_is_the_hosts_time() -> None:
    run = faster_run()
    run.best.candidate.ClearField("rewrites")
    for step in run.best.timing.steps:
        step.computed_by = analysis_pb2.ENGINE_LIBRARY
    for arm in list(run.best.timing.arms):
        if arm.kind == report.REWRITTEN:
            run.best.timing.arms.remove(arm)
    assert report.gain_text(run) == "the module's own library calls: what is gained is the host's time between them"


def test_a_launch_as_one_graph_is_part_of_where_a_gain_comes_from() -> None:
    run = faster_run()
    assert "CUDA graph" not in report.gain_text(run)
    run.best.candidate.program.cuda_graph = True
    assert report.gain_text(run).endswith("; launched as one CUDA graph")


def test_baselines_of_an_earlier_run_are_a_label_where_no_final_timed_them() -> None:
    run = faster_run()
    run.reference.is_kept = True
    assert report.KEPT not in report.labels_of(run)
    run.best.timing.tier = timing_pb2.TIER_SCREENING
    assert report.KEPT in report.labels_of(run)
    run.ClearField("best")
    assert report.KEPT in report.labels_of(run)


def test_what_inspected_the_kernels_is_told_and_what_could_not_says_why() -> None:
    run = faster_run()
    assert report.inspection_text(run) == ""
    said = run.best.verdict.inspections
    said.add(tool="compute-sanitizer memcheck")
    said.add(tool="compute-sanitizer racecheck")
    said.add(tool="compute-sanitizer initcheck", skipped="no end within 120 s")
    told = "compute-sanitizer (memcheck, racecheck): nothing found"
    assert report.inspection_text(run) == f"{told}; compute-sanitizer (initcheck): skipped: no end within 120 s"
    assert report.as_json(run)["inspections"]["compute-sanitizer racecheck"] == "nothing found"
    assert told in report.row(run)[-1]


def test_a_run_without_a_faster_kernel_says_so() -> None:
    run = faster_run()
    run.state = run_pb2.RUN_STATE_NO_FASTER
    run.best.timing.faster = False
    assert report.as_json(run)["verdict"] == "NO_FASTER"
    assert "no faster kernel found" in report.row(run)[4]


def test_what_making_arms_ready_took_is_told_where_it_is_known() -> None:
    run = faster_run()
    assert "arms_seconds" not in report.as_json(run)
    run.best.timing.arms.add(kind=timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE, median_ns=2000, prepare_seconds=41.237)
    assert report.as_json(run)["arms_seconds"]["compile_max_autotune"] == 41.24


def test_a_run_at_its_floor_shows_the_reference() -> None:
    run = run_pb2.Run(task=testing.task(), state=run_pb2.RUN_STATE_AT_FLOOR, message="at most 1.01x could be won")
    run.reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=1500)
    cells = report.row(run)
    assert cells[1:5] == ["1.5 us", "-", "-", "AT_FLOOR: at most 1.01x could be won"]
    assert report.as_json(run)["speedup_fastest"] is None


def test_an_arm_that_could_not_run_is_printed_with_its_reason() -> None:
    run = faster_run()
    run.best.timing.arms.add(kind=timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE, failure="RuntimeError: no GPU")
    assert report.as_json(run)["arms_failed"] == {"compile_max_autotune": "RuntimeError: no GPU"}
    assert "compile_max_autotune" not in report.as_json(run)["arms_ns"]
    assert "compile_max_autotune could not run: RuntimeError: no GPU; algebra" in report.row(run)[6]


def test_looser_precision_and_a_failing_kernelbench_check_are_labels() -> None:
    run = faster_run()
    run.task.precision = task_pb2.PRECISION_TF32
    run.best.verdict.kernelbench_pass = False
    assert {"tf32", "kernelbench_check_fails"} <= set(report.labels_of(run))


@pytest.mark.parametrize(
    ("state", "passed", "code"),
    [
        (run_pb2.RUN_STATE_FASTER, 3, 0),
        (run_pb2.RUN_STATE_NO_FASTER, 2, 0),
        (run_pb2.RUN_STATE_NO_FASTER, 0, 1),
        (run_pb2.RUN_STATE_AT_FLOOR, 0, 0),
        (run_pb2.RUN_STATE_BAD_INPUT, 0, 2),
        (run_pb2.RUN_STATE_FAILED, 0, 3),
    ],
)
def test_exit_codes(state: run_pb2.RunState.ValueType, passed: int, code: int) -> None:
    assert report.exit_code([run_pb2.Run(state=state, pass_count=passed)]) == code


def failed_trial() -> trial_pb2.Trial:
    return trial_pb2.Trial(
        number=4,
        parent=2,
        hypothesis=hypothesis_pb2.Hypothesis(moves=[testing.move("author", "row")], new_move_count=1),
        verdict=verdict_pb2.Verdict(
            state=verdict_pb2.VERDICT_STATE_FAIL, kind=verdict_pb2.FAILURE_KIND_COMPILE_ERROR, detail="no\nmore"
        ),
    )


def test_a_trial_is_one_line() -> None:
    assert report.trial_line(failed_trial()) == "#4 (from 2) author out row: COMPILE_ERROR: no"


def test_trials_are_drawn_under_the_trial_that_they_grew_from() -> None:
    child = failed_trial()
    child.number, child.parent = 5, 4
    output = io.StringIO()
    Console(file=output, width=100).print(report.tree("plan zero", [failed_trial(), child]))
    root, first, second = output.getvalue().splitlines()
    assert root == "plan zero"
    assert first.index("#4") < second.index("#5")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_trials_with_and_without_a_terminal(terminal: bool) -> None:
    output = io.StringIO()
    run = faster_run()
    with Progress(Console(file=output, force_terminal=terminal, width=160)) as progress:
        progress.expect(run)
        progress.take("r1", run_pb2.RunEvent(trial=failed_trial()))
        progress.take("r1", run_pb2.RunEvent(run=run))
    text = output.getvalue()
    assert "softmax" in text
    assert "faster" in text
    assert ("COMPILE_ERROR" in text) is not terminal


def test_the_live_table_says_in_80_columns_what_a_run_waits_for_and_for_how_long() -> None:
    earlier = [run_pb2.Run(phase_seconds=[seconds, 5.0, 30.0]) for seconds in (40.0, 45.0, 300.0)]
    earlier += [run_pb2.Run(phase_seconds=[45.0, 5.0, 0.0])] * 4  # without a kernel that was worth a final
    run, output, now = faster_run(), io.StringIO(), 100.0
    run.task.name = "gelu_bias_scale"
    run.state, run.message = run_pb2.RUN_STATE_PREPARING, "timing eager"
    run.best.timing.speedup_fastest.CopyFrom(timing_pb2.Speedup(median=1.83, low=1.76, high=1.89))
    console = Console(file=output, force_terminal=True, width=80, color_system=None)
    with Progress(console, clock=lambda: now) as progress:
        progress.learn([*earlier, run_pb2.Run(phase_seconds=[1.0])])
        progress.expect(run)
        progress.take("r1", run_pb2.RunEvent(run=run))
        now = 112.0
    lines = output.getvalue().splitlines()
    assert any(line.endswith("gelu_bias_scale: preparing for 12 of about 45 s: timing eager") for line in lines)
    assert any("gelu_bias_scale" in line and "preparing" in line and "1.83x [1.76, 1.89]" in line for line in lines)


def test_a_notebook_has_one_output_that_is_drawn_again_with_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(data["text/plain"])

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    run, output = faster_run(), io.StringIO()
    with Progress(Console(file=output, force_jupyter=True), clock=lambda: 7.0) as progress:
        progress.expect(run)
        run.state, run.message = run_pb2.RUN_STATE_PREPARING, "timing eager"
        progress.take("r1", run_pb2.RunEvent(run=run))
    assert [("softmax: preparing for 0 s: timing eager" in text) for text in shown] == [False, True, True]
    assert output.getvalue() == ""


def test_plain_lines_say_what_a_run_waits_for_and_about_how_long() -> None:
    run, output = faster_run(), io.StringIO()
    progress = Progress(Console(file=output, force_terminal=False, width=80))
    progress.learn([run_pb2.Run(phase_seconds=[45.0, 5.0, 30.0])])
    progress.expect(run)
    run.state = run_pb2.RUN_STATE_PREPARING
    for run.message in ("capturing the module", "capturing the module", "timing eager"):
        progress.take("r1", run_pb2.RunEvent(run=run))
    run.state, run.message = run_pb2.RUN_STATE_FASTER, "8.00x"
    progress.take("r1", run_pb2.RunEvent(run=run))
    assert output.getvalue().splitlines() == [
        "softmax: preparing, about 45 s: capturing the module",
        "softmax: preparing, about 45 s: timing eager",
        "softmax: faster: 8.00x",
    ]


def test_a_narrow_terminal_gets_lines_that_say_all_that_the_table_does() -> None:
    answer, times, notes = report.lines(faster_run())
    assert answer == "softmax: 8.00x [7.50, 8.50]"
    assert times == "  eager 1 ms, torch.compile 800 us, ours 100 us, 72 % of the floor"
    assert "75% of the time in authored kernels" in notes
    assert report.lines(
        run_pb2.Run(task=testing.task("softmax"), state=run_pb2.RUN_STATE_AT_FLOOR, message="near")
    ) == ["softmax: AT_FLOOR: near"]


def test_a_gain_that_is_not_called_one_says_why_beside_it() -> None:
    run = faster_run()
    run.state, run.best.timing.faster = run_pb2.RUN_STATE_NO_FASTER, False
    run.message = "no faster kernel found: the best reaches 8.00x, where equals differ by 300 %"
    assert report.row(run)[-3] == "no faster kernel found (8.00x [7.50, 8.50])"
    assert report.row(run)[-1].startswith("the best reaches 8.00x, where equals differ by 300 %; ")


def test_a_run_ends_with_its_identifier_and_the_next_commands() -> None:
    found, lost = faster_run(), run_pb2.Run(id="a; rm b", task=testing.task("chain"))
    found.best.timing.faster = True
    assert report.next_steps([found], " -X") == [
        "run r1: softmax",
        "next: warpsmith report r1 -X | warpsmith export r1 -X | warpsmith show r1 --tree -X",
    ]
    assert report.next_steps([lost], "")[1] == "next: warpsmith report 'a; rm b' | warpsmith show 'a; rm b' --tree"
    assert report.next_steps([found, lost], "")[-1].startswith("next: warpsmith report RUN | warpsmith export RUN")


def test_the_table_has_a_row_for_each_run() -> None:
    output = io.StringIO()
    Console(file=output, width=180).print(report.table([faster_run()]))
    assert "8.00x [7.50, 8.50]" in output.getvalue()
    assert "72 %" in output.getvalue()


@pytest.mark.parametrize(
    ("state", "message", "text"),
    [
        (run_pb2.RUN_STATE_BAD_INPUT, "softmax.py:3: forward failed", "softmax.py:3: forward failed"),
        (run_pb2.RUN_STATE_FAILED, "a worker ended\nTraceback", "softmax.py: a worker ended"),
        (run_pb2.RUN_STATE_NO_FASTER, "no faster kernel found", ""),
    ],
)
def test_an_error_is_one_line_that_names_the_file(state: run_pb2.RunState.ValueType, message: str, text: str) -> None:
    run = run_pb2.Run(task=testing.task("softmax"), state=state, message=message)
    assert report.error_text(run) == text


def of_a_later_version(message: Any, depth: int = 0) -> Any:
    """The message with every enum at a value that this version does not know, and one element in every list."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if depth < 5 and not field.message_type.GetOptions().map_entry:
                inner = getattr(message, field.name)
                of_a_later_version(inner.add() if field.is_repeated else inner, depth + 1)
                if not field.is_repeated:
                    inner.SetInParent()
        elif field.enum_type is not None:
            value = 97
            getattr(message, field.name).append(value) if field.is_repeated else setattr(message, field.name, value)
    return message


def test_a_run_of_a_later_version_is_shown() -> None:
    """What a newer server sends may have values that this client has no word for: it shows their numbers."""
    run = of_a_later_version(run_pb2.Run())
    assert report.verdict_of(run) == report.state_name(run.state) == "97"
    assert report.as_json(run)
    assert report.table([run]).row_count == 1
    assert report.exit_code([run]) in (0, 1, 2, 3)
    assert report.error_text(run) is not None
    assert report.gain_text(run) is not None
    trial = of_a_later_version(trial_pb2.Trial(number=1))
    assert "97" in report.trial_line(trial)
    assert report.tree("plan zero", [trial])
    assert report.funnel([trial])
    assert "97" in report_page.html(run, [trial])
