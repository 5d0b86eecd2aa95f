"""The results file of a bench: which of its lines are final, and what cannot be read costs one line."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import testing
from orchestrator.commands import chosen, client, directory_bench, module_runs
from orchestrator.commands.terminal import tell_line
from orchestrator.tasks import intake
from warpsmith.errors import BadInput, Infrastructure, ServiceGone
from warpsmith.v1 import run_pb2

OPTIONS = {"target": "cpu", "precision": "tf32", directory_bench.BUDGET: 60.0, "plugins": []}


@pytest.fixture
def modules(tmp_path: Path) -> list[directory_bench.Entry]:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"def get_inputs(): return '{name}'\n")
    return directory_bench.entries(tmp_path)


def ended(
    path: Path, _: float, state: run_pb2.RunState.ValueType = run_pb2.RUN_STATE_NO_FASTER, **more: Any
) -> run_pb2.Run:
    return run_pb2.Run(id=path.stem, task=testing.task(path.stem), state=state, **more)


def run_again(modules: Sequence[directory_bench.Entry], results: Path, options: Mapping[str, Any]) -> list[str]:
    """Names of the modules that a bench runs, in their order."""
    called: list[str] = []

    def noting(path: Path, seconds: float) -> run_pb2.Run:
        called.append(path.stem)
        return ended(path, seconds)

    directory_bench.bench(modules, results, noting, options=options)
    return called


@pytest.mark.parametrize("name", OPTIONS)
def test_a_line_of_other_options_is_not_the_result_and_stays(
    name: str, modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    other = OPTIONS | {name: 5.0}
    assert run_again(modules, results, OPTIONS) == ["a", "b"]
    assert run_again(modules, results, other) == ["a", "b"]
    assert run_again(modules, results, OPTIONS) == run_again(modules, results, other) == []
    found = directory_bench.bench(modules, results, ended, options=OPTIONS)
    assert [result["options"] for result in found] == [OPTIONS, OPTIONS]


def test_a_line_from_before_options_were_told_is_known_by_its_source(
    modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    lines = [{"file": entry.name, "source": entry.digest, "verdict": "AT_FLOOR"} for entry in modules]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_again(modules, results, OPTIONS) == run_again(modules, results, {**OPTIONS, "prepared": False}) == []
    assert run_again(modules, results, {**OPTIONS, "prepared": True}) == ["a", "b"]
    (tmp_path / "a.py").write_text("def get_inputs(): return 'another'\n")
    assert run_again(directory_bench.entries(tmp_path), results, OPTIONS) == ["a"]


@pytest.mark.parametrize("state", [run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_CANCELLED])
def test_a_module_that_failed_or_was_stopped_is_run_again_though_it_has_a_winner(
    state: run_pb2.RunState.ValueType, modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    winner = ended(modules[0].path, 0.0)
    winner.best.timing.faster = True

    def stopped(path: Path, seconds: float) -> run_pb2.Run:
        return ended(path, seconds, state, best=winner.best)

    found = directory_bench.bench(modules[:1], results, stopped, options=OPTIONS)
    assert found[0]["verdict"] == "PASS"
    assert run_again(modules, results, OPTIONS) == ["b", "a"]


def test_a_module_that_had_less_time_than_asked_for_is_run_again_after_those_that_had_no_turn(
    modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    left = iter([20.0, 0.0])
    given: list[float] = []

    def noting(path: Path, seconds: float) -> run_pb2.Run:
        given.append(seconds)
        return ended(path, seconds)

    directory_bench.bench(modules, results, noting, options=OPTIONS, seconds_left=lambda: next(left))
    assert given == [20.0]
    assert run_again(modules, results, OPTIONS) == ["b", "a"]
    assert run_again(modules, results, OPTIONS) == []


def test_a_service_that_ends_ends_the_bench(
    modules: list[directory_bench.Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    def until_stopped(path: Path, seconds: float) -> run_pb2.Run:
        assert stopped.wait(5)
        return ended(path, seconds, run_pb2.RUN_STATE_FAILED)

    def gone() -> None:
        raise Infrastructure("the compile service ended with code -9")

    monkeypatch.setattr(directory_bench, "CHECK_SECONDS", 0.01)
    with pytest.raises(Infrastructure, match="compile service ended"):
        directory_bench.bench(modules, tmp_path / "results.jsonl", until_stopped, stop=stopped.set, check=gone)


@pytest.mark.parametrize(
    ("verdict", "left"), [("", "r1"), ("CANCELLED", "r2"), ("FAILED", ""), ("NO_FASTER", "")], ids=str
)
def test_the_run_that_a_module_was_left_at_is_found_and_the_module_is_run_again(
    modules: list[directory_bench.Entry], tmp_path: Path, verdict: str, left: str
) -> None:
    results = tmp_path / "results.jsonl"
    log = directory_bench.RunLog(results, modules, OPTIONS)
    path = modules[0].path
    assert log.left(path) == ""
    log.begun(path, "r1", 1e9)
    if verdict:
        line = json.loads(results.read_text()) | {"verdict": verdict, "message": "why", "run": "r2"}
        results.write_text(f"{json.dumps(line)}\n")
    assert log.left(path) == left
    assert log.left(modules[1].path) == ""
    assert directory_bench.RunLog(results, modules, {**OPTIONS, "precision": "fp32"}).left(path) == ""
    assert run_again(modules, results, OPTIONS) == (["b"] if verdict == "NO_FASTER" else ["b", "a"])


def test_a_run_that_was_given_less_time_is_not_gone_on_with(
    modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    log = directory_bench.RunLog(tmp_path / "results.jsonl", modules, OPTIONS)
    log.begun(modules[0].path, "r1", 5.0)
    assert log.left(modules[0].path) == ""


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([{"verdict": "PASS"}, {"verdict": "NO_FASTER"}], 0),
        ([{"verdict": "AT_FLOOR"}], 0),
        ([{"verdict": "NO_FASTER", "trials": {"passed": 2}}], 0),
        ([{"verdict": "NO_FASTER", "trials": {"passed": 0}}], 1),
        ([], 1),
        ([{"verdict": "PASS"}, {"verdict": "BAD_INPUT"}], 2),
        ([{"verdict": "BAD_INPUT"}, {"verdict": "FAILED"}], 3),
        ([{"verdict": "PASS", "state": "FAILED"}], 3),
    ],
)
def test_the_exit_code_goes_by_the_verdicts(results: list[dict[str, Any]], code: int) -> None:
    assert directory_bench.exit_code(results) == code


def test_a_file_that_cannot_be_read_costs_its_own_line_and_a_directory_nothing(
    modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    del modules
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    (tmp_path / "package.py").mkdir()
    found = directory_bench.bench(directory_bench.entries(tmp_path), tmp_path / "results.jsonl", ended)
    assert [(result["file"], result["verdict"]) for result in found] == [
        ("a.py", "NO_FASTER"),
        ("b.py", "NO_FASTER"),
        ("dangling.py", "BAD_INPUT"),
        ("loop.py", "BAD_INPUT"),
    ]
    assert found[2]["message"].startswith(f"{tmp_path / 'dangling.py'}: is a symbolic link, and links are not followed")


# ---- files of others, and lines that are none of ours ------------------------------------------------------------

LINE = {"file": "a.py", "source": "", "verdict": "NO_FASTER"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given", ["shared", "shared/r.jsonl"])
def test_results_of_another_user_are_neither_believed_nor_written(
    given: str, modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    results = tmp_path / "shared" / "r.jsonl"
    results.parent.mkdir()
    line = LINE | {"source": modules[0].digest, "verdict": "PASS", "speedup_fastest": {"median": 99.0}}
    results.write_text(json.dumps(line))
    assert run_again(modules[:1], results, {}) == []
    os.chown(tmp_path / given, 12345, 12345)
    before = results.read_bytes()
    with pytest.raises(BadInput, match=rf"{given}: belongs to user 12345; name another file with --results"):
        directory_bench.bench(modules, results, ended)
    with pytest.raises(BadInput, match="belongs to user 12345"):
        directory_bench._append(results, LINE)
    assert results.read_bytes() == before


def test_results_that_others_may_write_are_refused(modules: list[directory_bench.Entry], tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    results.touch()
    results.chmod(0o666)
    with pytest.raises(BadInput, match=r"r\.jsonl: everybody may write there"):
        directory_bench.bench(modules, results, ended)


@pytest.mark.parametrize("rights", [0o755, 0o1777])
def test_results_may_be_in_a_folder_that_others_read_and_in_one_like_tmp(
    rights: int, modules: list[directory_bench.Entry], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(rights)
    for results in (folder / "r.jsonl", folder / "new" / "r.jsonl"):
        assert run_again(modules, results, OPTIONS) == ["a", "b"]
        results.chmod(0o644)
        assert run_again(modules, results, OPTIONS) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[" * 100_000, "no JSON object"),
        ('{"a":' * 100_000, "no JSON object"),
        ("# notes", "no JSON object"),
        ([LINE], "no JSON object"),
        (7, "no JSON object"),
        *[({key: LINE[key] for key in LINE if key != name}, f"`{name}` is missing") for name in LINE],
        (LINE | {"verdict": "FAILED"}, "`message` is missing"),
        (LINE | {"verdict": "BAD_INPUT"}, "`message` is missing"),
        *[(LINE | {name: ["x"]}, f"`{name}` is no str") for name in (*LINE, "state", "message")],
        *[(LINE | {name: ["x"]}, f"`{name}` is no dict") for name in ("options", "trials")],
        *[(LINE | {"labels": labels}, "`labels` is no list") for labels in (7, None, "x")],
        (LINE | {"labels": ["x", 7]}, "`labels` holds what is no str"),
        (LINE | {"verdict": "PASS"}, "`speedup_fastest` has no number"),
        (LINE | {"verdict": "PASS", "speedup_fastest": None}, "`speedup_fastest` has no number"),
        (LINE | {"speedup_fastest": [2.0]}, "`speedup_fastest` has no number"),
        *[
            (LINE | {"speedup_fastest": {"median": median}}, "`speedup_fastest` has no number")
            for median in ("2", None, -1.0, float("nan"), float("inf"), 10**400)
        ],
    ],
)
def test_a_line_that_bench_does_not_write_is_named_with_its_number_and_its_fault(
    line: Any, fault: str, tmp_path: Path
) -> None:
    results = tmp_path / "r.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    results.write_text(f"{json.dumps(LINE)}\n\n{text}\n")
    with pytest.raises(BadInput, match=rf"r\.jsonl:3: no line of results: .*{fault}.*; name another file") as refused:
        directory_bench.read_results(results)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("name", ["cpu_examples", "h200", "level1_h200", "level2_h200", "level3_h100", "products_h200"])
def test_results_that_bench_has_written_are_read_and_told(name: str, tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "docs" / "results" / f"{name}.jsonl"
    results = tmp_path / "r.jsonl"
    results.write_bytes(kept.read_bytes())
    lines = directory_bench.read_results(results)
    assert len(lines) == len(kept.read_text().splitlines())
    assert all(map(directory_bench.text, lines))
    assert directory_bench.summary(lines).startswith(f"{len(lines)} modules")


@pytest.mark.parametrize("label", ["OUTPUT_CONSTANT", "OUTPUT_ZERO"])
def test_a_module_that_computes_nothing_counts_in_no_mean(label: str) -> None:
    trivial = LINE | {"verdict": "PASS", "labels": [label], "speedup_fastest": {"median": 100.0}}
    assert directory_bench.summary([LINE, trivial]).endswith("geometric mean of 1 against the fastest baseline 1.00x")


def test_a_file_name_that_is_not_utf8_costs_its_own_line(
    modules: list[directory_bench.Entry], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del modules
    for name in (b"odd\xff.py", b"good.py"):
        place = tmp_path / os.fsdecode(name)
        place.write_text("class Model: ...\ndef get_inputs(): return []\n")
    for name in ("a.py", "b.py"):
        (tmp_path / name).unlink()

    def read(path: Path, seconds: float) -> run_pb2.Run:
        intake.read(intake.Request(str(path)))
        return ended(path, seconds)

    found = directory_bench.bench(directory_bench.entries(tmp_path), tmp_path / "results.jsonl", read)
    assert {line["file"]: line["verdict"] for line in found} == {"good.py": "NO_FASTER", "odd\udcff.py": "BAD_INPUT"}
    assert found[1]["message"] == r"file 'odd\udcff.py': is not UTF-8; name it otherwise"
    assert directory_bench.read_results(tmp_path / "results.jsonl") == found
    for line in found:
        tell_line(directory_bench.text(line))
    assert r"odd\udcff.py" in capsys.readouterr().out


def test_a_directory_whose_name_is_too_long_is_none() -> None:
    with pytest.raises(BadInput, match="no such directory"):
        directory_bench.entries(Path("x" * 300))


# ---- several GPUs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [
        (None, 2, ["0", "1"]),
        (None, 0, ["0", "1", "2"]),
        ("2, GPU-5f", 0, ["2", "GPU-5f"]),
        ("2", 2, "--gpus 2: this command can see 1"),
        ("", 0, "can see 0"),
        ("-1", 0, "can see 0"),
        ("0,7,1", 0, ["0"]),
        ("1,1", 2, "can see 1"),
        (None, 4, "can see 3"),
    ],
)
def test_each_set_of_services_sees_one_gpu(
    named: str | None, count: int, seen: list[str] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert chosen.gpus(1, "", "auto", tmp_path) == [{}]
    if isinstance(seen, str):
        with pytest.raises(BadInput, match=seen):
            chosen.gpus(count, "", "auto", tmp_path)
    else:
        assert chosen.gpus(count, "", "cuda", tmp_path) == [{"CUDA_VISIBLE_DEVICES": name} for name in seen]


@pytest.mark.parametrize(("server", "target"), [("host:50051", "auto"), ("", "cpu")])
def test_several_gpus_are_for_services_of_the_command_itself(server: str, target: str, tmp_path: Path) -> None:
    assert chosen.gpus(1, server, target) == [{}]
    with pytest.raises(BadInput, match="--gpus is for services that the command starts"):
        chosen.gpus(2, server, target, tmp_path)


@dataclass
class Machines:
    """Two GPUs' services, and the runs that they are asked for; a module called "held" ends when it may, or must."""

    monkeypatch: pytest.MonkeyPatch
    at: list[tuple[str, str]] = field(default_factory=list)
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)
    end: run_pb2.RunState.ValueType = run_pb2.RUN_STATE_FASTER

    def runs(self) -> module_runs.ModuleRuns:
        self.monkeypatch.setattr(module_runs.intake, "read", lambda request: request.subject)
        self.monkeypatch.setattr(module_runs.intake, "inspect", lambda text: text)
        for method in ("create", "follow", "cancel"):
            self.monkeypatch.setattr(client, method, getattr(self, method))
        progress = SimpleNamespace(expect=lambda _: None, take=lambda *_: None, note=self.notes.append)
        serving = [client.Serving(name, partial(self.check, name)) for name in ("one", "other")]  # type: ignore[arg-type]
        return module_runs.ModuleRuns(serving, run_pb2.Budget(), "cuda", "auto", False, None, "", False, progress)  # type: ignore[arg-type]

    def check(self, name: str) -> None:
        if name in self.gone:
            raise Infrastructure(f"the benchmark service of {name} ended")

    def create(self, orchestrator: Any, task: Any, *_: Any, **__: Any) -> run_pb2.Run:
        self.at.append((task, orchestrator))
        return run_pb2.Run(id=task)

    def follow(self, orchestrator: str, identifier: str, _: Any, **__: Any) -> run_pb2.Run:
        if identifier != "held" or orchestrator != "one":
            return run_pb2.Run(id=identifier, state=run_pb2.RUN_STATE_FASTER)
        self.begun.set()
        assert self.may_end.wait(10)
        if self.end == run_pb2.RUN_STATE_UNSPECIFIED:
            raise ServiceGone("the connection broke")
        return run_pb2.Run(id=identifier, state=self.end)

    def cancel(self, orchestrator: str, identifier: str) -> None:
        self.cancelled.append((orchestrator, identifier))
        self.may_end.set()


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(monkeypatch)


def test_modules_go_where_the_fewest_are(machines: Machines) -> None:
    """The first module is held until the others, one after the other at the second GPU, have ended."""
    made = machines.runs()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(made.optimise, Path("held"), 1.0)
        assert machines.begun.wait(10)
        for name in ("second", "third"):
            made.optimise(Path(name), 1.0)
        made.stop()
        assert held.result().id == "held"
    assert machines.at == [("held", "one"), ("second", "other"), ("third", "other")]
    assert machines.cancelled == [("one", "held")]


@pytest.mark.parametrize("end", [run_pb2.RUN_STATE_CANCELLED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_UNSPECIFIED])
def test_what_a_gpu_was_at_whose_services_ended_goes_to_another(
    machines: Machines, end: run_pb2.RunState.ValueType
) -> None:
    """Whether its orchestrator lives and says that the run came to nothing, or is gone with its connection."""
    made, machines.end = machines.runs(), end
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(made.optimise, Path("held"), 1.0)
        assert machines.begun.wait(10)
        made.check()
        machines.gone.add("one")
        made.check()
        assert held.result().state == run_pb2.RUN_STATE_FASTER
        made.optimise(Path("next"), 1.0)
    assert machines.at == [("held", "one"), ("held", "other"), ("next", "other")]
    assert machines.notes == ["the benchmark service of one ended; its modules go to the other GPUs"]
    machines.gone.add("other")
    with pytest.raises(Infrastructure, match="of other ended"):
        made.check()


def test_a_result_that_came_before_its_services_ended_stays(machines: Machines) -> None:
    made = machines.runs()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(made.optimise, Path("held"), 1.0)
        assert machines.begun.wait(10)
        machines.gone.add("one")
        made.check()
        assert held.result().state == run_pb2.RUN_STATE_FASTER
    assert machines.at == [("held", "one")]


def test_a_fault_of_services_that_live_is_told(machines: Machines) -> None:
    made, machines.end = machines.runs(), run_pb2.RUN_STATE_UNSPECIFIED
    machines.may_end.set()
    with pytest.raises(ServiceGone):
        made.optimise(Path("held"), 1.0)
