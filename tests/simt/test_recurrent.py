"""Recurrent networks in one kernel, executed here: values as PyTorch's in float64, no race, words zero again."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from simulated import program_of

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.recurrences.recurrent import CudaRecurrent, RecurrentSettings
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.calls.recurrence import Recurrence, is_call
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.rewrite import rewritten
from agent_synthesis.rewrite.loops.unrolled import replacements
from agent_synthesis.testing import Recurrent
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import task_pb2

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]  # each test compiles and runs all


@dataclass(frozen=True)
class Case:
    """A network, the batch and steps that it is run on, and how its kernel is set."""

    name: str
    network: torch.nn.RNNBase
    steps: int
    batch: int
    layers_at_once: int
    sm_count: int = 6
    dtype: torch.dtype = torch.float32
    seed: int = 1

    def inputs(self) -> tuple[torch.Tensor, ...]:
        network = self.network
        generator = torch.Generator().manual_seed(7)
        cells = network.num_layers * (1 + network.bidirectional)
        sizes = (self.batch, self.steps) if network.batch_first else (self.steps, self.batch)
        shapes = [(*sizes, network.input_size)] + [(cells, self.batch, network.hidden_size)] * (1 + _is_lstm(network))
        return tuple(torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)


def _is_lstm(network: torch.nn.RNNBase) -> bool:
    return isinstance(network, torch.nn.LSTM)


def _made(kind: type[torch.nn.RNNBase], *sizes: int, **options: Any) -> torch.nn.RNNBase:
    torch.manual_seed(3)
    return kind(*sizes, **options)


LSTM, GRU, RNN = torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN
CASES = [
    Case("lstm", _made(LSTM, 7, 10), 5, 3, 1),
    Case("lstm layers at once", _made(LSTM, 7, 10, 3), 6, 3, 3),
    Case("lstm layers after each other", _made(LSTM, 5, 6, 3, batch_first=True), 4, 2, 1, sm_count=3),
    Case("lstm more layers than at once", _made(LSTM, 5, 6, 5), 5, 2, 2, sm_count=4),
    Case("lstm both directions", _made(LSTM, 7, 9, 2, bidirectional=True), 4, 3, 1, sm_count=4),
    Case("lstm no biases", _made(LSTM, 130, 5, bias=False), 3, 9, 1),
    Case("lstm one step", _made(LSTM, 4, 5, 3), 1, 2, 1, sm_count=2),
    Case("gru", _made(GRU, 7, 10, 2), 5, 3, 2),
    Case("gru both directions", _made(GRU, 7, 9, 2, bidirectional=True, batch_first=True), 4, 3, 1, sm_count=4),
    Case("gru wide", _made(GRU, 140, 133), 3, 2, 1, sm_count=12),
    Case("gru many rows", _made(GRU, 3, 4), 3, 40, 1, sm_count=1),
    Case("tanh", _made(RNN, 7, 11, 2), 5, 3, 2, sm_count=5),
    Case("relu", _made(RNN, 7, 11, 2, nonlinearity="relu"), 5, 3, 1),
    Case("lstm of halves", _made(LSTM, 7, 10, 2).half(), 5, 3, 2, dtype=torch.float16),
    Case("gru of bfloat16", _made(GRU, 7, 10, 2).bfloat16(), 5, 3, 2, dtype=torch.bfloat16),
]


_ORDERED = ("lstm layers at once", "lstm more layers than at once", "lstm both directions", "gru wide", "gru many rows")
"""What orders threads is the same in all others: they differ in gates, types and sizes."""


def nest_of(case: Case) -> tuple[Recurrence, dict[str, torch.Tensor]]:
    """The case's nest, of a name of its own, and the values of what it reads."""
    inputs = case.inputs()
    index = GraphIndex(capture(Recurrent(case.network), inputs))
    (node,) = (name for name in index.nodes if not index.is_view(name))
    nest = lower(index, (node,), tuple(index.results(node)))
    assert isinstance(nest, Recurrence), nest
    parameters = dict(case.network.named_parameters())
    given = iter(inputs)
    values = {
        name: parameters.get(name.removeprefix("p_network_"), torch.empty(0)) if name.startswith("p_") else next(given)
        for name in index.sources
    }
    return replace(nest, name=f"ws_{case.name.replace(' ', '_')}"), values


def expected(case: Case) -> list[torch.Tensor]:
    """PyTorch's results in float64."""
    network, inputs = case.network, [each.double() for each in case.inputs()]
    with torch.no_grad():
        return list(Recurrent(copy.deepcopy(network).double())(*inputs))


@pytest.mark.parametrize("sanitizer", [Sanitizer.ADDRESS, Sanitizer.THREAD])
def test_networks_come_out_as_in_float64(simulator: Simulator, sanitizer: Sanitizer) -> None:
    simulations, nests = [], []
    cases = [each for each in CASES if sanitizer is Sanitizer.ADDRESS or each.name in _ORDERED]
    for case in cases:
        nest, values = nest_of(case)
        card = replace(H200, sm_count=case.sm_count)
        emission = CudaRecurrent(card).emit(nest, RecurrentSettings(case.layers_at_once, 256))
        program = program_of(nest, emission)
        sources = {name: bytes(each.detach().contiguous().view(torch.uint8).numpy()) for name, each in values.items()}
        simulations.append(Simulation(program, sources, case.seed))
        nests.append((nest, emission))
    executions = simulator.execute_all(simulations, sanitizer)
    for case, (nest, emission), execution in zip(cases, nests, executions, strict=True):
        assert not execution.findings, (case.name, execution.findings)
        words = emission.workspaces[-1]
        assert words.zero_between_calls
        assert not any(execution.outputs[words.name]), case.name
        made = [buffer.name for buffer in nest.buffers if buffer.written]
        for name, truth in zip(made, expected(case), strict=True):
            tensor = torch.frombuffer(bytearray(execution.outputs[name]), dtype=case.dtype).double()
            shape = truth.transpose(0, 1).shape if case.network.batch_first and name == made[0] else truth.shape
            got = tensor.reshape(shape)
            got = got.transpose(0, 1) if case.network.batch_first and name == made[0] else got
            bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.dtype]
            assert float((got - truth).abs().max()) < bound, (case.name, name)


class Loop(torch.nn.Module):
    """A plain network as a loop, whose weights are columns of one layer's, or lie turned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.both, self.turned = torch.nn.Linear(11 + 7, 11), torch.nn.Linear(11, 7, bias=False)
        self.bare = torch.nn.Linear(11, 11, bias=False)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The states of one loop, and of a second that reads them the other way round."""
        first, second, other = [], [], hidden
        for t in range(x.shape[1]):
            hidden = torch.tanh(self.both(torch.cat((hidden, x[:, t]), dim=1)))
            first.append(hidden)
        for t in reversed(range(x.shape[1])):
            other = torch.relu(x[:, t] @ self.turned.weight + self.bare(other))
            second.append(other)
        return torch.stack(first), torch.stack(second)


def test_weights_are_read_where_they_lie(simulator: Simulator) -> None:
    module, args = Loop(), (torch.randn(3, 5, 7), torch.randn(3, 11))
    plan = plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CUDA)
    while found := replacements(plan.index):
        plan = rewritten(plan, next(iter(found)), "unrolled")
    index, held = plan.index, dict(module.named_parameters())
    values = {
        source.name: held[source.qualified_name].detach() if source.qualified_name else args[source.input_index]
        for source in index.graph.sources
    }
    simulations, nests = [], []
    for node in index.graph.nodes:
        if not is_call(node):
            (made,) = aten.call(node.target, node.args, node.kwargs, values.__getitem__, torch.device("cpu"))
            assert made is not None
            values[node.name] = made
            continue
        nest = lower(index, (node.name,), (node.results[0].name,))
        assert isinstance(nest, Recurrence), nest
        nest = replace(nest, name=f"ws_{node.name}")
        emission = CudaRecurrent(replace(H200, sm_count=4)).emit(nest, RecurrentSettings(1, 256))
        sources = {}
        for buffer in nest.buffers:
            if not buffer.written:
                lying = values[buffer.name]
                flat = torch.as_strided(lying, (buffer.element_count,), (1,), lying.storage_offset()).clone()
                sources[buffer.name] = bytes(flat.view(torch.uint8).numpy())
        simulations.append(Simulation(program_of(nest, emission), sources, seed=1))
        nests.append(nest)
        values[node.results[0].name] = torch.empty(0)
    assert {stride for nest in nests for cell in nest.network.weights for stride in cell[0].strides} == {18, 11, 1}
    executions = simulator.execute_all(simulations, Sanitizer.ADDRESS)
    for nest, execution, truth in zip(nests, executions, module.double()(*(x.double() for x in args)), strict=True):
        assert not execution.findings
        (written,) = (buffer.name for buffer in nest.buffers if buffer.written)
        got = torch.frombuffer(bytearray(execution.outputs[written]), dtype=torch.float32).double()
        assert float((got.reshape(truth.shape) - truth.detach()).abs().max()) < 2e-6
