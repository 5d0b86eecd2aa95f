"""Biases of convolutions: on a GPU an addition of its own, which is computed with what follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

CPU, CUDA = task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA
Move = analysis_pb2.Move
AUTHOR, FUSE = analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE
LAYOUT = Move(kind=analysis_pb2.MOVE_KIND_LAYOUT, group="*", choice="channels_last")
WHOLE = Move(kind=AUTHOR, group="*", choice="beside_products")


class Then(nn.Module):
    """A convolution and three calls after it, which are one kernel."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu_(self.convolution(x)) * 1.5)


def zero(module: nn.Module, *inputs: torch.Tensor, target: task_pb2.Target.ValueType = CUDA) -> Plan:
    return plan_zero(GraphIndex(capture(module, inputs)), target)


def gives_the_same(module: nn.Module, plan: Plan, x: torch.Tensor, zero_plan: Plan) -> None:
    members = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {
        name: x if source.origin == graph_pb2.ORIGIN_INPUT else members[source.qualified_name].detach()
        for name, source in zero_plan.index.sources.items()
    }
    expected = aten.interpret(zero_plan.index.graph, dict(values))
    (result,) = interpreter.run_plan(plan, dict(values))
    wanted = expected[zero_plan.index.graph.outputs[0]]
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    assert result.stride() == wanted.stride()


KINDS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(48, 40, 3), (2, 48, 9)),
    (nn.Conv2d(48, 40, 3, padding="same"), (2, 48, 9, 7)),
    (nn.Conv2d(48, 40, 3, stride=2, dilation=2, groups=2), (2, 48, 9, 7)),
    (nn.Conv2d(48, 40, 1), (48, 9, 7)),
    (nn.Conv3d(48, 40, 2), (2, 48, 5, 6, 7)),
    (nn.ConvTranspose1d(48, 40, 3, stride=2), (2, 48, 9)),
    (nn.ConvTranspose2d(48, 40, 3, output_padding=1, stride=2, groups=2), (2, 48, 5, 5)),
    (nn.ConvTranspose3d(48, 40, 2), (2, 48, 5, 4, 3)),
]
"""Dense ones."""


@pytest.mark.parametrize(("convolution", "extents"), KINDS, ids=lambda each: str(each)[:40])
def test_each_kind_is_a_call_without_one_and_one_kernel(convolution: nn.Module, extents: tuple[int, ...]) -> None:
    module, x = Then(convolution), torch.randn(extents)
    before = zero(module, x)
    (name,) = (group.name for group in before.groups if "conv" in group.name)
    plan = moves.apply(before, Move(kind=AUTHOR, group="*", choice="beside_products"))
    assert [(group.name, group.engine) for group in plan.groups] == [
        (f"{name}_unbiased", "library"),
        ("tanh", "authored"),
    ]
    gives_the_same(module, plan, x, before)
    generate(plan)


class Network(nn.Module):
    """Three of them, with norms, in any layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 24, 3),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3),
            nn.BatchNorm2d(24),
            nn.SiLU(),
            nn.Conv2d(24, 24, 1),
            nn.GELU(),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


@pytest.mark.parametrize("chosen", [[WHOLE], [LAYOUT, WHOLE]], ids=["plain", "channels-last"])
def test_whole_plans_take_them_apart(chosen: list[Move]) -> None:
    module, x = Network().eval(), torch.randn(2, 4, 12, 12)
    before = zero(module, x)
    plan = moves.apply_all(before, chosen)
    library = [group.name for group in plan.groups if group.engine == "library"]
    assert library == ["conv2d_unbiased", "conv2d_1_unbiased", "conv2d_2_unbiased"]
    assert sum("relu" in plan.all_nodes(group) for group in plan.groups) == 1
    assert {"conv2d", "relu"} <= {*plan.all_nodes(plan.group("relu"))}
    gives_the_same(module, plan, x, before)
    generate(plan)


def test_on_a_processor_a_dense_one_stays() -> None:
    plan = zero(Then(nn.Conv2d(24, 24, 3)), torch.randn(2, 24, 8, 8), target=CPU)
    assert not [legal for legal in moves.legal(plan) if legal.move.kind == AUTHOR and legal.move.group == "conv2d"]
    with pytest.raises(IllegalMove):
        moves.apply(plan, Move(kind=AUTHOR, group="conv2d"))


def test_the_librarys_own_pass_over_the_result_is_counted() -> None:
    x = torch.randn(2, 4, 8, 8)
    plans = [zero(Then(nn.Conv2d(4, 6, 3, bias=bias)), x) for bias in (True, False)]
    with_one, without = (cost.of_group(plan, plan.group("conv2d")).extra_bytes for plan in plans)
    assert with_one - without == 2 * 4 * 2 * 6 * 6 * 6
