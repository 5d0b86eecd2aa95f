"""What a cubin may hold: no memory that lives from launch to launch, nothing of the device's runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_compile.compiler import Compiler
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_compile.toolchains.toolchain import Rejected
from warpsmith.hardware import CARDS
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2

HEAD = 'extern "C" __global__ void run(float* x) {'
TABLE = "= {1, 2, 3, 4};"


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    toolchain = Nvrtc()
    if toolchain.missing():
        pytest.skip(toolchain.missing())
    made = Compiler([toolchain], None)
    yield made
    made.close()


def outcome(compiler: Compiler, ahead: str, body: str, architecture: str = "") -> artifact_pb2.Artifact | Rejected:
    program = candidate_pb2.Program(target=task_pb2.TARGET_CUDA, architecture=architecture)
    program.sources.add(name="kernel.cu", text=f"{ahead}\n{HEAD} {body} }}\n")
    program.steps.add(group="y", launch=candidate_pb2.Launch(entry="run"))
    return compiler.compile(program).outcome


@pytest.mark.parametrize(
    ("ahead", "body"),
    [
        ("__device__ int calls;", "x[0] = atomicAdd(&calls, 1);"),
        ("__device__ int calls = 1;", "if (++calls > 9) return; x[0] = 1;"),
        ("", "static int calls; x[0] = calls++;"),
        ("__device__ float kept[100];", "for (int i = 0; i < (int)x[7]; ++i) kept[i * threadIdx.x] += x[i];"),
        ("__device__ float kept[100];", "float* at = threadIdx.x > 3 ? kept : x; at[x[3] > 2 ? 1 : 7] = 5;"),
        ("__device__ __noinline__ void count() { static int calls; ++calls; }", "count();"),
        ("__device__ float kept[9]; __constant__ float* at[2] = {kept, kept + 1};", "at[x[3] > 2 ? 1 : 0][0] += x[1];"),
        ("__device__ float kept[9]; __device__ float* at[2] = {kept, kept + 1};", "at[x[3] > 2 ? 1 : 0][0] += x[1];"),
        ("", "float* own = (float*)malloc(64); own[0] = x[0]; x[1] = own[threadIdx.x]; free(own);"),
        ('extern "C" int printf(const char*, ...);', 'printf("%f", x[0]);'),
    ],
    ids=["zero", "one", "static", "array", "maybe", "in a function", "by a constant", "by another", "heap", "printer"],
)
@pytest.mark.parametrize("architecture", ["", *sorted(CARDS)])
def test_a_cubin_keeps_nothing_from_launch_to_launch(
    ahead: str, body: str, architecture: str, compiler: Compiler
) -> None:
    found = outcome(compiler, ahead, body, architecture)
    assert isinstance(found, Rejected)
    assert found.kind == verdict_pb2.FAILURE_KIND_POLICY_REJECT


@pytest.mark.parametrize(
    ("ahead", "body"),
    [
        ("constexpr long ROWS = 16, SIZE = 3 * ROWS, ZERO = 0;", "x[0] = SIZE + ZERO;"),
        (f"__constant__ float table[4] {TABLE}", "x[0] = table[threadIdx.x];"),
        (f"constexpr float table[4] {TABLE}", "for (int i = 0; i < 4; ++i) x[i] = table[i];"),
        ("", "__shared__ float s[64]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[63 - threadIdx.x];"),
        ("", "x[0] = sinf(x[0]) + powf(x[1], x[2]) + lgammaf(x[3]) + erfinvf(x[4]) + cosf(x[5]);"),
        ("", "double v = x[0]; x[1] = sin(v) + pow(v, v) + tgamma(v);"),
    ],
    ids=["constants", "constant memory", "unrolled table", "shared", "mathematics", "doubles"],
)
@pytest.mark.parametrize("architecture", ["", *sorted(CARDS)])
def test_what_lives_no_longer_than_a_launch_is_fine(
    ahead: str, body: str, architecture: str, compiler: Compiler
) -> None:
    found = outcome(compiler, ahead, body, architecture)
    assert isinstance(found, artifact_pb2.Artifact), getattr(found, "diagnostics", "")
