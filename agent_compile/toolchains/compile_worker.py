"""Runs g++, clang++ or nvcc inside a jailed worker: sources in, binary or messages out.

The one idea: the compiler is a child of the worker with a fresh directory and a bounded pipe; deadlines and the
killing of descendants (nvcc leaves `cicc` behind) are the jail's. What to run comes from the environment variable
COMPILER_SETTING, which only the toolchain writes. Loads nothing that it compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf.message import Message

from agent_compile import diagnostics, policy, resources
from warpsmith import hardware
from warpsmith.processor_flags import LINKED
from warpsmith.v1 import artifact_pb2, candidate_pb2, compile_service_pb2, verdict_pb2

VARIABLE = "COMPILER_SETTING"


@dataclass(frozen=True)
class Setting:
    """Which compiler to run and how."""

    family: str
    """"gxx" (g++ or clang++: assembly, its check, shared object) or "nvcc" (cubin)."""
    compiler: str
    """Path of the compiler."""
    flags: Sequence[str]
    """Its flags, without input and output."""
    output_bytes: int
    """Most bytes of messages."""

    def environment(self) -> dict[str, str]:
        """The variable that carries it into the jail."""
        return {VARIABLE: json.dumps(asdict(self))}


class _TooMuchOutput(Exception):
    """The compiler wrote more messages than allowed and was cut off."""


@dataclass(frozen=True)
class _Run:
    code: int
    log: str


def _run(command: Sequence[str], directory: Path, output_bytes: int) -> _Run:
    environment = {**os.environ, "TMPDIR": str(directory), "SOURCE_DATE_EPOCH": "0", "LC_ALL": "C"}
    environment.pop(VARIABLE, None)
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        log = process.stdout.read(output_bytes + 1)
        # Closing our end makes the compiler's next write fail, which ends it without a signal from us: on some
        # rungs a jailed process may signal no other.
        process.stdout.close()
        code = process.wait()
    if len(log) > output_bytes:
        raise _TooMuchOutput
    return _Run(code, log.decode(errors="replace"))


def _compile(request: compile_service_pb2.CompileCandidateRequest) -> compile_service_pb2.CompileCandidateResponse:
    setting = Setting(**json.loads(os.environ[VARIABLE]))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for source in request.program.sources:
            (directory / source.name).write_text(source.text)
        try:
            if setting.family == "gxx":
                return _build_shared_object(setting, directory, request.program.sources[0].name)
            return _build_cubin(setting, directory, request.program)
        except _TooMuchOutput:
            text = f"the compiler wrote more than {setting.output_bytes} bytes of messages"
            return _rejected(verdict_pb2.FAILURE_KIND_COMPILE_LIMIT, text, directory)


def _build_shared_object(
    setting: Setting, directory: Path, source: str
) -> compile_service_pb2.CompileCandidateResponse:
    def run(*arguments: str) -> _Run:
        return _run([setting.compiler, *arguments], directory, setting.output_bytes)

    # Through assembly, because only there can text that the source smuggled to the assembler be seen.
    # As C++ whatever its name: g++ would leave a .cu to the linker, and make nothing of it without a word.
    ran = run(*setting.flags, "-S", "-o", "kernel.s", "-x", "c++", source)
    if ran.code:
        return _rejected(_kind(ran), ran.log, directory)
    assembly = (directory / "kernel.s").read_text(errors="replace")
    if refused := policy.check_assembly(source, assembly):
        return _rejected(refused.kind, refused.diagnostics, directory)
    ran = run(*LINKED, "-o", "kernel.so", "kernel.s")
    if ran.code:
        return _rejected(_kind(ran), ran.log, directory)
    return _compiled(artifact_pb2.BINARY_FORMAT_SHARED_OBJECT, (directory / "kernel.so").read_bytes(), "")


def _build_cubin(
    setting: Setting, directory: Path, program: candidate_pb2.Program
) -> compile_service_pb2.CompileCandidateResponse:
    architecture = f"-arch={hardware.architecture(program)}"
    command = [setting.compiler, *setting.flags, architecture, "-o", "kernel.cubin", program.sources[0].name]
    ran = _run(command, directory, setting.output_bytes)
    if ran.code:
        return _rejected(_kind(ran), ran.log, directory)
    return _compiled(artifact_pb2.BINARY_FORMAT_CUBIN, (directory / "kernel.cubin").read_bytes(), ran.log)


_EXHAUSTED = ("out of memory", "virtual memory exhausted", "cannot allocate memory", "bad_alloc", "killed",
              "file size limit exceeded", "no space left on device", "terminated program")  # fmt: skip
_TOO_LARGE = ("uses too much shared data", "uses too much parameter space", "uses too much local data",
              "out of registers")  # fmt: skip


def failure_kind(log: str, code: int = 1) -> verdict_pb2.FailureKind.ValueType:
    """COMPILE_LIMIT where the compiler ran out of something, RESOURCE where the kernel asks for more than there is."""
    text = log.lower()
    if code < 0 or any(words in text for words in _EXHAUSTED):
        return verdict_pb2.FAILURE_KIND_COMPILE_LIMIT
    if any(words in text for words in _TOO_LARGE):
        return verdict_pb2.FAILURE_KIND_RESOURCE
    return verdict_pb2.FAILURE_KIND_COMPILE_ERROR


def _kind(ran: _Run) -> verdict_pb2.FailureKind.ValueType:
    return failure_kind(ran.log, ran.code)


def _rejected(
    kind: verdict_pb2.FailureKind.ValueType, log: str, directory: Path
) -> compile_service_pb2.CompileCandidateResponse:
    text = diagnostics.tidy(log, directory=str(directory)) or "the compiler failed and said nothing"
    rejection = compile_service_pb2.CompileRejection(kind=kind, diagnostics=text)
    return compile_service_pb2.CompileCandidateResponse(rejection=rejection)


def _compiled(
    format_: artifact_pb2.BinaryFormat.ValueType, content: bytes, log: str
) -> compile_service_pb2.CompileCandidateResponse:
    artifact = artifact_pb2.Artifact(format=format_, content=content, resources=resources.parse(log))
    return compile_service_pb2.CompileCandidateResponse(artifact=artifact)


METHODS: Mapping[str, tuple[type[Message], Callable[..., Message]]] = {
    "compile": (compile_service_pb2.CompileCandidateRequest, _compile),
}
