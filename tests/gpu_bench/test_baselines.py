"""Baselines: what runs, what fails and says so, and the module's state."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from gpu_bench.pytorch import baselines, compiling
from gpu_bench.pytorch.baselines import Baselines, aa_copy, preserved_state
from gpu_bench.pytorch.benchmark_mode import BenchmarkMode
from gpu_bench.timing.clocks import Arm
from warpsmith.v1 import task_pb2, timing_pb2


def made(module: nn.Module, *inputs: torch.Tensor) -> Baselines:
    return Baselines(module, [inputs, tuple(tensor + 1 for tensor in inputs)], task_pb2.TARGET_CPU)


def without_compiling(monkeypatch) -> None:
    def refuse(*_args, **_kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", refuse)


def test_eager_runs_the_module_without_gradients_on_the_named_set():
    found = made(nn.Linear(4, 3), torch.rand(2, 4))
    result = found.eager().call(1)
    assert not result.requires_grad
    assert torch.equal(result, found.module(found.inputs[1][0]))


def test_screening_has_eager_and_a_final_all(monkeypatch):
    without_compiling(monkeypatch)
    found = made(nn.ReLU(), torch.rand(4))
    assert [p.name for p in found.prepare(timing_pb2.TIER_SCREENING)] == ["eager"]
    assert [p.name for p in found.prepare(timing_pb2.TIER_FINAL)] == ["eager", "compile"]


def test_a_baseline_that_cannot_be_built_says_why_and_is_not_tried_twice(monkeypatch):
    without_compiling(monkeypatch)
    found = made(nn.ReLU(), torch.rand(4))
    first = found.prepare_reference()[1]
    assert (first.name, first.arm, first.failure) == ("compile", None, "RuntimeError: no compiler here")
    assert found.prepare_reference()[1] is first


def short_of_memory(monkeypatch, times: int) -> None:
    """Lets torch.compile fail so many times for want of memory."""
    left = [torch.OutOfMemoryError("tried to allocate 16.00 GiB")] * times

    def compiled(module, **_options):
        if left:
            raise left.pop()
        return module

    monkeypatch.setattr(torch, "compile", compiled)


def test_a_baseline_that_met_a_passing_want_of_memory_is_built_again_when_others_gave_back(monkeypatch):
    short_of_memory(monkeypatch, times=1)
    found = made(nn.ReLU(), torch.rand(4))
    with pytest.raises(torch.OutOfMemoryError, match="no memory to prepare compile"):
        found.prepare_with_room(timing_pb2.TIER_FINAL)
    found.prepare_with_room(timing_pb2.TIER_FINAL)
    assert [bool(each.arm) for each in found.prepare(timing_pb2.TIER_FINAL)] == [True, True]


def test_a_baseline_that_there_is_never_memory_for_says_so_and_is_not_tried_a_third_time(monkeypatch):
    short_of_memory(monkeypatch, times=2)
    found = made(nn.ReLU(), torch.rand(4))
    with pytest.raises(torch.OutOfMemoryError):
        found.prepare_with_room(timing_pb2.TIER_FINAL)
    found.prepare_with_room(timing_pb2.TIER_FINAL)
    assert found.prepare(timing_pb2.TIER_FINAL)[1].failure == "OutOfMemoryError: tried to allocate 16.00 GiB"
    found.prepare_with_room(timing_pb2.TIER_FINAL)
    assert found.prepare(timing_pb2.TIER_FINAL)[1].arm is None


def test_screening_adds_the_fastest_known_baseline_once_it_is_built(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_options: module)
    found = made(nn.ReLU(), torch.rand(4))
    found.medians_ns.update({"eager": 2.0, "compile": 1.0})
    assert [p.name for p in found.prepare(timing_pb2.TIER_SCREENING)] == ["eager"]
    found.prepare_reference()
    assert [p.name for p in found.prepare(timing_pb2.TIER_SCREENING)] == ["eager", "compile"]


def on_a_gpu(module: nn.Module, *inputs: torch.Tensor) -> Baselines:
    """As if for a GPU; nothing of it needs one before it is called."""
    return Baselines(module, [inputs, tuple(tensor + 1 for tensor in inputs)], task_pb2.TARGET_CUDA)


def test_on_a_gpu_a_final_also_has_autotuning_and_graphs():
    found = on_a_gpu(nn.ReLU(), torch.rand(4))
    assert found._final_names() == [
        "eager",
        "compile",
        "compile_max_autotune",
        "eager_graph",
        "compile_reduce_overhead",
    ]


def test_convolutions_add_channels_last_and_on_a_gpu_benchmark_mode():
    convolution, inputs = nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8)
    formats = {"channels_last", "compile_channels_last"}
    assert set(made(convolution, inputs)._final_names()) == {"eager", "compile", *formats}
    with_convolution = set(on_a_gpu(convolution, inputs)._final_names())
    assert with_convolution - set(on_a_gpu(nn.ReLU(), inputs)._final_names()) == {*formats, "cudnn_benchmark"}


@pytest.mark.parametrize("convolution", [nn.Conv2d(3, 4, 1), nn.Conv1d(3, 4, 3), nn.ConvTranspose1d(3, 4, 3)])
def test_convolutions_without_planes_have_benchmark_mode_alone(convolution):
    names = on_a_gpu(convolution, torch.rand(1, 3, 8))._final_names()
    assert "cudnn_benchmark" in names
    assert not {"channels_last", "compile_channels_last"} & set(names)


def test_a_reference_leaves_out_what_compiles_again(monkeypatch):
    without_compiling(monkeypatch)
    found = on_a_gpu(nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8))
    assert [p.name for p in found.prepare_reference()] == [
        "eager", "compile", "eager_graph", "channels_last", "cudnn_benchmark"
    ]  # fmt: skip


def test_what_took_too_long_to_compile_once_is_not_compiled_again(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda _module, **_options: lambda *_args: time.sleep(5))
    monkeypatch.setattr(baselines, "COMPILE_LIMIT_S", 0.05)
    found = made(nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8))
    assert found._get("compile").failure == "TooLong: took longer than 0 s"
    assert found._get("compile_channels_last").failure == "TooLong: not tried, for compile took longer than 0 s"


def test_channels_last_gives_the_same_result():
    found = made(nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8))
    arm = found._get("channels_last").arm
    assert arm is not None
    torch.testing.assert_close(arm.call(0).contiguous(), found.eager().call(0))
    assert found.module.weight.is_contiguous()


def test_what_is_compiled_for_channels_last_is_given_weights_and_inputs_of_that_format(monkeypatch):
    given = []

    def compiled(module, **options):
        given.append(options)

        def call(x):
            given.append((module.weight, x))
            return module(x)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    found = made(nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8))
    prepared = {each.name: each for each in found.prepare(timing_pb2.TIER_FINAL)}
    arm = prepared["compile_channels_last"].arm
    assert arm is not None, prepared["compile_channels_last"].failure
    torch.testing.assert_close(arm.call(1).contiguous(), found.eager().call(1))
    assert given[-1][0] is not found.module.weight
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in given[-1])
    assert {"mode": None, "dynamic": False} in given


def test_graphs_are_given_back_where_another_baseline_is_faster_and_built_again_when_needed(monkeypatch):
    found = on_a_gpu(nn.ReLU(), torch.rand(4))
    built = []
    monkeypatch.setattr(found, "_graphed", lambda: built.append("graph") or Arm("eager_graph", found.eager().call))
    found._get("eager_graph")
    found.medians_ns.update({"eager": 3.0, "eager_graph": 1.0, "compile": 2.0})
    found.give_back_graphs()
    assert "eager_graph" in found._prepared, "a screening is against it"
    found._prepared["compile"] = found._get("eager")
    found.medians_ns["compile"] = 0.5
    found.give_back_graphs()
    assert "eager_graph" not in found._prepared
    assert found._get("eager_graph").arm
    assert len(built) == 2


def test_graphs_that_are_given_up_are_not_built_again_and_say_why(monkeypatch):
    found = on_a_gpu(nn.ReLU(), torch.rand(4))
    monkeypatch.setattr(found, "_graphed", lambda: Arm("eager_graph", found.eager().call))
    released = []
    monkeypatch.setattr(baselines, "release_graphs", lambda: released.append(True))
    found._get("eager_graph")
    assert found.give_up_graphs()
    assert found._get("eager_graph").failure == "no memory for it beside the candidate"
    assert not found.give_up_graphs()
    assert not released, "torch.compile recorded none"
    found._prepared["compile_reduce_overhead"] = found._get("eager")
    assert found.give_up_graphs()
    assert released
    assert not found._get("compile_reduce_overhead").arm


def test_each_call_of_recorded_graphs_is_a_step_of_its_own(monkeypatch):
    happened: list[object] = []

    def compiled(module, *, mode, dynamic):
        assert not dynamic
        return lambda x: (happened.append(mode), module(x))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: happened.append("step"))
    found = on_a_gpu(nn.ReLU(), torch.rand(4))
    arm = found._get("compile_reduce_overhead").arm
    assert arm is not None
    happened.clear()
    assert torch.equal(arm.call(1), found.eager().call(1))
    assert happened == ["step", "reduce-overhead"]


def test_graphs_of_a_baseline_that_failed_are_given_back(monkeypatch):
    without_compiling(monkeypatch)
    released = []
    monkeypatch.setattr(baselines, "release_graphs", lambda: released.append(True))
    found = on_a_gpu(nn.ReLU(), torch.rand(4))
    found.prepare_with_room(timing_pb2.TIER_SCREENING)
    assert not released
    found.prepare_with_room(timing_pb2.TIER_FINAL)
    assert released


def test_benchmark_mode_is_on_in_the_calls_of_its_arms_alone():
    class Told(nn.Conv2d):
        def forward(self, x):
            modes.append((torch.backends.cudnn.benchmark, threading.current_thread().name))
            return super().forward(x)

    modes: list[tuple[bool, str]] = []
    found = on_a_gpu(Told(3, 4, 3), torch.rand(2, 3, 8, 8))
    for name in ("cudnn_benchmark", "channels_last"):
        arm = found._get(name).arm
        assert arm is not None
        modes.clear()
        torch.testing.assert_close(arm.call(1).contiguous(), found.eager().call(1))
        assert modes == [(True, "benchmark-mode"), (False, "MainThread")]


def test_what_a_call_in_benchmark_mode_raises_passes_through_and_the_next_call_is_made():
    def call(index):
        if not index:
            raise ValueError("no such set")
        return index

    there = BenchmarkMode().calling(call)
    with pytest.raises(ValueError, match="no such set"):
        there(0)
    assert there(1) == 1
    assert not torch.backends.cudnn.benchmark


def test_the_thread_of_benchmark_mode_ends_with_it():
    others = set(threading.enumerate())
    mode = BenchmarkMode()
    (thread,) = set(threading.enumerate()) - others
    assert mode.calling(lambda index: index)(2) == 2
    del mode
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_state_mode_and_random_numbers_are_restored():
    norm = nn.BatchNorm1d(4)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with preserved_state(norm):
        norm(torch.rand(8, 4))
        norm.eval()
    assert norm.training
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert torch.equal(torch.rand(3), expected)


def test_the_aa_copy_is_the_same_call():
    arm = made(nn.ReLU(), torch.rand(4)).eager()
    assert aa_copy(arm).call is arm.call
    assert aa_copy(arm).name == "aa_copy"


def test_preparing_has_a_time_limit():
    with pytest.raises(compiling.TooLong, match="took longer"), compiling.time_limit(0.05):
        time.sleep(5)


def test_the_reason_of_a_failure_names_the_error_of_a_helper_process():
    told = "An exception occurred in a subprocess:\n\nName=k\nTraceback ...\nRuntimeError: no active GPU\n\nSet X=1"
    assert baselines.reason(OSError(told)) == (
        "OSError: An exception occurred in a subprocess: RuntimeError: no active GPU"
    )
    assert baselines.reason(ValueError("")) == "ValueError: "


def test_triton_is_compiled_in_the_process_that_has_the_gpu():
    from torch._inductor import config

    before = config.compile_threads
    with compiling.compiling_here(task_pb2.TARGET_CUDA):
        assert config.compile_threads == 1
    with compiling.compiling_here(task_pb2.TARGET_CPU):
        assert config.compile_threads == before


def test_a_compiled_module_computes_what_eager_does(monkeypatch):
    compile_module = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **_options: compile_module(module, backend="eager"))
    found = made(nn.Softmax(dim=1), torch.rand(4, 32))
    prepared = found.prepare_reference()[1]
    assert prepared.arm is not None, prepared.failure
    torch.testing.assert_close(prepared.arm.call(1), found.eager().call(1))
    assert prepared.seconds > 0
    compiling.release_compiled()
