"""Baselines on a GPU: that each computes what eager does, and runs in the way that it is named after."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from gpu_bench.pytorch import compiling
from gpu_bench.pytorch.baselines import Baselines
from gpu_bench.pytorch.benchmark_mode import BenchmarkMode
from gpu_bench.timing.clocks import CudaClock
from gpu_bench.timing.interleaving import measure, plan_for
from warpsmith.v1 import task_pb2, timing_pb2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # torch.compile and the profiler advise their users by warnings
]

SETS = 3


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing that is compiled outlives a test."""
    yield
    compiling.release_compiled()
    torch.cuda.empty_cache()


def network() -> Baselines:
    """Two convolutions, with state."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3)).cuda()
    return Baselines(module, [(torch.rand(8, 16, 32, 32, device="cuda"),) for _ in range(SETS)], task_pb2.TARGET_CUDA)


def test_every_baseline_of_a_convolutional_network_computes_what_eager_does():
    found = network()
    prepared = found.prepare(timing_pb2.TIER_FINAL)
    assert {each.name: each.failure for each in prepared if each.failure} == {}
    assert len(prepared) == 8
    for each in prepared:
        for index in range(SETS):
            assert each.arm is not None
            wanted = found.eager().call(index)
            torch.testing.assert_close(each.arm.call(index).contiguous(), wanted, rtol=1e-2, atol=1e-2)


def test_all_of_them_can_be_timed_in_turns():
    arms = [each.arm for each in network().prepare(timing_pb2.TIER_FINAL) if each.arm is not None]
    plan = plan_for(timing_pb2.TIER_FINAL, task_pb2.TARGET_CUDA, SETS)
    plan = replace(plan, reading_ns=1e6, short_call_ns=1e6)  # calls of 43 us are else read one by one
    samples = measure(arms, CudaClock(50 << 20), plan)
    assert {arm.name: arm.failure for arm in samples.arms.values() if arm.failure} == {}
    assert samples.group_length > 1  # results of one call are held while the next are made


def test_recorded_graphs_are_replayed_on_every_buffer_set_and_never_recorded_again():
    from torch._inductor import cudagraph_trees

    arm = network()._get("compile_reduce_overhead").arm
    assert arm is not None
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None
    recorded = len(list(manager.get_roots()))
    held = [arm.call(index % SETS) for index in range(4 * SETS)]
    assert manager.path_state == cudagraph_trees.ExecutionState.EXECUTION
    assert len(list(manager.get_roots())) == recorded
    assert len({result.data_ptr() for result in held}) == 1


def test_graphs_that_are_released_leave_no_memory_behind():
    torch.cuda.empty_cache()
    free = torch.cuda.memory_reserved()
    found = Baselines(nn.Softmax(dim=1), [(torch.rand(4096, 16384, device="cuda"),)], task_pb2.TARGET_CUDA)
    assert found._get("compile_reduce_overhead").arm is not None
    assert torch.cuda.memory_reserved() - free > 512 << 20  # inputs, a copy of them and results, 256 MiB each
    del found
    compiling.release_compiled()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - free < 128 << 20


def kernel_count(act) -> int:
    """Kernels that ran meanwhile, in any thread."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        act()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def test_algorithms_are_tried_for_what_eager_has_chosen_by_rule_and_eager_goes_on_as_before():
    convolution = nn.Conv2d(24, 40, 3).cuda()
    inputs = torch.rand(8, 24, 56, 56, device="cuda")

    @torch.no_grad()
    def call(_index: int) -> torch.Tensor:
        return convolution(inputs)

    call(0)
    as_before = kernel_count(functools.partial(call, 0))
    there = BenchmarkMode().calling(call)
    tried = kernel_count(functools.partial(there, 0))
    assert tried > 3 * as_before
    assert kernel_count(functools.partial(there, 0)) <= as_before + 4
    assert kernel_count(functools.partial(call, 0)) == as_before
