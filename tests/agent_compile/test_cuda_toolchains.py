"""NVRTC and nvcc, without a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_compile.findings import State, check_driver, describe_toolchains
from agent_compile.toolchains import toolkit
from agent_compile.toolchains.nvcc import Nvcc
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_compile.toolchains.toolchain import Compiled, Limits, Rejected, Toolchain
from agent_compile.toolchains.toolkit import NvrtcLibrary, choose_nvrtc
from warpsmith.errors import Infrastructure
from warpsmith.hardware import CARDS, Hardware
from warpsmith.v1 import artifact_pb2, verdict_pb2

SOFTMAX = """#include "lanes.cuh"
extern "C" __global__ void __launch_bounds__(256) kernel(const float* __restrict__ x, float* __restrict__ y) {
  __shared__ float box[8];
  const long row = blockIdx.x * 1024L;
  const float4 v = reinterpret_cast<const float4*>(x + row)[threadIdx.x];
  float m = lanes_max(fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
  if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = m;
  __syncthreads();
  for (int i = 0; i < 8; ++i) m = fmaxf(m, box[i]);
  __syncthreads();
  const float4 e = {expf(v.x - m), expf(v.y - m), expf(v.z - m), expf(v.w - m)};
  float s = lanes_sum(e.x + e.y + e.z + e.w);
  if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = s;
  __syncthreads();
  s = 0;
  for (int i = 0; i < 8; ++i) s += box[i];
  reinterpret_cast<float4*>(y + row)[threadIdx.x] = {e.x / s, e.y / s, e.z / s, e.w / s};
}
"""
LANES = """#pragma once
__device__ inline float lanes_max(float v) {
  for (int lane = 16; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, lane));
  return v;
}
__device__ inline float lanes_sum(float v) {
  for (int lane = 16; lane > 0; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
  return v;
}
"""


@pytest.fixture(scope="module")
def nvcc() -> Iterator[Nvcc]:
    toolchain = Nvcc()
    if toolchain.missing():
        pytest.skip(toolchain.missing())
    yield toolchain
    toolchain.close()


@pytest.fixture(params=["nvrtc", "nvcc"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_a_kernel_becomes_a_cubin_with_its_resources(either: Toolchain, program: Any) -> None:
    outcome = either.compile(program(SOFTMAX, target="cuda", lanes__cuh=LANES))
    assert isinstance(outcome, Compiled)
    assert outcome.format == artifact_pb2.BINARY_FORMAT_CUBIN
    (kernel,) = outcome.resources
    assert kernel.entry == "kernel"
    assert 10 < kernel.register_count < 128
    assert (kernel.shared_bytes, kernel.spill_bytes, kernel.stack_bytes) == (32, 0, 0)


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.architecture)
def test_it_compiles_for_the_programs_architecture(either: Toolchain, program: Any, card: Hardware) -> None:
    major, minor = card.capability
    made = program(f"""#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != {100 * major + 10 * minor}
#error another architecture
#endif
extern "C" __global__ void kernel(float* a) {{ a[0] = 1.0f; }}
""", target="cuda")  # fmt: skip
    made.architecture = card.architecture
    assert isinstance(either.compile(made), Compiled)


def test_errors_are_located(either: Toolchain, program: Any) -> None:
    outcome = either.compile(program(SOFTMAX, target="cuda", lanes__cuh=LANES.replace("fmaxf(v,", "undeclared(v,")))
    assert isinstance(outcome, Rejected)
    assert outcome.kind == verdict_pb2.FAILURE_KIND_COMPILE_ERROR
    assert "lanes.cuh:3: error: " in outcome.diagnostics
    assert "undeclared" in outcome.diagnostics
    assert "/tmp" not in outcome.diagnostics


def test_unknown_ptx_is_a_compile_error(either: Toolchain, program: Any) -> None:
    text = 'extern "C" __global__ void kernel(float* a) { asm("bogus %0;" :: "f"(a[0])); }\n'
    outcome = either.compile(program(text, target="cuda"))
    assert isinstance(outcome, Rejected)
    assert outcome.kind == verdict_pb2.FAILURE_KIND_COMPILE_ERROR
    assert "bogus" in outcome.diagnostics


def test_too_much_shared_memory_is_a_matter_of_resources(either: Toolchain, program: Any) -> None:
    text = """extern "C" __global__ void kernel(float* a) {
  __shared__ float s[100000];
  s[threadIdx.x] = a[0];
  __syncthreads();
  a[threadIdx.x] = s[2];
}
"""
    outcome = either.compile(program(text, target="cuda"))
    assert isinstance(outcome, Rejected)
    assert outcome.kind == verdict_pb2.FAILURE_KIND_RESOURCE
    assert "too much shared data" in outcome.diagnostics


def test_a_launched_kernel_that_is_not_defined_is_a_compile_error(nvrtc: Nvrtc, program: Any) -> None:
    outcome = nvrtc.compile(program('extern "C" __global__ void other() {}\n', target="cuda"))
    assert isinstance(outcome, Rejected)
    assert "'kernel'" in outcome.diagnostics


def test_headers_of_the_toolkit_are_found(nvrtc: Nvrtc, program: Any) -> None:
    if toolkit.header_folder(13) is None:
        pytest.skip("no CUDA headers")
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void kernel(__half* a) { a[0] = __hadd(a[0], a[1]); }\n'
    assert isinstance(nvrtc.compile(program(text, target="cuda")), Compiled)


def test_an_unroll_bomb_ends_at_its_deadline_and_the_next_kernel_compiles(program: Any) -> None:
    nvrtc = Nvrtc(limits=Limits(wall_seconds=1))
    if nvrtc.missing():
        pytest.skip(nvrtc.missing())
    bomb = """extern "C" __global__ void kernel(float* a) {
#pragma unroll
  for (int i = 0; i < 3000; ++i)
#pragma unroll
    for (int j = 0; j < 300; ++j) a[i * j] = sinf(a[i + j]) * a[i];
}
"""
    begin = time.monotonic()
    outcome = nvrtc.compile(program(bomb, target="cuda"))
    assert isinstance(outcome, Rejected)
    assert outcome.kind == verdict_pb2.FAILURE_KIND_COMPILE_LIMIT
    assert time.monotonic() - begin < 20
    assert isinstance(nvrtc.compile(program('extern "C" __global__ void kernel() {}\n', target="cuda")), Compiled)
    nvrtc.close()


def test_a_small_kernel_compiles_within_150_ms_once_warm(
    nvrtc: Nvrtc, program: Any, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    nvrtc.compile(program(SOFTMAX, target="cuda", lanes__cuh=LANES))
    seconds = []
    for number in range(9):
        begin = time.perf_counter()
        nvrtc.compile(program(f"// {number}\n{SOFTMAX}", target="cuda", lanes__cuh=LANES))
        seconds.append(time.perf_counter() - begin)
    p50 = statistics.median(seconds)
    record_property("nvrtc_p50_seconds", p50)
    with capsys.disabled():
        print(f"\n[NVRTC small kernel, warm worker: p50 {1e3 * p50:.0f} ms]")
    # Twice the bar of 150 ms, because other work may share the processors of a test machine.
    assert p50 < 0.3


# ---- choosing by driver ----------------------------------------------------------------------------------


THIRTEEN, TWELVE = NvrtcLibrary(Path("/13"), 13), NvrtcLibrary(Path("/12"), 12)


@pytest.mark.parametrize(
    ("libraries", "driver", "chosen"),
    [
        ([THIRTEEN, TWELVE], None, THIRTEEN),
        ([THIRTEEN, TWELVE], 13, THIRTEEN),
        ([THIRTEEN, TWELVE], 12, TWELVE),
        ([THIRTEEN], 12, THIRTEEN),
        ([], 12, None),
    ],
)
def test_the_newest_nvrtc_that_the_driver_loads_is_chosen(
    libraries: list[NvrtcLibrary], driver: int | None, chosen: NvrtcLibrary | None
) -> None:
    assert choose_nvrtc(libraries, driver) == chosen


def test_a_cuda_12_driver_with_only_nvrtc_13_is_a_problem_with_its_remedy() -> None:
    (finding,) = check_driver(12080, [THIRTEEN])
    assert finding.state is State.PROBLEM
    assert "CUDA 12.8" in finding.detail
    assert "nvidia-cuda-nvrtc-cu12" in finding.remedy
    assert "580" in finding.remedy


def test_a_cuda_12_driver_with_both_says_which_is_used() -> None:
    (finding,) = check_driver(12080, [THIRTEEN, TWELVE])
    assert finding.state is State.OK
    assert "NVRTC 12 is used instead of 13" in finding.detail


def test_no_driver_is_absent_and_no_problem() -> None:
    (finding,) = check_driver(None, [THIRTEEN])
    assert finding.state is State.ABSENT


def test_every_toolchain_is_described() -> None:
    findings = {finding.subject: finding for finding in describe_toolchains()}
    assert set(findings) >= {"gxx", "nvrtc", "nvcc", "driver"}
    assert not [f for f in findings.values() if f.state is State.PROBLEM]


def test_a_missing_library_is_said_with_its_remedy(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "nvrtc_libraries", lambda: ())
    nvrtc = Nvrtc()
    assert "pip install" in nvrtc.missing()
    with pytest.raises(Infrastructure, match="no NVRTC"):
        nvrtc.compile(program("", target="cuda"))


def test_a_library_that_does_not_load_is_the_machines_fault(program: Any, tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"not a library")
    nvrtc = Nvrtc(NvrtcLibrary(broken, 13))
    with pytest.raises(Infrastructure):
        nvrtc.compile(program("", target="cuda"))
    nvrtc.close()
