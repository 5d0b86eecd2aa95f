"""Recurrent calls that read each other's sequences are layers of one: where that holds, and that values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.calls.recurrence import is_call
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

X, H = torch.randn(6, 3, 5).double(), torch.randn(1, 3, 4).double()


class Networks(nn.Module):
    """Two networks, and what is done with them."""

    def __init__(self, first: nn.Module, second: nn.Module, used: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.used = first, second, used

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        return self.used(self.first, self.second, x, h)


def _last(first: Any, second: Any, x: torch.Tensor, _: torch.Tensor) -> Any:
    return second(first(x)[0])[0][-1]


def _all_states(first: Any, second: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    middle, one = first(x, h)
    end, two = second(middle, h * 2)
    return end, one, two.exp(), one * 2


def _memories(first: Any, second: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    middle, (one, memory) = first(x, (h, h))
    scaled = memory * 3  # before the second
    end, (_, other) = second(middle)
    return end, one, scaled, other


HOLDS: dict[str, tuple[nn.Module, nn.Module, Callable[..., Any]]] = {
    "lstm": (nn.LSTM(5, 4), nn.LSTM(4, 4), _last),
    "lstm with states": (nn.LSTM(5, 4), nn.LSTM(4, 4), _memories),
    "gru with states": (nn.GRU(5, 4), nn.GRU(4, 4), _all_states),
    "layers of several": (nn.RNN(5, 4, 2), nn.RNN(4, 4, 3), _last),
    "both directions": (nn.GRU(5, 4, bidirectional=True), nn.GRU(8, 4, bidirectional=True), _last),
    "rows first": (nn.GRU(5, 4, batch_first=True, bias=False), nn.GRU(4, 4, batch_first=True, bias=False), _last),
}


def planned(module: nn.Module) -> Plan:
    return plan_zero(GraphIndex(capture(module, (X, H))), task_pb2.TARGET_CPU)


def offered(plan: Plan) -> list[analysis_pb2.Move]:
    return [each.move for each in moves.legal(plan) if each.move.choice == "stacked_layers"]


@pytest.mark.parametrize("name", HOLDS)
def test_two_calls_are_one_with_the_layers_of_both(name: str) -> None:
    module = Networks(*HOLDS[name]).double().eval()
    plan = planned(module)
    (move,) = offered(plan)
    after = moves.apply(plan, move)
    assert sum(map(is_call, after.index.graph.nodes)) == 1
    assert not offered(after)
    held, sources = dict(module.named_parameters()), {}
    for source in after.index.graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            sources[source.name] = (X, H)[source.input_index]
        elif source.origin != graph_pb2.ORIGIN_CONSTANT:
            sources[source.name] = held[source.qualified_name].detach()
    with torch.no_grad():
        expected = module(X, H)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    made = interpreter.run_plan(after, sources)
    for got, truth in zip(made, expected, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-10)
    assert len({each.untyped_storage().data_ptr() for each in made}) == len(made)


def _read_between(first: Any, second: Any, x: torch.Tensor, _: torch.Tensor) -> Any:
    middle = first(x)[0]
    return second(middle)[0] + middle


def _changed_between(first: Any, second: Any, x: torch.Tensor, _: torch.Tensor) -> Any:
    return second(first(x)[0].relu())[0]


def _begun_by_the_first(first: Any, second: Any, x: torch.Tensor, _: torch.Tensor) -> Any:
    middle, state = first(x)
    return second(middle, state)[0]


REFUSED: dict[str, tuple[nn.Module, nn.Module, Callable[..., Any]]] = {
    "another cell": (nn.RNN(5, 4), nn.RNN(4, 4, nonlinearity="relu"), _last),
    "another width": (nn.GRU(5, 4), nn.GRU(4, 6), _last),
    "no biases": (nn.GRU(5, 4), nn.GRU(4, 4, bias=False), _last),
    "read between": (nn.GRU(5, 4), nn.GRU(4, 4), _read_between),
    "changed between": (nn.GRU(5, 4), nn.GRU(4, 4), _changed_between),
    "begun by the first": (nn.GRU(5, 4), nn.GRU(4, 4), _begun_by_the_first),
    "projected": (nn.LSTM(5, 8, proj_size=4), nn.LSTM(4, 8, proj_size=4), _last),
    "one direction and both": (nn.GRU(5, 4), nn.GRU(4, 4, bidirectional=True), _last),
}


@pytest.mark.parametrize("why", REFUSED)
def test_calls_that_are_no_layers_of_one_are_left_alone(why: str) -> None:
    assert not offered(planned(Networks(*REFUSED[why]).double().eval()))


def test_a_loop_of_several_layers_is_one_kernel_in_a_whole_plan() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTMCell(20, 32), nn.LSTMCell(32, 32), nn.LSTMCell(32, 32)])
            self.out = nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros(x.shape[0], 32, device=x.device)
            states, outputs = [(zeros, zeros)] * 3, []
            for t in range(x.shape[1]):
                value = x[:, t]
                for place, cell in enumerate(self.cells):
                    states[place] = cell(value, states[place])
                    value = states[place][0]
                outputs.append(self.out(value))
            return torch.stack(outputs, 1)

    plan = plan_zero(GraphIndex(capture(Layers(), (torch.randn(4, 10, 20),))), task_pb2.TARGET_CUDA)
    author = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")
    asked = [each.move for each in moves.legal(plan) if each.move.choice == "unrolled"]
    for made in (moves.apply(plan, author), moves.apply_all(plan, [*asked, author])):
        assert made.rewrites == ("unrolled",) * 3 + ("stacked_layers",) * 2
        assert [group.schedule for group in made.groups].count("cuda_recurrent") == 1
