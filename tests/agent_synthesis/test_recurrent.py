"""Recurrent networks as kernels: what is taken, what is refused and why, and what becomes of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from agent_synthesis.emit.cuda.recurrences.recurrent import RecurrentSettings
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.calls.recurrence import Recurrence
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

CUDA = task_pb2.TARGET_CUDA
X = torch.randn(12, 4, 8)


def plan_of(module: nn.Module, *args: torch.Tensor, target: task_pb2.Target.ValueType = CUDA) -> Plan:
    return plan_zero(GraphIndex(capture(module, args)), target)


def author(group: str) -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group)


def authored(module: nn.Module, *args: torch.Tensor) -> tuple[Plan, Recurrence]:
    plan = plan_of(module, *args)
    plan = moves.apply(plan, author(recurrent(plan)))
    nest = plan.nest(plan.group(recurrent(plan)))
    assert isinstance(nest, Recurrence)
    return plan, nest


def recurrent(plan: Plan) -> str:
    """The name of the first group that is a recurrent call."""
    return next(group.name for group in plan.groups if ".input" in plan.index.nodes[group.nodes[0]].target)


def launch_of(plan: Plan) -> candidate_pb2.Launch:
    (launch,) = (step.launch for step in generate(plan).steps if step.HasField("launch"))
    return launch


class Last(nn.Module):
    """The last step of a network's sequence."""

    def __init__(self, network: nn.RNNBase, before: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.network, self.before = network, before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence: torch.Tensor = self.network(self.before(x))[0]
        return sequence[-1]


@pytest.mark.parametrize(
    "network",
    [
        nn.LSTM(8, 16, 3),
        nn.GRU(8, 16, 2, bidirectional=True),
        nn.RNN(8, 16),
        nn.RNN(8, 16, nonlinearity="relu", bias=False),
        nn.GRU(8, 16, 2, dropout=0.5).eval(),
    ],
)
def test_a_recurrent_call_becomes_one_cooperative_launch(network: nn.RNNBase) -> None:
    plan, nest = authored(Last(network), X)
    launch = launch_of(plan)
    made = nest.network
    assert made is not None
    assert launch.cooperative
    assert launch.grid.x <= plan.hardware.sm_count
    assert (made.steps, made.batch, made.inputs, made.hidden) == (12, 4, 8, 16)
    assert (made.layers, made.directions) == (network.num_layers, 1 + network.bidirectional)
    buffers = {buffer.name: buffer for buffer in generate(plan).buffers}
    assert [name for name in launch.writes if buffers[name].zero_between_calls] == [launch.writes[-1]]
    assert made.results[1:] == (None,) * (len(made.results) - 1)  # nobody reads the states


def test_layers_run_at_once_where_one_direction_lets_them() -> None:
    (one, _), (both, _) = (authored(Last(nn.LSTM(8, 16, 4, bidirectional=two)), X) for two in (False, True))
    settings = [plan.group(recurrent(plan)).settings for plan in (one, both)]
    assert settings == [RecurrentSettings(layers=4), RecurrentSettings(layers=1)]
    changed = one.alternatives(one.group(recurrent(one)))
    assert {each.layers for each in changed if isinstance(each, RecurrentSettings)} == {1, 2, 3, 4}
    alike = both.alternatives(both.group(recurrent(both)))
    assert {each.layers for each in alike if isinstance(each, RecurrentSettings)} == {1}


@pytest.mark.parametrize(
    ("network", "dtype", "reason"),
    [
        (nn.LSTM(8, 16, proj_size=4), torch.float32, "projects its hidden states"),
        (nn.GRU(8, 16).double(), torch.float64, "not all of one type of 16 or 32 bits"),
        (nn.GRU(8, 16, 2, dropout=0.5), torch.float32, "random"),
        (nn.LSTM(8, 4096), torch.float32, "no schedule"),
    ],
)
def test_what_is_no_kernel_says_why(network: nn.RNNBase, dtype: torch.dtype, reason: str) -> None:
    plan = plan_of(Last(network), X.to(dtype))
    with pytest.raises(IllegalMove, match=reason):
        moves.apply(plan, author(recurrent(plan)))


def test_a_processor_leaves_it_to_the_library() -> None:
    plan = plan_of(Last(nn.LSTM(8, 16)), X, target=task_pb2.TARGET_CPU)
    with pytest.raises(IllegalMove):
        moves.apply(plan, author(recurrent(plan)))


def test_nothing_else_is_in_its_kernel() -> None:
    plan = plan_of(nn.Sequential(nn.ReLU(), nn.LSTM(8, 16), Applied(lambda pair: pair[0].exp())), X)
    offered = moves.legal(plan)
    fusing = [each.move for each in offered if each.move.kind == analysis_pb2.MOVE_KIND_FUSE]
    assert not fusing
    with pytest.raises(IllegalMove, match="a kernel of its own"):
        moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="exp", choice=recurrent(plan)))


@pytest.mark.parametrize("is_batch_first", [False, True])
def test_a_view_is_read_where_it_lies(is_batch_first: bool) -> None:
    turned = Last(nn.LSTM(8, 16, batch_first=is_batch_first), lambda x: x.transpose(0, 1))
    plan, nest = authored(turned, X)
    assert nest.network is not None
    assert nest.network.values.strides == ((32, 8, 1) if is_batch_first else (8, 32, 1))
    program = generate(plan)
    assert next(step.library.target for step in program.steps if step.HasField("library")).startswith("aten.")
    names = [argument.buffer for argument in launch_of(plan).arguments]
    assert nest.buffers[nest.network.values.buffer].name in names


def test_two_equal_networks_have_one_kernel() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.GRU(8, 8), nn.GRU(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sequence: torch.Tensor = self.second(self.first(x)[0])[0]
            return sequence

    plan = plan_of(Two(), X)
    for group in [group.name for group in plan.groups if ".input" in plan.index.nodes[group.nodes[0]].target]:
        plan = moves.apply(plan, author(group))
    program = generate(plan)
    assert len({step.launch.entry for step in program.steps if step.HasField("launch")}) == 1
    assert next(source.text for source in program.sources if source.name == "kernel.cu").count("__global__") == 1


@pytest.mark.parametrize("setting", [{"layers": 0}, {"layers": 4}, {"threads": 0}, {"threads": 16}, {"threads": 100}])
def test_settings_that_cannot_be_are_refused_by_name(setting: dict[str, int]) -> None:
    plan, nest = authored(Last(nn.LSTM(8, 16, 3)), X)
    group = plan.group(recurrent(plan))
    with pytest.raises(IllegalMove, match=r"layers|threads"):
        plan.schedule(group).emit(nest, group.settings.changed(setting))


@pytest.mark.parametrize(("count", "is_wide"), [(1 << 20, False), (1 << 31, True)])
def test_offsets_are_wide_where_a_tensor_is(count: int, is_wide: bool) -> None:
    plan, nest = authored(Last(nn.LSTM(8, 16, batch_first=True)), X)
    group = plan.group(recurrent(plan))
    assert nest.network is not None
    buffers = list(nest.buffers)
    buffers[nest.network.values.buffer] = replace(buffers[nest.network.values.buffer], element_count=count)
    text = plan.schedule(group).emit(replace(nest, buffers=tuple(buffers)), group.settings).text
    assert ("ws::int64(row)" in text) == is_wide
