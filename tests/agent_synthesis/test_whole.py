"""Whole plans: all that can be in kernels of ours at once, right, and the first thing that is tried of a network."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.generator import generate
from agent_synthesis.graphs import decompositions
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter, iteration_space
from agent_synthesis.nests.analysis import stages
from agent_synthesis.nests.analysis.apart import apart
from agent_synthesis.plans import analysis, moves, whole
from agent_synthesis.plans.plan import Plan, plan_zero, schedules_for
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200_MEASURED
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, task_pb2

TARGETS = [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA]


class Transformer(nn.Module):
    """Norm, products, a gate, a residual; twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            y = self.norms[layer](x)
            gated = nn.functional.gelu(self.up[2 * layer](y)) * torch.sigmoid(self.up[2 * layer + 1](y))
            x = x + self.down[layer](gated)
        return x.softmax(1)


class Network(nn.Module):
    """Convolutions, which stay calls, with norms, residuals and memory that is written in place between."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + nn.functional.relu_(norm(convolution(x)))
        return x.mean((2, 3))


MODULES = [(Transformer(), (16, 32)), (Network().eval(), (2, 24, 8, 8)), (Network().train(), (2, 24, 8, 8))]


def move(choice: str = "") -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=whole.EVERY_GROUP, choice=choice)


def zero(module: nn.Module, shape: tuple[int, ...], target: task_pb2.Target.ValueType = TARGETS[1]) -> Plan:
    return plan_zero(GraphIndex(capture(module, (torch.zeros(shape),))), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("choice", whole.CHOICES)
@pytest.mark.parametrize(("module", "shape"), MODULES)
def test_a_whole_plan_computes_what_the_module_does(
    module: nn.Module, shape: tuple[int, ...], choice: str, target: task_pb2.Target.ValueType
) -> None:
    plan = moves.apply(zero(module, shape, target), move(choice))
    members = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    x = torch.randn(shape)
    sources = {
        source.name: members[source.qualified_name].detach().clone() if source.qualified_name else x
        for source in plan.index.graph.sources
    }
    wanted = aten.interpret(plan.index.graph, {name: tensor.clone() for name, tensor in sources.items()})
    (result,) = interpreter.run_plan(plan, sources)
    torch.testing.assert_close(result, wanted[plan.index.graph.outputs[0]], rtol=1e-4, atol=1e-5)


def test_each_call_is_in_one_kernel_and_in_as_few_as_there_can_be() -> None:
    """A residual's sum goes to the norm that reads it, a gate is one kernel, products take what ends them."""
    plan = zero(*MODULES[0])
    beside, every = (moves.apply(plan, move(choice)) for choice in whole.CHOICES)
    assert not any(group.recomputed for made in (beside, every) for group in made.groups)
    assert [group.name for group in beside.groups if group.engine == "library"] == [
        "linear", "linear_1", "linear_2", "linear_3", "linear_4", "linear_5"
    ]  # fmt: skip
    assert [group.nodes for group in beside.groups if group.engine == "authored"] == [
        ("layer_norm",), ("gelu", "sigmoid", "mul"), ("add", "layer_norm_1"), ("gelu_1", "sigmoid_1", "mul_1"),
        ("add_1", "softmax"),
    ]  # fmt: skip
    assert all(group.engine == "authored" for group in every.groups)
    assert ("gelu", "linear_1", "mul", "sigmoid") in [tuple(sorted(group.nodes)) for group in every.groups]


def test_what_could_not_move_at_first_moves_once_its_other_readers_have() -> None:
    """A softmax by hand whose exponentials are met before their sum."""

    class ByHand(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                e = (x @ x.t()).exp()
                x = e.sum(1, keepdim=True).reciprocal() * e
            return x

    plan = moves.apply(zero(ByHand(), (16, 16)), move("beside_products"))
    assert [group.engine for group in plan.groups] == ["library", "authored"] * 3


@torch.library.custom_op("warpsmith_plans::linear", mutates_args=())
def own_linear(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An operation that shares no more than its name with ATen's."""
    return x + y


@own_linear.register_fake
def _(x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class WithOwn(nn.Module):
    """It, where rewrites look for products, sums and scales."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = own_linear(torch.tanh(x.softmax(1)), x) * 2 + 1
            x = x.exp() * x.sum(1, keepdim=True)
        return x


@pytest.mark.parametrize("target", TARGETS)
def test_an_operation_outside_aten_stays_a_call_where_nobody_knows_it(
    target: task_pb2.Target.ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = capture(WithOwn(), (torch.rand(32, 32),))
    monkeypatch.setattr(aten, "_admitted", set())  # plans are made in another process than captures
    plan = plan_zero(GraphIndex(graph), target)
    described = analysis.describe(plan, with_legal_moves=True)
    assert described.minimum.product_flop_count == 0
    for legal in described.legal_moves:
        made = moves.apply(plan, legal.move)
        calls = {node for group in made.groups if group.engine == "library" for node in made.all_nodes(group)}
        assert {"linear", "linear_1", "linear_2"} <= calls
        assert generate(made).steps


def test_convolutions_stay_calls() -> None:
    plan = moves.apply(zero(*MODULES[1]), move("beside_products"))
    library = [group.name for group in plan.groups if group.engine == "library"]
    assert library == ["conv2d_unbiased", "conv2d_1_unbiased", "conv2d_2_unbiased"]
    assert len(plan.groups) == 6


def test_beside_convolutions_one_kernel_is_a_whole_plan() -> None:
    """The layout may come before it, which no chain of moves says."""
    plan = moves.apply(
        zero(nn.Sequential(nn.Conv2d(24, 32, 3), nn.ReLU(), nn.Conv2d(32, 24, 3)), (2, 24, 8, 8)),
        move("beside_products"),
    )
    assert [group.name for group in plan.groups if group.engine == "authored"] == ["relu", "conv2d_1"]


def test_a_choice_that_says_the_same_as_another_is_not_offered() -> None:
    many_phases = (nn.ConvTranspose2d(24, 32, 3, stride=9), nn.ReLU(), nn.ConvTranspose2d(32, 24, 3, stride=9))
    apart = nn.Sequential(*many_phases), (2, 24, 4, 4)
    dense = nn.Sequential(nn.Conv2d(24, 32, 3), nn.ReLU(), nn.Conv2d(32, 24, 3)), (2, 24, 8, 8)
    few = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), (2, 4, 8, 8)
    both = ["beside_products", ""]
    for (module, shape), expected in (
        (apart, ["beside_products"]), (dense, both), (few, both), (MODULES[0], both),
    ):  # fmt: skip
        legal = [each.move for each in moves.legal(zero(module, shape))]
        assert [each.choice for each in legal if each == move(each.choice)] == expected


@pytest.mark.parametrize("is_training", [True, False])
def test_what_a_norm_stores_in_another_layout_passes_through_tiles(is_training: bool) -> None:
    """Each element of a batch norm that was stored channels-last took a sector of its own."""
    module = nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 1)).train(is_training)
    layout = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAYOUT, group="*", choice="channels_last")
    plan = moves.apply_all(zero(module, (16, 32, 64, 64)), [layout, move("beside_products")])
    (copy,) = (group for group in plan.groups if group.name == "relu_channels_last")
    assert "batch_norm" in copy.nodes
    assert copy.schedule == ("cuda_reductions_apart" if is_training else "cuda_transpose")
    if is_training:
        nest = plan.nest(copy)
        assert plan.schedule(copy).footprint(nest, copy.settings).extra_bytes < 16 * 32 * 64 * 64 * 4
        (rows,) = (each for each in schedules_for(plan.target, nest) if each.name == "cuda_row_reduction")
        extra = rows.footprint(nest, rows.defaults(nest)).extra_bytes
        assert extra >= 7 * 16 * 32 * 64 * 64 * 4, "what one kernel of rows would cost is told"


def test_a_copy_at_the_end_is_stored_by_the_kernel_that_sums_two_norms() -> None:
    """Each of which is as large as the copy."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv2d(64, 64, 1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = (
                norm(convolution(x)) for norm, convolution in zip(self.norms, self.convolutions, strict=True)
            )
            return (left + right).relu()

    layout = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAYOUT, group="*", choice="channels_last")
    plan = moves.apply_all(zero(Residual(), (10, 64, 224, 224)), [layout, move("beside_products")])
    group = plan.group("relu_contiguous")
    assert group.schedule == "cuda_reductions_apart"
    assert {"batch_norm", "batch_norm_1", "add", "relu"} <= {*group.nodes}
    found = apart(plan.nest(group))
    assert found is not None
    assert len(stages.plan(iteration_space.canonical(found.reducing), merge=True, apart=True)) == 2
    images = {buffer.name for buffer in found.storing.buffers if buffer.element_count == 10 * 64 * 224 * 224}
    assert len(images) == 3, "both are read once more, and the sum is written"


def test_what_is_in_kernels_already_stays_as_it_is() -> None:
    plan = zero(*MODULES[0])
    first = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="mul", choice="gelu")
    plan = moves.apply(plan, first)
    assert moves.apply(plan, move("beside_products")).group("mul").nodes == plan.group("mul").nodes


def test_counters_of_all_norms_are_one_kernel() -> None:
    module = Network().train()
    for choice in whole.CHOICES:
        plan = moves.apply(zero(module, (2, 24, 8, 8)), move(choice))
        counting = [group for group in plan.groups if "add_.Tensor" in str(plan.index.nodes[group.nodes[0]].target)]
        (one,) = [group for group in counting if not plan.outputs(group)]
        assert len(one.nodes) == 3
    assert sum(step.HasField("launch") for step in generate(plan).steps) < 12


class Parts(nn.Module):
    """A pool over parts that lie beside each other, complex numbers and a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool1d(torch.cat([x.relu(), x.tanh()], 1), 3, 2, ceil_mode=True)
        y = torch.view_as_complex(x.reshape(*x.shape[:2], 4, 2))
        result: torch.Tensor = self.rnn(torch.view_as_real(y * y.exp()).flatten(-2) + 1)[0] * 2
        return result


def test_a_plan_is_computed_by_what_its_kernels_mean() -> None:
    module, x = Parts(), torch.randn(4, 5, 16)
    plan = moves.apply(zero(module, (4, 5, 16)), move())
    sources = {**dict(module.named_parameters()), "x": x}
    given = {each.name: sources[each.qualified_name or "x"].detach() for each in plan.index.graph.sources}
    (found,) = interpreter.run_plan(plan, given)
    torch.testing.assert_close(found, module(x))


def test_a_decomposition_may_decline(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = zero(nn.Softplus(), (4, 8))
    (node,) = plan.index.nodes
    overload = aten.resolve(plan.index.nodes[node].target)
    monkeypatch.setattr(decompositions, "decompositions", lambda: {overload: lambda *_, **__: NotImplemented})
    assert decompositions.taken_apart(plan.index, node) is None


def test_a_kernel_of_many_tensors_has_narrower_vectors() -> None:
    """As many registers as a thread has hold two elements of sixty tensors, and not four."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, x.unbind(0))

    plan = plan_zero(GraphIndex(capture(Applied(total), (torch.zeros(60, 64, 64),))), TARGETS[1])
    plan = moves.apply(
        plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=plan.groups[-1].name, choice="*")
    )
    (group,) = plan.groups
    assert group.settings.words()["vector_width"] == 2


def test_a_plan_of_few_kernels_is_no_whole_plan() -> None:
    """A chain of moves says the same."""
    plan = zero(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Softmax(1)), (16, 32))
    with pytest.raises(IllegalMove, match="fewer than 3 kernels"):
        moves.apply(plan, move())
    with pytest.raises(IllegalMove, match="a whole plan may be 'beside_products', '', not 'half'"):
        moves.apply(plan, move("half"))
    assert not any(legal.move == move(legal.move.choice) for legal in moves.legal(plan))


def test_a_search_of_a_network_begins_with_a_whole_plan() -> None:
    described = analysis.describe(zero(*MODULES[0]), with_legal_moves=True)
    (beside, _) = (legal for legal in described.legal_moves if legal.move == move(legal.move.choice))
    assert (beside.before.launch_count, beside.after.launch_count) == (11, 5)
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA), analysis=described, device=H200_MEASURED, limit=2
    )
    proposed = RooflineReasoner().propose(request).hypotheses
    assert proposed[0].moves[0].group == whole.EVERY_GROUP


def test_a_search_begins_with_kernels_in_either_layout() -> None:
    """What is faster depends on the library: on an H200 a transition of DenseNet-121 took 0.39 and 1.03 of compile's
    speed."""
    module = nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 1), nn.AvgPool2d(2))
    described = analysis.describe(zero(module, (16, 32, 64, 64)), with_legal_moves=True)
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA), analysis=described, device=H200_MEASURED, limit=3
    )
    kinds = [[move.kind for move in each.moves] for each in RooflineReasoner().propose(request).hypotheses]
    layout, author = analysis_pb2.MOVE_KIND_LAYOUT, analysis_pb2.MOVE_KIND_AUTHOR
    assert {layout in each for each in kinds if author in each} == {True, False}
