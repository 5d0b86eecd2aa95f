"""Workspaces of a GPU's program in one block: that those needed at once are apart, and how little a network takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero
from gpu_bench.running.executor import TorchMemory
from gpu_bench.running.gpu.workspace_plan import ALIGNMENT, PlannedMemory, WorkspacePlan, span_bytes
from gpu_bench.timing.timed_memory import LargeWorkspaces, Workspaces
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.program_steps import lifetimes
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2, tensor_pb2

Program = candidate_pb2.Program
WORKSPACE, LIBRARY = candidate_pb2.ROLE_WORKSPACE, candidate_pb2.ROLE_LIBRARY
EVERY = (WORKSPACE, LIBRARY, candidate_pb2.ROLE_OUTPUT)
KIB = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[16, 16], strides=[16, 1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(64, 256) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in range(0, 8, 2):
            y = torch.relu(self.norms[block](self.convolutions[block](x)))
            x = torch.relu(self.norms[block + 1](self.convolutions[block + 1](y)) + x)
        return x.mean((2, 3))


def made(module: nn.Module, shape: tuple[int, ...], *choices: tuple[analysis_pb2.MoveKind.ValueType, str]) -> Program:
    plan = plan_zero(GraphIndex(capture(module, (torch.zeros(shape),))), task_pb2.TARGET_CUDA)
    for kind, choice in choices:
        plan = moves.apply(plan, analysis_pb2.Move(kind=kind, group="*", choice=choice))
    return generate(plan)


def peak_bytes(program: Program, *roles: candidate_pb2.Role.ValueType) -> int:
    """The most that buffers of these roles take at once, where each comes and goes, as in an export."""
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    lives = lifetimes(program, *roles)
    lives |= {name: (first, len(program.steps)) for name, (first, _) in lives.items() if name in program.outputs}
    return max(
        sum(span_bytes(specs[name]) for name, (first, last) in lives.items() if first <= position <= last)
        for position in range(len(program.steps))
    )


def assert_apart(program: Program) -> None:
    plan, specs = WorkspacePlan.of(program), {buffer.name: buffer.spec for buffer in program.buffers}
    lives = lifetimes(program, WORKSPACE)
    for one, other in itertools.combinations(plan.offsets, 2):
        meet = lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]
        ends = {name: plan.offsets[name] + span_bytes(specs[name]) for name in (one, other)}
        overlap = plan.offsets[one] < ends[other] and plan.offsets[other] < ends[one]
        assert not (meet and overlap), (one, other)
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets.values())


NETWORKS = [
    (Transformer(), (512, 64), [(analysis_pb2.MOVE_KIND_AUTHOR, "beside_products")]),
    (Residual().eval(), (8, 16, 32, 32), [(analysis_pb2.MOVE_KIND_AUTHOR, "beside_products")]),
    (
        Residual().train(), (8, 16, 32, 32),
        [(analysis_pb2.MOVE_KIND_LAYOUT, "channels_last"), (analysis_pb2.MOVE_KIND_AUTHOR, "beside_products")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shape", "choices"), NETWORKS)
def test_a_whole_plan_needs_about_what_eager_does(
    module: nn.Module, shape: tuple[int, ...], choices: list[tuple[analysis_pb2.MoveKind.ValueType, str]]
) -> None:
    program = made(module, shape, *choices)
    assert_apart(program)
    assert len(WorkspacePlan.of(program).offsets) > 4
    assert peak_bytes(program, *EVERY) <= 1.1 * peak_bytes(made(module, shape), *EVERY)
    assert WorkspacePlan.of(program).byte_count <= 1.25 * peak_bytes(program, WORKSPACE)


def test_products_of_ours_keep_what_they_convert_apart() -> None:
    """That is more than eager needs: their factors in three parts."""
    assert_apart(made(Transformer(), (512, 64), (analysis_pb2.MOVE_KIND_AUTHOR, "")))


def steps(*names: str) -> Program:
    """A launch for each, which reads the buffers of its letters and writes the last."""
    program = Program()
    for name in sorted({letter for each in names for letter in each}):
        program.buffers.add(name=name, role=WORKSPACE, spec=KIB)
    for each in names:
        launch = program.steps.add().launch
        for letter in each:
            launch.arguments.add(buffer=letter)
    return program


def test_workspaces_that_are_not_needed_at_once_share_a_place() -> None:
    program = steps("a", "ab", "bc", "cd")
    assert WorkspacePlan.of(program).byte_count == 2 * 1024
    assert_apart(program)


def test_memory_that_a_view_of_the_librarys_looks_at_is_kept_for_it() -> None:
    program = steps("a", "b", "c")
    view = candidate_pb2.LibraryCall(target="aten.view.default", results=["v"])
    view.args.add(tensor="a")
    view.args.add().list.values.add(integer=256)
    program.buffers.add(name="v", role=LIBRARY, spec=tensor_pb2.TensorSpec(dtype=1, shape=[256], strides=[1]))
    program.steps.insert(1, candidate_pb2.Step(library=view))
    program.steps.add().launch.arguments.add(buffer="v")
    plan = WorkspacePlan.of(program)
    assert plan.offsets["a"] not in (plan.offsets["b"], plan.offsets["c"])
    assert plan.offsets["b"] == plan.offsets["c"]


def test_what_stays_zero_between_calls_has_memory_of_its_own() -> None:
    program = steps("a", "ab")
    program.buffers[1].zero_between_calls = True
    plan = WorkspacePlan.of(program)
    assert list(plan.offsets) == ["a"]
    memory = PlannedMemory(plan, TorchMemory(torch.device("cpu")))
    assert not memory.zeros("b", KIB).any()


def test_a_workspace_has_the_type_and_layout_that_its_kernel_relies_on() -> None:
    program = steps("ab")
    turned = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_BFLOAT16, shape=[16, 4], strides=[1, 24])
    program.buffers[1].spec.CopyFrom(turned)
    memory = PlannedMemory(WorkspacePlan.of(program), TorchMemory(torch.device("cpu")))
    a, b = memory.empty("a", KIB), memory.empty("b", turned)
    assert (b.dtype, b.shape, b.stride()) == (torch.bfloat16, (16, 4), (1, 24))
    a.fill_(1.0)
    b.fill_(2.0)
    assert a.unique().tolist() == [1.0]


def test_a_program_without_workspaces_takes_no_memory() -> None:
    program = made(Transformer(), (8, 64))
    assert WorkspacePlan.of(program) == WorkspacePlan({}, 0)


def test_an_unknown_move_is_refused() -> None:
    with pytest.raises(IllegalMove):
        made(Transformer(), (8, 64), (analysis_pb2.MOVE_KIND_LAYOUT, "channels_last"))


@pytest.mark.parametrize(("beyond", "blocks"), [(0, 1), (1, 4)], ids=["large", "small"])
def test_buffer_sets_share_workspaces_that_no_cache_holds(beyond: int, blocks: int) -> None:
    plan = WorkspacePlan.of(made(Transformer(), (8, 64), (analysis_pb2.MOVE_KIND_AUTHOR, "")))
    assert plan.byte_count
    large = LargeWorkspaces(plan.byte_count + beyond)
    sets = [Workspaces(torch.device("cpu"), large) for _ in range(4)]
    found = [PlannedMemory(plan, memory) for memory in sets]
    parts = [memory.empty(next(iter(plan.offsets)), KIB) for memory in found]
    assert len({part.data_ptr() for part in parts}) == blocks
    for memory, part in zip(sets, parts, strict=True):
        part.zero_()
        memory.forget()
        assert bool((part.view(torch.uint8) == 0x3F).all())
