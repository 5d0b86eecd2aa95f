"""Plans of modules whose loops capture unrolled: what is offered, what whole plans are, the weights of the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.calls.recurrence import Recurrence
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import rewritten
from agent_synthesis.rewrite.loops.unrolled import replacements
from agent_synthesis.schedule import Emission
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

CUDA, CPU = task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU


def operations(plan: Plan) -> list[str]:
    return [plan.index.nodes[group.nodes[-1]].target.split(".")[1] for group in plan.groups]


class Vanilla(nn.Module):
    """KernelBench's 3/34 at a length, a width and a number of steps."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.i2h, self.h2o, self.tanh = nn.Linear(inputs + hidden, hidden), nn.Linear(hidden, outputs), nn.Tanh()

    def forward(self, x: torch.Tensor, h0: torch.Tensor) -> torch.Tensor:
        hidden, outputs = h0.to(x.device), []
        for t in range(x.size(0)):
            hidden = self.tanh(self.i2h(torch.cat((x[t], hidden), dim=1)))
            outputs.append(self.h2o(hidden))
        return torch.stack(outputs, dim=0)


def vanilla(steps: int, hidden: int = 256, target: task_pb2.Target.ValueType = CUDA) -> Plan:
    args = (torch.empty(steps, 8, 1024), torch.empty(8, hidden))
    return plan_zero(GraphIndex(capture(Vanilla(1024, hidden, 128), args)), target)


def author_all(plan: Plan, choice: str) -> Plan:
    return moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice=choice))


@pytest.mark.parametrize("choice", ["", "beside_products"])
def test_a_whole_plan_keeps_the_weights_of_a_loop_on_chip(choice: str) -> None:
    plan = author_all(vanilla(16), choice)
    assert plan.rewrites == ("unrolled",)
    schedules = {group.name: group.schedule for group in plan.groups}
    assert schedules.pop("rnn_tanh") == "cuda_recurrent"
    assert operations(plan) == ["zeros", "rnn_tanh", "linear"]
    assert bool(schedules["linear_1_steps"]) == (choice == "")


def test_of_hundreds_of_steps_few_moves_are_listed() -> None:
    legal = moves.legal(vanilla(200))
    assert {each.move.choice for each in legal} == {"unrolled", "beside_products", "", "cuda_graph"}


def test_a_network_that_does_not_fit_is_a_call_of_the_library_where_a_search_wants_it() -> None:
    plan = vanilla(6, hidden=8192)
    assert any(each.move.choice == "unrolled" for each in moves.legal(plan))
    assert not author_all(plan, "").rewrites
    found = next(iter(replacements(plan.index)))
    assert "rnn_tanh" in operations(rewritten(plan, found, "unrolled"))


def test_a_processor_has_it_as_a_call_and_its_whole_plans_as_they_were() -> None:
    plan = vanilla(6, target=CPU)
    assert any(each.move.choice == "unrolled" for each in moves.legal(plan))
    assert not author_all(plan, "").rewrites


def test_one_step_is_left_as_it_is() -> None:
    plan = vanilla(1)
    assert not [each for each in moves.legal(plan) if each.move.choice == "unrolled"]


# ---- the kernel


def recurrence(plan: Plan) -> tuple[Recurrence, Emission]:
    group = plan.group("rnn_tanh")
    nest = plan.nest(group)
    assert isinstance(nest, Recurrence)
    return nest, plan.schedule(group).emit(nest, group.settings)


def test_columns_of_a_weight_are_read_where_they_lie() -> None:
    nest, emission = recurrence(author_all(vanilla(16), ""))
    assert nest.network is not None
    (weights,) = nest.network.weights
    assert [tensor.strides for tensor in weights] == [(1280, 1), (1280, 1), (1,), (1,)]
    assert emission.text.count("return {1280, 1};") == 2


def test_the_kernel_of_the_loop_compiles_without_spilling(compile_cuda: Callable[[Emission], str]) -> None:
    _, emission = recurrence(author_all(vanilla(16), ""))
    assert " 0 bytes spill stores" in compile_cuda(emission)
