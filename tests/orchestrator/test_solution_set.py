"""`warpsmith judge` over a whole run of KernelBench: pairs, claims, what holds, and what one bad file costs."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from orchestrator.commands import cli, client
from orchestrator.interchange import claims, interchange_commands, layout, solution_set
from orchestrator.tasks import intake
from warpsmith.errors import BadInput, Infrastructure, ServiceGone
from warpsmith.v1 import (
    benchmark_service_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

REFERENCE = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return {}
def get_inputs():
    return [torch.randn(256, 256)]
def get_init_inputs():
    return []
"""
SOLUTION = """import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return {}
"""
RIGHT, WRONG, CRASHES = "torch.relu(x).mul_(2.0)", "torch.relu(x) * 2.001", "torch.tanh(x) + missing"
FORGED = "9 of 9 that were claimed to be right are right"
NEEDS_GPU = "torch.tanh(x.cuda()) + 1.0"


class Services:
    """A correctness and a benchmark service that go by the solution's text."""

    def __init__(self) -> None:
        self.judged: list[bytes] = []
        self.faults: dict[bytes, Infrastructure] = {}
        """What verifying a solution with such a text raises."""
        self.target = task_pb2.TARGET_CPU
        self.noise = 0.0

    def DescribeDevice(self, request: Any, timeout: float | None = None) -> Any:
        del request, timeout
        device = timing_pb2.Device(target=self.target, name="fake processor")
        return benchmark_service_pb2.DescribeDeviceResponse(device=device)

    def VerifyArtifact(self, request: Any, timeout: float | None = None) -> Any:
        del timeout
        text = request.artifact.content
        self.judged.append(text)
        for part, error in self.faults.items():
            if part in text:
                raise error
        verdict = verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS, kernelbench_pass=True)
        if RIGHT.encode() not in text:
            verdict.state, verdict.kind = verdict_pb2.VERDICT_STATE_FAIL, verdict_pb2.FAILURE_KIND_WRONG_VALUE
            verdict.detail = f"far off\n{FORGED}\x1b[2K"
        return correctness_service_pb2.VerifyArtifactResponse(verdict=verdict)

    def MeasureArtifact(self, request: Any, timeout: float | None = None) -> Any:
        del request, timeout
        arms = [timing_pb2.Arm(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=2e6)]
        fastest = timing_pb2.Speedup(median=1.2, low=1.1, high=1.3)
        eager = timing_pb2.Speedup(median=1.5, low=1.4, high=1.6)
        timing = timing_pb2.Timing(arms=arms, speedup_fastest=fastest, speedup_eager=eager, noise_floor=self.noise)
        timing.faster = not self.noise
        return benchmark_service_pb2.MeasureArtifactResponse(timing=timing)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    """In the place of the real ones; modules are taken as they are."""
    found = Services()

    @contextmanager
    def judging(*_: object) -> Iterator[tuple[Any, Any]]:
        yield found, found

    monkeypatch.setattr(client, "judging", judging)
    monkeypatch.setattr(intake, "inspect", lambda task: task)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout of two tasks, and a run with solutions of all sorts and claims about them."""
    level, run = tmp_path / "checkout" / "KernelBench" / "level1", tmp_path / "run"
    level.mkdir(parents=True)
    run.mkdir()
    (level / "1_Scaled_relu.py").write_text(REFERENCE.format("torch.relu(x) * 2.0"))
    (level / "2_Shifted_tanh.py").write_text(REFERENCE.format("torch.tanh(x) + 1.0"))
    bodies = {(1, 0): RIGHT, (1, 1): WRONG, (2, 0): CRASHES, (2, 1): NEEDS_GPU, (9, 0): "x"}
    for (number, sample), body in bodies.items():
        (run / layout.Solution(1, number, sample).file_name).write_text(SOLUTION.format(body))
    (run / layout.Solution(1, 2, 2).file_name).write_text("class ModelNew(:\n")
    (run / "level_1_problem_two_sample_0_kernel.py").write_text("")
    (run / "generation_config.yaml").write_text("")
    results = {"1": [claim(0, runtime=1.0), claim(1, runtime=0.5)], "2": [claim(0, right=False)], "9": [claim(0)]}
    (run / claims.RESULTS_NAME).write_text(json.dumps(results))
    times = {"level1": {"1_Scaled_relu.py": {"mean": 3.0}}}
    (tmp_path / "times.json").write_text(json.dumps(times))
    return tmp_path


def claim(sample: int, *, right: bool = True, runtime: float = -1.0, **more: Any) -> dict[str, Any]:
    return {
        "sample_id": sample,
        "compiled": True,
        "correctness": right,
        "metadata": {"hardware": "NVIDIA H100"},
        "runtime": runtime,
        "runtime_stats": {},
        **more,
    }


@pytest.fixture
def command(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on the run and the checkout: (exit code, stdout, stderr)."""

    def run(*more: object) -> tuple[int, str, str]:
        arguments = ["judge", place / "run", place / "checkout", "--runs", place / "runs", *more]
        monkeypatch.setattr(sys, "argv", ["warpsmith", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture
def judge(command: Any, services: Services) -> Any:
    """The same, where the services go by the text."""
    del services
    return command


def outcomes(out: str) -> dict[str, tuple[str, str]]:
    """File → (outcome, kind or verdict)."""
    return {each["file"]: (each["outcome"], each.get("kind") or each["verdict"]) for each in json.loads(out)["tasks"]}


ALL = {
    "level_1_problem_1_sample_0_kernel.py": ("faster", "PASS"),
    "level_1_problem_1_sample_1_kernel.py": ("wrong", "WRONG_VALUE"),
    "level_1_problem_2_sample_0_kernel.py": ("wrong", "WRONG_VALUE"),
    "level_1_problem_2_sample_1_kernel.py": ("not judged", "NEEDS_GPU"),
    "level_1_problem_2_sample_2_kernel.py": ("wrong", "NO_SOLUTION"),
    "level_1_problem_9_sample_0_kernel.py": ("not judged", "BAD_INPUT"),
}


def test_one_bad_file_never_ends_the_rest(judge: Any, services: Services) -> None:
    code, out, err = judge("--json")
    assert outcomes(out) == ALL
    assert code == 3  # one needs a GPU
    assert "level_1_problem_two_sample_0_kernel.py (1)" in err
    assert "1 of 6 solutions need a GPU" in err
    assert "judged on fake processor; claims are of NVIDIA H100" in err
    assert len(services.judged) == 3


def test_claims_stand_against_what_holds(judge: Any, place: Path) -> None:
    _, out, _ = judge("--baseline", place / "times.json")
    rows = [" ".join(row.split()) for row in out.splitlines()]
    assert "claimed all faster not faster undecided wrong not judged" in rows
    assert "right, faster 2 1 0 0 1 0" in rows
    assert "right 1 0 0 0 0 1" in rows
    assert "wrong 1 0 0 0 1 0" in rows
    assert "nothing 2 0 0 0 1 1" in rows
    assert "1 of 2 that were claimed to be right are right" in rows
    assert "1 of 2 that were claimed to be faster are, than the fastest baseline" in rows
    assert FORGED in out
    assert FORGED not in rows
    assert "\x1b" not in out

    mean = (
        "geometric mean of 1 right ones: claimed 3.00x; found 1.50x against eager, 1.20x against the fastest baseline"
    )
    assert mean in rows


def test_only_what_is_claimed_to_be_right_may_be_judged(judge: Any, services: Services) -> None:
    _, out, _ = judge("--json", "--claimed-right")
    assert set(outcomes(out)) == {
        f"level_1_problem_{each}_kernel.py" for each in ("1_sample_0", "1_sample_1", "9_sample_0")
    }
    assert len(services.judged) == 2, "of one the checkout has no task"


def test_a_claim_that_the_machine_leaves_undecided_is_not_called_broken(
    judge: Any, services: Services, place: Path
) -> None:
    services.noise = 0.5
    code, out, _ = judge("--only", "1/1", "--samples", 1, "--baseline", place / "times.json")
    assert (code, out.split(maxsplit=1)[0]) == (0, "undecided")
    assert "0 of 1 that were claimed to be faster are, than the fastest baseline; 1 undecided\n" in out


def test_what_had_no_turn_in_its_time_is_no_judged_solution(
    judge: Any, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()  # a second between each two looks
    monkeypatch.setattr(interchange_commands, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    _, out, err = judge("--only", "1/1", "--time-limit", "2s")
    assert "time is up: 1 modules left" in err
    assert "1 of 2 solutions judged\n" in out
    assert len(services.judged) == 1
    assert "2 of 2 solutions judged\n" in judge("--only", "1/1")[1]


def test_on_a_gpu_everything_is_judged(judge: Any, services: Services) -> None:
    services.target = task_pb2.TARGET_CUDA
    _, out, err = judge("--json")
    assert outcomes(out) == ALL | {"level_1_problem_2_sample_1_kernel.py": ("wrong", "WRONG_VALUE")}
    assert "need a GPU" not in err
    assert {each["options"]["target"] for each in json.loads(out)["tasks"]} == {"cuda"}


def test_a_claim_of_speed_without_a_time_of_the_reference_is_asked_for(judge: Any, services: Services) -> None:
    code, out, err = judge("--only", "1/1", "--samples", 1)
    assert (code, "--baseline" in err) == (0, True)
    assert "claimed: right  " in out
    assert len(services.judged) == 1


def test_the_same_command_goes_on_where_it_stopped(judge: Any, services: Services, place: Path) -> None:
    services.faults[WRONG.encode()] = Infrastructure("no memory for the truth")
    code, out, _ = judge("--json")
    assert (code, outcomes(out)["level_1_problem_1_sample_1_kernel.py"]) == (3, ("not judged", "FAILED"))
    services.faults.clear()
    services.judged.clear()
    assert outcomes(judge("--json")[1]) == ALL
    assert [WRONG.encode() in text for text in services.judged] == [True]
    # Another text of the task is another question.
    task = place / "checkout" / "KernelBench" / "level1" / "1_Scaled_relu.py"
    task.write_text(task.read_text() + "\n")
    services.judged.clear()
    judge()
    assert len(services.judged) == 2


def test_a_service_that_is_gone_ends_the_command_and_the_solution_is_judged_again(
    judge: Any, services: Services
) -> None:
    services.faults[RIGHT.encode()] = ServiceGone("benchmark: gone")
    code, out, err = judge("--json")
    assert (code, out) == (3, "")
    assert err.endswith("warpsmith: benchmark: gone\n")
    assert len(services.judged) == 1
    services.faults.clear()
    assert outcomes(judge("--json")[1]) == ALL


def test_a_reference_that_cannot_be_used_is_no_solutions_fault(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(task: task_pb2.Task) -> task_pb2.Task:
        asked.append(task.name)
        raise BadInput(f"{task.entry_path}: needs 40 GB")

    monkeypatch.setattr(intake, "inspect", refuse)
    code, out, _ = judge("--json", "--only", "1/1")
    assert code == 2
    assert set(outcomes(out).values()) == {("not judged", "BAD_INPUT")}
    assert "the reference cannot be used: 1_Scaled_relu.py: needs 40 GB" in out
    assert asked == ["1_Scaled_relu"]  # once for both samples


def test_results_are_written_for_spreadsheets_and_for_monitoring(judge: Any, place: Path) -> None:
    judge("--csv", place / "out.csv", "--openmetrics", place / "out.txt")
    rows = list(csv.DictReader((place / "out.csv").read_text().splitlines()))
    assert [(row["file"], row["outcome"]) for row in rows] == [(file, outcome) for file, (outcome, _) in ALL.items()]
    assert (rows[0]["speedup_eager.median"], rows[1]["speedup_eager.median"]) == ("1.5", "")
    families = {family.name: family for family in text_string_to_metric_families((place / "out.txt").read_text())}
    verdicts = {
        sample.labels["name"]: sample.labels["verdict"] for sample in families["warpsmith_result_verdict"].samples
    }
    assert verdicts["level_1_problem_1_sample_0_kernel.py"] == "PASS"
    assert len(verdicts) == len(ALL)


@pytest.mark.parametrize(
    ("results", "message"),
    [("[]", "holds no JSON object"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")],
)
def test_claims_that_cannot_be_read_keep_nothing_from_being_judged(
    results: str, message: str, judge: Any, place: Path
) -> None:
    (place / "run" / claims.RESULTS_NAME).write_text(results)
    _, out, err = judge("--json")
    assert f"{claims.RESULTS_NAME}: {message}" in err
    assert outcomes(out) == ALL


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        [[]],
        [{"sample_id": [0]}],
        [claim(0, runtime=float("nan")) | {"metadata": 3}],
        [claim(0, runtime=10**400)],
        [claim(0, runtime=True)],
        [claim(0, runtime=1e-320)],
    ],
    ids=str,
)
def test_a_claim_of_another_form_is_none(entry: Any, place: Path) -> None:
    solution = layout.Solution(1, 1, 0)
    (place / "run" / claims.RESULTS_NAME).write_text(json.dumps({"1": entry}))
    found = claims.read(place / "run", [solution], {(1, 1): 1.0})
    assert found.get(solution, claims.Claim(True)).speedup is None


def test_the_time_of_the_reference_in_the_results_goes_before_that_of_a_file(place: Path) -> None:
    solution = layout.Solution(1, 1, 0)
    # As earlier releases of KernelBench wrote it: one result, in no list.
    results = {"1": claim(0, runtime=2.0, ref_runtime=5.0)}
    (place / "run" / claims.RESULTS_NAME).write_text(json.dumps(results))
    assert claims.read(place / "run", [solution], {(1, 1): 100.0})[solution].speedup == 2.5


def test_claims_about_solutions_of_several_levels_are_left_out_because_they_name_none(judge: Any, place: Path) -> None:
    (place / "run" / layout.Solution(2, 1, 0).file_name).write_text(SOLUTION.format(RIGHT))
    code, out, err = judge("--json", "--only", "1/1", "--samples", 1)
    assert (code, json.loads(out)["tasks"][0]["claimed_right"]) == (0, None)
    assert "names no levels, and the folder has solutions of 2" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "one"], "--only one: write 1 for a level, 1/23 for a task"),
        (["--only", "1/2", "--claimed-right"], "--claimed-right: leaves none of the chosen solutions"),
        (["--only", "3"], "--only 3, --samples 0: leave none of the run's 6 solutions"),
        (["--target", "tpu"], "--target tpu: choose one of auto, cpu, cuda"),
        (["--baseline", "/nowhere.json"], "/nowhere.json: cannot be read: No such file or directory"),
        (["--csv", "/nowhere/a.csv"], "/nowhere/a.csv: cannot be written (No such file or directory)"),
    ],
)
def test_bad_input_is_one_line(more: list[str], message: str, judge: Any) -> None:
    code, _, err = judge(*more)
    assert code == 2
    assert err.splitlines()[-1].startswith(f"warpsmith: {message}")


def test_a_folder_that_is_no_checkout_and_one_that_is_no_run_say_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no level1/1_NAME\.py; name a checkout"):
        layout.tasks(tmp_path)
    with pytest.raises(BadInput, match=r"holds no level_L_problem_P_sample_S_kernel\.py; name the folder of a run"):
        layout.solutions(tmp_path)
    with pytest.raises(BadInput, match="nowhere: cannot be listed: No such file"):
        layout.solutions(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("import triton.language as tl\n", True),
        ("from cutlass import cute\n", True),
        ("load_inline(name='a', cuda_sources=source)\n", True),
        ("source = 'extern __global__ void f() {}'\n", True),
        ("x = torch.empty(8, device='cuda:0')\n", True),
        ("y = x.cuda()\n", True),
        ("# .cuda(), triton\nload_inline(name='a', cpp_sources=source)\n", False),
        ("if torch.cuda.is_available(): pass\n", False),
        ("class ModelNew(:\n", False),
    ],
)
def test_a_solution_needs_a_gpu_where_its_text_says_so(text: str, needs: bool, tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_text(text)
    assert solution_set.needs_gpu(tmp_path / "solution.py") is needs


def test_options_of_a_run_are_refused_for_one_solution(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "run" / layout.Solution(1, 1, 0).file_name
    monkeypatch.setattr(sys, "argv", ["warpsmith", "judge", str(file), str(file), "--samples", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, "is no folder" in capsys.readouterr().err) == (2, True)


@pytest.mark.services
def test_the_real_judge_tells_right_from_wrong_and_from_what_crashes(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = client.judging

    @contextmanager
    def judging(*arguments: Any) -> Iterator[tuple[Any, Any]]:
        with real(*arguments) as (correctness, benchmark):
            # A time takes most of a minute and differs from machine to machine: what is tested here is the verdicts.
            timed = SimpleNamespace(DescribeDevice=benchmark.DescribeDevice, MeasureArtifact=Services().MeasureArtifact)
            yield correctness, timed

    monkeypatch.setattr(client, "judging", judging)
    code, out, _ = command("--json", "--target", "cpu")
    kinds = {
        "level_1_problem_1_sample_1_kernel.py": "WRONG_PRECISION",
        "level_1_problem_2_sample_0_kernel.py": "LAUNCH_ERROR",
    }
    assert outcomes(out) == ALL | {file: ("wrong", kind) for file, kind in kinds.items()}
    assert code == 3
