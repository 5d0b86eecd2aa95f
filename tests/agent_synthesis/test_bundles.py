"""Small kernels that need nothing of each other as one launch: which may be, what they compute, and how they part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training_steps import Tried, of

from agent_synthesis.bundle import Bundle
from agent_synthesis.emit.cuda.parts import bundle as schedule
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import alike, analysis, bundles, cost, moves
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

CUDA = task_pb2.TARGET_CUDA
FILTERS = [(8, 6, 3, 3), (4, 64, 3, 3), (5, 3, 7, 7), (3, 33, 3, 3), (4, 64, 3, 3), (2, 70, 5, 5)]


def move(kind: str, group: str, choice: str = "") -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=analysis_pb2.MoveKind.Value(f"MOVE_KIND_{kind}"), group=group, choice=choice)


EVERY, TOGETHER, APART = move("AUTHOR", "*"), move("LAUNCH", "*", "together"), move("LAUNCH", "*", "apart")
LAYOUT, BESIDE = move("LAYOUT", "*", "channels_last"), move("AUTHOR", "*", "beside_products")


class Holding(nn.Module):
    """A function of parameters and buffers, by number, and of inputs."""

    def __init__(self, forward: Callable[..., Any], *held: torch.Tensor) -> None:
        super().__init__()
        self._forward, self._count = forward, len(held)
        for number, tensor in enumerate(held):
            self.register_buffer(f"held{number}", tensor)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._forward(*(getattr(self, f"held{number}") for number in range(self._count)), *inputs)


def zero(
    module: nn.Module, *inputs: torch.Tensor, target: task_pb2.Target.ValueType = CUDA, prepared: bool = False
) -> Plan:
    return plan_zero(GraphIndex(capture(module, inputs)), target, prepared=prepared)


def authored(plan: Plan) -> Plan:
    """Each group that can be a kernel of its own."""
    for group in plan.groups:
        with contextlib.suppress(IllegalMove):
            plan = moves.apply(plan, move("AUTHOR", group.name))
    return plan


def bundled(plan: Plan) -> list[Group]:
    return [group for group in plan.groups if group.members]


def members(plan: Plan) -> list[list[str]]:
    return [[each.name for each in group.members] for group in bundled(plan)]


def check(module: nn.Module, plan: Plan, *inputs: torch.Tensor) -> None:
    """The plan gives what the module's calls do, and writes the same in place."""
    held, given = module.state_dict(), iter(inputs)
    sources = {
        each.name: (held[each.qualified_name] if each.qualified_name else next(given)).detach().clone()
        for each in plan.index.graph.sources
        if each.origin != graph_pb2.ORIGIN_CONSTANT
    }
    eager, own = ({name: tensor.clone() for name, tensor in sources.items()} for _ in range(2))
    wanted = aten.interpret(plan.index.graph, eager)
    results = interpreter.run_plan(plan, own)
    for name, result in zip(plan.index.graph.outputs, results, strict=True):
        torch.testing.assert_close(result, wanted[name], rtol=1e-4, atol=1e-5)
    for name, tensor in eager.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-4, atol=1e-5)


def laid_out(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each.contiguous(memory_format=torch.channels_last) for each in weights)


def test_weights_of_any_size_are_laid_out_by_one_launch(compile_cuda: Callable[[Emission], str]) -> None:
    module = Holding(laid_out, *(torch.randn(shape) for shape in FILTERS))
    plan = moves.apply(zero(module), EVERY)
    (group,) = plan.groups
    assert [each.schedule for each in group.members].count("cuda_transpose") >= 3
    nest = plan.nest(group)
    assert isinstance(nest, Bundle)
    emission = plan.schedule(group).emit(nest, group.settings)
    (launch,) = emission.launches
    assert len(launch.arguments) == len(nest.buffers) == 2 * len(FILTERS)
    assert sorted(launch.writes) == sorted(plan.outputs(group))
    footprints = [plan.schedule(each).footprint(plan.nest(each), each.settings) for each in group.members]
    assert launch.grid.x == sum(each.parallel_count for each in footprints)
    assert emission.text.count("struct ") == len(FILTERS) - 1, "equal ones share their code"
    assert "__launch_bounds__(256, 4)" in emission.text, "blocks hide each other's waits"
    assert " 0 bytes spill stores" in compile_cuda(emission)
    check(module, plan)
    (step,) = generate(plan).steps
    assert step.launch == launch


def test_other_small_steps_are_launched_together_too(compile_cuda: Callable[[Emission], str]) -> None:
    """Weights that are rounded, norms that are folded, counters and tensors that are updated in place."""

    def forward(
        weight: torch.Tensor, other: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor, count: torch.Tensor,
        x: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        folded = scale / (mean * mean + 1e-5).sqrt()
        count.add_(1)
        mean.mul_(0.9)
        return weight.half(), other.bfloat16().t().contiguous(), folded, x.sigmoid()

    held = [torch.randn(40, 24), torch.randn(70, 33), torch.randn(50), torch.randn(50), torch.tensor(3)]
    module = Holding(forward, *held)
    plan = moves.apply(zero(module, torch.randn(7, 9)), EVERY)
    (names,) = members(plan)
    assert names == ["div", "add_", "to", "contiguous", "sigmoid"], "mean_ is in the kernel of div"
    check(module, plan, torch.randn(7, 9))
    for group in bundled(plan):
        compile_cuda(plan.schedule(group).emit(plan.nest(group), group.settings))


def test_small_tensors_of_an_optimizer_are_updated_by_one_launch() -> None:
    """Each in place, by a rate that is computed: a single number, so that no result is awaited in the cache."""
    shapes = [(40,), (30, 20), (20,), (7, 3), (41,)]

    def forward(steps: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
        parameters, momenta = list(held[: len(shapes)]), list(held[len(shapes) : 2 * len(shapes)])
        taken = steps + 1
        torch._foreach_lerp_(momenta, list(held[2 * len(shapes) :]), 0.1)
        torch._foreach_addcdiv_(parameters, momenta, [taken.sqrt()] * len(shapes))
        return taken

    drawn = [torch.randn(shape) for shape in shapes * 2]
    module, gradients = Holding(forward, torch.tensor(3.0), *drawn), [torch.randn(shape) for shape in shapes]
    plan = moves.apply(zero(module, *gradients), EVERY)
    (group,) = bundled(plan)
    assert len(group.members) == len(shapes)
    assert not any(bundles._is_in_cache(plan, each, 1 << 20) for each in group.members)
    check(module, plan, *gradients)
    written = [name for step in generate(plan).steps for name in step.launch.writes]
    assert len(written) == len({*written}) == 2 * len(shapes) + 2, "and the number of steps, and its root"


class Network(nn.Module):
    """A stem and residual blocks, in training mode."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2 * blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(1 + 2 * blocks))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norms[0](self.stem(x)))
        for number in range(0, len(self.convolutions), 2):
            y = functional.relu(self.norms[number + 1](self.convolutions[number](x)))
            x = functional.relu(x + self.norms[number + 2](self.convolutions[number + 1](y)))
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


def test_a_network_has_one_launch_for_its_weights_before_all_else() -> None:
    module, x = Network(), torch.randn(2, 3, 16, 16)
    plan = moves.apply_all(zero(module, x), [LAYOUT, BESIDE])
    (group,) = bundled(plan)
    assert plan.groups[0] is group
    copies = [name for name in plan.index.nodes if name.endswith("weight_channels_last")]
    assert len(copies) == 5
    assert {*copies, "x_channels_last"} <= {*group.nodes}
    assert any("add_" in name for name in group.nodes), "and counters of batch norms"
    check(module, plan, x)
    program = generate(plan)
    assert program.steps[0].group == group.name
    assert not any(name in step.launch.writes for step in program.steps[1:] for name in copies)


def chain(count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def forward(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = x @ (weight * x.sum()).exp()
        return x

    return forward


def test_what_needs_another_is_never_launched_with_it() -> None:
    module = Holding(chain(4), torch.randn(16, 16))
    plan = authored(zero(module, torch.randn(16, 16)))
    with pytest.raises(IllegalMove, match="no two small kernels"):
        moves.apply(plan, TOGETHER)
    assert not any(legal.move in (TOGETHER, APART) for legal in moves.legal(plan))


def test_memory_that_one_writes_in_place_is_read_by_none_beside_it() -> None:
    def forward(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = state.half()
        state.mul_(0.5)
        return before, x.sigmoid(), x.half()

    module, x = Holding(forward, torch.randn(30)), torch.randn(20)
    plan = moves.apply(authored(zero(module, x)), TOGETHER)
    (writer,) = (name for name, node in plan.index.nodes.items() if node.mutates)
    assert plan.partition.owner[writer] == writer, "it comes after all others, which are one launch"
    assert [len(names) for names in members(plan)] == [3]
    check(module, plan, x)


def test_what_is_computed_is_launched_with_others_that_are_not_before_it() -> None:
    """Two towers: elements of one beside those of the other, weights beside weights."""

    def forward(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x, y = (x @ first.exp()).sigmoid(), (y @ second.exp()).sigmoid()
        return x @ y

    module = Holding(forward, torch.randn(16, 16), torch.randn(16, 16))
    inputs = torch.randn(16, 16), torch.randn(16, 16)
    elements = [move("AUTHOR", group.name) for group in zero(module, *inputs).groups if "matmul" not in group.name]
    plan = moves.apply_all(zero(module, *inputs), [*elements, TOGETHER])
    found = members(plan)
    assert ["sigmoid", "sigmoid_1"] in found
    assert all({name.split("_")[0] for name in names} in ({"exp"}, {"sigmoid"}) for names in found)
    check(module, plan, *inputs)


def test_a_bundle_is_no_larger_than_a_kernel_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Holding(laid_out, *(torch.randn(4, 3, 3, 3) for _ in range(70)))
    plan = moves.apply(zero(module), EVERY)
    assert [len(names) for names in members(plan)] == [64, 6]
    assert all(len(plan.nest(group).buffers) <= schedule.MOST_TENSORS for group in bundled(plan))
    moved = bundles._moved_bytes(plan, bundled(plan)[0].members[0])
    monkeypatch.setattr(bundles, "_MOST_TOGETHER_BYTES", 10 * moved)
    assert {len(names) for names in members(moves.apply(zero(module), EVERY))} == {10}
    monkeypatch.setattr(bundles, "_MOST_BYTES", moved - 1)
    assert not bundled(moves.apply(zero(module), EVERY))


def test_bundles_that_are_alike_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Holding(laid_out, *(torch.randn(4, 3, 3, 3) for _ in range(8)))
    plan = authored(zero(module))
    monkeypatch.setattr(bundles, "_MOST_TOGETHER_BYTES", 4 * bundles._moved_bytes(plan, plan.groups[0]))
    plan = moves.apply(plan, TOGETHER)
    first, second = bundled(plan)
    assert alike.classes(plan)[first.name] == [first.name, second.name]
    launches = [step.launch for step in generate(plan).steps]
    assert launches[0].entry == launches[1].entry
    assert not {*launches[0].writes} & {*launches[1].writes}
    assert first.arrangement == second.arrangement
    check(module, plan)


def test_kernels_are_taken_apart_as_they_were() -> None:
    module = Holding(laid_out, *(torch.randn(shape) for shape in FILTERS))
    plan = authored(zero(module))
    made = moves.apply(plan, TOGETHER)
    assert (len(plan.groups), len(made.groups)) == (len(FILTERS), 1)
    assert [group.name for group in moves.apply(made, APART).groups] == [group.name for group in plan.groups]
    assert set(moves.apply(made, APART).groups) == set(plan.groups)
    back = moves.apply(made, move("LIBRARY", made.groups[0].name))
    assert all(group.engine == "library" and not group.members for group in back.groups)
    with pytest.raises(IllegalMove, match="no kernels are launched together"):
        moves.apply(plan, APART)
    with pytest.raises(IllegalMove, match="no two small kernels"):
        moves.apply(made, TOGETHER)
    with pytest.raises(IllegalMove, match="together or apart, all of a plan"):
        moves.apply(plan, move("LAUNCH", "clone", "together"))


def test_a_search_sees_a_bundle_as_one_group_and_both_moves() -> None:
    module = Holding(laid_out, *(torch.randn(shape) for shape in FILTERS))
    plan = authored(zero(module))
    (told,) = (legal for legal in moves.legal(plan) if legal.move == TOGETHER)
    assert (told.before.launch_count, told.after.launch_count) == (len(FILTERS), 1)
    assert told.before.read_bytes == told.after.read_bytes == 4 * sum(torch.Size(each).numel() for each in FILTERS)
    assert told.effect == "launches small kernels that need nothing of each other together"
    made = moves.apply(plan, TOGETHER)
    described = analysis.describe(made, with_legal_moves=True)
    assert [(group.schedule, group.cost.launch_count) for group in described.groups] == [("cuda_bundle", 1)]
    offered = [legal.move for legal in described.legal_moves]
    assert APART in offered
    assert TOGETHER not in offered
    assert not any(each.kind == analysis_pb2.MOVE_KIND_SET for each in offered)
    digests = {analysis.describe(each, with_legal_moves=False).plan_digest for each in (plan, made)}
    assert len(digests) == 2


def test_nothing_is_fused_into_a_bundle_or_out_of_it() -> None:
    def forward(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first.exp() + x, second.exp() * x

    plan = zero(Holding(forward, torch.randn(20), torch.randn(20)), torch.randn(20))
    plan = moves.apply_all(plan, [move("AUTHOR", name) for name in ("exp", "exp_1", "add")])
    made = moves.apply(plan, TOGETHER)
    assert members(made) == [["exp", "exp_1"]]
    with pytest.raises(IllegalMove, match="kernels that are launched together stay as they are"):
        moves.apply(made, move("FUSE", "add", "exp_1"))
    assert moves.apply(moves.apply(made, APART), move("FUSE", "add", "exp")).group("add").nodes == ("exp", "add")


def test_a_processor_has_no_launches_to_spare() -> None:
    plan = zero(Holding(laid_out, *(torch.randn(shape) for shape in FILTERS)), target=task_pb2.TARGET_CPU)
    assert not bundled(moves.apply(plan, EVERY))
    with pytest.raises(IllegalMove):
        moves.apply(authored(plan), TOGETHER)


def test_what_is_kept_from_call_to_call_is_launched_with_nothing() -> None:
    module, x = Network().eval(), torch.randn(2, 3, 16, 16)
    plan = moves.apply_all(zero(module, x, prepared=True), [LAYOUT, BESIDE])
    assert all(plan.is_kept(group) for group in plan.groups if group.name.endswith("weight_channels_last"))
    assert not any("weight" in name for names in members(plan) for name in names)


def test_a_training_step_launches_nothing_of_its_backward_in_its_forward() -> None:
    def forward(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x @ weight.exp()
        return x

    tried = Tried.of((of(forward, *[(16, 16)] * 4), lambda: [torch.randn(16, 16)]), CUDA)
    elements = [each.name for each in tried.plan.groups if not {"mm", "matmul", "t"} & {each.name.split("_")[0]}]
    plan = moves.apply_all(tried.plan, [*(move("AUTHOR", name) for name in elements), TOGETHER])
    kinds = [{bundles._kind(plan, each) for each in group.members} for group in bundled(plan)]
    assert kinds
    assert all(len(each) == 1 for each in kinds)
    tried.check(plan)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (2, 40, 7)])
def test_a_bundle_costs_what_its_members_do_but_for_launches(sizes: Sequence[int]) -> None:
    plan = authored(zero(Holding(laid_out, *(torch.randn(size, 5, 3, 3) for size in sizes))))
    made = moves.apply(plan, TOGETHER)
    before, after = (cost.total(cost.of_group(each, group) for group in each.groups) for each in (plan, made))
    assert (before.launch_count, after.launch_count) == (3, 1)
    assert (before.read_bytes, before.write_bytes) == (after.read_bytes, after.write_bytes)
    assert after.parallel_count >= before.parallel_count
