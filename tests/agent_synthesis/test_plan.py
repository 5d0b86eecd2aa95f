"""Plans stay right whatever legal moves are made, and refuse the others with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import analysis, cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.graphs.task_module import tensor_leaves
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, task_pb2


def planned(module: nn.Module, args: tuple[Any, ...]) -> Plan:
    return plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CPU)


def move(kind: str, group: str, choice: str = "", **arguments: int) -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=words.move_kind_of(kind), group=group, choice=choice, arguments=arguments)


def sources_of(plan: Plan, module: nn.Module, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    leaves = tensor_leaves(args)
    found = {}
    for source in plan.index.graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            found[source.name] = leaves[source.input_index]
        elif source.origin != graph_pb2.ORIGIN_CONSTANT:
            found[source.name] = held[source.qualified_name].detach()
    return found


def assert_right(plan: Plan, module: nn.Module, args: tuple[Any, ...], exact: bool = False) -> None:
    eager, ours = copy.deepcopy(module), copy.deepcopy(module)
    torch.manual_seed(5)
    with torch.no_grad():
        expected = pytree.tree_leaves(eager(*copy.deepcopy(args)))
    torch.manual_seed(5)
    results = interpreter.run_plan(plan, sources_of(plan, ours, copy.deepcopy(args)))
    tolerance = 0.0 if exact else 2e-5
    for result, tensor in zip(results, expected, strict=True):
        torch.testing.assert_close(result, tensor, rtol=tolerance, atol=tolerance)
    for (_, left), (_, right) in zip(eager.named_buffers(), ours.named_buffers(), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


class Tail(nn.Module):
    """A product, then a normalised, activated, scaled tail."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(12, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.line(x))) * 2.0 + 1.0


class Residual(nn.Module):
    """In-place activations on intermediates, as model zoos write them, and batch norm that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.relu, self.drop = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        x = self.relu(self.norm(self.first(x)))
        y = self.second(self.drop(x))
        y += x
        return self.relu(y) * self.steps


class Diamond(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.sin()
        b = a.exp()
        c = a.cumsum(1)
        return b + c, a


class Alias(nn.Module):
    """Reads memory before and after it is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.state * 2
        self.state.add_(x.sum(0))
        return before + x + self.state


class RowSum(nn.Module):
    def __init__(self, bias: bool = True, mean: bool = False, keepdim: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(12, 16, bias=bias)
        self.mean, self.keepdim = mean, keepdim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x)
        return y.mean(-1, keepdim=self.keepdim) if self.mean else y.sum(-1, keepdim=self.keepdim)


MODULES = [
    (Tail(), (torch.randn(6, 12),)), (Residual(), (torch.randn(2, 3, 6, 6),)), (Diamond(), (torch.randn(4, 5),)),
    (Alias(), (torch.randn(3, 4),)), (RowSum(), (torch.randn(5, 12),)),
]  # fmt: skip


@pytest.mark.parametrize(("module", "args"), MODULES)
def test_plan_zero_is_eager_to_the_bit(module: nn.Module, args: tuple[Any, ...]) -> None:
    assert_right(planned(module, args), module, args, exact=True)


@pytest.mark.parametrize(("module", "args"), MODULES)
def test_every_legal_move_and_the_moves_after_it_keep_the_meaning(module: nn.Module, args: tuple[Any, ...]) -> None:
    seen = set()
    pending = [planned(module, args)]
    for _ in range(40):
        if not pending:
            break
        plan = pending.pop()
        assert_right(plan, module, args)
        for legal in moves.legal(plan):
            if legal.move.kind == analysis_pb2.MOVE_KIND_SET:
                continue
            after = moves.apply(plan, legal.move)
            key = analysis.describe(after, with_legal_moves=False).plan_digest
            if key not in seen:
                seen.add(key)
                pending.append(after)


def test_a_tail_becomes_one_kernel_by_one_compound_move() -> None:
    module, args = MODULES[0]
    plan = planned(module, args)
    assert [group.name for group in plan.groups] == ["linear", "layer_norm", "gelu", "mul", "add"]
    fused = moves.apply(plan, move("fuse", "add", "*"))
    assert [(g.name, g.engine, g.nodes) for g in fused.groups] == [
        ("linear", "library", ("linear",)),
        ("add", "authored", ("layer_norm", "gelu", "mul", "add")),
    ]
    offered = [(m.move.group, m.move.choice) for m in moves.legal(plan) if m.move.kind == analysis_pb2.MOVE_KIND_FUSE]
    assert offered == [("gelu", "layer_norm"), ("mul", "gelu"), ("add", "mul"), ("add", "*")]
    split = moves.apply(fused, move("library", "add"))
    assert [(g.name, g.engine) for g in split.groups] == [(g.name, g.engine) for g in plan.groups]


def test_legal_moves_say_what_they_save() -> None:
    module, args = MODULES[0]
    plan = planned(module, args)
    legal = next(m for m in moves.legal(plan) if (m.move.group, m.move.choice) == ("add", "mul"))
    assert legal.effect == "computes mul and add in one kernel"
    tensor = 6 * 16 * 4
    assert (legal.before.read_bytes, legal.before.write_bytes) == (2 * tensor, 2 * tensor)
    assert (legal.after.read_bytes, legal.after.write_bytes) == (tensor, tensor)
    assert (legal.before.launch_count, legal.after.launch_count) == (2, 1)


def test_a_producer_that_others_read_is_stored_by_the_fused_kernel_or_computed_twice() -> None:
    module, args = MODULES[2]
    plan = planned(module, args)
    fused = moves.apply(moves.apply(plan, move("author", "exp")), move("fuse", "exp", "sin"))
    (kernel,) = [group for group in fused.groups if group.engine == "authored"]
    assert fused.outputs(kernel) == ["sin", "exp"]
    whole = moves.apply(moves.apply(plan, move("fuse", "add", "exp")), move("fuse", "add", "sin"))
    kernel = whole.group("add")
    assert (kernel.nodes, kernel.recomputed) == (("exp", "add"), ("sin",))
    assert [group.name for group in whole.groups] == ["sin", "cumsum", "add"]
    assert_right(whole, module, args)


def test_reads_do_not_move_across_writes_in_place() -> None:
    module, args = MODULES[3]
    plan = planned(module, args)
    assert [node.target for node in plan.index.graph.nodes][:3] == [
        "aten.mul.Tensor", "aten.sum.dim_IntList", "aten.add_.Tensor",
    ]  # fmt: skip
    merged = moves.apply(plan, move("fuse", "add_1", "add"))
    with pytest.raises(IllegalMove, match="before and after"):
        moves.apply(merged, move("fuse", "add_1", "mul"))
    with pytest.raises(IllegalMove, match="may not move into a kernel"):
        moves.apply(merged, move("fuse", "add_1", "add_"))


def test_in_place_activations_on_intermediates_fuse() -> None:
    module, args = MODULES[1]
    plan = planned(module, args)
    fused = moves.apply(plan, move("fuse", "mul", "*"))
    assert fused.group("mul").nodes == ("conv2d_1", "add__2", "relu__1", "mul")
    assert_right(fused, module, args)


@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 12)])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_sum_of_a_linear_becomes_a_product_with_a_vector(
    shape: tuple[int, ...], keepdim: bool, mean: bool, bias: bool
) -> None:
    module, args = RowSum(bias, mean, keepdim), (torch.randn(shape),)
    plan = planned(module, args)
    name = "mean" if mean else "sum_1"
    rule = next(m for m in moves.legal(plan) if m.move.kind == analysis_pb2.MOVE_KIND_REWRITE)
    assert rule.move == move("rewrite", name, "linear_row_sum")
    assert rule.after.product_flop_count < rule.before.product_flop_count / 8
    after = moves.apply(plan, rule.move)
    assert after.rewrites == ("linear_row_sum",)
    assert_right(after, module, args)
    authored = moves.apply(moves.apply(after, move("fuse", name, "*")) if bias and not keepdim else after,
                           move("author", f"{name}_weight"))  # fmt: skip
    assert_right(authored, module, args)


def test_rules_hold_only_under_their_condition() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(12, 16)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.line(x)
            return y.sum(0), y.sum(1)

    plan = planned(Both(), (torch.randn(4, 12),))
    assert not [m for m in moves.legal(plan) if m.move.kind == analysis_pb2.MOVE_KIND_REWRITE]
    with pytest.raises(IllegalMove, match="does not apply"):
        moves.apply(plan, move("rewrite", "sum_2", "linear_row_sum"))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (move("author", "nothing"), "no group 'nothing'"), (move("author", "linear"), "product of two matrices"),
        (move("fuse", "add", "gelu"), "reads no result"), (move("library", "add"), "library call already"),
        (move("author", "mul", "no_such"), "no schedule 'no_such'"), (move("frobnicate", "add"), "no move is called"),
        (move("rewrite", "add", "magic"), "no rule is called"), (move("set", "add", "a=b"), "author it before"),
        (move("fuse", "layer_norm", "*"), "that no schedule takes"),
    ],
)  # fmt: skip
def test_illegal_moves_say_why(bad: analysis_pb2.Move, reason: str) -> None:
    module, args = MODULES[0]
    with pytest.raises(IllegalMove, match=reason):
        moves.apply(planned(module, args), bad)


def test_settings_change_one_at_a_time() -> None:
    module, args = MODULES[0]
    plan = moves.apply(planned(module, args), move("author", "layer_norm"))
    settings = [m.move for m in moves.legal(plan) if m.move.kind == analysis_pb2.MOVE_KIND_SET]
    assert settings
    for setting in settings:
        changed = moves.apply(plan, setting).group("layer_norm").settings
        assert changed != plan.group("layer_norm").settings
    with pytest.raises(IllegalMove, match="there is no setting 'colour'; there are: reduce, "):
        moves.apply(plan, move("set", "layer_norm", "colour=red"))
    with pytest.raises(IllegalMove, match="there is no setting 'hats'"):
        moves.apply(plan, move("set", "layer_norm", hats=3))
    with pytest.raises(IllegalMove, match="stores = gold: it may be plain, streaming"):
        moves.apply(plan, move("set", "layer_norm", "stores=gold"))


def test_programs_name_every_tensor_and_their_digest_is_that_of_their_parts() -> None:
    for module, args in MODULES:
        plan = planned(module, args)
        for variant in [plan, *(moves.apply(plan, m.move) for m in moves.legal(plan))]:
            program = generator.generate(variant)
            assert program.digest == digest.of_program(program)
            assert_well_formed(program)


def assert_well_formed(program: candidate_pb2.Program) -> None:
    roles = {buffer.name: buffer.role for buffer in program.buffers}
    assert len(roles) == len(program.buffers)
    ready = {name for name, role in roles.items() if role == candidate_pb2.ROLE_SOURCE}
    for step in program.steps:
        if step.WhichOneof("kind") == "library":
            values = [*step.library.args, *(named.value for named in step.library.kwargs)]
            assert set(tensor_names(values)) <= ready
            ready |= set(step.library.results)
        else:
            touched = {argument.buffer for argument in step.launch.arguments if argument.buffer}
            written = set(step.launch.writes)
            assert {n for n in touched - written if roles[n] != candidate_pb2.ROLE_WORKSPACE} <= ready
            ready |= written
    assert set(program.outputs) <= ready


def test_outputs_that_are_views_and_state_keep_their_roles() -> None:
    module, args = Residual(), (torch.randn(2, 3, 6, 6),)
    program = generator.generate(planned(module, args))
    state = {b.source.qualified_name for b in program.buffers if b.source.origin == graph_pb2.ORIGIN_STATE}
    assert state == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "steps"}

    class View(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().view(-1)

    plan = moves.apply(planned(View(), (torch.randn(3, 4),)), move("author", "relu"))
    program = generator.generate(plan)
    roles = {buffer.name: buffer.role for buffer in program.buffers}
    assert roles == {
        "x": candidate_pb2.ROLE_SOURCE, "relu": candidate_pb2.ROLE_OUTPUT, "view": candidate_pb2.ROLE_LIBRARY,
    }  # fmt: skip
    assert program.sources[0].name == "kernel.cpp"
    assert "author relu" in program.sources[0].text


def test_a_kernel_result_that_another_step_reads_is_a_workspace() -> None:
    module, args = MODULES[0]
    plan = moves.apply(planned(module, args), move("author", "layer_norm"))
    program = generator.generate(plan)
    roles = {buffer.name: buffer.role for buffer in program.buffers}
    assert roles["layer_norm"] == candidate_pb2.ROLE_WORKSPACE
    assert roles["linear"] == candidate_pb2.ROLE_LIBRARY
    assert generator.emitter_digest() == generator.emitter_digest()


def test_costs_count_bytes_and_products() -> None:
    plan = planned(*MODULES[0])
    linear = cost.of_group(plan, plan.group("linear"))
    assert linear.product_flop_count == 2 * 6 * 16 * 12
    assert linear.read_bytes == 4 * (6 * 12 + 16 * 12 + 16)
    least = cost.minimum(plan)
    assert least.read_bytes == 4 * (6 * 12 + 16 * 12 + 16 + 32)
    assert least.write_bytes == 4 * 6 * 16
    described = analysis.describe(plan, with_legal_moves=False)
    assert described.features == ["partition:none"]
    assert [list(group.producers) for group in described.groups][1] == ["linear"]
