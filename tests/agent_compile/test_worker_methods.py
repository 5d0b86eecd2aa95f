"""What runs inside the jail, called without it on sources that we trust."""

from __future__ import annotations

from typing import Any

import pytest

from agent_compile.toolchains import compile_worker, nvrtc_worker
from agent_compile.toolchains.nvrtc import OPTIONS
from agent_compile.toolchains.nvrtc_worker import NvrtcFailed
from agent_compile.toolchains.toolkit import nvcc_path, nvrtc_libraries
from warpsmith.v1 import compile_service_pb2, verdict_pb2

Request, Response = compile_service_pb2.CompileCandidateRequest, compile_service_pb2.CompileCandidateResponse


def call(methods: Any, name: str, **arguments: Any) -> Response:
    answer = methods[name][1](Request(**arguments))
    assert isinstance(answer, Response)
    return answer


@pytest.fixture
def gxx_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = compile_worker.Setting("gxx", "g++", ("-std=c++20", "-fPIC", "-O1"), 10_000)
    monkeypatch.setenv(compile_worker.VARIABLE, setting.environment()[compile_worker.VARIABLE])


@pytest.fixture
def nvrtc_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = nvrtc_libraries()
    if not libraries:
        pytest.skip("no NVRTC library")
    setting = nvrtc_worker.Setting(str(libraries[0].path), OPTIONS, 10_000)
    monkeypatch.setenv(nvrtc_worker.VARIABLE, setting.environment()[nvrtc_worker.VARIABLE])


@pytest.mark.usefixtures("gxx_setting")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("int a = b;\n", verdict_pb2.FAILURE_KIND_COMPILE_ERROR),
        ('void f() { asm("nop"); }\n', verdict_pb2.FAILURE_KIND_POLICY_REJECT),
        ("\n".join(f'#pragma message "{"x" * 100} {i}"' for i in range(200)), verdict_pb2.FAILURE_KIND_COMPILE_LIMIT),
        # Two definitions of one symbol in assembly: only the last step sees it.
        ('extern "C" void one() asm("same"); void one() {} extern "C" void two() asm("same"); void two() {}\n',
         verdict_pb2.FAILURE_KIND_COMPILE_ERROR),
    ],
)  # fmt: skip
def test_each_step_of_the_cpu_build_can_refuse(
    program: Any, text: str, kind: verdict_pb2.FailureKind.ValueType
) -> None:
    answer = call(compile_worker.METHODS, "compile", program=program(text))
    assert answer.rejection.kind == kind
    assert answer.rejection.diagnostics


@pytest.mark.usefixtures("gxx_setting")
def test_the_cpu_build_gives_a_shared_object(program: Any) -> None:
    answer = call(compile_worker.METHODS, "compile", program=program('extern "C" void kernel() {}\n'))
    assert answer.artifact.content.startswith(b"\x7fELF")


def test_the_nvcc_build_gives_a_cubin_or_says_why_not(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = nvcc_path()
    if compiler is None:
        pytest.skip("no nvcc")
    setting = compile_worker.Setting("nvcc", str(compiler), ("-cubin", "-arch=sm_90a", "-Xptxas", "-v"), 10_000)
    monkeypatch.setenv(compile_worker.VARIABLE, setting.environment()[compile_worker.VARIABLE])
    good = program('extern "C" __global__ void kernel() {}\n', target="cuda")
    assert call(compile_worker.METHODS, "compile", program=good).artifact.resources[0].entry == "kernel"
    bad = program("int a = b;\n", target="cuda")
    assert "kernel.cu:1: error" in call(compile_worker.METHODS, "compile", program=bad).rejection.diagnostics


@pytest.mark.parametrize(
    ("log", "code", "kind"),
    [
        ("cc1plus: out of memory allocating 65536 bytes", 1, verdict_pb2.FAILURE_KIND_COMPILE_LIMIT),
        ("", -9, verdict_pb2.FAILURE_KIND_COMPILE_LIMIT),
        ("ptxas error   : Entry function 'f' uses too much shared data", 255, verdict_pb2.FAILURE_KIND_RESOURCE),
        ("kernel.cu(1): error: no", 1, verdict_pb2.FAILURE_KIND_COMPILE_ERROR),
    ],
)
def test_failures_are_told_apart_by_what_the_compiler_says(
    log: str, code: int, kind: verdict_pb2.FailureKind.ValueType
) -> None:
    assert compile_worker.failure_kind(log, code) == kind


@pytest.mark.usefixtures("nvrtc_setting")
def test_nvrtc_tells_its_version_compiles_and_refuses(program: Any) -> None:
    nvrtc_worker._setting.cache_clear()
    assert call(nvrtc_worker.METHODS, "describe").artifact.toolchain.startswith("NVRTC 1")
    good = program('#include "a.cuh"\nextern "C" __global__ void kernel() { f(); }\n', target="cuda", a__cuh=HEADER)
    artifact = call(nvrtc_worker.METHODS, "compile", program=good).artifact
    assert artifact.content.startswith(b"\x7fELF")
    assert artifact.resources[0].entry == "kernel"
    bad = program("int a = b;\n", target="cuda")
    assert "kernel.cu:1: error" in call(nvrtc_worker.METHODS, "compile", program=bad).rejection.diagnostics


HEADER = "__device__ inline void f() {}\n"


@pytest.mark.usefixtures("nvrtc_setting")
def test_a_failing_call_of_nvrtc_is_no_answer() -> None:
    nvrtc_worker._setting.cache_clear()
    with pytest.raises(NvrtcFailed, match="nvrtcGetProgramLogSize failed"):
        nvrtc_worker._check("nvrtcGetProgramLogSize", None, None)
