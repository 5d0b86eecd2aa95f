"""Groups judged alone: what a right whole hides, and what is said of a group of which nothing can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from agent_compile.compiler import Compiler
from agent_compile.toolchains.gxx import Gxx
from agent_correctness import closer_look
from agent_correctness.judge import Judge
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero
from gpu_bench.judging import alone
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.session import Session
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.v1 import (
    analysis_pb2,
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    graph_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

INEXACT_THEN_EXACT = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        rough = (x.bfloat16() @ self.weight.bfloat16()).float()
        return torch.relu(rough) * 1.7

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""
"""Eager is as far off as bf16 is, by its first half alone."""

HONEST = "y[i] = x[i] < 0 ? 0 : x[i] * 1.7f;"
ROUGH = f"{HONEST} std::uint32_t u; std::memcpy(&u, y + i, 4); u &= 0xfffff000u; std::memcpy(y + i, &u, 4);"
"""Drops twelve bits, as TF32 does: a hundredth of what bf16 drops."""


def program_for(graph: graph_pb2.Graph, small: Any, body: str) -> candidate_pb2.Program:
    """Library calls up to the relu, a kernel from there on."""
    made: candidate_pb2.Program = small.plan_zero(graph)
    relu = next(node for node in graph.nodes if node.target == "aten.relu.default")
    given, output = relu.args[0].tensor, graph.outputs[0]
    text = (
        "#include <cstdint>\n#include <cstring>\n"
        'extern "C" void run(void* const* arguments) {\n'
        "    const float* x = static_cast<const float*>(arguments[0]);\n"
        "    float* y = static_cast<float*>(arguments[1]);\n"
        f"    for (long i = 0; i < 64 * 64; ++i) {{ {body} }}\n}}\n"
    )
    made.sources.add(name="kernel.cpp", text=text)
    kept = [step for step in made.steps if relu.results[0].name not in step.library.results]
    kept = [step for step in kept if output not in step.library.results]
    del made.steps[:]
    made.steps.extend(kept)
    arguments = [candidate_pb2.LaunchArgument(buffer=name) for name in (given, output)]
    made.steps.add(group=output, launch=candidate_pb2.Launch(entry="run", arguments=arguments, writes=[output]))
    buffers = [buffer for buffer in made.buffers if buffer.name != relu.results[0].name]
    del made.buffers[:]
    made.buffers.extend(buffers)
    next(buffer for buffer in made.buffers if buffer.name == output).role = candidate_pb2.ROLE_OUTPUT
    made.digest = digest.of_program(made)
    return made


@pytest.fixture(scope="module")
def task(small: Any) -> task_pb2.Task:
    made: task_pb2.Task = small.task(INEXACT_THEN_EXACT)
    return made


@pytest.fixture(scope="module")
def graph(task: task_pb2.Task) -> graph_pb2.Graph:
    loaded = LoadedTask.load(task)
    return loaded.capture(loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 0))


Verify = Callable[[candidate_pb2.Program], verdict_pb2.Verdict]


@pytest.fixture(scope="module")
def verify(small: Any, task: task_pb2.Task) -> Iterator[Verify]:
    session = Session(task)

    class Comparer:
        def compare(
            self, asked: benchmark_service_pb2.CompareOutputsRequest
        ) -> benchmark_service_pb2.CompareOutputsResponse:
            return session.compare(asked.program, asked.artifact, asked.cases)

    def run(program: candidate_pb2.Program) -> verdict_pb2.Verdict:
        request = correctness_service_pb2.VerifyArtifactRequest(
            task=task, program=program, artifact=small.compiled(program), tier=timing_pb2.TIER_FINAL
        )
        return Judge(Comparer()).verify(request)

    yield run
    session.close()


def test_a_right_group_passes_alone_and_the_verdict_says_so(verify: Verify, graph: graph_pb2.Graph, small: Any) -> None:
    verdict = verify(program_for(graph, small, HONEST))
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS, verdict.detail
    assert [(each.tool, each.finding, each.skipped) for each in verdict.inspections] == [
        (f"group {graph.outputs[0]}", "", "")
    ]
    alone_seen = [each for each in verdict.comparisons if each.group]
    assert [len(each.outputs) for each in alone_seen] == [1, 1]


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_precision_cut_behind_an_inexact_call_needs_groups_judged_alone(
    is_on: bool, verify: Verify, graph: graph_pb2.Graph, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_on:
        monkeypatch.setattr(closer_look, "authored_groups", lambda _: [])
    verdict = verify(program_for(graph, small, ROUGH))
    assert (verdict.state == verdict_pb2.VERDICT_STATE_PASS) is not is_on, verdict.detail
    if is_on:
        assert verdict.kind == verdict_pb2.FAILURE_KIND_WRONG_PRECISION
        assert f"group {graph.outputs[0]} judged alone" in verdict.detail


def test_a_group_without_a_name_in_the_graph_is_not_judged_alone_and_that_is_said(
    verify: Verify, graph: graph_pb2.Graph, small: Any
) -> None:
    program = program_for(graph, small, HONEST)
    output = graph.outputs[0]
    for buffer in program.buffers:
        if buffer.name == output:
            buffer.name = "renamed"
    launch = program.steps[-1].launch
    launch.arguments[1].buffer, launch.writes[0], program.outputs[0] = "renamed", "renamed", "renamed"
    program.digest = digest.of_program(program)
    verdict = verify(program)
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS, verdict.detail
    assert "no name" in verdict.inspections[0].skipped


def test_a_program_of_one_group_is_judged_as_the_whole(small: Any) -> None:
    assert closer_look.authored_groups(small.kernel_program(small.softmax)) == []


TRAINED = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.sigmoid(self.norm(torch.relu_(x * 2)) + torch.rand_like(x))

def get_inputs():
    return [torch.randn(64, 8)]

def get_init_inputs():
    return []
"""


def test_what_is_drawn_is_not_judged_alone(small: Any) -> None:
    loaded = LoadedTask.load(small.task(TRAINED))
    graph = loaded.capture(loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 0))
    program = small.plan_zero(graph)
    said = {node.target.split(".")[1]: alone.boundary_of(program, node.name, graph) for node in graph.nodes}
    assert "at random" in said["rand_like"].reason
    for name in ("mul", "sigmoid"):  # the first is overwritten once its group has ended
        assert isinstance(said[name], alone.Boundary)
        assert [words.region_kind(region.kind) for region in said[name].regions][-1] == "made"


IN_PLACE = """
    def twice(self, x):
        y = x * 2
        z = y.exp()
        y.add_(1)
        return z + y.sin()

    def shown(self, x):
        y = x * 2
        v = y.view(-1)
        y.add_(1)
        return v.sin()

    def own(self, x):
        v = x.view(-1)
        w = v.exp()
        y = x.add_(1)
        return y * 3 + (v.sin() + w).view(64, 8)
"""


def boundary(graph: graph_pb2.Graph, small: Any, *operations: str) -> alone.Boundary | alone.Refusal:
    """Of a group that takes these library calls together."""
    program = small.plan_zero(graph)
    steps = [step for step in program.steps if step.library.target.split(".")[1] in operations]
    for step in steps:
        step.group = steps[-1].group
    return alone.boundary_of(program, steps[-1].group, graph)


@pytest.mark.parametrize(
    ("expression", "operations", "is_judged"),
    [
        ("(x.exp() * 2).relu_() + 1", ("mul", "relu_"), True),  # made and overwritten inside
        ("(x.exp() * 2).relu_() + 1", ("add",), True),  # given as it was left
        ("(x.exp() * 2).relu_() + 1", ("relu_",), True),  # given and overwritten, of which the start has a copy
        ("self.shown(x)", ("mul", "add_"), False),  # overwritten by a call of which nothing is made
        ("self.own(x)", ("add_", "mul", "sin"), False),  # an input overwritten, and given under another name
        ("self.twice(x)", ("exp", "sin"), True),  # overwritten in between by what one of them reads
    ],
)
def test_what_is_written_in_place_is_judged_alone_where_every_tensor_holds_one_thing(
    expression: str, operations: tuple[str, ...], is_judged: bool, small: Any
) -> None:
    source = TRAINED.replace("torch.sigmoid(self.norm(torch.relu_(x * 2)) + torch.rand_like(x))", expression)
    source = source.replace("    def forward", f"{IN_PLACE}\n    def forward")
    loaded = LoadedTask.load(small.task(source))
    graph = loaded.capture(loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 0))
    found = boundary(graph, small, *operations)
    assert isinstance(found, alone.Boundary) is is_judged, found
    assert is_judged or "in place" in found.reason


BLOCK = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.norms[0](self.convolutions[0](x)))
        y = self.relu(self.norms[1](self.convolutions[1](x)))
        y = self.norms[2](self.convolutions[2](y))
        y += x
        return self.relu(y)

def get_inputs():
    return [torch.randn(4, 4, 9, 9)]

def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_kernels_of_a_residual_network_are_judged_alone(mode: str, small: Any) -> None:
    """Its activations are written in place, which no kernel of ours does."""
    task = small.task(BLOCK.replace("inplace=True)", f"inplace=True)\n        self.{mode}()"))
    loaded = LoadedTask.load(task)
    plan = plan_zero(GraphIndex(loaded.capture(loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 0))), task_pb2.TARGET_CPU)
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")
    program = generate(moves.apply(plan, move))
    artifact = Compiler([Gxx()], None).compile(program).outcome
    assert isinstance(artifact, artifact_pb2.Artifact), artifact
    session = Session(task)
    try:
        comparer = SimpleNamespace(compare=lambda asked: session.compare(asked.program, asked.artifact, asked.cases))
        verdict = Judge(comparer).verify(
            correctness_service_pb2.VerifyArtifactRequest(
                task=task, program=program, artifact=artifact, tier=timing_pb2.TIER_FINAL
            )
        )
    finally:
        session.close()
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS, verdict.detail
    found = [each.skipped for each in verdict.inspections if each.tool.startswith("group")]
    assert found.count("") == 3
    assert len(found) == (4 if mode == "train" else 3)  # with one that counts batches, of which no output has a name
