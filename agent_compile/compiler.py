"""The whole way from a program to its outcome: policy, cache, toolchain, digest.

The one idea: an artifact is named by its program's sources and entries, by the toolchain's description and by the
rules that let it through, so equal work is done once and nothing outlives a rule. Refusals are remembered too, but
not those that time or memory decided.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from agent_compile import elf, policy
from agent_compile.cache import Cache
from agent_compile.toolchains.toolchain import Compiled, Outcome, Rejected, Toolchain
from warpsmith import digest, hardware
from warpsmith.contract import words
from warpsmith.errors import BadInput
from warpsmith.v1 import artifact_pb2, candidate_pb2, compile_service_pb2, task_pb2, verdict_pb2

_RULES = digest.digest("rules", *map(inspect.getsource, (policy, elf)))
_counter = Counter("warpsmith_compile_cache_lookups_total", "Programs looked for in the cache.", ["outcome"])
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
        # Buffers and grids do not change the binary: candidates that differ only there share one.
        texts = [part for source in program.sources for part in (source.name, source.text)]
        description = toolchain.describe()
        entries, architecture = policy.entries(program), digest.of_architecture(program)
        key = digest.digest("artifact", program.target, description, _RULES, *entries, *architecture, "sources", *texts)
        found = self._cache.find(key) if self._cache else None
        _lookups["miss" if found is None else "hit"].inc()
        if found is not None:
            return Answer(_opened(found, program_digest), cached=True)
        begin = time.perf_counter()
        outcome = toolchain.compile(program)
        response = _packed(outcome, key, description, time.perf_counter() - begin)
        transient = isinstance(outcome, Rejected) and outcome.kind == verdict_pb2.FAILURE_KIND_COMPILE_LIMIT
        if self._cache and not transient:
            response = self._cache.publish(key, response)
        return Answer(_opened(response, program_digest), cached=False)

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
