"""What the machine says of itself."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
import torch

from gpu_bench import device, nvml
from gpu_bench.machine import BENCH, Machine, worker_environment, worker_policy
from gpu_bench.pytorch.compiler_cache import CompilerCache
from warpsmith import hardware
from warpsmith.errors import BadInput
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2, timing_pb2


def test_a_cpu_is_described_quickly_and_once():
    begin = time.perf_counter()
    ceilings = device.describe(task_pb2.TARGET_CPU)
    assert time.perf_counter() - begin < 10  # under 2 s alone; tests share the machine
    found = ceilings.device
    assert 1e8 < found.read_bytes_per_second < 5e12
    assert found.write_bytes_per_second > 1e8
    assert found.copy_bytes_per_second > 1e8
    assert found.product_flops == 2 * found.operation_flops > 1e9
    assert 10 < found.launch_ns < 1e6
    assert found.unit_count == torch.get_num_threads()
    assert found.physical_bytes_per_second >= 1.5 * found.read_bytes_per_second
    assert found.environment.torch
    assert device.describe(task_pb2.TARGET_CPU) is ceilings


def test_ceilings_cross_to_another_process_unchanged():
    described = timing_pb2.Device(read_bytes_per_second=2.0, name="x")
    ceilings = device.Ceilings(described, 1.0, 2.0, 3.0, 4.0)
    assert device.Ceilings.of(ceilings.message()) == ceilings


def test_a_machine_is_measured_once_whatever_the_target_is_called():
    machine = Machine()
    try:
        assert machine.known_ceilings(task_pb2.TARGET_CPU) is None
        found = machine.describe(task_pb2.TARGET_UNSPECIFIED)
        assert machine.describe(found.device.target) is found
        assert machine.known_ceilings(found.device.target) is found
    finally:
        machine.close()


def test_torch_compile_works_where_no_namespace_gives_a_process_a_tmp_of_its_own():
    machine = Machine(jail.Rung.LANDLOCK)
    try:
        cache = CompilerCache(machine.compiled(task_pb2.TARGET_CPU))
        compiled = {*machine.headers.glob("*.h.gch")}
        assert compiled
        cache.renew()
        policy = cache.allowed(worker_policy(task_pb2.TARGET_CPU))
        variables = worker_environment(-1) | cache.environment()
        with Worker(BENCH, policy, rung=jail.Rung.LANDLOCK, env=variables) as another:
            request = judging_pb2.CompileOnceRequest(target=task_pb2.TARGET_CPU)
            another.call("compile_once", request, judging_pb2.Done, deadline_s=100.0)
            scratch = Path(tempfile.gettempdir()).glob("warpsmith-jail-*/torchinductor_*/precompiled_headers/*.gch")
            assert compiled <= {header.resolve() for header in scratch if header.is_symlink()}
        cache.close()
    finally:
        machine.close()
    assert not machine.headers.exists()


def test_load_can_only_lower_a_ceiling():
    def made(read: float, launch: float) -> device.Ceilings:
        described = timing_pb2.Device(read_bytes_per_second=read, launch_ns=launch, name="x")
        return device.Ceilings(described, read, 1.0, 0.0, 0.0)

    best = device.best_of(made(2.0, 10.0), made(3.0, 5.0))
    assert (best.device.read_bytes_per_second, best.device.launch_ns) == (3.0, 5.0)
    assert (best.fp32_product_rate, best.device.name) == (3.0, "x")


def test_the_largest_cache_counts(tmp_path):
    for index, size in enumerate(("48K", "2048K", "32M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert device.last_level_cache_bytes(tmp_path) == 32 << 20
    assert device.last_level_cache_bytes(tmp_path / "absent") == 32 << 20


def test_the_processor_is_named(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Fast One\n")
    assert device.cpu_name(tmp_path / "cpuinfo") == "Fast One"
    assert device.cpu_name(tmp_path / "absent") or True


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.04e12),
        ("Other", 0.0),
    ],
)
def test_physical_bandwidth_is_known_by_name(name, rate):
    assert hardware.memory_bandwidth(name) == rate


def test_an_unspecified_target_is_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.resolve_target(task_pb2.TARGET_UNSPECIFIED) == task_pb2.TARGET_CPU
    with pytest.raises(BadInput, match="no GPU"):
        device.resolve_target(task_pb2.TARGET_CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.resolve_target(task_pb2.TARGET_UNSPECIFIED) == task_pb2.TARGET_CUDA


def test_the_environment_is_read_before_and_after():
    before = device.environment(task_pb2.TARGET_CPU, toolkit="g++ 14", jail_rung="bubblewrap", seed=3)
    after = device.finished(before, task_pb2.TARGET_CPU)
    assert (after.toolkit, after.jail_rung, after.seed) == ("g++ 14", "bubblewrap", 3)
    assert len(before.clock_mhz) == 1
    assert len(after.clock_mhz) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_without_a_driver_the_gpu_tells_nothing():
    assert nvml.gpu_state() == nvml.GpuState()


def test_the_peak_of_products_is_that_of_the_highest_clock():
    for clock_khz in (1_980_000, 1_410_000):  # held down now, and not for ever
        assert device.half_tensor_peak(hardware.H200, clock_khz) == pytest.approx(1070.5e12, rel=1e-3)
