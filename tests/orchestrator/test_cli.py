"""The command line: what bad input costs, what commands print, how a directory is benched and resumed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import importlib.metadata
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from orchestrator import commands, testing
from orchestrator.commands import budgets, chosen, cli, client, directory_bench, doctor, module_runs, progress, report
from orchestrator.tasks import intake
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.sandbox import jail
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2


def served(*_: object, check: Callable[[], None] = lambda: None) -> contextlib.nullcontext[client.Serving]:
    """In the place of services, where calls to them are replaced too."""
    return contextlib.nullcontext(client.Serving(None, check))  # type: ignore[arg-type]


EXAMPLES = Path(__file__).parents[2] / "examples"


def warpsmith(
    *arguments: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["warpsmith", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), said.out, said.err


def test_the_version_is_that_of_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = warpsmith("--version", capsys=capsys, monkeypatch=monkeypatch)
    assert said == (0, f"warpsmith {importlib.metadata.version('warpsmith')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize", "missing.py"], "missing.py: no such file"),
        (["optimize", "missing.py", "--budget", "soon"], "--budget soon: write a time such as 60s, 5m or 1h"),
        (
            ["optimize", "missing.py", "--search", "magic"],
            "no search is called 'magic'; installed: beam, evolution, exhaustive, random",
        ),
        (["optimize", "missing.py", "--plugin", "poet=x"], "a role is one of reasoner, synthesizer"),
        (["bench", "nowhere"], "nowhere: no such directory"),
        (["bench", ".", "--shard", "5/4"], "--shard 5/4"),
        (["bench", str(EXAMPLES), "--results", "."], ".: results cannot be read (Is a directory); name a file with"),
        (["runs", "--runs", "nowhere"], "nowhere: no runs are kept here"),
        (["watch", "--runs", "nowhere"], "no command is under way in nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = warpsmith(*arguments, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out) == (2, "")
    assert err.startswith("warpsmith: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_runs_show_and_report_read_what_is_kept(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(*arguments: object) -> str:
        code, out, _ = warpsmith(*arguments, "--runs", kept, capsys=capsys, monkeypatch=monkeypatch)
        assert code == 0
        return out

    assert "softmax" in say("runs")
    assert json.loads(say("runs", "--json"))["runs"][0]["verdict"] == "PASS"
    assert "author" in say("show")
    assert "// ---- kernel.cpp" in say("show", "last", "--trial", 2)
    assert "against the fastest" in say("report")
    task = json.loads(say("report", "20260101", "--json"))["tasks"][0]
    assert task["speedup_fastest"]["median"] == pytest.approx(1.92)


def test_a_trial_that_is_not_there_is_named(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = warpsmith("show", "--trial", 99, "--runs", kept, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert "has no trial 99" in err


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = warpsmith("optimize", "--help", capsys=capsys, monkeypatch=monkeypatch)
    assert code == 0
    assert "warpsmith optimize softmax.py --budget 60s" in out


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("5m", 300), ("1h", 3600), ("90", 90), ("1.5m", 90)])
def test_budgets_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert budgets.seconds(text) == seconds


def make_modules(directory: Path) -> None:
    for name in ("a", "b", "c"):
        (directory / f"{name}.py").write_text(f"def get_inputs(): return '{name}'\n")
    (directory / "readme.py").write_text("")


def ended(path: Path, _: float) -> run_pb2.Run:
    run = run_pb2.Run(id=path.stem, task=testing.task(path.stem), state=run_pb2.RUN_STATE_AT_FLOOR)
    if path.stem == "b":
        raise BadInput("b.py: forward failed")
    return run


@pytest.mark.parametrize("command", [["optimize", "a.py"], ["bench", "."]])
def test_every_search_takes_limits_of_tokens_and_of_time_on_the_device(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[run_pb2.Budget] = []
    done = run_pb2.Run(id="r", task=testing.task("a"), state=run_pb2.RUN_STATE_AT_FLOOR)

    def create(_: object, __: object, limits: run_pb2.Budget, *___: object, **____: object) -> run_pb2.Run:
        given.append(limits)
        return done

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("class Model: ...\n\ndef get_inputs(): return []\n")
    monkeypatch.setattr(client, "searching", served)
    monkeypatch.setattr(client, "create", create)
    monkeypatch.setattr(client, "latest", lambda *_: [])
    monkeypatch.setattr(client, "follow", lambda *_, **__: done)
    monkeypatch.setattr(intake, "inspect", lambda task: task)
    warpsmith(*command, "--tokens", 5000, "--device-time", "30s", capsys=capsys, monkeypatch=monkeypatch)
    (limits,) = given
    assert (limits.model_tokens, limits.device_seconds) == (5000, 30.0)


@pytest.mark.parametrize("moment", ["inspected", "created"])
def test_ctrl_c_reaches_a_module_of_a_bench_that_is_still_in_intake(
    moment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[Callable[[], None]] = []
    said: list[str] = []

    def benched(*given: Any, stop: Callable[[], None], **_: object) -> list[dict[str, Any]]:
        stops.append(stop)
        return [{"file": "a.py", **report.as_json(given[2](tmp_path / "a.py", 60.0))}]

    def inspect(task: task_pb2.Task) -> task_pb2.Task:
        if moment == "inspected":
            stops[0]()
        return task

    def create(*_: object, **__: object) -> run_pb2.Run:
        said.append("created")
        stops[0]()
        return run_pb2.Run(id="r")

    cancelled = run_pb2.Run(id="r", state=run_pb2.RUN_STATE_CANCELLED)
    (tmp_path / "a.py").write_text("class Model: ...\n\ndef get_inputs(): return []\n")
    monkeypatch.setattr(client, "searching", served)
    monkeypatch.setattr(directory_bench, "bench", benched)
    monkeypatch.setattr(intake, "inspect", inspect)
    monkeypatch.setattr(client, "create", create)
    monkeypatch.setattr(client, "cancel", lambda _, run: said.append(f"cancelled {run}"))
    monkeypatch.setattr(client, "follow", lambda *_, **__: cancelled)
    code, out, _ = warpsmith("bench", tmp_path, "--runs", tmp_path, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out.split()[0]) == (1, "CANCELLED")
    assert said == ([] if moment == "inspected" else ["created", "cancelled r"])


def test_ctrl_c_in_optimize_inspects_nothing_that_is_queued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inspected: list[str] = []
    released = threading.Event()

    def inspect(task: task_pb2.Task) -> task_pb2.Task:
        inspected.append(task.name)
        released.wait(2)
        return task

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    files = [tmp_path / f"{name}.py" for name in "abcdef"]
    for file in files:
        file.write_text("class Model: ...\n\ndef get_inputs(): return []\n")
    monkeypatch.setattr(client, "searching", interrupted)
    monkeypatch.setattr(intake, "inspect", inspect)
    code, _, _ = warpsmith("optimize", *files, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 130
    released.set()
    assert len(inspected) <= cli.INSPECTED_AT_ONCE


def test_a_bench_ends_with_the_error_of_a_service_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def create(_: object, task: task_pb2.Task, *__: object, **___: object) -> run_pb2.Run:
        begun.append(task.name)
        return run_pb2.Run(id=task.name)

    def gone() -> NoReturn:
        raise Infrastructure("the benchmark service ended with code -9")

    for name in "abc":
        (tmp_path / f"{name}.py").write_text("class Model: ...\n\ndef get_inputs(): return []\n")
    failed = run_pb2.Run(id="r", state=run_pb2.RUN_STATE_FAILED, message="benchmark: gone")
    monkeypatch.setattr(client, "searching", served)
    monkeypatch.setattr(intake, "inspect", lambda task: task)
    monkeypatch.setattr(client, "create", create)
    monkeypatch.setattr(client, "follow", lambda *_, **__: failed)
    arguments = ["bench", tmp_path, "--runs", tmp_path / "runs", "--target", "cpu"]
    code, out, _ = warpsmith(*arguments, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out.split()[0], begun) == (3, "FAILED", ["a", "b", "c"])
    begun.clear()
    monkeypatch.setattr(client, "searching", lambda *_: served(check=gone))
    code, out, err = warpsmith(*arguments, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out, begun) == (3, "", ["a"])
    assert err.endswith("warpsmith: the benchmark service ended with code -9\n")


def test_a_bench_asked_for_something_else_searches_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[run_pb2.Run] = []

    def create(_: object, task: task_pb2.Task, budget: run_pb2.Budget, *__: object, **___: object) -> run_pb2.Run:
        asked.append(run_pb2.Run(task=task, budget=budget))
        return run_pb2.Run(id="r")

    def searches(*arguments: object) -> int:
        asked.clear()
        common = ["bench", tmp_path, "--runs", tmp_path / "runs", *arguments]
        code, out, _ = warpsmith(*common, capsys=capsys, monkeypatch=monkeypatch)
        assert (code, out.split()[0]) == (0, "AT_FLOOR")
        return len(asked)

    (tmp_path / "a.py").write_text("class Model: ...\n\ndef get_inputs(): return []\n")
    at_floor = run_pb2.Run(id="r", state=run_pb2.RUN_STATE_AT_FLOOR)
    monkeypatch.setattr(client, "searching", served)
    monkeypatch.setattr(intake, "inspect", lambda task: task)
    monkeypatch.setattr(client, "create", create)
    monkeypatch.setattr(client, "follow", lambda *_, **__: at_floor)
    assert searches() == 1
    assert searches() == searches("--fresh") == 0
    others = (["--target", "cpu"], ["--precision", "tf32"], ["--budget", "5m"], ["--trials", 3], ["--search", "random"])
    for other in others:
        assert searches(*other) == 1
        assert searches(*other) == 0
    assert searches("--time-limit", "30s", "--budget", "2m") == 1
    assert 0 < asked[0].budget.wall_seconds <= 30
    assert searches("--budget", "2m") == 1
    assert searches("--time-limit", "30s", "--budget", "2m") == 0


def test_a_bench_goes_on_where_it_stopped(tmp_path: Path) -> None:
    make_modules(tmp_path)
    entries = directory_bench.entries(tmp_path)
    results = tmp_path / "results.jsonl"
    time_left = iter([10.0, 10.0, 0.0])
    first = directory_bench.bench(entries, results, ended, seconds_left=lambda: next(time_left))
    assert [result["verdict"] for result in first] == ["AT_FLOOR", "BAD_INPUT"]
    with results.open("a") as file:
        file.write('{"file": "cut sh')
        file.write("\n")
    called: list[str] = []

    def noting(path: Path, seconds: float) -> run_pb2.Run:
        called.append(path.stem)
        return ended(path, seconds)

    second = directory_bench.bench(entries, results, noting)
    assert called == ["c"]
    assert len(second) == 3
    assert directory_bench.summary(second).startswith("3 modules: 2 AT_FLOOR, 1 BAD_INPUT; geometric mean of 2")


def test_shards_share_the_modules_out(tmp_path: Path) -> None:
    make_modules(tmp_path)
    names = [[entry.name for entry in directory_bench.entries(tmp_path, (index, 2))] for index in (0, 1)]
    assert names == [["a.py", "c.py"], ["b.py"]]


def test_the_doctor_finds_this_machine_fit_to_run_tests(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in doctor.examine(tmp_path)}
    assert findings["python"].health is doctor.Health.GOOD
    assert findings["torch"].health is doctor.Health.GOOD
    assert {"compiler", "jail", "sockets", "disk", "gpu"} <= set(findings)


def test_the_doctor_names_a_remedy_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "apt-get install g++" in doctor.compiler().fix
    with monkeypatch.context() as elsewhere:
        tmp_path.chmod(0o777)
        elsewhere.setattr("tempfile.tempdir", str(tmp_path))
        elsewhere.setattr(jail, "probe", jail.probe.__wrapped__)
        assert (doctor.confinement().health, "TMPDIR" in doctor.confinement().fix) == (doctor.Health.BAD, True)
        tmp_path.chmod(0o700)
    monkeypatch.setattr(doctor, "FREE_BYTES", 1 << 62)
    assert doctor.disk(tmp_path).health is doctor.Health.LIMITED
    monkeypatch.setattr(doctor, "driver_version", lambda: (12, 4))
    found = list(doctor.gpu())
    assert found[0].detail == "driver for CUDA 12.4"
    assert "nvidia-cuda-nvrtc>=12.0,<13" in found[-1].fix


def test_declared_trust_holds_here_and_in_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "probe", lambda: ())
    monkeypatch.setattr(jail, "_input_is_trusted", False)
    assert chosen.environment([], "", "", trust_input=True) == {"WARPSMITH_TRUST_INPUT": "1"}
    assert jail.choose() is jail.Rung.NONE


def test_the_reader_starts_nothing(kept: Path) -> None:
    with client.reading("", kept) as orchestrator:
        assert orchestrator.GetRun(messages.GetRunRequest(run_id="last")).run.task.name == "softmax"


def test_the_entry_point_runs_as_a_program(tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-c",
        "from orchestrator.commands import main; main()",
        "optimize",
        str(tmp_path / "x.py"),
    ]
    finished = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    assert finished.stderr == f"warpsmith: {tmp_path / 'x.py'}: no such file\n"


def test_ctrl_c_while_libraries_load_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 130


@pytest.mark.parametrize("asked", ["--version", "--help"])
def test_an_output_without_room_is_said_in_one_line(asked: str) -> None:
    with Path("/dev/full").open("w") as full:
        program = [sys.executable, "-c", "from orchestrator.commands import main; main()", asked]
        finished = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stderr) == (
        3,
        "warpsmith: its output: cannot be written: No space left on device\n",
    )


def test_a_bench_makes_modules_ready_while_another_is_searched(tmp_path: Path) -> None:
    make_modules(tmp_path)
    entries = directory_bench.entries(tmp_path)
    both = threading.Barrier(2, timeout=5)

    def meeting(path: Path, seconds: float) -> run_pb2.Run:
        if path.stem != "c":
            both.wait()  # broken unless two are under way at once
        return ended(path, seconds)

    found = directory_bench.bench(entries, tmp_path / "results.jsonl", meeting, ahead=1)
    assert [result["name"] for result in found] == ["a", "b", "c"]


def test_ctrl_c_in_a_bench_begins_no_more_and_a_stopped_module_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_modules(tmp_path)
    entries = directory_bench.entries(tmp_path)
    results = tmp_path / "results.jsonl"
    stopped = threading.Event()
    waits = iter([KeyboardInterrupt])
    real_wait = concurrent.futures.wait

    def interrupted(*arguments: object, **options: object) -> object:
        for error in waits:
            raise error
        return real_wait(*arguments, **options)  # type: ignore[arg-type]

    def until_stopped(path: Path, seconds: float) -> run_pb2.Run:
        del seconds
        assert stopped.wait(5)
        return run_pb2.Run(id=path.stem, task=testing.task(path.stem), state=run_pb2.RUN_STATE_CANCELLED)

    monkeypatch.setattr(directory_bench, "wait", interrupted)
    found = directory_bench.bench(entries, results, until_stopped, stop=stopped.set)
    assert [result["verdict"] for result in found] == ["CANCELLED"]
    again = directory_bench.bench(entries, results, ended)
    assert [result["verdict"] for result in again] == ["AT_FLOOR", "BAD_INPUT", "AT_FLOOR"]


def test_nothing_is_made_ready_ahead_on_a_processor() -> None:
    assert directory_bench.ahead(-1, "cpu") == 0
    assert directory_bench.ahead(2, "cpu") == 2


def test_each_gpu_has_a_module_under_way_and_some_that_are_made_ready() -> None:
    assert [directory_bench.ahead(wanted, "cuda", 4) for wanted in (0, 1)] == [3, 7]


def test_the_shell_completes_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("_WARPSMITH_COMPLETE", "complete_bash"), ("COMP_WORDS", "warpsmith ex"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    code, out, _ = warpsmith(capsys=capsys, monkeypatch=monkeypatch)
    assert (code, out.split()) == (0, ["export"])


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    ("server", "runs", "said"),
    [
        ("", "runs", "resume b"),
        ("", "/tmp/{} x", "resume b --runs '/tmp/{} x'"),
        ("h:1", "runs", "watch b --server h:1"),
    ],
)
def test_a_command_that_leaves_runs_says_what_goes_on_with_them(
    leaving: type[BaseException], server: str, runs: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(_: object, identifier: str, *__: object, **___: object) -> run_pb2.Run:
        if identifier == "b":
            raise leaving
        return run_pb2.Run(id=identifier)

    monkeypatch.setattr(client, "follow", follow)
    output = io.StringIO()
    goes_on = f"{'watch' if server else 'resume'} {{}}{client.where(server, Path(runs))}"
    serving = client.Serving(None, lambda: None, goes_on)  # type: ignore[arg-type]
    shown = progress.Progress(Console(file=output, width=200))
    with pytest.raises(leaving):
        module_runs.followed(serving, [run_pb2.Run(id="a"), run_pb2.Run(id="b")], shown)
    assert output.getvalue() == f"left: `warpsmith {said}` goes on with it\n"
