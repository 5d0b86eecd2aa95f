"""Calls NVRTC inside a jailed worker: sources in memory in, cubin and messages out.

The one idea: NVRTC runs in the calling process and cannot be interrupted, so that process is one that may be killed.
It is called through ctypes, because one binding then serves CUDA 12 and 13; the functions used have not changed
between them (NVRTC documentation, chapter 3). Which library and flags comes from the variable NVRTC_SETTING.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf.message import Message

from agent_compile import diagnostics, resources
from agent_compile.toolchains.compile_worker import failure_kind
from warpsmith import hardware
from warpsmith.v1 import artifact_pb2, compile_service_pb2, verdict_pb2

VARIABLE = "NVRTC_SETTING"
_SUCCESS, _OUT_OF_MEMORY = 0, 1
_Handle = ctypes.c_void_p


@dataclass(frozen=True)
class Setting:
    """Which library to load and the options of every compilation."""

    library: str
    options: Sequence[str]
    output_bytes: int

    def environment(self) -> dict[str, str]:
        """The variable that carries it into the jail."""
        return {VARIABLE: json.dumps(asdict(self))}


class NvrtcFailed(RuntimeError):
    """NVRTC itself failed, not the compilation."""


@functools.cache
def _setting() -> Setting:
    return Setting(**json.loads(os.environ[VARIABLE]))


@functools.cache
def _library() -> ctypes.CDLL:
    # NVRTC opens its second library by name alone, which finds nothing where it lies outside the system's folders;
    # once that is loaded, the name is known.
    path = Path(_setting().library).resolve()
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _check(function: str, *arguments: object) -> None:
    code = getattr(_library(), function)(*arguments)
    if code != _SUCCESS:
        raise NvrtcFailed(f"{function} failed with code {code}")


def _fetch(size_function: str, function: str, handle: ctypes.c_void_p, limit: int | None = None) -> bytes:
    size = ctypes.c_size_t()
    _check(size_function, handle, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value + 1)
    _check(function, handle, buffer)
    return buffer.raw[: min(size.value, limit) if limit is not None else size.value]


def _compile(request: compile_service_pb2.CompileCandidateRequest) -> compile_service_pb2.CompileCandidateResponse:
    source, headers = request.program.sources[0], request.program.sources[1:]
    texts = (ctypes.c_char_p * len(headers))(*(header.text.encode() for header in headers))
    names = (ctypes.c_char_p * len(headers))(*(header.name.encode() for header in headers))
    handle = _Handle()
    _check(
        "nvrtcCreateProgram", ctypes.byref(handle), source.text.encode(), source.name.encode(),
        len(headers), texts, names,
    )  # fmt: skip
    try:
        architecture = f"--gpu-architecture={hardware.architecture(request.program)}"
        options = [option.encode() for option in (architecture, *_setting().options)]
        code = _library().nvrtcCompileProgram(handle, len(options), (ctypes.c_char_p * len(options))(*options))
        raw = _fetch("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", handle, _setting().output_bytes)
        log = raw.rstrip(b"\0").decode(errors="replace")
        if "nvrtc: error: failed to open" in log:
            raise NvrtcFailed(log)
        if code != _SUCCESS:
            kind = verdict_pb2.FAILURE_KIND_COMPILE_LIMIT if code == _OUT_OF_MEMORY else failure_kind(log)
            text = diagnostics.tidy(log) or f"NVRTC failed with code {code} and said nothing"
            rejection = compile_service_pb2.CompileRejection(kind=kind, diagnostics=text)
            return compile_service_pb2.CompileCandidateResponse(rejection=rejection)
        content = _fetch("nvrtcGetCUBINSize", "nvrtcGetCUBIN", handle)
    finally:
        _library().nvrtcDestroyProgram(ctypes.byref(handle))
    artifact = artifact_pb2.Artifact(
        format=artifact_pb2.BINARY_FORMAT_CUBIN, content=content, resources=resources.parse(log)
    )
    return compile_service_pb2.CompileCandidateResponse(artifact=artifact)


def _describe(_: compile_service_pb2.CompileCandidateRequest) -> compile_service_pb2.CompileCandidateResponse:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    artifact = artifact_pb2.Artifact(toolchain=f"NVRTC {major.value}.{minor.value}")
    return compile_service_pb2.CompileCandidateResponse(artifact=artifact)


METHODS: Mapping[str, tuple[type[Message], Callable[..., Message]]] = {
    "compile": (compile_service_pb2.CompileCandidateRequest, _compile),
    "describe": (compile_service_pb2.CompileCandidateRequest, _describe),
}
