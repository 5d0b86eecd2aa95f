"""Hostile CUDA kernels: what each tries on a GPU, and which verdicts are right for it.

The one idea: as in `hostile_programs`, a case is data. The kernels come through the product's own compiler; the tasks
are those of the CPU suite, with one thread for each row or element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import hostile_tasks as tasks
from hostile_tasks import Module, Tensor

from warpsmith import digest
from warpsmith.v1 import candidate_pb2, task_pb2

VALUE = ("WRONG_VALUE", "WRONG_OVERFIT")
MEMORY = ("WRONG_OUT_OF_BOUNDS",)
UNWRITTEN = ("WRONG_UNINITIALIZED",)
RACE = ("WRONG_NONDETERMINISTIC", *VALUE, "WRONG_PRECISION", *UNWRITTEN, *MEMORY)
"""What a race may show as: any two of the runs of a case may differ, those with other poison or canaries too."""
_SPELLING = {tasks.F32: "float", tasks.I64: "long long", tasks.I32: "int"}
_PRELUDE = "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fc00000)\n"
_FIRST = "    const long thread = blockIdx.x * (long)blockDim.x + threadIdx.x;\n    (void)thread;\n"


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched."""

    blocks: int = 1
    threads: int = 64
    shared_bytes: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel that must not pass; with no `kinds`, one that must."""

    category: str
    name: str
    kinds: tuple[str, ...]
    """Kinds of failure that are right for it, without FAILURE_KIND_."""
    body: str
    module: Module = tasks.SOFTMAX
    launch: Launch = Launch()
    ahead: str = ""
    edit: Callable[[candidate_pb2.Program], object] | None = None
    seconds: float = 40.0
    """Longest that the verdict may take."""
    workspaces: dict[str, Tensor] | None = None


def task(module: Module) -> task_pb2.Task:
    """The module as a task of the cuda target."""
    made = module.task()
    made.target = task_pb2.TARGET_CUDA
    made.digest = digest.of_task(made)
    return made


def program(module: Module, kernels: Sequence[Kernel]) -> candidate_pb2.Program:
    """A program with one launch for each kernel, all over the same buffers."""
    workspaces = kernels[0].workspaces or tasks.WORKSPACE
    made = tasks.program(module, ["" for _ in kernels], workspaces=workspaces)
    tensors = {**module.sources, **module.outputs, **workspaces}
    parameters = ", ".join(f"{_SPELLING[tensor.dtype]}* {name}" for name, tensor in tensors.items())
    unused = "".join(f"    (void){name};\n" for name in tensors)
    text = f"{_PRELUDE}{module.constants}\n" + "\n".join(kernel.ahead for kernel in kernels) + "\n"
    for number, kernel in enumerate(kernels):
        text += f'extern "C" __global__ void run{number}({parameters}) {{\n{_FIRST}{unused}{kernel.body}\n}}\n'
    made.target = task_pb2.TARGET_CUDA
    made.sources[0].name, made.sources[0].text = "kernel.cu", text
    for step, kernel in zip(made.steps, kernels, strict=True):
        step.launch.grid.CopyFrom(candidate_pb2.Extent3(x=kernel.launch.blocks, y=1, z=1))
        step.launch.block.CopyFrom(candidate_pb2.Extent3(x=kernel.launch.threads, y=1, z=1))
        step.launch.shared_bytes = kernel.launch.shared_bytes
    made.digest = digest.of_program(made)
    return made


# ---- right kernels -----------------------------------------------------------------------------------------

_SOFTMAX = """
    const long i = thread;
    if (i < ROWS) {
        const float* row = x + i * COLUMNS;
        float m = -INFINITY, s = 0;
        for (long j = 0; j < COLUMNS; ++j) m = isnan(row[j]) ? row[j] : (row[j] > m ? row[j] : m);
        for (long j = 0; j < COLUMNS; ++j) s += expf(row[j] - m);
        for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = expf(row[j] - m) / s;
    }
"""
_LINEAR = """
    for (long at = thread; at < M * N; at += gridDim.x * (long)blockDim.x) {
        const long m = at / N, n = at % N;
        float sums[8] = {};
        for (long k = 0; k < K; k += 8)
            for (long l = 0; l < 8; ++l) sums[l] += FACTOR(x[m * K + k + l]) * FACTOR(weight[n * K + k + l]);
        y[at] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }
"""
_PLAIN_FACTOR = "#define FACTOR(value) (value)"
_RELU = "for (long i = thread; i < SIZE; i += gridDim.x * (long)blockDim.x) y[i] = x[i] < 0 ? 0.0f : x[i];"
_SUM = """
    __shared__ double parts[1024];
    double part = 0;
    for (long i = threadIdx.x; i < SIZE; i += 1024) { y[i] = x[i] < 0 ? 0.0f : x[i]; part += x[i]; }
    parts[threadIdx.x] = part;
    BARRIER
    for (int width = 512; width > 0; width /= 2) {
        if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
        BARRIER
    }
    if (threadIdx.x == 0) s[0] = static_cast<float>(parts[0]);
"""
_RIGHT_SUM = _SUM.replace("BARRIER", "__syncthreads();")

MILLION = tasks.MILLION
WIDE = replace(
    tasks.TINY,
    name="wide",
    inputs="[torch.randn(4096, 16384)]",
    sources={"x": Tensor((4096, 16384))},
    outputs={"y": Tensor((4096, 16384))},
    constants="constexpr long SIZE = 4096L * 16384;",
)
"""Large enough to fill the GPU: for times."""
_WIDE_BODY = """
    const float4* from = reinterpret_cast<const float4*>(x);
    float4* to = reinterpret_cast<float4*>(y);
    for (long i = thread; i < SIZE / 4; i += gridDim.x * (long)blockDim.x) {
        float4 v = LOAD(from + i);
        v.x = v.x < 0 ? 0.0f : v.x; v.y = v.y < 0 ? 0.0f : v.y;
        v.z = v.z < 0 ? 0.0f : v.z; v.w = v.w < 0 ? 0.0f : v.w;
        to[i] = v;
    }
"""
ALL = Launch(1056, 512)
HONEST = [
    Kernel("honest", "a thread for each row", (), _SOFTMAX),
    Kernel("honest", "a naive product", (), _LINEAR, tasks.LINEAR, Launch(16, 256), _PLAIN_FACTOR),
    Kernel("honest", "a sum by barriers", (), _RIGHT_SUM, MILLION, Launch(1, 1024)),
    Kernel("honest", "a kernel of two microseconds", (), _RELU, tasks.TINY),
    Kernel("honest", "227 KiB of shared memory", (), """
    extern __shared__ float buffer[];
    for (long i = threadIdx.x; i < 227 * 256; i += blockDim.x) buffer[i] = static_cast<float>(i);
    __syncthreads();
    if (buffer[227 * 256 - 1] != 227 * 256 - 1) return;
    """ + _SOFTMAX, launch=Launch(1, 64, 227 << 10)),
    Kernel("honest", "one large copy", (), _WIDE_BODY, WIDE, ALL, "#define LOAD(at) *(at)"),
    Kernel("honest", "a table in constant memory", (), _SOFTMAX.replace("/ s", "/ s * one[i % 2]"),
           ahead="__constant__ float one[2] = {1.0f, 1.0f};"),
]  # fmt: skip
BY_MODULE = {kernel.module.name: kernel for kernel in reversed(HONEST)}
"""A right kernel of each module."""


def honest(module: Module) -> Kernel:
    """A right kernel of the module."""
    return BY_MODULE[module.name]


# ---- hostile ones ------------------------------------------------------------------------------------------

S, R = _SOFTMAX, _RELU
_SPIN = "for (;;) __nanosleep(1000);"

CASES = [
    Kernel("hang", "spin in one thread", ("TIMEOUT",), f"{S}\nif (thread == 0) {{ {_SPIN} }}"),
    Kernel("hang", "spin on all multiprocessors", ("TIMEOUT",), _SPIN, launch=Launch(132 * 8, 1024)),
    Kernel("hang", "a grid barrier with more blocks than fit", ("TIMEOUT",), """
    __shared__ float large[12000];
    large[threadIdx.x] = thread;
    int* count = reinterpret_cast<int*>(w);
    if (threadIdx.x == 0) { atomicAdd(count, 1); while (atomicAdd(count, 0) < static_cast<int>(gridDim.x)) {} }
    __syncthreads();
    """ + S + "\nif (threadIdx.x == 0 && blockIdx.x == 0) *count = 0;", launch=Launch(40_000, 64),
           workspaces={"w": Tensor((4,), tasks.F32, stays_zero=True)}),
    Kernel("crash", "illegal address", ("CRASH",), "*reinterpret_cast<volatile int*>(8) = 1;"),
    Kernel("crash", "writes a terabyte past the end", ("CRASH",), f"{S}\ny[SIZE + (1L << 38)] = 0.5f;"),
    Kernel("crash", "misaligned vector access", ("CRASH",),
           f"{S}\n*reinterpret_cast<volatile double*>(reinterpret_cast<char*>(y) + 4) = 1.0;"),
    Kernel("crash", "trap", ("CRASH",), "__trap();"),
    Kernel("crash", "shared memory past its end", ("CRASH",), """
    extern __shared__ volatile float some[];
    some[(1 << 20) + threadIdx.x] = 1;
    """ + S),
    Kernel("memory", "writes one past the end", MEMORY, f"{S}\nif (thread == 0) y[SIZE] = 0.5f;"),
    Kernel("memory", "writes element -1", MEMORY, f"{S}\nif (thread == 0) y[-1] = 0.5f;"),
    Kernel("memory", "writes past a workspace", MEMORY, f"{S}\nif (thread == 0) w[64] = 0.5f;"),
    Kernel("memory", "reads one past the end into a sum", MEMORY,
           f"{S}\nif (i == ROWS - 1) y[SIZE - 1] += x[SIZE] * 1e-12f;"),
    Kernel("memory", "reads element -1 into a maximum", MEMORY, f"{S}\nif (i == 0 && x[-1] > y[0]) y[0] += 1e-6f;"),
    Kernel("memory", "a missing barrier", RACE,
           _SUM.replace("BARRIER", ""), MILLION, Launch(1, 1024)),
    Kernel("memory", "a race in global memory", RACE, f"""
    {R}
    if (thread == 0) s[0] = 0;
    for (long i = thread; i < SIZE; i += gridDim.x * (long)blockDim.x) {{
        volatile float* total = s;
        *total = *total + x[i];
    }}""", MILLION, Launch(132, 256)),
    Kernel("memory", "float atomics that nobody declared", RACE, f"""
    {R}
    for (long i = thread; i < SIZE; i += gridDim.x * (long)blockDim.x) atomicAdd(w, x[i]);
    __threadfence();
    if (thread == 0) s[0] = w[0];""", MILLION, Launch(132, 256)),
    Kernel("memory", "leaves one of a million elements", UNWRITTEN,
           _RIGHT_SUM.replace("y[i] = ", "if (i != 777777) y[i] = "), MILLION, Launch(1, 1024)),
    Kernel("memory", "shared memory read before it is written", ("WRONG_NONDETERMINISTIC", *VALUE, *UNWRITTEN, "CRASH",
                                                                 "WRONG_NAN", "WRONG_PRECISION"), """
    extern __shared__ volatile unsigned seen[];
    unsigned mixed = 0;
    for (long i = threadIdx.x; i < 48 * 256; i += blockDim.x) { mixed += seen[i]; seen[i] = clock() * 2654435761u; }
    """ + S + "\nif (i < ROWS) y[i * COLUMNS] *= 1.0f + (mixed & 1023u) * 1e-4f;", launch=Launch(1, 64, 48 << 10)),
    Kernel("memory", "a workspace that nobody wrote", UNWRITTEN, f"{S}\nif (i == 0) y[0] += w[3] * 1e-8f;"),
    Kernel("memory", "too much shared memory", ("POLICY_REJECT", "LAUNCH_ERROR"), S, launch=Launch(1, 64, 300 << 10)),
    Kernel("memory", "too much static shared memory", ("COMPILE_ERROR", "LAUNCH_ERROR", "RESOURCE"), f"""
    __shared__ float large[60000];
    for (int i = threadIdx.x; i < 60000; i += blockDim.x) large[i] = x[i % SIZE];
    __syncthreads();
    w[0] = large[59999];
    {S}"""),
    Kernel("memory", "a stack without end", ("RESOURCE", "LAUNCH_ERROR", "CRASH"), f"""
    if (thread == 0) w[0] = deeper(x, 0);
    {S}""", ahead="""__device__ __noinline__ float deeper(const float* x, int n) {
    volatile float frame[256];
    frame[n & 255] = x[n & 255];
    return x[1] < -1e30f ? 0.0f : deeper(x, n + 1) + frame[(n * 7) & 255];
}"""),
    Kernel("memory", "a workspace of 256 GB", ("RESOURCE",), S,
           edit=lambda made: made.buffers[2].spec.shape.__setitem__(0, 1 << 36)),
    Kernel("answer", "writes nothing", UNWRITTEN, "return;"),
    Kernel("answer", "zeroes the inputs and the output", ("WRONG_INPUT_MUTATED",),
           "for (long i = thread; i < SIZE; i += 64) x[i] = y[i] = 0;"),
    Kernel("answer", "changes one input by one bit", ("WRONG_INPUT_MUTATED",),
           f"{S}\nif (thread == 0) reinterpret_cast<unsigned*>(x)[5] ^= 1u;"),
    Kernel("answer", "NaN everywhere", ("WRONG_NAN",), "for (long i = thread; i < SIZE; i += 64) y[i] = NAN;"),
    Kernel("answer", "constant", VALUE, "for (long i = thread; i < SIZE; i += 64) y[i] = 1.0f / COLUMNS;"),
    Kernel("answer", "zeros from the ninth row on", VALUE,
           f"{S}\nif (i >= 8 && i < ROWS) for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = 0;"),
    Kernel("answer", "no shift by the maximum", ("WRONG_NAN", *VALUE), S.replace("row[j] - m", "row[j]")),
    Kernel("answer", "copies from memory what looks like an answer", ("CRASH", *UNWRITTEN, *MEMORY), """
    if (thread == 0) for (long at = 1; at < (1L << 15); ++at) {
        const float* there = y - at;
        double sum = 0;
        for (long j = 0; j < COLUMNS; ++j) sum += there[j] > 0 && there[j] < 1 ? there[j] : 9;
        if (fabs(sum - 1) < 1e-5) { for (long k = 0; k < SIZE; ++k) y[k] = there[k]; return; }
    }"""),
    Kernel("earlier calls", "a variable that counts calls", ("POLICY_REJECT",),
           "if (thread == 0) ++calls;\nif (calls > 1000) return;\n" + S, ahead="__device__ int calls;"),
    Kernel("earlier calls", "a static variable of the kernel", ("POLICY_REJECT",),
           "static int calls;\nif (thread == 0) ++calls;\nif (calls > 1000) return;\n" + S),
    Kernel("earlier calls", "a table that can be written", ("POLICY_REJECT",),
           f"{S}\nif (i < ROWS) y[i] *= table[i]; table[3] = x[0];",
           ahead="__device__ float table[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};"),
    Kernel("earlier calls", "memory of the device's heap", ("POLICY_REJECT",),
           f"float* own = static_cast<float*>(malloc(64));\nif (own) own[0] = x[0];\n{S}\nif (own) w[0] = own[0];"),
    Kernel("earlier calls", "keeps a flag in memory that has to be left zero", UNWRITTEN,
           f"{S}\nif (thread == 0) w[0] = 1;", workspaces={"w": Tensor((4,), tasks.F32, stays_zero=True)}),
    Kernel("host code", "floods the printer", ("POLICY_REJECT",),
           f'for (;;) printf("%d", static_cast<int>(thread));\n{S}', ahead='extern "C" int printf(const char*, ...);'),
    Kernel("precision", "fp16 factors in an fp32 product", ("WRONG_PRECISION", *VALUE), _LINEAR, tasks.LINEAR,
           Launch(16, 256), "#include <cuda_fp16.h>\n#define FACTOR(value) __half2float(__float2half(value))"),
    Kernel("precision", "TF32 factors in an fp32 product", ("WRONG_PRECISION",), _LINEAR, tasks.LINEAR, Launch(16, 256),
           "#define FACTOR(value) __int_as_float((__float_as_int(value) + 0x1000) & 0xffffe000)"),
    Kernel("precision", "drops one percent of K", ("WRONG_PRECISION", *VALUE), _LINEAR.replace("k < K", "k < K - 8"),
           tasks.LINEAR, Launch(16, 256), _PLAIN_FACTOR),
    Kernel("precision", "fast division and exponential of a wrong base", ("WRONG_NAN", "WRONG_PRECISION", *VALUE),
           S.replace("expf(row[j] - m)", "exp2f(1.4427f * (row[j] - m))")),
]  # fmt: skip

# ---- cases that only time shows ----------------------------------------------------------------------------

_SLOW = "    for (int wait = 0; wait < 100; ++wait) __nanosleep(3000);\n"
KEPT_IN_WORKSPACE = Kernel("earlier calls", "an answer kept in a workspace", (), """
    const bool known = reinterpret_cast<unsigned*>(w)[SIZE] == 0xC0FFEEu;
    if (known) { for (long i = thread; i < SIZE; i += 64) y[i] = w[i]; return; }
""" + _SLOW + _SOFTMAX + """
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
EVICT_LAST = Kernel("timer", "asks the L2 to keep its input", (), _WIDE_BODY, WIDE, ALL, """
__device__ __forceinline__ float4 keeping(const float4* at) {
    float4 v;
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at), "l"(policy));
    return v;
}
#define LOAD(at) keeping(at)""")  # fmt: skip
