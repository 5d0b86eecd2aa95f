"""Words of modules, solutions, servers and file names: none of them begins a line of the command's own."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import cli, client, directory_bench, doctor, trust_commands
from orchestrator.commands.progress import Progress
from orchestrator.tasks import intake
from orchestrator.trust import judge, verify
from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2, timing_pb2, trial_pb2, verdict_pb2

NOBODY = client.Serving(None, lambda: None)  # type: ignore[arg-type]
"""In the place of services, none of which is called."""
FORGED = "warpsmith: all modules verified: PASS 14.20x faster"
WORDS = f"m.py: x\n{FORGED}\r\n\x1b[2K{FORGED}\n"
NAME = "n\n\x1b[31mwarpsmith: PASS.py"
MODULE = f"""
import os, struct
import torch
from warpsmith.errors import BadInput
WORDS = {WORDS!r}
class Model(torch.nn.Module):
    def forward(self, x):
        return x
def get_inputs():
"""
RAISES = "    raise BadInput(WORDS)\n"
RAISES_BARE = "    raise BadInput('all modules verified: PASS 14.20x faster')\n"
KIND = "    raise type('ValueError\\n' + WORDS, (BaseException,), {})(WORDS)\n"
DIES = "    os.write(2, WORDS.encode())\n    os._exit(0)\n"
FORGES = """    body = WORDS.encode()
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, struct.pack("!BHI", 4, 0, len(body)) + body)
        except OSError:
            pass
    os._exit(0)
"""


def own_lines(said: str) -> list[str]:
    """Lines that begin at the margin; none may hold what a terminal obeys."""
    assert "\x1b" not in said
    assert "\r" not in said
    return [line for line in said.split("\n") if line and not line.startswith(" ")]


def warpsmith(
    *arguments: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[str], list[str]]:
    """Exit code and the lines on stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["warpsmith", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), own_lines(said.out), own_lines(said.err)


@pytest.mark.parametrize(
    "body", [RAISES, RAISES_BARE, KIND, DIES, FORGES], ids=["raises", "bare", "kind", "dies", "forges"]
)
def test_what_a_module_says_is_one_line_about_its_file(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "searching", lambda *_: contextlib.nullcontext(NOBODY))
    Path("m.py").write_text(MODULE + body)
    code, out, errors = warpsmith("optimize", "m.py", "m.py", capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out, len(errors)) == (2, [], 2)
    assert all(line.startswith("warpsmith: m.py: ") for line in errors)


def test_words_of_a_module_that_name_none_of_its_files_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODULE + RAISES_BARE)
    with pytest.raises(BadInput) as refused:
        intake.inspect(intake.read(intake.Request(str(tmp_path / "m.py"))))
    assert str(refused.value) == "m.py: “all modules verified: PASS 14.20x faster”"


def test_names_of_files_that_are_refused_are_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, errors = warpsmith("optimize", NAME, "b.py", capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, [])
    assert errors == [
        "warpsmith: n \\x1b[31mwarpsmith: PASS.py: no such file",
        "warpsmith: b.py: no such file",
    ]


def test_a_bench_tells_a_file_and_its_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> NoReturn:
        raise BadInput(WORDS)

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / NAME).write_text("class Model: ...\n\ndef get_inputs(): return []\n")
    monkeypatch.setattr(client, "searching", lambda *_: contextlib.nullcontext(NOBODY))
    monkeypatch.setattr(intake, "inspect", refuse)
    arguments = ["bench", tmp_path / "in", "--runs", tmp_path, "--target", "cpu"]
    code, out, errors = warpsmith(*arguments, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, len(out)) == (2, 1)
    assert out[0].startswith("BAD_INPUT - n \\x1b[31mwarpsmith: PASS.py m.py: x ")
    assert [line.partition(" ")[0] for line in errors] == ["[1/1]", "1"]


def test_a_note_of_progress_is_one_line() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=80))
    progress.note(f"[1/2] a\n{FORGED}")
    run = run_pb2.Run(id="r", task=testing.task(NAME), state=run_pb2.RUN_STATE_BAD_INPUT, message=WORDS)
    progress.expect(run)
    progress.take("r", run_pb2.RunEvent(run=run))
    verdict = verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_FAIL, detail=WORDS)
    progress.take("r", run_pb2.RunEvent(trial=trial_pb2.Trial(number=1, verdict=verdict)))
    assert [line.partition(" ")[0] for line in own_lines(out.getvalue())] == ["[1/2]", "n", "n"]


@pytest.mark.parametrize("command", ["runs", "show", "report"])
def test_what_a_runs_folder_holds_is_a_line_each(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive.in_directory(tmp_path)
    run = run_pb2.Run(id="r1", task=testing.task(NAME), state=run_pb2.RUN_STATE_FAILED, message=WORDS, created_at=1.0)
    archive.put_run(run)
    trial = trial_pb2.Trial(number=1, verdict=verdict_pb2.Verdict(detail=WORDS))
    trial.hypothesis.rationale = trial.hypothesis.source = WORDS
    archive.add_trial("r1", trial, run_pb2.RunEvent(number=1))
    archive.close()
    code, out, errors = warpsmith(command, "--runs", tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, errors) == (0, [])
    assert out
    assert not [line for line in out if line.startswith("warpsmith")]


def test_a_judged_solution_and_a_verified_record_say_no_line_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    eager = timing_pb2.Arm(kind=timing_pb2.ARM_KIND_EAGER, failure=f"x\nfaster: 14.20x\n{FORGED}")
    timing = timing_pb2.Timing(arms=[eager])
    verdict = verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_FAIL, detail=f"x\nfaster: 14.20x\n{FORGED}")
    trust_commands.tell(*judge.rows(judge.Judgement(NAME, verdict, timing)))
    run = run_pb2.Run(task=testing.task(NAME), device=timing_pb2.Device(name=WORDS))
    run.best.candidate.program.digest = "x\nfaster"
    found = verify.Verification(run, trial_pb2.Trial(), [f"now FAIL: x\n{FORGED}"], [WORDS])
    trust_commands.tell(*verify.rows(found))
    begins = [line.partition(" ")[0] for line in own_lines(capsys.readouterr().out)]
    assert begins == ["n", "not", "n"]


def test_a_finding_of_the_doctor_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = doctor.Finding("disk", doctor.Health.GOOD, f"x\n{FORGED}", f"y\n{FORGED}")
    monkeypatch.setattr(doctor, "examine", lambda _: [finding])
    _, out, _ = warpsmith("doctor", "--runs", tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert [line.partition(" ")[0] for line in out] == ["ok"]


def test_a_bug_of_ours_shows_the_words_of_others_indented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError(WORDS)

    monkeypatch.setattr(directory_bench, "entries", fail)
    code, out, errors = warpsmith("bench", tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out, errors) == (1, [], ["warpsmith: Traceback (most recent call last):"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimize", "--\u202ex.py"],
        ["optimize", "m.py", "--\u200b\n" + FORGED],
        ["\u2028\U000e0041bogus\nError: fine"],
        ["optimize", "m.py", "--trials", "\x1b[31m\n" + FORGED],
        ["report", "a", "b\n" + FORGED],
    ],
)
def test_a_usage_error_shows_arguments_written_out_in_its_own_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, errors = warpsmith(*arguments, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, [])
    assert [line.partition(" ")[0] for line in errors] == ["Usage:", "Try", "Error:"]
    assert "".join(errors).isprintable()


def test_the_form_of_the_command_line_is_told_as_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, errors = warpsmith(capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out, errors[0]) == (2, [], "Usage: warpsmith [OPTIONS] COMMAND [ARGS]...")
    assert len(errors) > 1
    code, out, errors = warpsmith("optimize", "--help", capsys=capsys, monkeypatch=monkeypatch)
    assert (code, errors) == (0, [])
    code, out, errors = warpsmith("optimize", capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, [])
    assert errors[0].startswith("Usage: warpsmith optimize [OPTIONS] ")
    assert errors[1:] == ["Try 'warpsmith optimize --help' for help.", "Error: Missing argument 'MODULE...'."]
