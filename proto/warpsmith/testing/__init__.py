"""Tells the author of a plugin whether it fits its role, whatever it is written in.

    python -m warpsmith.testing toolchain NAME
    python -m warpsmith.testing reasoner 127.0.0.1:50051

asks the plugin that is installed under that name, or a running server, and prints what it finds. In a test of the
author's, `check_reasoner(MyReasoner)` gives the findings; an empty list means that it fits. The suites of agents that
can be servers are here, and in `asking` what all suites share; those of other roles are beside what they ask about.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from warpsmith import arguments, digest, plugins, printable, service
from warpsmith.contract import words
from warpsmith.errors import BadInput, IllegalMove, Infrastructure, UnknownPlugin, WarpsmithError
from warpsmith.testing import asking
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    compile_service_pb2,
    compile_service_pb2_grpc,
    hypothesis_pb2,
    reasoning_service_pb2,
    reasoning_service_pb2_grpc,
    synthesis_service_pb2,
    synthesis_service_pb2_grpc,
    task_pb2,
    tensor_pb2,
    timing_pb2,
    trial_pb2,
)

SOFTMAX = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=1)


def get_inputs():
    return [torch.rand(64, 256)]


def get_init_inputs():
    return []
"""
"""The module that the questions are about, in KernelBench's format."""

Propose = Callable[[reasoning_service_pb2.ProposeHypothesesRequest], reasoning_service_pb2.ProposeHypothesesResponse]
Analyze = Callable[[synthesis_service_pb2.AnalyzePlanRequest], synthesis_service_pb2.AnalyzePlanResponse]
Synthesize = Callable[
    [synthesis_service_pb2.SynthesizeCandidateRequest], synthesis_service_pb2.SynthesizeCandidateResponse
]
Compile = Callable[[compile_service_pb2.CompileCandidateRequest], compile_service_pb2.CompileCandidateResponse]

SUITES = {
    "reasoner": "warpsmith.testing:check_reasoner",
    "synthesizer": "warpsmith.testing:check_synthesizer",
    "toolchain": "agent_compile.conformance:check_toolchain",
    "check": "agent_correctness.conformance:check_check",
    "executor": "gpu_bench.running.conformance:check_executor",
    "search": "orchestrator.search.conformance:check_search",
    "exporter": "orchestrator.exports.conformance:check_exporter",
    "schedule": "agent_synthesis.conformance:check_schedule",
    "lowering": "agent_synthesis.conformance:check_handlers",
}
"""What gives the findings on what makes a plugin of a role; named, not imported: this kit does without the services."""


def softmax_task(target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU) -> task_pb2.Task:
    """The task of `SOFTMAX`: one float32 [64, 256] in, one out."""
    task = task_pb2.Task(name="softmax", entry_path="softmax.py", class_name="Model", target=target)
    task.sources.add(path="softmax.py", content=SOFTMAX.encode())
    task.precision = task_pb2.PRECISION_FP32
    for spec in (task.inputs.add(), task.outputs.add()):
        spec.dtype = tensor_pb2.DTYPE_FLOAT32
        spec.shape.extend([64, 256])
        spec.strides.extend([256, 1])
    task.input_literals.append("")
    task.digest = digest.of_task(task)
    return task


def softmax_analysis() -> analysis_pb2.Analysis:
    """Plan zero of the task, described by hand: one library group that may be authored."""
    analysis = analysis_pb2.Analysis(plan_digest=digest.of_moves([]))
    byte_count = 64 * 256 * 4
    cost = analysis_pb2.Cost(read_bytes=byte_count, write_bytes=byte_count, operation_count=5 * 64 * 256)
    cost.launch_count, cost.parallel_count = 1, 64
    analysis.groups.add(
        name="softmax", computed_by=analysis_pb2.ENGINE_LIBRARY, operations=["aten.softmax.int"], cost=cost
    )
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="softmax")
    analysis.legal_moves.add(move=move, before=cost, after=cost, effect="writes softmax as one kernel")
    analysis.minimum.CopyFrom(cost)
    return analysis


def reasoning_request(limit: int = 4) -> reasoning_service_pb2.ProposeHypothesesRequest:
    """A request about plan zero on a plain machine, with plenty of headroom."""
    device = timing_pb2.Device(target=task_pb2.TARGET_CPU, name="test", copy_bytes_per_second=2e10)
    device.read_bytes_per_second = device.write_bytes_per_second = 1e10
    device.product_flops = device.operation_flops = 1e11
    device.launch_ns, device.unit_count, device.cache_bytes = 2000.0, 2, 1 << 20
    reference = timing_pb2.ReferenceReport(fastest_arm=timing_pb2.ARM_KIND_EAGER, floor_ns=10_000.0)
    reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=100_000.0)
    request = reasoning_service_pb2.ProposeHypothesesRequest(task=softmax_task(), limit=limit)
    request.analysis.CopyFrom(softmax_analysis())
    request.device.CopyFrom(device)
    request.reference.CopyFrom(reference)
    return request


def check_reasoning(propose: Propose) -> list[str]:
    """Findings about a reasoner's method, or about what calls a server. Raises Infrastructure: no server answers."""
    return asking.findings(_reasoning(propose), of_server=True)


def check_reasoner(make: Callable[[], Any]) -> list[str]:
    """Findings about the reasoner that `make` gives."""

    def questions() -> Iterator[str]:
        reasoner = asking.made(make)

        def propose(
            request: reasoning_service_pb2.ProposeHypothesesRequest,
        ) -> reasoning_service_pb2.ProposeHypothesesResponse:
            return asking.method(reasoner, "propose", request, gives=reasoning_service_pb2.ProposeHypothesesResponse)

        yield from _reasoning(propose)

    return asking.findings(questions())


def _reasoning(propose: Propose) -> Iterator[str]:
    def proposed() -> Sequence[hypothesis_pb2.Hypothesis]:
        answer = asking.ask(propose, request, gives=reasoning_service_pb2.ProposeHypothesesResponse, name="propose")
        return answer.hypotheses

    request = reasoning_request()
    hypotheses = proposed()
    if not hypotheses:
        yield "proposes nothing for a softmax with tenfold headroom and a legal move"
    if len(hypotheses) > request.limit:
        yield f"proposes {len(hypotheses)} hypotheses where {request.limit} were asked for"
    legal = {digest.of_moves([item.move]) for item in request.analysis.legal_moves}
    for number, hypothesis in enumerate(hypotheses, start=1):
        name = f"hypothesis {number}"
        new = hypothesis.new_move_count
        if not 1 <= new <= len(hypothesis.moves):
            yield f"{name}: new_move_count is {new} of {len(hypothesis.moves)} moves"
        elif digest.of_moves([hypothesis.moves[-new]]) not in legal:
            yield f"{name}: its first new move is not among the legal ones"
        if not (math.isfinite(hypothesis.predicted_speedup) and hypothesis.predicted_speedup > 0):
            yield f"{name}: predicted_speedup {hypothesis.predicted_speedup} is not a positive number"
        if not hypothesis.rationale.strip() or "\n" in hypothesis.rationale:
            yield f"{name}: the rationale is not one sentence"
        if not hypothesis.source:
            yield f"{name}: source is empty"
    request.analysis.ClearField("legal_moves")
    if proposed():
        yield "proposes moves where none is legal"
    request.ClearField("analysis")
    yield from asking.refuses(proposed, BadInput, "a request without an analysis")


def check_synthesis(analyze: Analyze, synthesize: Synthesize) -> list[str]:
    """Findings about what calls a synthesizer's server. Needs torch where it runs. Raises Infrastructure."""
    return asking.findings(_synthesis(analyze, synthesize), of_server=True)


def check_synthesizer(make: Callable[[], Any]) -> list[str]:
    """Findings about the synthesizer that `make` gives."""

    def questions() -> Iterator[str]:
        plugin = asking.made(make)

        def analyze(request: synthesis_service_pb2.AnalyzePlanRequest) -> synthesis_service_pb2.AnalyzePlanResponse:
            found = asking.method(plugin, "analyze", request.task, request.moves, gives=analysis_pb2.Analysis)
            return synthesis_service_pb2.AnalyzePlanResponse(analysis=found)

        def synthesize(
            request: synthesis_service_pb2.SynthesizeCandidateRequest,
        ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
            candidate = candidate_pb2.Candidate
            found = asking.method(plugin, "synthesize", request.task, request.hypothesis, gives=candidate)
            return synthesis_service_pb2.SynthesizeCandidateResponse(candidate=found)

        def repair() -> tuple[Any, ...]:
            return asking.method(plugin, "repair", softmax_task(), trial_pb2.Trial(), "", gives=tuple)

        yield from _synthesis(analyze, synthesize)
        yield from asking.refuses(repair, BadInput, "the repair of a trial that did not fail")

    return asking.findings(questions())


def _synthesis(analyze: Analyze, synthesize: Synthesize) -> Iterator[str]:
    task = softmax_task()
    analysis = analyze(synthesis_service_pb2.AnalyzePlanRequest(task=task)).analysis
    if not analysis.groups:
        yield "plan zero has no groups"
    for legal in analysis.legal_moves:
        request = synthesis_service_pb2.AnalyzePlanRequest(task=task, moves=[legal.move])
        try:
            analyze(request)
        except WarpsmithError as error:
            yield f"legal move {words.move_kind(legal.move.kind)} {legal.move.group} does not apply: {error}"
    candidates = []
    for _ in range(2):
        request_one = synthesis_service_pb2.SynthesizeCandidateRequest(task=task)
        request_one.hypothesis.CopyFrom(hypothesis_pb2.Hypothesis())
        candidates.append(synthesize(request_one).candidate)
    if candidates[0] != candidates[1]:
        yield "equal requests give different candidates"
    yield from (f"plan zero: {finding}" for finding in _program(candidates[0].program))
    bad = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="no such group")
    request_bad = synthesis_service_pb2.AnalyzePlanRequest(task=task, moves=[bad])
    yield from asking.refuses(lambda: analyze(request_bad), IllegalMove, "a move on a group that does not exist")


def _program(program: candidate_pb2.Program) -> Iterator[str]:
    names = {buffer.name for buffer in program.buffers}
    if program.digest != digest.of_program(program):
        yield "the program's digest is not that of its parts"
    for output in program.outputs:
        if output not in names:
            yield f"output {output} is not among the buffers"
    for step in program.steps:
        for argument in step.launch.arguments:
            if (name := arguments.buffer_of(argument)) is not None and name not in names:
                yield f"launch {step.launch.entry} names {name}, which is not a buffer"


def check_compile(compile_candidate: Compile) -> list[str]:
    """Findings about what calls a compile agent's server, for the CPU target; a toolchain's own method is asked by
    `agent_compile.conformance`. Raises Infrastructure."""
    return asking.findings(_compile(compile_candidate), of_server=True)


def _compile(compile_candidate: Compile) -> Iterator[str]:
    def outcome(text: str) -> compile_service_pb2.CompileCandidateResponse:
        program = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
        program.sources.add(name="kernel.cpp", text=text)
        program.digest = digest.of_program(program)
        request = compile_service_pb2.CompileCandidateRequest(program=program)
        answer = compile_service_pb2.CompileCandidateResponse
        return asking.ask(compile_candidate, request, gives=answer, name="CompileCandidate")

    good = 'extern "C" void nothing(void* const* arguments) { (void)arguments; }\n'
    first, second = outcome(good), outcome(good)
    if first.WhichOneof("outcome") != "artifact" or not first.artifact.content:
        yield f"a right source gives no binary: {first.rejection.diagnostics}"
    elif first.artifact.digest != second.artifact.digest:
        yield "equal programs give artifacts of different digests"
    broken = outcome('extern "C" void broken(void* const*) { undeclared(); }\n')
    if broken.WhichOneof("outcome") != "rejection":
        yield "a source that does not compile is not rejected"
    elif "undeclared" not in broken.rejection.diagnostics:
        yield "the diagnostics do not name what is wrong"


def check_plugin(role: str, name: str) -> list[str]:
    """Findings about the plugin that is installed under a name.

    Raises:
        UnknownPlugin: no such role, or none of that name is installed.
    """
    plugins.require(role, name)
    module, _, suite = SUITES[role].partition(":")
    check: Callable[[Any], list[str]] = getattr(importlib.import_module(module), suite)
    try:
        return check(plugins.find(role, name))
    except UnknownPlugin as error:
        return [str(error)]


def check_server(role: str, address: str) -> list[str]:
    """Findings about the server at an address that fills a role.

    Raises:
        BadInput: no server fills the role. Infrastructure: there is no answer.
    """
    match role:
        case "reasoner":
            reasoning = service.dial(reasoning_service_pb2_grpc.ReasoningServiceStub, address)
            return check_reasoning(reasoning.ProposeHypotheses)
        case "synthesizer":
            synthesis = service.dial(synthesis_service_pb2_grpc.SynthesisServiceStub, address)
            return check_synthesis(synthesis.AnalyzePlan, synthesis.SynthesizeCandidate)
        case "toolchain":
            compiler = service.dial(compile_service_pb2_grpc.CompileServiceStub, address)
            return check_compile(compiler.CompileCandidate)
        case _:
            raise BadInput(f"no server can be a {role!r}; one can be a reasoner, a synthesizer, a toolchain")


def concluded(name: str, findings: Sequence[str]) -> int:
    """Prints the findings on what is called `name`; the exit status: 0 when it fits, 1 when not."""
    for finding in findings:
        print(f"- {printable.line(finding)}")
    count = f"{len(findings)} finding{'s' * (len(findings) > 1)}"
    print(f"{name}: {count if findings else 'fits'}")
    return 1 if findings else 0


def main(arguments: list[str]) -> int:
    """Asks a plugin or a server and prints the findings; 0: it fits, 1: it does not, 2: a wrong command line, 3: no
    answer of a server."""
    if len(arguments) != 2:
        print(f"usage: python -m warpsmith.testing {'|'.join(SUITES)} NAME|HOST:PORT", file=sys.stderr)
        return 2
    role, name = arguments
    try:
        if ":" in name:
            return concluded(f"{role} at {name}", check_server(role, name))
        return concluded(f"{role} {name}", check_plugin(role, name))
    except BadInput as error:
        print(printable.line(str(error)), file=sys.stderr)
        return 2
    except Infrastructure as error:
        print(f"{role} at {name}: {printable.line(str(error))}", file=sys.stderr)
        return 3
