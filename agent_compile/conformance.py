"""Tells the author of a toolchain whether it fits its role; `python -m warpsmith.testing toolchain NAME` asks it.

The one idea: it compiles two small programs of its target, a right one twice and one with a mistake. It looks at the
outcome and not into the binary, which is loaded by nobody here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agent_compile.toolchains.toolchain import Compiled, Outcome, Rejected, Toolchain
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.testing import asking
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2

_SIGNATURES = {
    task_pb2.TARGET_CPU: ("kernel.cpp", 'extern "C" void right(void* const* arguments)'),
    task_pb2.TARGET_CUDA: ("kernel.cu", 'extern "C" __global__ void right(float* x)'),
}
"""By target, the name of a source and the head of a kernel in it."""
_KINDS = (
    verdict_pb2.FAILURE_KIND_COMPILE_ERROR, verdict_pb2.FAILURE_KIND_COMPILE_LIMIT,
    verdict_pb2.FAILURE_KIND_POLICY_REJECT, verdict_pb2.FAILURE_KIND_RESOURCE,
)  # fmt: skip


def check_toolchain(make: Callable[[], Toolchain]) -> list[str]:
    """Findings about the toolchain that `make` gives; empty when it fits. It is closed again."""
    return asking.findings(_findings(make))


def _findings(make: Callable[[], Toolchain]) -> Iterator[str]:
    toolchain = asking.made(make)
    try:
        yield from _about(toolchain)
    except asking.Unfit as unfit:  # it is to be closed all the same
        yield str(unfit)
    asking.method(toolchain, "close", gives=object)


def _about(toolchain: Toolchain) -> Iterator[str]:
    if not asking.member(toolchain, "name", str):
        yield "name is empty"
    asking.member(toolchain, "target", int)
    target = toolchain.target
    if target not in _SIGNATURES:
        yield f"target is {target}, which is neither TARGET_CPU nor TARGET_CUDA"
        return
    if lack := asking.method(toolchain, "missing", gives=str):
        yield f"it cannot be asked here: {lack}"
        return
    description = asking.method(toolchain, "describe", gives=str)
    if not description.strip() or "\n" in description:
        yield "describe does not give one line"
    if asking.method(toolchain, "describe", gives=str) != description:
        yield "describe gives another description each time"
    head = _SIGNATURES[target][1]
    first, second = (_outcome(toolchain, f"{head} {{}}\n") for _ in range(2))
    yield from _of_right(first, second)
    yield from _of_wrong(_outcome(toolchain, f"{head} {{ undeclared(); }}\n"))


def _outcome(toolchain: Toolchain, text: str) -> Outcome:
    program = candidate_pb2.Program(target=toolchain.target)
    program.sources.add(name=_SIGNATURES[toolchain.target][0], text=text)
    program.steps.add(group="right").launch.entry = "right"
    program.digest = digest.of_program(program)
    return asking.method(toolchain, "compile", program, gives=(Compiled, Rejected))


def _of_right(first: Outcome, second: Outcome) -> Iterator[str]:
    if isinstance(first, Rejected):
        yield f"a right source is rejected: {first.diagnostics}"
        return
    if not isinstance(first.content, bytes) or not first.content:
        yield "the content of a right source's binary is not bytes, or none"
    if first.format not in (artifact_pb2.BINARY_FORMAT_SHARED_OBJECT, artifact_pb2.BINARY_FORMAT_CUBIN):
        yield "the format of a right source's binary is neither BINARY_FORMAT_SHARED_OBJECT nor BINARY_FORMAT_CUBIN"
    if not isinstance(second, Compiled) or first.content != second.content:
        yield "equal programs give different binaries"


def _of_wrong(outcome: Outcome) -> Iterator[str]:
    if not isinstance(outcome, Rejected):
        yield "a source that does not compile is not rejected"
        return
    if outcome.kind not in _KINDS:
        kinds = ", ".join(map(words.failure_kind, _KINDS))
        yield f"the kind of a rejection is not one of {kinds}"
    if "undeclared" not in outcome.diagnostics:
        yield "the diagnostics of a rejection do not name what is wrong"
