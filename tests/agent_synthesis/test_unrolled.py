"""Loops that capture unrolled become one recurrent network: what is found, that values stay, and what is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import rewritten
from agent_synthesis.rewrite.loops.unrolled import replacements
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

Steps = Callable[..., Any]
CUDA, CPU = task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU


class Loop(nn.Module):
    """Layers for a state of `hidden` units and inputs of `inputs` columns, and what is done with them."""

    def __init__(self, steps: Steps, inputs: int = 5, hidden: int = 4, outputs: int = 6) -> None:
        super().__init__()
        self.steps, self.hidden = steps, hidden
        self.both, self.swapped = nn.Linear(inputs + hidden, hidden), nn.Linear(hidden + inputs, hidden, bias=False)
        self.of_input, self.of_state = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.bare = nn.Linear(hidden, hidden, bias=False)
        self.out, self.norm = nn.Linear(hidden, outputs), nn.LayerNorm(hidden)
        self.rnn, self.relu = nn.RNNCell(inputs, hidden), nn.RNNCell(inputs, hidden, bias=False, nonlinearity="relu")
        self.gru, self.lstm = nn.GRUCell(inputs, hidden), nn.LSTMCell(inputs, hidden)
        self.second = nn.GRUCell(hidden, hidden)
        self.table = nn.Embedding(9, inputs)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.steps(self, *args)


def planned(module: Loop, *args: torch.Tensor, target: task_pb2.Target.ValueType = CPU) -> Plan:
    return plan_zero(GraphIndex(capture(module, args)), target)


def rolled(plan: Plan) -> Plan:
    """The plan with every loop that is found as a call."""
    while found := replacements(plan.index):
        plan = rewritten(plan, next(iter(found)), "unrolled")
    return plan


def operations(plan: Plan) -> list[str]:
    return [plan.index.nodes[group.nodes[-1]].target.split(".")[1] for group in plan.groups]


def results(plan: Plan, module: nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    held, sources = dict(module.named_parameters()), {}
    for source in plan.index.graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            sources[source.name] = args[source.input_index]
        elif source.origin != graph_pb2.ORIGIN_CONSTANT:
            sources[source.name] = held[source.qualified_name].detach()
    return interpreter.run_plan(plan, sources)


def assert_keeps_values(plan: Plan, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        expected = module(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    for got, truth in zip(results(plan, module, args), expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-10)
        assert got.stride() == truth.stride()
    known = {source.name for source in plan.index.graph.sources}
    for node in plan.index.graph.nodes:  # in order of execution
        assert known.issuperset(plan.index.reads(node.name))
        known.update(plan.index.results(node.name))


# ---- forms; x is [steps, rows, inputs], h is [rows, hidden]


def _both(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs = []
    for t in range(x.shape[0]):
        h = torch.tanh(m.both(torch.cat((x[t], h), dim=1)))
        outputs.append(m.out(h))
    return torch.stack(outputs, dim=0)


def _state_first(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs, x = [], x.transpose(0, 1).contiguous()
    for t in range(x.shape[1]):
        h = torch.relu(m.swapped(torch.cat([h, x[:, t, :]], dim=-1)))
        outputs.append(m.out(h))
    return torch.stack(outputs, dim=1), h


def _two_layers(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for step in x.unbind():
        h = torch.tanh(m.of_input(step) + m.of_state(h))
    return m.out(h)


def _one_bias(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs, h = [], h * 0
    for step in x.chunk(x.shape[0], 0):
        h = torch.tanh(m.bare(h) + m.of_input(step.squeeze(0)))
        outputs.append(h)
    return torch.cat(outputs, 1)


def _projected_before(m: Any, x: torch.Tensor, _: torch.Tensor) -> Any:
    projected = m.of_input(x)
    h, outputs = torch.zeros(x.shape[1], m.hidden, dtype=x.dtype, device=x.device), []
    for t in range(x.shape[0]):
        h = torch.tanh(projected[t] + m.of_state(h))
        outputs.append(torch.relu(m.norm(h)) * 2)
    return torch.cat(outputs)


def _projected_flat(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    projected = m.of_input(x.reshape(-1, x.shape[2])).view(x.shape[0], -1, m.hidden)
    for t in range(x.shape[0]):
        h = torch.tanh(m.bare(h) + projected[t])
    return h


def _products(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    weight = m.of_input.weight.t()
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] @ weight + h.mm(m.bare.weight) + m.of_input.bias + m.of_state.bias + m.norm.bias)
    return h


def _backwards(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs = []
    for t in reversed(range(x.shape[0])):
        h = torch.tanh(m.of_state(h) + m.of_input(x[t]))
        outputs.insert(0, h)
    return torch.stack(outputs)


def _some_steps(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs = []
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
        outputs.append(m.out(h))
    return torch.stack(outputs[1::2]), outputs[2], torch.stack([outputs[3], outputs[0], outputs[1]])


def _parts_written(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    made = torch.empty(x.shape[1], x.shape[0], 6, dtype=x.dtype, device=x.device)
    for t in range(x.shape[0]):
        h = m.relu(x[t], h)
        made[:, t] = m.out(h)
    return made, h


def _gru(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs = []
    for t in range(x.shape[0]):
        h = m.gru(m.norm(x[t][:, :4]) @ m.both.weight[:4, :5], h)
        outputs.append(h)
    return torch.stack(outputs, dim=2), h, outputs[1]


def _lstm(m: Any, x: torch.Tensor, _: torch.Tensor) -> Any:
    state, outputs = None, []
    for t in range(x.shape[0]):
        state = m.lstm(x[t], state)
        outputs.append(m.out(state[0]).softmax(1).unsqueeze(1))
    return torch.cat(outputs, dim=1), *state


def _layers(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    other, outputs = h, []
    for t in range(x.shape[0]):
        h = m.gru(x[t], h)
        other = m.second(h, other)
        outputs.append(m.out(other))
    return torch.stack(outputs), h, other


def _tokens(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    tokens = (x[:, :, 0] * 4).long().clamp(0, 8).t()
    for t in range(tokens.shape[1]):
        h = m.rnn(m.table(tokens[:, t]), h)
    return h


def _with_context(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    total, context = 0, x.mean(0)
    for t in range(x.shape[0]):
        h = m.gru(x[t] * 2 + context, h)
        total = total + m.out(h)  # each step's is read
    return total


def _same_input(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for _ in range(x.shape[0]):
        h = torch.tanh(m.of_input(x[0]) + m.of_state(h))
    return h


def _an_input_twice(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in (0, 1, 1, 2, 3):
        h = m.rnn(x[t], h)
    return h


def _written_over(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs = []
    for t in range(x.shape[0]):
        total = m.of_input(x[t])
        total += m.of_state(h)
        h = nn.functional.relu(total, inplace=True)
        outputs.append(m.out(h).relu_())
    return torch.stack(outputs)


def _evaluated_dropout(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = nn.functional.dropout(torch.tanh(m.of_input(x[t]) + m.of_state(h)), 0.5, m.training)
    return h


def _scaled(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = torch.tanh(m.of_input(x[t]).add(m.of_state(h), alpha=2))
    return h


def _stack_written_over(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    outputs = []
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
        outputs.append(h)
    return torch.stack(outputs).relu_(), outputs[1] * 2, outputs[2]


HOLDS: dict[str, tuple[Steps, list[str]]] = {
    "both in one layer": (_both, ["zeros", "rnn_tanh", "linear"]),
    "the state first, rows first": (_state_first, ["contiguous", "rnn_relu", "linear", "clone"]),
    "two layers": (_two_layers, ["rnn_tanh", "linear"]),
    "one bias": (_one_bias, ["mul", "zeros", "rnn_tanh", "clone"]),
    "projected before": (_projected_before, ["zeros", "rnn_tanh", "layer_norm", "relu", "mul"]),
    "projected flat": (_projected_flat, ["zeros", "rnn_tanh"]),
    "products": (_products, ["add", "rnn_tanh"]),
    "backwards": (_backwards, ["flip", "rnn_tanh", "flip"]),
    "some steps": (_some_steps, ["rnn_tanh", "linear", "stack", "linear", "linear"]),
    "parts written": (_parts_written, ["rnn_relu", "linear", "clone"]),
    "gru": (_gru, ["layer_norm", "matmul", "gru", "clone", "clone"]),
    "lstm": (_lstm, ["zeros", "lstm", "linear", "softmax", "clone"]),
    "layers": (_layers, ["gru", "gru", "linear"]),
    "written over": (_written_over, ["rnn_relu", "linear", "relu"]),
    "dropout in evaluation": (_evaluated_dropout, ["rnn_tanh"]),
    "a stack that is written over": (_stack_written_over, ["rnn_tanh", "clone", "stack", "relu_", "mul"]),
    "tokens": (_tokens, ["mul", "to", "clamp", "embedding", "rnn_tanh"]),
    "with a context": (_with_context, ["mean", "mul", "add", "gru", *["linear", "add"] * 6]),
    "the same input": (_same_input, ["rnn_tanh"]),
    "an input twice": (_an_input_twice, ["stack", "rnn_tanh"]),
    "a product that is scaled": (_scaled, ["mul", "mul", "rnn_tanh"]),
}


@pytest.mark.parametrize("form", HOLDS)
def test_a_loop_is_one_recurrent_call_with_the_same_values(form: str) -> None:
    steps, expected = HOLDS[form]
    module = Loop(steps).double().eval()
    args = (torch.randn(6, 3, 5).double(), torch.randn(3, 4).double())
    plan = rolled(planned(module, *args))
    assert operations(plan) == expected
    assert set(plan.rewrites) == {"unrolled"}
    assert_keeps_values(plan, module, args)


@pytest.mark.parametrize("seed", range(24))
def test_values_stay_at_any_size(seed: int) -> None:
    draw = random.Random(seed)
    steps, rows, inputs, hidden = draw.randint(4, 12), draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 9)
    form = draw.choice([_both, _state_first, _two_layers, _one_bias, _projected_before, _backwards, _some_steps])
    form = draw.choice([form, _projected_flat, _parts_written, _lstm, _with_context, _same_input])
    module = Loop(form, inputs, hidden).double().eval()
    args = (torch.randn(steps, rows, inputs).double(), torch.randn(rows, hidden).double())
    plan = planned(module, *args)
    after = rolled(plan)
    assert after.rewrites == ("unrolled",)
    assert len(after.groups) < len(plan.groups)
    assert_keeps_values(after, module, args)


# ---- what is left alone


def _dropped(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = torch.dropout(m.rnn(x[t], h), 0.5, True)
    return h


def _fed_back(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    step = x[0]
    for _ in range(x.shape[0]):
        h = m.rnn(step, h)
        step = m.out(h)[:, :5]
    return h


def _attending(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = torch.tanh(m.of_input(x[t] * h.mean(1, keepdim=True)) + m.of_state(h))
    return h


def _by_memory(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    told = torch.zeros(x.shape[1], 5, dtype=x.dtype)
    for t in range(x.shape[0]):
        h = torch.tanh(m.of_input(x[t] + told.sum()) + m.of_state(h))
        told[:, :4].copy_(h)
    return h


def _weights_that_differ(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = torch.tanh(m.of_input(x[t]) + (m.bare if t == 3 else m.of_state)(h))
    return h


def _gated(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = h + torch.sigmoid(m.of_input(x[t])) * torch.tanh(m.of_state(h))
    return h


def _added_as_it_is(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = torch.tanh(x[t][:, :4] + m.of_state(h))
    return h


def _without_input(m: Any, _: torch.Tensor, h: torch.Tensor) -> Any:
    for _step in range(6):
        h = torch.tanh(m.of_state(h))
    return h


def _written_between(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    x = x.clone()
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
        x[t].mul_(2)
    return h, x


def _read_between(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    total, factor = 0, x[0, :, :4].exp()
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
        total = total + h * factor
        factor.mul_(2)
    return total


def _state_written_over(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
    return h.mul_(2)


def _input_written_over(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    x = x * 2
    for t in range(x.shape[0]):
        h = m.rnn(x[t], h)
    return h, x.relu_()


def _memories(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    state, kept = (h, h), []
    for t in range(x.shape[0]):
        state = m.lstm(x[t], state)
        kept.append(state[1])
    return torch.stack(kept)


def _mixed_rows(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(x.shape[0]):
        h = torch.tanh(m.of_input(x[t][:1]) + m.of_state(h))
    return h


def _three_steps(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    for t in range(3):
        h = m.rnn(x[t], h)
    return h


REFUSED: dict[str, Steps] = {
    "dropout between": _dropped,
    "an output is the next input": _fed_back,
    "an input depends on the state": _attending,
    "an input depends on the state by memory": _by_memory,
    "weights that differ in one step": _weights_that_differ,
    "gates of its own": _gated,
    "an input that no layer made": _added_as_it_is,
    "no input": _without_input,
    "an input that is written": _written_between,
    "the last state is written over": _state_written_over,
    "inputs that are written over": _input_written_over,
    "what follows a step reads what is written": _read_between,
    "an LSTM's memories are read": _memories,
    "an input of one row for all": _mixed_rows,
    "few steps": _three_steps,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_recurrent_call_is_left_alone(why: str) -> None:
    module = Loop(REFUSED[why]).double().eval()
    plan = planned(module, torch.randn(6, 3, 5).double(), torch.randn(3, 4).double())
    assert not replacements(plan.index)
    assert not [each for each in moves.legal(plan) if each.move.choice == "unrolled"]


def test_two_loops_with_weights_of_their_own_are_two_calls() -> None:
    def halves(m: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        for t in range(x.shape[0]):
            h = (m.rnn if t < 5 else m.relu)(x[t], h)
        return h

    module = Loop(halves).double().eval()
    args = (torch.randn(10, 3, 5).double(), torch.randn(3, 4).double())
    plan = rolled(planned(module, *args))
    assert operations(plan) == ["rnn_tanh", "rnn_relu"]
    assert_keeps_values(plan, module, args)


def test_a_step_that_an_other_kernel_has_is_not_taken_from_it() -> None:
    plan = planned(Loop(_both).eval(), torch.randn(6, 3, 5), torch.randn(3, 4), target=CUDA)
    author = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="tanh_2")
    made = moves.apply(plan, author)
    assert not [each for each in moves.legal(made) if each.move.choice == "unrolled"]
