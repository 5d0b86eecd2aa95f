"""A GPU that cannot be trusted goes out of service: what says so, who hears it, and who is not to blame."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from gpu_bench import metrics, nvml
from gpu_bench.nvml import Gpu
from gpu_bench.quarantine import Bounds, Quarantine, Reason
from gpu_bench.servicer import BenchmarkServicer
from warpsmith import service
from warpsmith.errors import DeviceQuarantined, WorkerCrashed, WorkerTimeout
from warpsmith.settings import Settings
from warpsmith.v1 import benchmark_service_pb2, benchmark_service_pb2_grpc, task_pb2, timing_pb2, verdict_pb2

CUDA, CPU = task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU
SOUND = "0 0 0 0 1980 0 40"
BROKEN_MEMORY = "2 0 0 0 1980 0 40"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in for the driver's library."""
    directory = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.cpp")
    target = directory / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(target), str(source)], check=True, timeout=60)
    return directory


class Driver:
    """What the stand-in says."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.says(SOUND)

    def says(self, words: str) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(words)
        partial.replace(self._file)


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    loaded = ctypes.CDLL(str(library / "libnvidia-ml.so.1"))
    # The environment of C is not Python's where it was changed behind the loader's back: `putenv` does both.
    monkeypatch.setattr(nvml, "_library", lambda: loaded)
    return Driver(tmp_path / "nvml")


@pytest.fixture(autouse=True)
def _nothing_stays_out_of_service() -> Iterator[None]:
    yield
    for reason in Reason:
        metrics.QUARANTINED.labels(reason.value).set(0)


def device(share: float = 1.0) -> timing_pb2.Device:
    """An H200, or what is left of it."""
    return timing_pb2.Device(
        target=CUDA,
        copy_bytes_per_second=share * 4.1e12,
        read_bytes_per_second=share * 4.4e12,
        tensor_flops=share * 7e14,
        physical_bytes_per_second=4.8e12,
    )


class Probe:
    """Answers in turn what it was given; the last for ever."""

    def __init__(self, *answers: timing_pb2.Device | Exception) -> None:
        self.answers, self.calls = list(answers), 0

    def __call__(self) -> timing_pb2.Device:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def quarantine(*answers: timing_pb2.Device | Exception, gpu: Gpu | None = None) -> Quarantine:
    return Quarantine(Probe(*(answers or (device(),))), gpu)


def noisy(floor: float) -> timing_pb2.Timing:
    return timing_pb2.Timing(noise_floor=floor)


# ---- what the driver says -------------------------------------------------------------------------------------------


def test_a_sound_gpu_is_read_and_nothing_is_held_against_it(driver: Driver) -> None:
    driver.says("0 0 0 0 1755 36 87")
    gpu = Gpu.visible()
    assert gpu is not None
    state = gpu.state()
    assert (state.driver, state.sm_clock_mhz) == ("580.00", 1755)
    assert state.throttle_reasons == ("software_power_cap", "software_thermal_slowdown")
    assert gpu.busy_share() == pytest.approx(0.87)
    assert (gpu.memory_fault(), gpu.xid()) == ("", 0)
    for reason in Reason:  # a rate sees the first one too
        assert REGISTRY.get_sample_value("warpsmith_bench_quarantined", {"reason": reason.value}) == 0


@pytest.mark.usefixtures("driver")
def test_the_visible_gpu_is_the_first_that_cuda_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, is_there in (("GPU-1b2c,3", True), ("7", False), ("MIG-5", False), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert (Gpu.visible() is not None) == is_there, wanted


@pytest.mark.parametrize(
    ("words", "reason", "said"),
    [
        (BROKEN_MEMORY, Reason.MEMORY, "2 uncorrected memory errors"),
        ("0 1 0 0 1980 0 0", Reason.MEMORY, "waits to be remapped"),
        ("0 0 1 0 1980 0 0", Reason.MEMORY, "could not be remapped"),
        ("0 0 0 79 1980 0 0", Reason.XID, "Xid 79"),
    ],
)
def test_what_the_driver_reports_takes_the_gpu_out_of_service(
    driver: Driver, words: str, reason: Reason, said: str
) -> None:
    judged, told = quarantine(gpu=Gpu.visible()), []
    judged.when_unfit(lambda: told.append(judged.reason))
    judged.look()
    assert judged.reason is None
    driver.says(words)
    judged.look()
    judged.look()
    assert judged.reason is reason
    assert said in judged.detail
    assert told == [reason], "once"
    assert REGISTRY.get_sample_value("warpsmith_bench_quarantined", {"reason": reason.value}) == 1


@pytest.mark.parametrize("xid", [13, 31, 43, 45])
def test_an_xid_that_a_faulty_program_causes_says_nothing_of_the_gpu(driver: Driver, xid: int) -> None:
    judged = quarantine(gpu=Gpu.visible())
    judged.look()
    driver.says(f"0 0 0 {xid} 1980 0 0")
    judged.look()
    assert judged.reason is None


def test_errors_from_before_the_service_began_do_not_count(driver: Driver) -> None:
    driver.says(BROKEN_MEMORY)
    gpu = Gpu.visible()
    assert gpu is not None
    assert gpu.memory_fault() == ""
    driver.says(BROKEN_MEMORY.replace("2", "3", 1))
    assert gpu.memory_fault() == "1 uncorrected memory errors since this service has used it"


def test_who_asks_late_is_told_at_once(driver: Driver) -> None:
    judged, told = quarantine(gpu=Gpu.visible()), []
    driver.says(BROKEN_MEMORY)
    judged.look()
    judged.when_unfit(lambda: told.append(True))
    assert told == [True]


# ---- what programs and the probe show -------------------------------------------------------------------------------


def test_the_program_under_way_when_memory_fails_is_not_charged(driver: Driver) -> None:
    judged = quarantine(gpu=Gpu.visible())
    verdicts = []

    def measured() -> None:
        with judged.guarding(CUDA):
            driver.says(BROKEN_MEMORY)
            verdicts.append("wrong value")  # what its caller would have heard

    for _ in range(2):
        with pytest.raises(DeviceQuarantined, match=r"out of service \(memory\): 2 uncorrected"):
            measured()
    assert len(verdicts) == 1, "the second is refused before it begins"


def test_a_processor_is_never_out_of_service(driver: Driver) -> None:
    judged = quarantine(gpu=Gpu.visible())
    driver.says(BROKEN_MEMORY)
    with judged.guarding(CPU):
        judged.saw_timing(CPU, noisy(0.9))
        judged.saw_device(timing_pb2.Device(target=CPU, read_bytes_per_second=1.0, physical_bytes_per_second=1e10))
    assert judged.reason is None


def test_a_kernel_that_is_not_freed_takes_the_gpu_out_of_service() -> None:
    judged = quarantine(WorkerTimeout("describe gave no answer within 60 s"))
    with pytest.raises(DeviceQuarantined, match=r"\(hang\): it does not answer a new process"), judged.guarding(CUDA):
        judged.suspect()
    assert judged.reason is Reason.HANG


def test_a_gpu_that_answers_after_a_hang_stays_in_service() -> None:
    for answers in ((device(),), (WorkerTimeout("late"), device())):
        judged = quarantine(*answers)
        with judged.guarding(CUDA):
            judged.suspect()
        assert judged.reason is None


def test_a_worker_that_is_lost_has_the_gpu_looked_at_and_keeps_its_own_error() -> None:
    judged = quarantine(device())
    with pytest.raises(WorkerCrashed), judged.guarding(CUDA):
        raise WorkerCrashed("judge")
    probe = judged._probe
    assert isinstance(probe, Probe)
    assert probe.calls == 1
    judged = quarantine(WorkerCrashed("describe"))
    with pytest.raises(DeviceQuarantined), judged.guarding(CUDA):
        raise WorkerCrashed("judge")


def test_a_gpu_at_half_of_what_it_was_is_slow_and_one_a_little_slower_is_not() -> None:
    judged = quarantine(device(0.8))
    judged.saw_device(device())
    judged.suspect()
    assert judged.reason is None
    judged = quarantine(device(0.45))
    judged.saw_device(device())
    judged.suspect()
    assert judged.reason is Reason.SLOW
    assert "copy_bytes_per_second is 1.84e+12, less than 2.4e+12" in judged.detail


def test_a_gpu_far_below_its_data_sheet_is_slow_from_the_first_and_one_bad_look_is_none() -> None:
    judged = quarantine(device(0.3))
    with pytest.raises(DeviceQuarantined, match="slow"):
        judged.saw_device(device(0.3))
    judged = quarantine(device())
    judged.saw_device(device(0.3))  # something else was at work
    assert judged.reason is None


def test_noise_counts_when_it_stays() -> None:
    judged, most = quarantine(), Bounds().noisy_in_a_row
    for _ in range(most - 1):
        judged.saw_timing(CUDA, noisy(0.5))
    judged.saw_timing(CUDA, noisy(0.01))
    for _ in range(most - 1):
        judged.saw_timing(CUDA, noisy(0.5))
    assert judged.reason is None
    judged.saw_timing(CUDA, noisy(0.5))
    assert judged.reason is Reason.NOISE


# ---- the service ----------------------------------------------------------------------------------------------------


class Hanging:
    """A session in which every program hangs; and the sessions that hold it."""

    def using(self, *_: object) -> Hanging:
        return self

    def __enter__(self) -> Hanging:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def measure(self, _: object) -> benchmark_service_pb2.MeasureArtifactResponse:
        fault = benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_TIMEOUT, detail="no end")
        return benchmark_service_pb2.MeasureArtifactResponse(fault=fault)

    def abandon(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing to end."""


def health_of(port: int, part: str) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=part), timeout=5, wait_for_ready=True
        )
    return int(reply.status)


@pytest.mark.parametrize(("answer", "is_charged"), [(device(), True), (WorkerTimeout("late"), False)])
def test_a_program_that_hangs_is_charged_only_where_the_gpu_survives_it(
    answer: timing_pb2.Device | Exception, is_charged: bool
) -> None:
    servicer = BenchmarkServicer(Hanging(), quarantine(answer))  # type: ignore[arg-type]
    running = service.start(
        "benchmark",
        benchmark_service_pb2_grpc.add_BenchmarkServiceServicer_to_server,
        servicer,
        Settings(port=0, drain_seconds=0.1),
    )
    stub = service.dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, f"127.0.0.1:{running.port}")
    request = benchmark_service_pb2.MeasureArtifactRequest(task=task_pb2.Task(target=CUDA))
    try:
        if is_charged:
            assert stub.MeasureArtifact(request).fault.kind == verdict_pb2.FAILURE_KIND_TIMEOUT
        else:
            with pytest.raises(DeviceQuarantined, match="out of service"):
                stub.MeasureArtifact(request)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert health_of(running.port, "") == (serving if is_charged else not_serving)
        assert health_of(running.port, service.LIVENESS) == serving, "the kubelet must not start it again"
    finally:
        running.stop()


def test_the_real_service_goes_out_of_service_when_the_driver_reports_errors(
    library: Path, tmp_path: Path, small: SimpleNamespace
) -> None:
    driver, ports = Driver(tmp_path / "nvml"), tmp_path / "ports"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "FAKE_NVML": str(tmp_path / "nvml"),
        "CUDA_VISIBLE_DEVICES": "0",
        "WARPSMITH_PORT": "0",
        "WARPSMITH_METRICS_PORT": "0",
        "WARPSMITH_PORT_FILE": str(ports),
    }
    process = subprocess.Popen([sys.executable, "-m", "gpu_bench"], env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not ports.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        port, metrics_port = map(int, ports.read_text().split())
        assert health_of(port, "") == health_pb2.HealthCheckResponse.SERVING
        driver.says(BROKEN_MEMORY)
        while health_of(port, "") == health_pb2.HealthCheckResponse.SERVING and time.monotonic() < deadline:
            time.sleep(0.1)
        assert health_of(port, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health_of(port, service.LIVENESS) == health_pb2.HealthCheckResponse.SERVING
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        assert 'warpsmith_bench_quarantined{reason="memory"} 1.0' in text
        assert "warpsmith_bench_device_busy_ratio 0.4" in text
        stub = service.dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, f"127.0.0.1:{port}")
        task = small.task()
        task.target = CUDA
        with pytest.raises(DeviceQuarantined):
            stub.RunReference(benchmark_service_pb2.RunReferenceRequest(task=task), timeout=30)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
