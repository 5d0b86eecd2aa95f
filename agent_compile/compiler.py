"""The whole way from a program to its outcome: policy, cache, toolchain, digest.

The one idea: an artifact is named by its program's sources and entries, by the toolchain's description and by the
rules that let it through, so equal work is done once and nothing outlives a rule. Refusals are remembered too, but
not those that time or memory decided. A program of many kernels is compiled in parts, beside each other.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client import Counter

from agent_compile import elf, policy
from agent_compile.cache import Cache
from agent_compile.toolchains.toolchain import Compiled, Outcome, Rejected, Toolchain
from warpsmith import digest, hardware
from warpsmith.contract import program_parts, words
from warpsmith.errors import BadInput
from warpsmith.sandbox.processors import processor_count
from warpsmith.service import tracing
from warpsmith.v1 import artifact_pb2, candidate_pb2, compile_service_pb2, task_pb2, verdict_pb2

_RULES = digest.digest("rules", *map(inspect.getsource, (policy, elf)))
PARTS_SECONDS = 100.0
"""After which no part of a program is begun. Those that were are kept, so that the next time has fewer to make."""
Part = tuple[compile_service_pb2.CompileCandidateResponse, bool]
"""What came of what is compiled in one go, and whether it was known."""
_counter = Counter("warpsmith_compile_cache_lookups_total", "Programs and parts looked for in the cache.", ["outcome"])
_lookups = {outcome: _counter.labels(outcome) for outcome in ("hit", "miss")}


@dataclass(frozen=True)
class Answer:
    """What came of a program."""

    outcome: artifact_pb2.Artifact | Rejected
    cached: bool
    """Whether it was known."""


class Compiler:
    """Compiles programs with the first usable toolchain of their target."""

    def __init__(self, toolchains: Iterable[Toolchain], cache: Cache | None) -> None:
        self._toolchains: Sequence[Toolchain] = tuple(toolchains)
        self._cache = cache

    def compile(self, program: candidate_pb2.Program) -> Answer:
        """Compiles, or finds what an equal program gave.

        Raises:
            BadInput: the program names no target or an unknown architecture, or no compiler for it is here; says what
                to install.
            Infrastructure: the compiler or its jail does not work.
        """
        program_digest = program.digest or digest.of_program(program)
        if not program.sources:
            if named := policy.entries(program):
                text = f"error: the program launches {named[0]!r} and has no sources"
                return Answer(Rejected(verdict_pb2.FAILURE_KIND_COMPILE_ERROR, text), cached=False)
            return Answer(_library_only(program_digest), cached=False)
        if refused := policy.check_sources(program):
            return Answer(refused, cached=False)
        hardware.of_architecture(hardware.architecture(program))
        toolchain = self.toolchain(program.target)
        begin = time.perf_counter()
        parts = program_parts.apart(program)
        if len(parts) == 1:
            response, cached = self._part(program, toolchain)
            return Answer(_opened(response, program_digest), cached)
        with ThreadPoolExecutor(processor_count()) as pool:
            found = list(pool.map(_until_refused(lambda part: self._part(part, toolchain)), parts))
        answers = [each for each in found if each is not None]
        cached = all(was_cached for _, was_cached in answers)
        outcomes = [_opened(response, program_digest) for response, _ in answers]
        if refused := next((outcome for outcome in outcomes if isinstance(outcome, Rejected)), None):
            return Answer(refused, cached)
        if len(answers) < len(parts):
            text = f"the compiler took more than {PARTS_SECONDS:g} s for {len(parts)} kernels"
            return Answer(Rejected(verdict_pb2.FAILURE_KIND_COMPILE_LIMIT, text), cached=False)
        made = [outcome for outcome in outcomes if isinstance(outcome, artifact_pb2.Artifact)]
        return Answer(_together(made, time.perf_counter() - begin), cached)

    def _part(self, program: candidate_pb2.Program, toolchain: Toolchain) -> Part:
        """Compiles in one go, or finds what came of the same."""
        # Buffers and grids do not change the binary: candidates that differ only there share one.
        texts = [part for source in program.sources for part in (source.name, source.text)]
        description = toolchain.describe()
        entries, architecture = policy.entries(program), digest.of_architecture(program)
        key = digest.digest("artifact", program.target, description, _RULES, *entries, *architecture, "sources", *texts)
        found = self._cache.find(key) if self._cache else None
        _lookups["miss" if found is None else "hit"].inc()
        if found is not None:
            return found, True
        begin = time.perf_counter()
        with tracing.span("toolchain", toolchain=description, sources=len(program.sources)):
            outcome = toolchain.compile(program)
        response = _packed(outcome, key, description, time.perf_counter() - begin)
        transient = isinstance(outcome, Rejected) and outcome.kind == verdict_pb2.FAILURE_KIND_COMPILE_LIMIT
        if self._cache and not transient:
            response = self._cache.publish(key, response)
        return response, False

    def toolchain(self, target: task_pb2.Target.ValueType) -> Toolchain:
        """The first toolchain of the target that can compile here.

        Raises:
            BadInput: none can; says what each lacks.
        """
        if target == task_pb2.TARGET_UNSPECIFIED or target not in task_pb2.Target.values():
            raise BadInput("the program names no target")
        fitting = [toolchain for toolchain in self._toolchains if toolchain.target == target]
        lacking = [toolchain.missing() for toolchain in fitting]
        for toolchain, lack in zip(fitting, lacking, strict=True):
            if not lack:
                return toolchain
        raise BadInput("; ".join(lacking) or f"no toolchain for {words.target(target)} is installed")

    def close(self) -> None:
        """Ends every worker."""
        for toolchain in self._toolchains:
            toolchain.close()


def _until_refused(
    compile_part: Callable[[candidate_pb2.Program], Part],
) -> Callable[[candidate_pb2.Program], Part | None]:
    """The same, but that none is begun after a refusal, or after the time of all: None."""
    is_refused, until = threading.Event(), time.monotonic() + PARTS_SECONDS

    def compiled(part: candidate_pb2.Program) -> Part | None:
        if is_refused.is_set() or time.monotonic() > until:
            return None
        found = compile_part(part)
        if found[0].WhichOneof("outcome") == "rejection":
            is_refused.set()
        return found

    return compiled


def _together(parts: Sequence[artifact_pb2.Artifact], seconds: float) -> artifact_pb2.Artifact | Rejected:
    """One artifact of those of the parts."""
    whole = artifact_pb2.Artifact()
    whole.CopyFrom(parts[0])
    whole.digest = digest.digest("parts", *(part.digest for part in parts))
    whole.compile_seconds = seconds
    for part in parts[1:]:
        whole.further.append(part.content)
        whole.resources.extend(part.resources)
    size = len(whole.content) + sum(map(len, whole.further))
    if size > policy.BINARY_BYTES:
        text = f"the binaries take {size} bytes; {policy.BINARY_BYTES} are allowed"
        return Rejected(verdict_pb2.FAILURE_KIND_COMPILE_LIMIT, text)
    return whole


def _library_only(program_digest: str) -> artifact_pb2.Artifact:
    return artifact_pb2.Artifact(
        digest=digest.digest("artifact", "none", program_digest),
        program_digest=program_digest,
        format=artifact_pb2.BINARY_FORMAT_NONE,
        toolchain="none: every step is a library call",
    )


def _packed(
    outcome: Outcome, key: str, description: str, seconds: float
) -> compile_service_pb2.CompileCandidateResponse:
    match outcome:
        case Compiled(content, format_, resources):
            artifact = artifact_pb2.Artifact(
                digest=key,
                format=format_,
                content=content,
                resources=resources,
                toolchain=description,
                compile_seconds=seconds,
            )
            return compile_service_pb2.CompileCandidateResponse(artifact=artifact)
        case Rejected(kind, text):
            rejection = compile_service_pb2.CompileRejection(kind=kind, diagnostics=text)
            return compile_service_pb2.CompileCandidateResponse(rejection=rejection)


def _opened(
    response: compile_service_pb2.CompileCandidateResponse, program_digest: str
) -> artifact_pb2.Artifact | Rejected:
    if response.WhichOneof("outcome") == "rejection":
        return Rejected(response.rejection.kind, response.rejection.diagnostics)
    artifact = response.artifact
    artifact.program_digest = program_digest
    return artifact
