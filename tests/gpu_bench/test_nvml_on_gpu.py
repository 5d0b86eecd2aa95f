"""What a real driver tells of its GPU, and that a program's own faults are not held against it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from gpu_bench.nvml import Gpu, gpu_state
from gpu_bench.quarantine import Quarantine
from warpsmith.v1 import task_pb2, timing_pb2

pytestmark = pytest.mark.gpu

BUSY = "import torch\na = torch.rand(8192, 8192, device='cuda')\nwhile True:\n    a @ a\n    torch.cuda.synchronize()"
OUT_OF_BOUNDS = "import torch\ntorch.zeros(1, device='cuda')[torch.tensor([1 << 40], device='cuda')].cpu()"


@pytest.fixture
def gpu() -> Gpu:
    found = Gpu.visible()
    assert found is not None, "a GPU with its driver"
    return found


def test_the_driver_tells_its_version_and_a_clock_and_both_ways_to_the_gpu_agree(gpu: Gpu) -> None:
    seen = gpu.state()
    assert seen.driver.split(".")[0].isdigit()
    assert seen.sm_clock_mhz > 100
    assert gpu_state().driver == seen.driver


def test_a_running_kernel_shows_as_use_and_an_idle_gpu_does_not(gpu: Gpu) -> None:
    worker = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        until = time.monotonic() + 60
        while (gpu.busy_share() or 0.0) < 0.5 and time.monotonic() < until:
            time.sleep(0.2)
        assert (gpu.busy_share() or 0.0) >= 0.5
    finally:
        worker.kill()
        worker.wait()
    until = time.monotonic() + 20
    while gpu.busy_share() != 0.0 and time.monotonic() < until:
        time.sleep(0.2)
    assert gpu.busy_share() == 0.0


def test_a_program_that_reads_out_of_bounds_does_not_take_the_gpu_out_of_service(gpu: Gpu) -> None:
    quarantine = Quarantine(timing_pb2.Device, gpu)
    quarantine.look()
    with quarantine.guarding(task_pb2.TARGET_CUDA):
        assert subprocess.run([sys.executable, "-c", OUT_OF_BOUNDS], capture_output=True, check=False).returncode
    quarantine.look()
    assert quarantine.reason is None, quarantine.detail
    assert gpu.memory_fault() == ""
