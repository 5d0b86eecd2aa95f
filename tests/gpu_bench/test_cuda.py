"""The CUDA executor on a GPU: launches with every attribute, and each fault by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_bench.limits import Limits
from gpu_bench.running.executor import ProgramFault, Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from gpu_bench.session import Session
from warpsmith import digest
from warpsmith.v1 import artifact_pb2, benchmark_service_pb2, candidate_pb2, task_pb2, verdict_pb2

pytestmark = pytest.mark.gpu

N = 1 << 16
MODULE = f"""
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2.0 + 1.0

def get_inputs():
    return [torch.rand({N})]
"""
RIGHT = "long i = blockIdx.x * 256L + threadIdx.x; y[i] = x[i] * 2.0f + 1.0f;"
CASE = benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_NORMAL, seed=5)


def cubin(text: str) -> bytes:
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        pytest.fail(log.decode())
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    content = b" " * size
    nvrtc.nvrtcGetCUBIN(program, content)
    return content


def made(small: Any, body: str, **fields: Any) -> tuple[candidate_pb2.Program, artifact_pb2.Artifact]:
    """A program of one launch, and its cubin; `fields` change the launch."""
    text = f'extern "C" __global__ void run(const float* x, float* y, float k) {{ {body} }}'
    launch = candidate_pb2.Launch(
        entry="run",
        grid=candidate_pb2.Extent3(x=N // 256, y=1, z=1),
        block=candidate_pb2.Extent3(x=256, y=1, z=1),
        arguments=[
            candidate_pb2.LaunchArgument(buffer="x"),
            candidate_pb2.LaunchArgument(buffer="y"),
            candidate_pb2.LaunchArgument(float32=3.0),
        ],
        writes=["y"],
        **fields,
    )
    program = candidate_pb2.Program(
        target=task_pb2.TARGET_CUDA,
        sources=[candidate_pb2.DeviceSource(name="kernel.cu", text=text)],
        buffers=[
            small.source_buffer("x", small.spec(N)),
            candidate_pb2.Buffer(name="y", role=candidate_pb2.ROLE_OUTPUT, spec=small.spec(N)),
        ],
        steps=[candidate_pb2.Step(group="y", launch=launch)],
        outputs=["y"],
    )
    program.digest = digest.of_program(program)
    artifact = artifact_pb2.Artifact(
        program_digest=program.digest, format=artifact_pb2.BINARY_FORMAT_CUBIN, content=cubin(text)
    )
    return program, artifact


def run(small: Any, body: str, **fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, output) of one call."""
    program, artifact = made(small, body, **fields)
    device = torch.device("cuda", 0)
    x = torch.rand(N, device=device)
    executor = CudaExecutor()
    call = executor.load(program, artifact, device).bind(Sources([x]))
    (y,) = call()
    executor.synchronize()
    return x, y


def test_a_kernel_gets_pointers_and_scalars(small: Any) -> None:
    x, y = run(small, "long i = blockIdx.x * 256L + threadIdx.x; y[i] = x[i] * k;")
    assert torch.equal(y, x * 3.0)


def test_a_launch_follows_the_current_stream(small: Any) -> None:
    program, artifact = made(small, RIGHT)
    x = torch.rand(N, device="cuda")
    call = CudaExecutor().load(program, artifact, torch.device("cuda", 0)).bind(Sources([x]))
    call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (y,) = call()
    stream.synchronize()
    torch.testing.assert_close(y, x * 2 + 1)


def test_large_shared_memory_is_allowed(small: Any) -> None:
    body = (
        "extern __shared__ float s[]; s[50000 + threadIdx.x] = x[blockIdx.x * 256L + threadIdx.x]; __syncthreads();"
        "y[blockIdx.x * 256L + threadIdx.x] = s[50000 + threadIdx.x];"
    )
    x, y = run(small, body, shared_bytes=220 << 10)
    assert torch.equal(x, y)


@pytest.mark.parametrize("size", [4, 16])
def test_a_cluster_has_the_size_that_was_asked_for(small: Any, size: int) -> None:
    body = (
        'unsigned n; asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(n));y[blockIdx.x * 256L + threadIdx.x] = n;'
    )
    _, y = run(small, body, cluster=candidate_pb2.Extent3(x=size, y=1, z=1))
    assert bool((y == size).all())


@pytest.mark.parametrize("field", ["cooperative", "programmatic_dependent"])
def test_launch_attributes_are_accepted(small: Any, field: str) -> None:
    x, y = run(small, RIGHT, **{field: True})
    torch.testing.assert_close(y, x * 2 + 1)


def test_a_cooperative_launch_that_does_not_fit_is_a_resource_fault(small: Any) -> None:
    program, artifact = made(small, RIGHT, cooperative=True)
    program.steps[0].launch.grid.x = 1 << 20
    call = CudaExecutor().load(program, artifact, torch.device("cuda", 0)).bind(Sources([torch.rand(N, device="cuda")]))
    with pytest.raises(ProgramFault) as raised:
        call()
    assert raised.value.kind == verdict_pb2.FAILURE_KIND_RESOURCE


def test_a_broken_cubin_is_a_launch_error(small: Any) -> None:
    program, artifact = made(small, RIGHT)
    artifact.content = b"no cubin"
    with pytest.raises(ProgramFault) as raised:
        CudaExecutor().load(program, artifact, torch.device("cuda", 0))
    assert raised.value.kind == verdict_pb2.FAILURE_KIND_LAUNCH_ERROR


@pytest.fixture(scope="module")
def session(small: Any) -> Iterator[Session]:
    task = small.task(MODULE)
    task.target = task_pb2.TARGET_CUDA
    opened = Session(task, limits=Limits(hang_seconds=20.0))
    yield opened
    opened.close()


def compare(small: Any, session: Session, body: str) -> benchmark_service_pb2.CompareOutputsResponse:
    return session.compare(*made(small, body), [CASE])


def test_a_right_kernel_passes_in_the_workers(small: Any, session: Session) -> None:
    response = compare(small, session, RIGHT)
    assert not response.HasField("fault"), response.fault
    (comparison,) = response.comparisons
    assert comparison.outputs[0].max_ratio <= 8
    assert [*comparison.broken_canaries, *comparison.stray_read_outputs, *comparison.unrepeatable_outputs] == []


def test_a_write_past_the_end_breaks_a_canary(small: Any, session: Session) -> None:
    response = compare(small, session, f"{RIGHT} if (i == 0) y[{N}] = 1.0f;")
    assert list(response.comparisons[0].broken_canaries) == ["y"]


@pytest.mark.parametrize(
    "body",
    [
        "*reinterpret_cast<volatile float*>(16) = x[0];",
        "__trap();",
        "*reinterpret_cast<volatile double*>(reinterpret_cast<char*>(y) + 4) = x[0];",
    ],
    ids=["illegal address", "trap", "misaligned"],
)
def test_a_fault_of_the_kernel_is_a_crash_and_the_next_one_runs(small: Any, session: Session, body: str) -> None:
    assert compare(small, session, body).fault.kind == verdict_pb2.FAILURE_KIND_CRASH
    assert not compare(small, session, RIGHT).HasField("fault")


def test_an_endless_kernel_is_a_timeout(small: Any, session: Session) -> None:
    body = "volatile float* p = y; *p = 0.0f; while (*p < 1.0f) {}"
    assert compare(small, session, body).fault.kind == verdict_pb2.FAILURE_KIND_TIMEOUT
    assert not compare(small, session, RIGHT).HasField("fault")
