"""Our runs as a run of KernelBench: which are written, in what form, and what is left out."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import cli
from orchestrator.exports.export import Exported
from orchestrator.interchange import claims, kernelbench_run, layout
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.story import Story
from warpsmith import plugins
from warpsmith.errors import BadInput, NotFound
from warpsmith.v1 import run_pb2, task_pb2, timing_pb2

MEAN_MS = 2.0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Tasks whose texts are those of the fake world's."""
    for level, name in ((1, "1_relu"), (1, "2_tanh"), (2, "1_relu_tanh")):
        folder = tmp_path / "checkout" / "KernelBench" / f"level{level}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_bytes(testing.task(name).sources[0].content)
    return tmp_path / "checkout"


def run_of(name: str, *, is_faster: bool = True, identifier: str = "r", **of_task: Any) -> run_pb2.Run:
    run = run_pb2.Run(id=identifier, task=testing.task(name), device=timing_pb2.Device(name="AMD EPYC"))
    for field, value in of_task.items():
        setattr(run.task, field, value)
    kinds = {timing_pb2.ARM_KIND_EAGER: 4.0, timing_pb2.ARM_KIND_COMPILE: 3.0}
    if is_faster:
        kinds[timing_pb2.ARM_KIND_CANDIDATE] = MEAN_MS
    arms = [
        timing_pb2.Arm(kind=kind, median_ns=mean * 1e6, samples_ns=[(mean - 1) * 1e6, (mean + 1) * 1e6])
        for kind, mean in kinds.items()
    ]
    if is_faster:
        run.best.timing.arms.extend(arms)
        run.best.timing.faster = True
        run.best.verdict.state, run.best.verdict.kernelbench_pass = 1, True
    else:
        run.reference.arms.extend(arms)
    return run


def exported(run_id: str, flavour: str) -> str:
    return f"# {flavour} of {run_id}\n"


def written(
    runs: Sequence[run_pb2.Run], checkout: Path, export: Callable[[str, str], str] = exported
) -> tuple[dict[str, Any], kernelbench_run.Written]:
    """File → its JSON, or text; and all that was made."""
    tasks = layout.tasks(checkout)
    machine, of_tasks = kernelbench_run.latest(runs, tasks)
    made = kernelbench_run.written(of_tasks, machine, tasks, "ours", export)
    texts = {str(file): text for file, text in made.files.items()}
    return {file: json.loads(text) if file.endswith(".json") else text for file, text in texts.items()}, made


def test_a_winner_is_a_solution_with_a_result_and_every_reference_has_times(checkout: Path) -> None:
    files, _ = written([run_of("2_tanh", is_faster=False), run_of("1_relu"), run_of("1_relu_tanh")], checkout)
    times = "results/timing/AMD_EPYC_CPU"
    assert list(files) == [
        "runs/ours_level1/level_1_problem_1_sample_0_kernel.py",
        "runs/ours_level1/eval_results.json",
        "runs/ours_level2/level_2_problem_1_sample_0_kernel.py",
        "runs/ours_level2/eval_results.json",
        f"{times}/baseline_time_torch.json",
        f"{times}/baseline_time_torch_compile_inductor_default.json",
    ]
    result = files["runs/ours_level1/eval_results.json"]["1"][0]
    stats = {"mean": MEAN_MS, "std": 1.0, "min": 1.0, "max": 3.0, "num_trials": 2}
    where = {"hardware": "AMD EPYC (CPU)", "device": "cpu"}
    assert {name: result[name] for name in ("sample_id", "compiled", "correctness", "runtime", "runtime_stats")} == {
        "sample_id": 0,
        "compiled": True,
        "correctness": True,
        "runtime": MEAN_MS,
        "runtime_stats": stats | where,
    }
    assert result["metadata"].items() >= (where | {"run": "r", "flavour": "module", "precision": "fp32"}).items()
    eager = files[f"{times}/baseline_time_torch.json"]
    assert {level: list(of) for level, of in eager.items()} == {
        "level1": ["1_relu.py", "2_tanh.py"],
        "level2": ["1_relu_tanh.py"],
    }
    assert eager["level1"]["2_tanh.py"]["mean"] == 4.0


def test_what_is_written_is_read_as_a_claim(checkout: Path, tmp_path: Path) -> None:
    _, made = written([run_of("1_relu")], checkout)
    kernelbench_run.write(tmp_path / "out", made)
    folder = tmp_path / "out" / "runs" / "ours_level1"
    solutions, others = layout.solutions(folder)
    file = tmp_path / "out" / "results" / "timing" / "AMD_EPYC_CPU" / "baseline_time_torch.json"
    baselines = claims.baseline_times(file, layout.tasks(checkout))
    read = claims.read(folder, solutions, baselines)
    assert (read, others) == ({layout.Solution(1, 1, 0): claims.Claim(True, 2.0, "AMD EPYC (CPU)")}, [])


@pytest.mark.skipif(not os.environ.get("KERNELBENCH"), reason="KERNELBENCH names no checkout")
def test_kernelbenchs_own_analysis_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(os.environ["KERNELBENCH"])
    runs = [run_of("1_relu", is_faster=name != "21_Sigmoid") for name in ("19_ReLU", "20_LeakyReLU", "21_Sigmoid")]
    for run, name in zip(runs, ("19_ReLU", "20_LeakyReLU", "21_Sigmoid"), strict=True):
        run.task.entry_path = run.task.sources[0].path = f"{name}.py"
        run.task.sources[0].content = (root / "KernelBench" / "level1" / f"{name}.py").read_bytes()
    _, made = written(runs, root)
    kernelbench_run.write(tmp_path, made)
    for name in ("pydra", "tabulate", "datasets"):  # of its command line and of its download, which this does not need
        stub: Any = ModuleType(name)
        stub.Config, stub.REQUIRED, stub.main = SimpleNamespace, None, lambda **_: lambda called: called
        stub.tabulate = stub.load_dataset = stub.Dataset = lambda *_, **__: ""
        monkeypatch.setitem(sys.modules, name, stub)
    package = ModuleType("kernelbench")  # without its own beginning, which changes torch
    package.__path__ = [str(root / "src" / "kernelbench")]
    monkeypatch.setitem(sys.modules, "kernelbench", package)
    script = runpy.run_path(str(root / "scripts" / "benchmark_eval_analysis.py"))
    times = tmp_path / "results" / "timing" / "AMD_EPYC_CPU" / "baseline_time_torch.json"
    places = {"baseline_file": str(times), "eval_results_dir": str(tmp_path / "runs")}
    found = script["analyze_greedy_eval"]("ours_level1", "AMD_EPYC_CPU", "baseline_time_torch", 1, **places)
    assert (found["total_eval"], found["correct_count"], found["geo_mean_speedup"]) == (2, 2, pytest.approx(2.0))
    assert found["fast_p"] == {"0.0": 2 / 3, "0.5": 2 / 3, "0.8": 2 / 3, "1.0": 2 / 3, "1.5": 2 / 3, "2.0": 0.0}


def test_what_misses_kernelbenchs_tolerance_is_not_called_right(checkout: Path) -> None:
    run = run_of("1_relu")
    run.best.verdict.kernelbench_pass = False
    assert not written([run], checkout)[0]["runs/ours_level1/eval_results.json"]["1"][0]["correctness"]


def test_a_gpus_winner_has_the_harness_flavour_and_one_that_has_none_is_named(checkout: Path) -> None:
    def export(run_id: str, flavour: str) -> str:
        if run_id == "refused":
            raise BadInput("its checker would refuse this file")
        return exported(run_id, flavour)

    cuda = {"target": task_pb2.TARGET_CUDA}
    files, made = written([run_of("1_relu", **cuda), run_of("2_tanh", identifier="refused", **cuda)], checkout, export)
    assert files["runs/ours_level1/level_1_problem_1_sample_0_kernel.py"] == "# kernelbench of r\n"
    assert list(files["runs/ours_level1/eval_results.json"]) == ["1"]
    assert made.left_out == ["level 1, task 2: its checker would refuse this file"]
    eager = files["results/timing/AMD_EPYC/baseline_time_torch.json"]["level1"]
    assert {each["device"] for each in eager.values()} == {"cuda:0"}


NEWEST_FIRST = (("2_tanh", "newest"), ("1_relu", "taken"), ("1_relu", "older"))


@pytest.mark.parametrize(
    "other",
    [
        run_of("1_relu", identifier="prepared", prepared=True),
        run_of("1_relu", identifier="another precision", precision=task_pb2.PRECISION_BF16),
        run_of("1_relu", identifier="another target", target=task_pb2.TARGET_CUDA),
        run_pb2.Run(id="nothing timed", task=testing.task("1_relu")),
    ],
    ids=lambda run: run.id,
)
def test_of_each_task_the_newest_run_that_is_like_the_newest_of_all_is_taken(
    other: run_pb2.Run, checkout: Path
) -> None:
    newest, *rest = [run_of(name, identifier=identifier) for name, identifier in NEWEST_FIRST]
    _, of_tasks = kernelbench_run.latest([newest, other, *rest], layout.tasks(checkout))
    assert {key: run.id for key, run in of_tasks.items()} == {(1, 1): "taken", (1, 2): "newest"}


def test_a_task_that_was_changed_is_another_task(checkout: Path) -> None:
    (checkout / "KernelBench" / "level1" / "1_relu.py").write_text("class Model: pass\n")
    with pytest.raises(NotFound, match="no run that is kept is of a task of this checkout"):
        kernelbench_run.latest([run_of("1_relu")], layout.tasks(checkout))


def test_where_only_medians_were_kept_they_stand_for_no_trials(checkout: Path) -> None:
    run = run_of("1_relu", is_faster=False)
    for arm in run.reference.arms:
        del arm.samples_ns[:]
    files, _ = written([run], checkout)
    found = files["results/timing/AMD_EPYC_CPU/baseline_time_torch.json"]["level1"]["1_relu.py"]
    assert (found["mean"], found["num_trials"]) == (4.0, 0)


def test_nothing_is_written_over(checkout: Path, tmp_path: Path) -> None:
    _, made = written([run_of("1_relu")], checkout)
    there = tmp_path / "out" / "results" / "timing" / "AMD_EPYC_CPU" / "baseline_time_torch.json"
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    with pytest.raises(BadInput, match="is there already; name another folder"):
        kernelbench_run.write(tmp_path / "out", made)
    assert (there.read_text(), (tmp_path / "out" / "runs").exists()) == ("mine", False)


def test_the_command_writes_what_the_archive_has(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, agents = Archive.in_directory(tmp_path / "runs"), testing.World().agents()
    run = run_pb2.Run(id="20260101-000000-abc", task=testing.task("1_relu"), created_at=1.0)
    archive.put_run(run)
    SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), Story(archive, run)).execute()
    archive.close()
    # What the fake world makes is no program that an exporter could write.
    exporter = SimpleNamespace(export=lambda run: Exported("a.py", f"class ModelNew: ...  # {run.id}\n"))
    monkeypatch.setattr(plugins, "load", lambda role, name: {("exporter", "module"): exporter}[role, name])
    arguments = ["kernelbench", checkout, tmp_path / "out", "--runs", tmp_path / "runs", "--name", "mine"]
    monkeypatch.setattr(sys, "argv", ["warpsmith", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert said.out.endswith("1 of 1 tasks have a faster kernel\n")
    assert "fake processor (CPU): they compare with none of a GPU" in said.err
    folder = tmp_path / "out" / "runs" / "mine_level1"
    assert (folder / layout.Solution(1, 1, 0).file_name).read_text() == f"class ModelNew: ...  # {run.id}\n"
    assert json.loads((folder / claims.RESULTS_NAME).read_text())["1"][0]["metadata"]["run"] == run.id
