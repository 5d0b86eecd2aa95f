"""Programs launched as one CUDA graph on a GPU: in the bench, and in what an export carries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero
from gpu_bench.running.executor import ProgramFault, Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from gpu_bench.running.gpu.cuda_graph import GraphCall
from orchestrator.exports.carried.cuda_graphs import _WsGraphs
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

pytestmark = pytest.mark.gpu


class Network(nn.Module):
    """Library steps and kernels of ours in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.gelu(norm(layer(x)))
        return x


def pool() -> object:
    return torch.cuda.graph_pool_handle()


def assert_nothing_is_left_of_a_capture() -> None:
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.manual_seed(3)
    first = torch.randn(4, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(4, device="cuda"))
    torch.cuda.empty_cache()
    assert torch.equal(GraphCall(lambda: (2 * first,), pool())()[0], 2 * first)


@torch.no_grad()
def test_a_replay_gives_what_the_steps_give_in_new_tensors_for_what_lies_there_now() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    module, x = Network(), torch.randn(128, 64)
    plan = plan_zero(GraphIndex(capture(module, (x,))), task_pb2.TARGET_CUDA)
    whole = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")
    program = generator.generate(moves.apply(plan, whole))
    module, x = module.cuda(), x.cuda()
    loaded = CudaExecutor().load(program, cubin_of(program), x.device)
    steps = loaded.bind(Sources([x], dict(module.named_parameters()), {}))
    graph = GraphCall(steps, pool())
    for _ in range(3):
        x.normal_()
        (first,), (second,), (wanted,) = graph(), graph(), steps()
        assert torch.equal(first, wanted)
        assert torch.equal(second, wanted)
        assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, module(x))


def test_a_step_that_waits_for_the_device_is_told_and_does_no_harm() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(ProgramFault, match=r"cannot be launched as one CUDA graph: .*captur"):
        GraphCall(lambda: (x * x.sum().item(),), pool())
    assert float((x + 1).sum()) == 8.0
    assert_nothing_is_left_of_a_capture()


@torch.no_grad()
def test_an_export_captures_what_comes_again_and_changes_state_once_a_call() -> None:
    norm = nn.BatchNorm1d(8).cuda().train()
    other = nn.BatchNorm1d(8).cuda().train()
    graphs = _WsGraphs(lambda tensors, _: (norm(tensors[0]).relu(),), lambda _: torch.cuda.current_stream().cuda_stream)
    held = [torch.randn(16, 8, device="cuda") for _ in range(3)]
    for number in range(12):
        x = held[number % 3].normal_()
        (result,) = graphs([x])
        torch.testing.assert_close(result, other(x).relu())
        torch.testing.assert_close(norm.running_mean, other.running_mean)
    assert (graphs._captures, graphs._replays) == (3, 9)


def test_an_export_runs_step_by_step_what_cannot_be_captured() -> None:
    graphs = _WsGraphs(
        lambda tensors, _: (tensors[0] * tensors[0].sum().item(),),
        lambda _: torch.cuda.current_stream().cuda_stream,
    )
    x = torch.ones(4, device="cuda")
    for _ in range(4):
        assert torch.equal(graphs([x])[0], torch.full((4,), 4.0, device="cuda"))
    assert not graphs._captures
    assert_nothing_is_left_of_a_capture()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_export_has_graphs_of_its_own_on_each_gpu() -> None:
    def stream_of(index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream

    graphs = _WsGraphs(lambda tensors, _: (2 * tensors[0],), stream_of)
    for index in range(2):
        with torch.cuda.device(index):
            x = torch.ones(4, device="cuda")
            for number in range(4):
                assert torch.equal(graphs([x.fill_(number)])[0], torch.full_like(x, 2.0 * number))
    assert graphs._captures == 2
