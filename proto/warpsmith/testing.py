"""Tells the author of an agent whether it fits its role, whatever it is written in.

    python -m warpsmith.testing reasoning 127.0.0.1:50051

asks a running server the questions below and prints what it finds. A Python plugin is asked the same through its
methods: `check_reasoning(MyReasoner().propose)`. An empty list of findings means that it fits. A search strategy runs
inside the orchestrator and is asked by `orchestrator.search.conformance`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from warpsmith import arguments, digest, printable, service
from warpsmith.contract import words
from warpsmith.errors import BadInput, IllegalMove, Infrastructure, WarpsmithError
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
    """Findings about a reasoner."""
    return list(_reasoning(propose))


def _reasoning(propose: Propose) -> Iterator[str]:
    request = reasoning_request()
    response = propose(request)
    if not response.hypotheses:
        yield "proposes nothing for a softmax with tenfold headroom and a legal move"
    if len(response.hypotheses) > request.limit:
        yield f"proposes {len(response.hypotheses)} hypotheses where {request.limit} were asked for"
    legal = {digest.of_moves([item.move]) for item in request.analysis.legal_moves}
    for number, hypothesis in enumerate(response.hypotheses, start=1):
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
    if propose(request).hypotheses:
        yield "proposes moves where none is legal"
    request.ClearField("analysis")
    yield from _refuses(lambda: propose(request), BadInput, "a request without an analysis")


def check_synthesis(analyze: Analyze, synthesize: Synthesize) -> list[str]:
    """Findings about a synthesizer. Needs torch where the synthesizer runs."""
    return list(_synthesis(analyze, synthesize))


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
    yield from _refuses(lambda: analyze(request_bad), IllegalMove, "a move on a group that does not exist")


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
    """Findings about a compile agent for the CPU target."""
    return list(_compile(compile_candidate))


def _compile(compile_candidate: Compile) -> Iterator[str]:
    def outcome(text: str) -> compile_service_pb2.CompileCandidateResponse:
        program = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
        program.sources.add(name="kernel.cpp", text=text)
        program.digest = digest.of_program(program)
        return compile_candidate(compile_service_pb2.CompileCandidateRequest(program=program))

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


def _refuses(call: Callable[[], Any], expected: type[WarpsmithError], what: str) -> Iterator[str]:
    try:
        call()
    except expected:
        return
    except WarpsmithError as error:
        yield f"{what} gives {type(error).__name__} instead of {expected.__name__}"
    else:
        yield f"{what} is not refused"


def check_server(role: str, address: str) -> list[str]:
    """Findings about a server of the role ("reasoning", "synthesis" or "compile") at an address.

    Raises:
        BadInput: there is no suite for the role.
    """
    match role:
        case "reasoning":
            reasoning = service.dial(reasoning_service_pb2_grpc.ReasoningServiceStub, address)
            return check_reasoning(reasoning.ProposeHypotheses)
        case "synthesis":
            synthesis = service.dial(synthesis_service_pb2_grpc.SynthesisServiceStub, address)
            return check_synthesis(synthesis.AnalyzePlan, synthesis.SynthesizeCandidate)
        case "compile":
            compiler = service.dial(compile_service_pb2_grpc.CompileServiceStub, address)
            return check_compile(compiler.CompileCandidate)
        case _:
            raise BadInput(f"no conformance suite for {role!r}; there is one for reasoning, synthesis, compile")


def concluded(name: str, findings: Sequence[str]) -> int:
    """Prints the findings on what is called `name`; the exit status: 0 when it fits, 1 when not."""
    for finding in findings:
        print(f"- {printable.line(finding)}")
    print(f"{name}: {'fits' if not findings else f'{len(findings)} findings'}")
    return 1 if findings else 0


def main(arguments: list[str]) -> int:
    """Asks a server and prints the findings; 0: it fits, 1: it does not, 2: a wrong command line, 3: no answer."""
    if len(arguments) != 2:
        print("usage: python -m warpsmith.testing reasoning|synthesis|compile HOST:PORT", file=sys.stderr)
        return 2
    try:
        findings = check_server(*arguments)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except Infrastructure as error:
        print(f"{arguments[0]} at {arguments[1]}: {printable.line(str(error))}", file=sys.stderr)
        return 3
    return concluded(f"{arguments[0]} at {arguments[1]}", findings)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
