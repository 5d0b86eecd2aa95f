"""What the machine gives to any kernel, ours or one written by hand, and what it says of what it cannot run."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_correctness.simulation.simt import Execution, Limits, Sanitizer, Simulation, Simulator
from agent_correctness.simulation.simt_findings import Kind
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, task_pb2, tensor_pb2

KERNELS = """
extern "C" __global__ void histogram(const int* x, int* counts, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(counts + x[i] % 4, 1);
}
extern "C" __global__ void lanes(const int* x, int* y) {
  const int lane = threadIdx.x % 32, value = x[threadIdx.x];
  const int up = __shfl_up_sync(0xffffffffu, value, 1), down = __shfl_down_sync(0xffffffffu, value, 1);
  const int odd = lane % 2 == 0 ? __shfl_xor_sync(0x55555555u, value, 2) : __shfl_xor_sync(0xaaaaaaaau, value, 2);
  y[threadIdx.x] = up + 2 * down + 4 * odd + 8 * __popc(__ballot_sync(0xffffffffu, value % 2));
}
extern "C" __global__ void dynamic(const int* x, int* y, float scale) {
  extern __shared__ int reversed[];
  reversed[blockDim.x - 1 - threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = int(scale * reversed[threadIdx.x]) + __syncthreads_count(threadIdx.x < 5);
}
"""


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    made = Simulator(limits=Limits(run_seconds=5.0), cache=tmp_path_factory.mktemp("simt"))
    if made.missing():
        pytest.skip(made.missing())
    yield made
    made.close()


def program(text: str, entry: str, outputs: int, *, grid: int = 1, threads: int = 64) -> candidate_pb2.Program:
    """One launch of `entry(x, y)` on 32-bit integers: 64 of x, `outputs` of y."""
    made = candidate_pb2.Program(target=task_pb2.TARGET_CUDA)
    made.sources.add(name="kernel.cu", text=text)
    roles = (("x", candidate_pb2.ROLE_SOURCE, 64), ("y", candidate_pb2.ROLE_OUTPUT, outputs))
    launch = candidate_pb2.Launch(
        entry=entry, grid=candidate_pb2.Extent3(x=grid), block=candidate_pb2.Extent3(x=threads)
    )
    for name, role, count in roles:
        spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT32, shape=[count], strides=[1])
        made.buffers.add(name=name, role=role, spec=spec)
        launch.arguments.add(buffer=name)
    made.steps.add(launch=launch)
    return made


def run(simulator: Simulator, made: candidate_pb2.Program, sanitizer: Sanitizer = Sanitizer.ADDRESS) -> Execution:
    return simulator.execute(Simulation(made, {"x": struct.pack("64i", *range(64))}), sanitizer)


def integers(execution: Execution, name: str = "y") -> list[int]:
    content = execution.outputs[name]
    return list(struct.unpack(f"{len(content) // 4}i", content))


def body(text: str) -> str:
    return f'extern "C" __global__ void kernel(const int* x, int* y) {{ {text} }}\n'


@pytest.mark.parametrize("sanitizer", Sanitizer)
def test_atomics_of_several_blocks_add_up(simulator: Simulator, sanitizer: Sanitizer) -> None:
    made = program(KERNELS, "histogram", 4, grid=2, threads=32)
    made.buffers[1].role = candidate_pb2.ROLE_WORKSPACE
    made.buffers[1].zero_between_calls = True
    made.steps[0].launch.arguments.add(int32=62)
    execution = run(simulator, made, sanitizer)
    assert integers(execution) == [16, 16, 15, 15]
    kinds = [finding.kind for finding in execution.findings]
    assert kinds == ([Kind.DIRTY] if sanitizer is Sanitizer.ADDRESS else [])


def test_lanes_exchange_within_their_masks(simulator: Simulator) -> None:
    execution = run(simulator, program(KERNELS, "lanes", 64))
    wanted = []
    for thread in range(64):
        lane, first = thread % 32, thread - thread % 32
        up, down = max(thread - 1, first), min(thread + 1, first + 31)
        wanted.append(up + 2 * down + 4 * (first + (lane ^ 2)) + 8 * 16)
    assert not execution.findings
    assert integers(execution) == wanted


def test_dynamic_shared_memory_scalars_and_counting_barriers_work(simulator: Simulator) -> None:
    made = program(KERNELS, "dynamic", 64)
    made.steps[0].launch.shared_bytes = 256
    made.steps[0].launch.arguments.add(float32=3.0)
    execution = run(simulator, made)
    assert not execution.findings
    assert integers(execution) == [3 * (63 - thread) + 5 for thread in range(64)]


def test_a_block_that_waits_for_a_later_one_gets_it(simulator: Simulator) -> None:
    text = body(
        "if (blockIdx.x == 0) { while (atomicAdd(y, 0) != 7) __nanosleep(1); y[1] = 1; } else atomicExch(y, 7);"
    )
    made = program(text, "kernel", 2, grid=2, threads=1)
    made.buffers[1].role = candidate_pb2.ROLE_WORKSPACE
    assert integers(run(simulator, made, Sanitizer.THREAD)) == [7, 1]


@pytest.mark.parametrize(("places", "is_right"), [(1, False), (2, True)])
def test_blocks_do_not_keep_step(simulator: Simulator, places: int, is_right: bool) -> None:
    """Two blocks tell each other a step's number, in `places` places in turn: who is held back misses one of one."""
    text = body(
        "for (int step = 1; step <= 200; ++step) {"
        f"  int* words = y + step % {places} * 2; atomicExch(words + blockIdx.x, step);"
        "  while (atomicAdd(words + 1 - blockIdx.x, 0) != step) ; }"
    )
    made = program(text, "kernel", 4, grid=2, threads=1)
    made.steps[0].launch.cooperative = True
    made.buffers[1].role = candidate_pb2.ROLE_WORKSPACE
    findings = run(simulator, made).findings
    assert [finding.kind for finding in findings] == ([] if is_right else [Kind.DEADLOCK])


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("y[threadIdx.x] = x[threadIdx.x] / (x[threadIdx.x] - 7);", Kind.UNDEFINED, "division by zero"),
        ("y[threadIdx.x] = 0x7fffffff + x[threadIdx.x];", Kind.UNDEFINED, "signed integer overflow"),
        ("int z[2]; y[threadIdx.x] = z[x[threadIdx.x] % 3];", Kind.UNDEFINED, "index 2 out of bounds"),
        ("if (threadIdx.x < 40) __syncthreads(); else while (atomicOr(y, 0) != 7) ;", Kind.DEADLOCK, "block's barrier"),
        ("if (threadIdx.x % 32 < 16) __syncwarp(); else __syncthreads();", Kind.DEADLOCK, "a warp operation"),
        ("for (volatile int i = 0; i < 2; ) ;", Kind.TIMEOUT, "more than 5 s"),
        ("y[threadIdx.x] = __shfl_sync(0xffu, 1, 20);", Kind.MISUSE, "takes no part"),
        ('asm volatile("bar.sync 0;"); nothing();', Kind.UNSUPPORTED, "nothing"),
        ("int* p = nullptr; if (threadIdx.x == 9) y[0] = *p;", Kind.OUT_OF_BOUNDS, "thread (9, 0, 0)"),
    ],
)  # fmt: skip
def test_what_a_kernel_must_not_do_is_said(simulator: Simulator, text: str, kind: Kind, words: str) -> None:
    findings = run(simulator, program(body(text), "kernel", 64)).findings
    assert any(finding.kind is kind and words in finding.detail for finding in findings), findings


def test_equal_runs_give_equal_outputs_and_builds_are_kept(simulator: Simulator) -> None:
    made = program(body("y[threadIdx.x] = x[threadIdx.x] + 1;"), "kernel", 64)
    first = run(simulator, made)
    assert isinstance(simulator.cache, Path)
    known = sorted(simulator.cache.iterdir())
    assert run(simulator, made) == first
    assert sorted(simulator.cache.iterdir()) == known
    for file in known:
        file.write_text("import time; time.sleep(1)\n" * 9)  # longer than the digest before it
    assert run(simulator, made) == first


def test_programs_that_are_not_launches_on_given_memory_are_refused(simulator: Simulator) -> None:
    made = program(body(""), "kernel", 1)
    with pytest.raises(BadInput, match="source x is missing"):
        simulator.execute(Simulation(made, {}), Sanitizer.ADDRESS)
    made.steps.add(memset=candidate_pb2.Memset(buffer="y"))
    with pytest.raises(BadInput, match="must be a launch"):
        run(simulator, made)
    made.target = task_pb2.TARGET_CPU
    with pytest.raises(BadInput, match="only CUDA"):
        run(simulator, made)
