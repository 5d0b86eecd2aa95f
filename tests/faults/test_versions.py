"""One version beside the next: what a side lacks is done without, and what cannot be is named in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import place, require_result, up

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
