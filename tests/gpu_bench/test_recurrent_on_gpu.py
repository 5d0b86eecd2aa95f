"""Recurrent networks in one kernel through plan, NVRTC and executor on a GPU: against fp64, call after call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import recurrent_forms as forms
import torch
from torch import nn

from agent_compile.testing import cubin_of
from agent_synthesis.testing import Recurrent
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor

pytestmark = pytest.mark.gpu


CASES = {
    "lstm": (nn.LSTM(128, 256, 6, batch_first=True), 10, 64, {}),
    "lstm in both directions": (nn.LSTM(100, 200, 3, bidirectional=True), 7, 33, {}),
    "lstm, one layer after another": (nn.LSTM(64, 96, 4), 5, 40, {"layers": 1}),
    "lstm, a wide batch": (nn.LSTM(32, 48, 2), 70, 12, {}),
    "lstm of 512 threads": (nn.LSTM(128, 256, 6), 10, 64, {"threads": 512}),
    "gru": (nn.GRU(128, 256, 6), 10, 64, {}),
    "gru in both directions": (nn.GRU(128, 256, 2, bidirectional=True), 10, 50, {}),
    "gru of halves": (nn.GRU(128, 256, 3).half(), 9, 50, {}),
    "lstm of bfloat16": (nn.LSTM(128, 256, 3).bfloat16(), 9, 50, {}),
    "tanh": (nn.RNN(50, 77, 2), 3, 30, {}),
    "relu, no biases": (nn.RNN(50, 77, 2, nonlinearity="relu", bias=False), 3, 30, {}),
    "one step": (nn.GRU(16, 24, 3), 2, 1, {}),
}


def program_of(module: nn.Module, args: tuple[torch.Tensor, ...], setting: dict[str, int]) -> Any:
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import fusion, moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    plan = plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CUDA)
    (group,) = plan.groups
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group.name))
    assert plan.groups[0].schedule == "cuda_recurrent"
    return generator.generate(fusion.with_settings(plan, group.name, plan.groups[0].settings.changed(setting)))


@pytest.mark.parametrize("name", CASES)
def test_a_network_is_what_it_is_in_float64_and_the_same_in_each_call(name: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    network, batch, steps, setting = CASES[name]
    device, dtype = torch.device("cuda", 0), next(network.parameters()).dtype
    cells = network.num_layers * (1 + network.bidirectional)
    sizes = (batch, steps) if network.batch_first else (steps, batch)
    states = [(cells, batch, network.hidden_size)] * (1 + isinstance(network, nn.LSTM))
    args = tuple(torch.randn(shape).to(dtype) for shape in ((*sizes, network.input_size), *states))
    program = program_of(Recurrent(network), args, setting)
    with torch.no_grad():
        truth = Recurrent(copy.deepcopy(network).double())(*(each.double() for each in args))
    parameters = {key: each.detach().to(device) for key, each in Recurrent(network).named_parameters()}
    sources = Sources([each.to(device) for each in args], parameters, {})
    call = CudaExecutor().load(program, cubin_of(program), device).bind(sources)
    results = [call() for _ in range(5)]
    torch.cuda.synchronize()
    bound = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    for outputs in results:
        for output, first, wanted in zip(outputs, results[0], truth, strict=True):
            assert torch.equal(output, first)
            assert float((output.double().cpu() - wanted).abs().max()) < bound


class Steps(nn.Module):
    """A plain network as a loop, with a layer behind each step: KernelBench's 3/34 in small."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(300 + 70, 70), nn.Linear(70, 30)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What each step gives, and the last state."""
        outputs = []
        for t in range(x.shape[0]):
            hidden = torch.tanh(self.inner(torch.cat((x[t], hidden), dim=1)))
            outputs.append(self.outer(hidden))
        return torch.stack(outputs), hidden


@pytest.mark.parametrize("choice", ["", "beside_products"])
def test_a_loop_of_python_is_one_kernel_whose_weights_are_columns(choice: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    module, args = Steps(), (torch.randn(50, 8, 300), torch.randn(8, 70))
    plan = plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice=choice))
    assert "cuda_recurrent" in {group.schedule for group in plan.groups}
    program, device = generator.generate(plan), torch.device("cuda", 0)
    parameters = {key: each.detach().to(device) for key, each in module.named_parameters()}
    call = CudaExecutor().load(program, cubin_of(program), device)
    bound = call.bind(Sources([each.to(device) for each in args], parameters, {}))
    results = [bound() for _ in range(5)]
    torch.cuda.synchronize()
    with torch.no_grad():
        truth = copy.deepcopy(module).double()(*(each.double() for each in args))
    for outputs in results:
        for output, wanted in zip(outputs, truth, strict=True):
            assert float((output.double().cpu() - wanted).abs().max()) < 5e-6


@pytest.mark.parametrize("form", [*forms.OTHERS, *list(forms.LSTM)[:8], *list(forms.GRU)[:4]])
def test_cells_that_are_written_by_hand_are_one_kernel(form: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    steps = {**forms.LSTM, **forms.GRU, **forms.OTHERS}[form]
    module, args = forms.Gates(steps, 100, 200), forms.args(40, 7, 100, 200, torch.float32)
    plan = plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*"))
    assert {"cuda_recurrent", "cuda_loop"} & {group.schedule for group in plan.groups}
    program, device = generator.generate(plan), torch.device("cuda", 0)
    parameters = {key: each.detach().to(device) for key, each in module.named_parameters()}
    call = CudaExecutor().load(program, cubin_of(program), device)
    bound = call.bind(Sources([each.to(device) for each in args], parameters, {}))
    results = [bound() for _ in range(5)]
    torch.cuda.synchronize()
    with torch.no_grad():
        truth = copy.deepcopy(module).double()(*(each.double() for each in args))
    truth = [truth] if isinstance(truth, torch.Tensor) else torch.utils._pytree.tree_leaves(truth)
    for outputs in results:
        for output, first, wanted in zip(outputs, results[0], truth, strict=True):
            assert torch.equal(output, first)
            assert float((output.double().cpu() - wanted).abs().max()) < 2e-5
