"""Kernels that are right, and that only a stopwatch tells from honest ones; and what they are held against.

The one idea: each gains something where one defence of the clock is missing (`hostile_gpu_defences` takes them away),
and nothing where all are there.
"""

from __future__ import annotations

from dataclasses import replace

import hostile_tasks as tasks
from hostile_kernels import ALL, RELU, SOFTMAX, WIDE, WIDE_BODY, Kernel, Launch
from hostile_tasks import Tensor

_SLOW = "    for (int wait = 0; wait < 100; ++wait) __nanosleep(3000);\n"
KEPT_IN_WORKSPACE = Kernel("earlier calls", "an answer kept in a workspace", (), """
    const bool known = reinterpret_cast<unsigned*>(w)[SIZE] == 0xC0FFEEu;
    if (known) { for (long i = thread; i < SIZE; i += 64) y[i] = w[i]; return; }
""" + _SLOW + SOFTMAX + """
    __syncthreads();
    for (long i = thread; i < SIZE; i += 64) w[i] = y[i];
    if (thread == 0) reinterpret_cast<unsigned*>(w)[SIZE] = 0xC0FFEEu;
""", workspaces={"w": Tensor((16 * 33 + 1,))})  # fmt: skip
"""Right, and slow by some 0.3 ms unless the workspace still holds the last answer."""
LEFT_IN_OUTPUT = Kernel("earlier calls", "an answer found in fresh memory", (), """
    __shared__ int unlike;
    if (threadIdx.x == 0) unlike = 0;
    __syncthreads();
    const long from = blockIdx.x * (SIZE / gridDim.x);
    for (int k = threadIdx.x; k < 64; k += blockDim.x) {
        const float wanted = x[from + k] < 0 ? 0.0f : x[from + k];
        if (y[from + k] != wanted) unlike = 1;
    }
    __syncthreads();
    if (!unlike) return;
    for (long i = from + threadIdx.x; i < from + SIZE / gridDim.x; i += blockDim.x) y[i] = x[i] < 0 ? 0.0f : x[i];
""", WIDE, Launch(4096, 256))  # fmt: skip
"""Looks at 64 elements of each block's part of the output, and leaves where they are right already."""
EVICT_LAST = Kernel("timer", "asks the L2 to keep its input", (), WIDE_BODY, WIDE, ALL, """
__device__ __forceinline__ float4 keeping(const float4* at) {
    float4 v;
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at), "l"(policy));
    return v;
}
#define LOAD(at) keeping(at)""")  # fmt: skip
MOVED = Kernel("timer", "work moved into the step before", (), WIDE_BODY, WIDE, ALL, "#define LOAD(at) *(at)",
               then=("",))  # fmt: skip
"""Two steps, of which the first does all of the work and the second none."""
WAITING = Kernel("timer", "waits for what precedes it", (),
                 "for (int wait = 0; wait < 10; ++wait) __nanosleep(2000);\n" + SOFTMAX)  # fmt: skip
OVERLAPPING = replace(
    WAITING,
    name="begins before what precedes it has ended",
    body='asm volatile("griddepcontrol.launch_dependents;");\n' + WAITING.body,
    edit=lambda made: setattr(made.steps[0].launch, "programmatic_dependent", True),
)
"""The same, launched so that the calls of a group might run beside each other: each in the time of the one before."""
LUCKY = Kernel("sanitizer", "a missing barrier that does no harm here", (), """
    __shared__ float one[64];
    if (threadIdx.x < 32) one[threadIdx.x] = 1.0f;
    else for (int wait = 0; wait < 20; ++wait) __nanosleep(1000);
    if (threadIdx.x >= 32 && one[threadIdx.x - 32] != 1.0f) { y[0] = 2.0f; return; }
""" + SOFTMAX)  # fmt: skip
"""Right because one half of the block waits long enough: only racecheck sees it."""
SUMS = replace(
    tasks.TINY,
    name="sums",
    forward="x.sum(dim=1)",
    inputs="[torch.randn(4096, 2048)]",
    sources={"x": Tensor((4096, 2048))},
    outputs={"y": Tensor((4096,))},
    constants="constexpr long ROWS = 4096, COLUMNS = 2048;",
)
"""32 MiB to read, which fit the L2, and next to nothing to write."""
_SUMS_BODY = """
    const float4* from = reinterpret_cast<const float4*>(x) + thread / 32 * (COLUMNS / 4);
    float sum = 0;
    #pragma unroll
    for (long i = threadIdx.x % 32; i < COLUMNS / 4; i += 32) {
        const float4 v = LOAD(from + i);
        sum += (v.x + v.y) + (v.z + v.w);
    }
    for (int width = 16; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
    if (threadIdx.x % 32 == 0) y[thread / 32] = sum;
"""
READING = Kernel("timer", "reads its input", (), _SUMS_BODY, SUMS, Launch(512, 256), "#define LOAD(at) *(at)")
KEEPING = replace(READING, name="asks the L2 to keep its input", ahead=EVICT_LAST.ahead)
EIGHT = replace(
    tasks.TINY,
    name="eight",
    forward="torch.relu(torch.relu(torch.relu(torch.relu(torch.relu(torch.relu(torch.relu(torch.relu(x))))))))",
)
"""Eight launches of eager's, each of which takes the host longer than the device."""
AS_MANY = Kernel("timer", "as many launches", (), RELU, EIGHT, then=(RELU.replace("x[i]", "y[i]"),) * 7)
"""No faster on the device, but less work for the host."""
