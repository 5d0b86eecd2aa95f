"""Loops of random parts: how inputs are taken, which cell, what is done to each state and how results are joined."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.rewrite import rewritten
from agent_synthesis.rewrite.loops.unrolled import replacements
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2, task_pb2

Tensor = torch.Tensor
SIZES = range(1, 7)


class Parts(nn.Module):
    """Layers of a width for inputs and for states, and the parts that a seed draws."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps, self.rows, self.inputs, self.units = draw.randint(4, 7), *(draw.choice(SIZES) for _ in range(3))
        wide = self.inputs + self.units
        self.both, self.between = nn.Linear(wide, self.units), nn.Linear(wide + self.inputs, self.units)
        self.of_input, self.of_state = nn.Linear(self.inputs, self.units), nn.Linear(self.units, self.units)
        self.rnn, self.gru = nn.RNNCell(self.inputs, self.units), nn.GRUCell(self.inputs, self.units)
        self.lstm, self.norm = nn.LSTMCell(self.inputs, self.units), nn.LayerNorm(self.units)
        self.take, self.cell = draw.choice([*TAKEN.values()]), draw.choice([*CELLS.values()])
        self.ends = draw.choices([*DONE.values()], k=2)
        self.joins = draw.sample([*JOINED.values()], draw.randint(1, 4))

    def args(self) -> tuple[Tensor, ...]:
        return tuple(
            torch.randn(size).double() for size in ((self.steps, self.rows, self.inputs), (self.rows, self.units))
        )

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        taken, memory = self.take(x), hidden * 0.5
        states, ends = [], []
        for step in taken:
            hidden, memory = self.cell(self, step, hidden, memory)
            states.append(hidden)
            end = hidden
            for each in self.ends:
                end = each(self, end, step)
            ends.append(end)
        return tuple(join(ends, states) for join in self.joins)


TAKEN: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "index": lambda x: [x[t] for t in range(len(x))],
    "column": lambda x: [x.transpose(0, 1)[:, t, :] for t in range(len(x))],
    "last dimension": lambda x: [x.permute(1, 2, 0)[:, :, t] for t in range(len(x))],
    "unbind": lambda x: list(x.transpose(0, 1).contiguous().unbind(1)),
    "chunk": lambda x: [part.squeeze(0) for part in x.chunk(len(x))],
    "slice": lambda x: [x[t : t + 1].squeeze(0) for t in range(len(x))],
    "backwards": lambda x: [x[-1 - t] for t in range(len(x))],
    "computed": lambda x: [F.relu(x[t] * 2 + x.mean(0)) for t in range(len(x))],
    "the same": lambda x: [x[1]] * len(x),
    "mixed": lambda x: [x[t * t % len(x)] for t in range(len(x))],
}


def _written_over(m: Parts, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    total = m.of_input(x)
    total += m.of_state(h)
    return F.relu(total, inplace=True), c


CELLS: dict[str, Callable[[Parts, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "input first": lambda m, x, h, c: (torch.tanh(m.both(torch.cat((x, h), 1))), c),
    "state first": lambda m, x, h, c: (torch.relu(m.both(torch.cat((h, x), -1))), c),
    "state between": lambda m, x, h, c: (torch.tanh(m.between(torch.cat((x, h, x * 2), 1))), c),
    "two layers": lambda m, x, h, c: (torch.tanh(m.of_state(h) + m.of_input(x)), c),
    "products": lambda m, x, h, c: (torch.tanh(x @ m.of_input.weight.t() + h.mm(m.of_state.weight) + m.rnn.bias_hh), c),
    "written over": _written_over,
    "rnn": lambda m, x, h, c: (m.rnn(x, h), c),
    "gru": lambda m, x, h, c: (m.gru(x, h), c),
    "lstm": lambda m, x, h, c: m.lstm(x, (h, c)),
}
DONE: dict[str, Callable[[Parts, Tensor, Tensor], Tensor]] = {
    "nothing": lambda _m, h, _x: h,
    "a layer": lambda m, h, _x: F.linear(h, m.of_state.weight[:, : h.shape[1]]),
    "a norm": lambda _m, h, _x: F.layer_norm(h, [h.shape[1]]).softmax(1),
    "the input": lambda _m, h, x: h + x.sum(1, keepdim=True),
    "beside the input": lambda m, h, x: torch.cat((h, x), 1)[:, : m.units],
    "written over": lambda _m, h, _x: (h * 1.5).relu_(),
    "dropout": lambda m, h, _x: F.dropout(h, 0.3, m.training).unsqueeze(1).squeeze(1),
    "a sum": lambda _m, h, _x: h.sum(1, keepdim=True),
}


def _filled(ends: list[Tensor], dim: int) -> Tensor:
    shape = [*ends[0].shape[:dim], len(ends), *ends[0].shape[dim:]]
    made = torch.empty(shape, dtype=ends[0].dtype)
    for t, end in enumerate(ends):
        made.select(dim, t).copy_(end)
    return made * 2 if dim else made


JOINED: dict[str, Callable[[list[Tensor], list[Tensor]], Tensor]] = {
    "stack": lambda ends, _states: torch.stack(ends),
    "stack of rows": lambda ends, _states: torch.stack(ends, 1),
    "stack behind": lambda ends, _states: torch.stack(ends, -1),
    "joined": lambda ends, _states: torch.cat(ends),
    "joined columns": lambda ends, _states: torch.cat(ends, 1),
    "some": lambda ends, _states: torch.stack(ends[1::2]),
    "turned round": lambda ends, _states: torch.stack(ends[::-1]),
    "filled": lambda ends, _states: _filled(ends, 0),
    "filled rows": lambda ends, _states: _filled(ends, 1),
    "written over": lambda ends, _states: torch.stack(ends).relu_(),
    "a sum": lambda ends, _states: sum(ends[1:], ends[0]),
    "the last": lambda _ends, states: states[-1],
    "an early one": lambda _ends, states: states[1],
    "states": lambda _ends, states: torch.stack(states),
}


def _results(module: Parts, args: tuple[Tensor, ...], plan: Any) -> list[Tensor]:
    held, sources = dict(module.named_parameters()), {}
    for source in plan.index.graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            sources[source.name] = args[source.input_index].clone()
        elif source.origin != graph_pb2.ORIGIN_CONSTANT:
            sources[source.name] = held[source.qualified_name].detach().clone()
    return interpreter.run_plan(plan, sources)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_loop_of_any_parts_is_a_recurrent_call_with_the_same_values(first: int) -> None:
    for seed in range(first, first + 10):
        torch.manual_seed(seed)
        module = Parts(seed).double().eval()
        args = module.args()
        plan = plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CPU)
        assert replacements(plan.index), seed
        while found := replacements(plan.index):
            plan = rewritten(plan, next(iter(found)), "unrolled")
        with torch.no_grad():
            expected = module(*args)
        made = _results(module, args, plan)
        for got, truth in zip(made, expected, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-9, atol=1e-9, msg=str(seed))
            assert got.stride() == truth.stride() or got.numel() == 1, seed
        memory, own = ({each.untyped_storage().data_ptr() for each in results} for results in (made, expected))
        assert len(memory) == len(own), seed
