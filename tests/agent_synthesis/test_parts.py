"""The kernels of a network compile beside each other, and a search that changes one of them compiles that one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent_compile.cache import Cache
from agent_compile.compiler import Compiler
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_compile.toolchains.toolchain import Compiled, Outcome
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.contract import program_parts
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, artifact_pb2, candidate_pb2, task_pb2

ALL_AUTHORED = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")
WIDTHS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80)


class Counting(Nvrtc):
    """Remembers what was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def compile(self, program: candidate_pb2.Program) -> Outcome:
        self.seen += [step.launch.entry for step in program.steps]
        return super().compile(program)


@pytest.fixture(scope="module")
def plan() -> Plan:
    layers: list[torch.nn.Module] = []
    for before, after in zip((4, *WIDTHS), WIDTHS, strict=False):
        layers += [torch.nn.Conv2d(before, after, 1), torch.nn.ReLU()]
    graph = capture(torch.nn.Sequential(*layers), (torch.randn(2, 4, 8, 8),))
    return moves.apply(plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA), ALL_AUTHORED)


@pytest.fixture
def toolchain() -> Iterator[Counting]:
    made = Counting()
    if made.missing():
        pytest.skip(made.missing())
    yield made
    made.close()


def entries(program: candidate_pb2.Program) -> list[str]:
    return [step.launch.entry for step in program.steps if step.HasField("launch")]


def test_a_network_compiles_in_parts_and_one_kernel_alone_where_it_changes(
    plan: Plan, toolchain: Counting, tmp_path: Path
) -> None:
    compiler, program = Compiler([toolchain], Cache(tmp_path)), generate(plan)
    assert len(program_parts.apart(program)) == len(WIDTHS)
    made = compiler.compile(program).outcome
    assert isinstance(made, artifact_pb2.Artifact), made
    assert sorted(toolchain.seen) == sorted(entries(program))
    assert [each.entry for each in made.resources] == entries(program)
    assert all(content.startswith(b"\x7fELF") for content in (made.content, *made.further))
    assert len(made.further) == len(WIDTHS) - 1

    group = next(group for group in plan.groups if group.engine == "authored")
    choice = next(each.move for each in moves.legal(plan) if each.move.group == group.name and "=" in each.move.choice)
    toolchain.seen.clear()
    changed = generate(moves.apply(plan, choice))
    answer = compiler.compile(changed)
    assert isinstance(answer.outcome, artifact_pb2.Artifact)
    assert len(toolchain.seen) == 1
    assert answer.outcome.further[:] != made.further[:] or answer.outcome.content != made.content


def test_the_source_in_parts_is_one_that_compiles_as_a_whole(plan: Plan, toolchain: Counting) -> None:
    program = generate(plan)
    outcome = toolchain.compile(program)
    assert isinstance(outcome, Compiled), outcome
    assert sorted(each.entry for each in outcome.resources) == sorted(entries(program))
