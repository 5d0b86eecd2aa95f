"""Both agents over gRPC: an artifact in, a verdict, a timing and a device out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from agent_correctness.servicer import CorrectnessServicer
from gpu_bench.limits import Limits
from gpu_bench.servicer import BenchmarkServicer
from gpu_bench.sessions import Sessions
from warpsmith import service
from warpsmith.errors import BadInput, ServiceLate
from warpsmith.settings import Settings
from warpsmith.v1 import (
    benchmark_service_pb2,
    benchmark_service_pb2_grpc,
    correctness_service_pb2,
    correctness_service_pb2_grpc,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    """(benchmark, correctness). Connections end by age in the midst of nearly every call."""
    patch = pytest.MonkeyPatch()
    patch.setattr("warpsmith.service.serving.CONNECTION_AGE_MS", 200)
    bench = service.start(
        "benchmark",
        benchmark_service_pb2_grpc.add_BenchmarkServiceServicer_to_server,
        BenchmarkServicer(Sessions(limits=Limits(hang_seconds=120.0))),
        Settings(port=0),
    )
    settings = Settings(port=0, addresses={"benchmark": f"127.0.0.1:{bench.port}"})
    judge = service.start(
        "correctness",
        correctness_service_pb2_grpc.add_CorrectnessServiceServicer_to_server,
        CorrectnessServicer.of(settings),
        settings,
    )
    yield f"127.0.0.1:{bench.port}", f"127.0.0.1:{judge.port}"
    judge.stop()
    bench.stop()
    patch.undo()


def verify(small: Any, address: str, body: str) -> verdict_pb2.Verdict:
    program = small.kernel_program(body)
    request = correctness_service_pb2.VerifyArtifactRequest(
        task=small.task(), program=program, artifact=small.compiled(program), tier=timing_pb2.TIER_FINAL
    )
    return service.dial(correctness_service_pb2_grpc.CorrectnessServiceStub, address).VerifyArtifact(request).verdict


def test_a_right_kernel_passes_and_wrong_ones_fail_by_name(small: Any, addresses: tuple[str, str]) -> None:
    _, judge = addresses
    good = verify(small, judge, small.softmax)
    assert (good.state, good.kernelbench_pass) == (verdict_pb2.VERDICT_STATE_PASS, True)
    truncated = (
        "for (long i = 0; i < ROWS * COLUMNS; ++i) { std::uint32_t u; __builtin_memcpy(&u, y + i, 4);"
        " u &= 0xffffe000u; __builtin_memcpy(y + i, &u, 4); }"
    )
    assert verify(small, judge, small.softmax + truncated).kind == verdict_pb2.FAILURE_KIND_WRONG_PRECISION
    constant = "for (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = 1.0f / COLUMNS;"
    assert verify(small, judge, constant).kind == verdict_pb2.FAILURE_KIND_WRONG_VALUE
    unwritten = f"float spared = y[7]; {small.softmax} y[7] = spared;"
    assert verify(small, judge, unwritten).kind == verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED
    positive = f"{small.softmax} if (x[0] < 0 || x[1] < 0 || x[2] < 0 || x[3] < 0 || x[4] < 0) y[0] = 0.9f;"
    assert verify(small, judge, positive).kind == verdict_pb2.FAILURE_KIND_WRONG_OVERFIT


def test_a_program_is_timed_and_a_crash_while_timing_is_a_fault(small: Any, addresses: tuple[str, str]) -> None:
    bench, _ = addresses

    def held() -> float:
        return REGISTRY.get_sample_value("warpsmith_bench_held_seconds_total", {"call": "measure"}) or 0.0

    stub = service.dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, bench)

    def measure(body: str) -> benchmark_service_pb2.MeasureArtifactResponse:
        program = small.kernel_program(body)
        return stub.MeasureArtifact(
            benchmark_service_pb2.MeasureArtifactRequest(
                task=small.task(),
                program=program,
                artifact=small.compiled(program),
                tier=timing_pb2.TIER_SCREENING,
            )
        )

    before = held()
    timing = measure(small.softmax).timing
    assert {arm.kind for arm in timing.arms} >= {timing_pb2.ARM_KIND_CANDIDATE, timing_pb2.ARM_KIND_EAGER}
    assert timing.environment.jail_rung
    assert held() - before > timing.device_seconds > 0
    before = held()
    fault = measure("std::abort();").fault
    assert fault.kind == verdict_pb2.FAILURE_KIND_CRASH
    assert [(end.worker, end.work) for end in fault.ends] == [("candidate", "measure")]
    assert fault.ends[0].how.startswith("the process of the program ended by ")
    assert fault.ends[0].at > 0
    assert held() > before, "a measurement that ends in a fault held the device too"


def test_work_that_nobody_waits_for_is_ended_and_the_next_one_has_new_processes(
    small: Any, addresses: tuple[str, str]
) -> None:
    stub = service.dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, addresses[0])

    def measure(body: str, seconds: float) -> benchmark_service_pb2.MeasureArtifactResponse:
        program = small.kernel_program(body)
        request = benchmark_service_pb2.MeasureArtifactRequest(
            task=small.task(), program=program, artifact=small.compiled(program), tier=timing_pb2.TIER_SCREENING
        )
        return stub.MeasureArtifact(request, timeout=seconds)

    measure(small.softmax, 60.0)
    lost = REGISTRY.get_sample_value("warpsmith_bench_leases_lost_total", {"loss": "caller_left"}) or 0.0
    with pytest.raises(ServiceLate):
        measure("for (volatile long i = 0;; i = i + 1) {}", 2.0)
    begin = time.monotonic()
    assert measure(small.softmax, 60.0).HasField("timing")
    assert time.monotonic() - begin < 60.0, "a program may hang for 120 s, and this one does"
    assert REGISTRY.get_sample_value("warpsmith_bench_leases_lost_total", {"loss": "caller_left"}) == lost + 1


def test_a_device_that_is_not_there_is_bad_input(addresses: tuple[str, str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    stub = service.dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, addresses[0])
    with pytest.raises(BadInput):
        stub.DescribeDevice(benchmark_service_pb2.DescribeDeviceRequest(target=task_pb2.TARGET_CUDA))
