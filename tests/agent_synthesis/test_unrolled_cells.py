"""Cells with gates written by hand: each form is one recurrent call with the same values; what looks alike is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import recurrent_forms as forms
import torch
from torch import Tensor

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import rewritten
from agent_synthesis.rewrite.loops.unrolled import replacements
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2, task_pb2

Steps = forms.Steps
hardsigmoid, sigmoid, tanh = torch.nn.functional.hardsigmoid, torch.sigmoid, torch.tanh
KINDS: dict[str, tuple[Steps, str]] = {
    f"{kind}: {name}": (steps, f"aten.{call}.input")
    for kind, call, some in (
        ("lstm", "lstm", forms.LSTM),
        ("gru", "gru", forms.GRU),
        ("plain", "rnn_tanh", forms.PLAIN),
    )
    for name, steps in some.items()
}


def planned(module: forms.Gates, args: tuple[Tensor, ...]) -> Plan:
    return plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CPU)


def rolled(plan: Plan) -> Plan:
    while found := replacements(plan.index):
        plan = rewritten(plan, next(iter(found)), "unrolled")
    return plan


def targets(plan: Plan) -> list[str]:
    return [node.target for node in plan.index.graph.nodes]


def assert_keeps_values(plan: Plan, module: forms.Gates, args: tuple[Tensor, ...]) -> None:
    held, sources = dict(module.named_parameters()), {}
    for source in plan.index.graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            sources[source.name] = args[source.input_index]
        elif source.origin != graph_pb2.ORIGIN_CONSTANT:
            sources[source.name] = held[source.qualified_name].detach()
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(*args))
    for got, truth in zip(interpreter.run_plan(plan, sources), expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-10)
        assert got.stride() == truth.stride()


@pytest.mark.parametrize("form", KINDS)
def test_a_cell_written_by_hand_is_a_recurrent_call_with_the_same_values(form: str) -> None:
    steps, target = KINDS[form]
    sizes = random.Random(form)
    for _ in range(2):
        inputs, hidden, count, rows = (sizes.randint(*ends) for ends in ((1, 7), (1, 6), (5, 9), (1, 4)))
        module, args = forms.Gates(steps, inputs, hidden).double().eval(), forms.args(count, rows, inputs, hidden)
        plan = rolled(planned(module, args))
        made = targets(plan)
        assert target in made
        assert not {"aten.sigmoid.default", "aten.tanh.default", "aten.exp.default"} & {*made}
        assert_keeps_values(plan, module, args)


def _first_step_of_its_own(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    """No state before the first step."""
    outputs = []
    for t in range(x.shape[0]):
        gates = m.x4(x[t]) + m.h4(h) if t else m.x4(x[t])
        i, f, g, o = gates.chunk(4, 1)
        c = sigmoid(f) * (c if t else torch.zeros_like(c)) + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        outputs.append(h)
    return torch.stack(outputs), c


def test_a_loop_begins_behind_a_first_step_that_differs() -> None:
    module, args = forms.Gates(_first_step_of_its_own).double().eval(), forms.args()
    plan = rolled(planned(module, args))
    assert targets(plan).count("aten.lstm.input") == 1
    assert targets(plan).count("aten.tanh.default") == 2
    assert_keeps_values(plan, module, args)


# ---- what only looks like one


class Step(NamedTuple):
    """What a step of an LSTM has: sums of its gates, its states, its number."""

    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    h: Tensor
    c: Tensor
    t: int

    def end(self, **changed: Tensor) -> tuple[Tensor, Tensor]:
        """The states that an LSTM makes of it, if some of it were otherwise."""
        return _end(*self._replace(**changed)[:4], changed.get("c", self.c))


def _lstm(step: Callable[[Step], tuple[Tensor, Tensor]]) -> Steps:
    """An LSTM but for what `step` makes of it."""

    def steps(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
        for t in range(x.shape[0]):
            h, c = step(Step(*(m.x4(x[t]) + m.h4(h)).chunk(4, 1), h, c, t))
        return h, c

    return steps


def _end(i: Tensor, f: Tensor, g: Tensor, o: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def _minus(s: Step) -> tuple[Tensor, Tensor]:
    c = sigmoid(s.f) * s.c - sigmoid(s.i) * torch.relu(s.g)
    return sigmoid(s.o) * tanh(c), c


Cell = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of a GRU: r, z, the input's part and the state's part of the third gate, the state."""


def _gru(step: Callable[[Cell], Tensor]) -> Steps:
    def steps(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
        for t in range(x.shape[0]):
            of_x, of_h = m.x3(x[t]).chunk(3, 1), m.h3(h).chunk(3, 1)
            r, z = sigmoid(of_x[0] + of_h[0]), sigmoid(of_x[1] + of_h[1])
            h = step((r, z, of_x[2], of_h[2], h))
        return h

    return steps


def _mixed(z: Tensor, made: Tensor, h: Tensor) -> Tensor:
    return (1 - z) * made + z * h


def _reset_before(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Any:
    for t in range(x.shape[0]):
        r, z = sigmoid(m.x2(x[t]) + m.h2(h)).chunk(2, 1)
        h = _mixed(z, tanh(m.xg(x[t]) + m.hg(r * h)), h)
    return h


def _other_weights_once(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        gates = m.x4(x[t]) + (m.bare4 if t == 3 else m.h4)(h)
        h, c = _end(*gates.chunk(4, 1), c)
    return h


def _weights_that_grow(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    weight = m.h4.weight
    for t in range(x.shape[0]):
        h, c = _end(*(m.x4(x[t]) + h @ weight.t()).chunk(4, 1), c)
        weight = weight * 0.5
    return h


def _input_of_state(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        h, c = _end(*(m.x4(x[t] * c.mean(1, keepdim=True)) + m.h4(h)).chunk(4, 1), c)
    return h


def _fed_back(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    step = x[0]
    for _ in range(x.shape[0]):
        h, c = _end(*m.both4(torch.cat((step, h), 1)).chunk(4, 1), c)
        step = torch.cat((h, c), 1)[:, : x.shape[2]]
    return h


def _two_ago(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    before = h
    for t in range(x.shape[0]):
        gates = (m.x4(x[t]) + m.h4(before)).chunk(4, 1)
        before = h
        h, c = _end(*gates, c)
    return h


def _memory_multiplied(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        h, c = _end(*(m.x4(x[t]) + m.h4(h) + m.bare4(c)).chunk(4, 1), c)
    return h


def _normed(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        h, c = _end(*m.norm4(m.x4(x[t]) + m.h4(h)).chunk(4, 1), c)
    return h


def _memories_read(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    kept = []
    for t in range(x.shape[0]):
        h, c = _end(*(m.x4(x[t]) + m.h4(h)).chunk(4, 1), c)
        kept.append(torch.tanh(c))
    return torch.stack(kept), h


def _dropped(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
    for t in range(x.shape[0]):
        h, c = _end(*(m.x4(x[t]) + m.h4(torch.dropout(h, 0.5, True))).chunk(4, 1), c)
    return h


NEAR: dict[str, Steps] = {
    "a minus, and no tanh": _lstm(_minus),
    "an output of the old memory": _lstm(lambda s: (sigmoid(s.o) * tanh(s.c), s.end()[1])),
    "no function of the memory": _lstm(lambda s: (sigmoid(s.o) * s.end()[1], s.end()[1])),
    "relu of the new": _lstm(lambda s: s.end(g=torch.relu(s.g))),
    "a sigmoid that is hard": _lstm(lambda s: (hardsigmoid(s.o) * tanh(s.end()[1]), s.end()[1])),
    "the hidden state is kept": _lstm(lambda s: s.end(c=s.h)),
    "a gate twice": _lstm(lambda s: s.end(g=s.g * sigmoid(s.i))),
    "a gate of the memory": _lstm(lambda s: s.end(i=s.i + 0.5 * s.c)),
    "a bias that changes": _lstm(lambda s: s.end(f=s.f + s.t)),
    "gates that change places": _lstm(lambda s: s.end(i=s.f, f=s.i) if s.t % 2 else s.end()),
    "a state that decays": _lstm(lambda s: (0.5 * s.end()[0], s.end()[1])),
    "a residual": _lstm(lambda s: (s.h + s.end()[0], s.end()[1])),
    "rows change places": _lstm(lambda s: s.end(c=s.c.flip(0))),
    "units change places": _lstm(lambda s: s.end(c=s.c.flip(1))),
    "a row's mean": _lstm(lambda s: s.end(c=s.c.mean(1, keepdim=True).expand(-1, 4))),
    "both gates open": _gru(lambda s: (1 + s[1]) * tanh(s[2] + s[0] * s[3]) + s[1] * s[4]),
    "two gates, one formula": _gru(lambda s: (1 - s[0]) * tanh(s[2] + s[0] * s[3]) + s[1] * s[4]),
    "no tanh": _gru(lambda s: _mixed(s[1], s[2] + s[0] * s[3], s[4])),
    "a reset of both": _gru(lambda s: _mixed(s[1], tanh(s[0] * (s[2] + s[3])), s[4])),
    "a reset twice": _gru(lambda s: _mixed(s[1], tanh(s[2] + s[0] * s[0] * s[3]), s[4])),
    "a product beside the reset": _gru(lambda s: _mixed(s[1], tanh(s[2] + s[3] + s[0] * s[3]), s[4])),
    "the state as it is": _gru(lambda s: _mixed(s[1], tanh(s[2] + s[0] * s[4]), s[4])),
    "a reset before the product": _reset_before,
    "other weights once": _other_weights_once,
    "weights that grow": _weights_that_grow,
    "an input that depends on the memory": _input_of_state,
    "an output is the next input": _fed_back,
    "the state before the last": _two_ago,
    "the memory times a weight": _memory_multiplied,
    "norms of gates": _normed,
    "memories that are read": _memories_read,
    "dropout between": _dropped,
}


@pytest.mark.parametrize("why", NEAR)
def test_a_cell_that_differs_in_one_thing_is_left_alone(why: str) -> None:
    module = forms.Gates(NEAR[why]).double().eval()
    assert not replacements(planned(module, forms.args()).index)


def test_weights_that_lie_in_the_calls_order_are_views() -> None:
    plan = rolled(planned(forms.Gates(forms.LSTM["two layers, i f o g"]).eval(), forms.args(dtype=torch.float32)))
    assert targets(plan).count("aten.cat.default") == 4  # two matrices, two biases
    plan = rolled(planned(forms.Gates(forms.LSTM["split"]).eval(), forms.args(dtype=torch.float32)))
    assert "aten.cat.default" not in targets(plan)
