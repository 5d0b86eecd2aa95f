"""One version beside the next: what a side lacks is done without, and what cannot be is named in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import AGENTS, optimize, place, require_result, require_uncharged, up

from warpsmith import service
from warpsmith.errors import MethodMissing
from warpsmith.settings import Settings
from warpsmith.v1 import (
    optimization_service_pb2,
    optimization_service_pb2_grpc,
    synthesis_service_pb2_grpc,
)

pytestmark = pytest.mark.faults

EARLIER = """
from orchestrator.serving import fake_service
from warpsmith.v1 import {role}_service_pb2_grpc as earlier
fake_service._Fake.{method} = earlier.{service}Servicer.{method}
fake_service.serve_role({role!r})
"""
"""A service whose version has one method less."""
OTHER = """
from orchestrator.serving import fake_service
from warpsmith.v1 import benchmark_service_pb2_grpc, synthesis_service_pb2_grpc

UNKNOWN = bytes([0x8A, 0xFA, 0x01, 3]) + b"new"  # field 2001

class Other(fake_service._Fake):
    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        return says_more(name, method) if name[:1].isupper() and callable(method) else method

def says_more(name, method):
    def answered(request, context):
        answer = method(request, context)
        answer.MergeFromString(UNKNOWN)
        with open({calls!r}, "a") as file:
            print(name, file=file)
        return answer
    return answered

Other.OpenTask = benchmark_service_pb2_grpc.BenchmarkServiceServicer.OpenTask
Other.RepairCandidate = synthesis_service_pb2_grpc.SynthesisServiceServicer.RepairCandidate
fake_service._Fake = Other
fake_service.serve_role({role!r})
"""
"""A service whose answers have a field that nobody here knows, and which lacks what can be done without."""


def optimize_beside(here: Path, role: str, name: str, method: str) -> tuple[int, str]:
    """What a search says, and its code, whose service of a role lacks a method."""
    with place(here, FAKE_CALL_SECONDS="0.0") as made:
        (here / f"faked_{role}.py").write_text(EARLIER.format(role=role, service=name, method=method))
        up(made)
        options = ("--target", "cpu", "--trials", "60", "--budget", "5m", "--fresh", "--server", "runs")
        search = made.start("optimize", "good.py", *options)
        code = search.process.wait(120)
        if not code:
            require_result(made, search)
        return code, search.said


def test_a_run_does_without_a_method_that_an_earlier_service_lacks(tmp_path: Path) -> None:
    code, said = optimize_beside(tmp_path, "benchmark", "BenchmarkService", "OpenTask")
    assert code == 0, said


def test_every_agent_is_replaced_by_another_version_in_the_midst_of_a_run_and_serves_it_on(tmp_path: Path) -> None:
    with place(tmp_path, FAKE_CALL_SECONDS="0.05") as here:
        services = up(here)
        search = optimize(here, "--server", "runs")
        calls = [tmp_path / f"{name}.calls" for name in AGENTS]
        for count, (name, file) in enumerate(zip(AGENTS, calls, strict=True), start=1):
            (tmp_path / f"faked_{name}.py").write_text(OTHER.format(role=name, calls=str(file)))
            services.kill_service(name)
            services.wait_for("it is started again now", count)
        require_result(here, search)
        require_uncharged(here)
        assert all(file.exists() for file in calls), "the run has called each of them"


def test_a_method_without_which_nothing_goes_is_named(tmp_path: Path) -> None:
    _, said = optimize_beside(tmp_path, "synthesis", "SynthesisService", "SynthesizeCandidate")
    assert "SynthesizeCandidate: UNIMPLEMENTED: is not served here; the service is of an earlier version" in said


@pytest.mark.parametrize("is_known", [True, False])
def test_a_client_of_a_later_version_hears_which_method_a_server_lacks(is_known: bool) -> None:
    """Of a service that the server has with other methods, and of one that it does not have at all."""
    adds: dict[bool, tuple[Callable[..., None], object]] = {
        True: (
            optimization_service_pb2_grpc.add_OptimizationServiceServicer_to_server,
            optimization_service_pb2_grpc.OptimizationServiceServicer(),
        ),
        False: (
            synthesis_service_pb2_grpc.add_SynthesisServiceServicer_to_server,
            synthesis_service_pb2_grpc.SynthesisServiceServicer(),
        ),
    }
    running = service.start("earlier", *adds[is_known], Settings(port=0, drain_seconds=0.1))
    try:
        stub = service.dial(optimization_service_pb2_grpc.OptimizationServiceStub, f"127.0.0.1:{running.port}")
        with pytest.raises(MethodMissing, match=r"^ResumeRun: UNIMPLEMENTED: .*; the service is of an earlier version"):
            stub.ResumeRun(optimization_service_pb2.ResumeRunRequest(run_id="r"))
    finally:
        running.stop()
