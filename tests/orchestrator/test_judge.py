"""`warpsmith judge`: what is read of a solution, how it ends, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator import testing
from orchestrator.commands import cli, client
from orchestrator.trust import judge
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

REFERENCE = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.rand(8)]
"""
SOLUTION = """import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        {body}
"""


class Services:
    """A correctness and a benchmark service that answer what they are told."""

    def __init__(self, verdict: verdict_pb2.Verdict, outcome: benchmark_service_pb2.MeasureArtifactResponse) -> None:
        self.verdict, self.outcome = verdict, outcome
        self.artifacts: list[artifact_pb2.Artifact] = []

    def VerifyArtifact(self, request: Any, timeout: float | None = None) -> Any:
        del timeout
        assert request.artifact.program_digest == request.program.digest
        assert not request.program.steps
        self.artifacts.append(request.artifact)
        return correctness_service_pb2.VerifyArtifactResponse(verdict=self.verdict)

    def MeasureArtifact(self, request: Any, timeout: float | None = None) -> Any:
        del timeout
        self.artifacts.append(request.artifact)
        return self.outcome

    def DescribeDevice(self, request: Any, timeout: float | None = None) -> Any:
        del request, timeout
        return benchmark_service_pb2.DescribeDeviceResponse(device=timing_pb2.Device(target=task_pb2.TARGET_CPU))


def passing(*flags: timing_pb2.Flag.ValueType) -> Services:
    speedup = timing_pb2.Speedup(median=1.5, low=1.4, high=1.6)
    ours, eager = timing_pb2.ARM_KIND_CANDIDATE, timing_pb2.ARM_KIND_EAGER
    arms = [timing_pb2.Arm(kind=ours, median_ns=1e3), timing_pb2.Arm(kind=eager, median_ns=1500.0)]
    timing = timing_pb2.Timing(
        arms=arms, fastest_arm=eager, speedup_fastest=speedup, speedup_eager=speedup, faster=True, raised=flags
    )
    return Services(
        verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS, detail="13 comparisons", kernelbench_pass=True),
        benchmark_service_pb2.MeasureArtifactResponse(timing=timing),
    )


def failing(kind: verdict_pb2.FailureKind.ValueType) -> Services:
    verdict = verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_FAIL, kind=kind, detail="it is wrong")
    return Services(verdict, benchmark_service_pb2.MeasureArtifactResponse())


def solution(tmp_path: Path, body: str = "return torch.relu(x)") -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SOLUTION.format(body=body))
    return file


def judged(services: Any, file: Path) -> judge.Judgement:
    return judge.judge(services, services, testing.task("relu"), file)


def test_a_solution_is_an_artifact_that_is_its_text(tmp_path: Path) -> None:
    services = passing()
    found = judged(services, solution(tmp_path))
    assert (found.exit_code, judge.as_json(found)["speedup_fastest"]["median"]) == (0, 1.5)
    assert {each.format for each in services.artifacts} == {artifact_pb2.BINARY_FORMAT_PYTHON_MODULE}
    assert b"ModelNew" in services.artifacts[0].content
    assert "faster: 1.50x [1.40, 1.60] against eager" in "\n".join(judge.rows(found))


def test_a_failure_has_its_kind_and_exit_code_1(tmp_path: Path) -> None:
    found = judged(failing(verdict_pb2.FAILURE_KIND_CHEAT), solution(tmp_path))
    told = judge.as_json(found)
    assert (found.exit_code, told["verdict"], told["kind"]) == (1, "FAIL", "CHEAT")
    assert told["speedup_fastest"] is None


def test_a_fault_while_it_is_timed_is_a_failure(tmp_path: Path) -> None:
    services = passing()
    fault = benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_CHEAT, detail="it remembers")
    services.outcome = benchmark_service_pb2.MeasureArtifactResponse(fault=fault)
    found = judged(services, solution(tmp_path))
    assert (found.exit_code, found.verdict.detail) == (1, "while timed: it remembers")


def test_a_time_that_no_machine_can_reach_is_suspect(tmp_path: Path) -> None:
    found = judged(passing(timing_pb2.FLAG_FLOOR_REJECT), solution(tmp_path))
    assert (found.exit_code, judge.kind_of(found.verdict)) == (1, "SUSPECT")


@pytest.mark.parametrize(("steady_after", "labels"), [(1, []), (9, [judge.UNDECIDED])])
def test_what_an_unsteady_machine_leaves_undecided_is_measured_again_and_then_said(
    steady_after: int, labels: list[str], tmp_path: Path
) -> None:
    services = passing()
    steady = services.outcome.timing
    noisy = timing_pb2.Timing()
    noisy.CopyFrom(steady)
    noisy.faster, noisy.noise_floor = False, 0.4
    outcomes = [noisy] * steady_after + [steady]
    asked: list[object] = []

    def measure(request: object, **_: object) -> benchmark_service_pb2.MeasureArtifactResponse:
        asked.append(request)
        return benchmark_service_pb2.MeasureArtifactResponse(timing=outcomes[min(len(asked), len(outcomes)) - 1])

    services.MeasureArtifact = measure  # type: ignore[method-assign]
    told = judge.as_json(judged(services, solution(tmp_path)))
    assert (told["verdict"], told["faster"], told["labels"]) == ("PASS", not labels, labels)
    assert len(asked) == min(steady_after + 1, judge.MEASUREMENTS)


def test_a_service_at_fault_says_nothing_of_the_solution(tmp_path: Path) -> None:
    services = Services(
        verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_INFRA, detail="no GPU"),
        benchmark_service_pb2.MeasureArtifactResponse(),
    )
    with pytest.raises(Infrastructure, match="no GPU"):
        judged(services, solution(tmp_path))


@pytest.mark.parametrize(
    ("body", "labels"),
    [
        ("return torch.relu(x)", ()),
        (
            "try:\n            return fast(x)\n        except Exception:\n            return torch.relu(x)",
            ("FALLBACK",),
        ),
        ("try:\n            return torch.relu(x)\n        except ValueError as e:\n            raise e", ()),
    ],
    ids=["plain", "falls back", "raises again"],
)
def test_a_fallback_is_labelled(body: str, labels: tuple[str, ...], tmp_path: Path) -> None:
    assert judged(passing(), solution(tmp_path, body)).labels == labels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Other: pass\n", "defines no class ModelNew; that is what a solution is called"),
        ("class ModelNew(:\n", "syntax error"),
    ],
    ids=["no class", "syntax"],
)
def test_a_file_that_is_no_solution_is_bad_input(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(BadInput, match=message):
        judge.read(file, task_pb2.TARGET_CPU)


def test_the_command_prints_json_and_ends_with_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def judging(*_: object) -> Iterator[tuple[Any, Any]]:
        services = failing(verdict_pb2.FAILURE_KIND_WRONG_VALUE)
        yield services, services

    monkeypatch.setattr(client, "judging", judging)
    (tmp_path / "reference.py").write_text(REFERENCE)
    arguments = ["judge", str(solution(tmp_path)), str(tmp_path / "reference.py"), "--target", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["warpsmith", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = json.loads(capsys.readouterr().out)["tasks"][0]
    assert (ended.value.code, told["name"], told["kind"]) == (1, "mine", "WRONG_VALUE")
