"""Hostile CUDA kernels: what each tries on a GPU, and which verdicts are right for it.

The one idea: as in `hostile_programs`, a case is data. The kernels come through the product's own compiler; the tasks
are those of the CPU suite, with one thread for each row or element.

Not here, because a kernel cannot express it: taking all memory (it gets what its plan asks for, and the device's heap
is refused; both are cases), host code, modules, plans (alike on both targets: the CPU suite), the carve-out of the L2
and graphs that replay (host code: among the solutions), declared float atomics (nothing declares them; those of
integers are).
"""

from __future__ import annotations

from collections.abc import Callable
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
_SPELLING = {tasks.F32: "float", tasks.I64: "long long", tasks.I32: "int", tasks.I8: "signed char"}
_PRELUDE = "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fc00000)\n"
_FIRST = "    const long thread = blockIdx.x * (long)blockDim.x + threadIdx.x;\n    (void)thread;\n"


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched."""

    blocks: int = 1
    threads: int = 64
    shared_bytes: int = 0
    cluster: int = 1


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
    then: tuple[str, ...] = ()
    """Bodies of further kernels, launched alike after it."""
    bare: bool = False
    """Compiled without the look at what the binary keeps: the judge and the clock have to hold alone."""
    timed: bool = False
    """Whether it passes as long as it is judged, and has to be caught by its timing."""


def task(module: Module) -> task_pb2.Task:
    """The module as a task of the cuda target."""
    made = module.task()
    made.target = task_pb2.TARGET_CUDA
    made.digest = digest.of_task(made)
    return made


def program(kernel: Kernel) -> candidate_pb2.Program:
    """A program with one launch for each body of the kernel, all over the same buffers."""
    module, bodies, launch = kernel.module, (kernel.body, *kernel.then), kernel.launch
    workspaces = kernel.workspaces or tasks.WORKSPACE
    made = tasks.program(module, ["" for _ in bodies], workspaces=workspaces)
    tensors = {**module.sources, **module.outputs, **workspaces}
    parameters = ", ".join(f"{_SPELLING[tensor.dtype]}* {name}" for name, tensor in tensors.items())
    unused = "".join(f"    (void){name};\n" for name in tensors)
    text = f"{_PRELUDE}{module.constants}\n{kernel.ahead}\n"
    for number, body in enumerate(bodies):
        text += f'extern "C" __global__ void run{number}({parameters}) {{\n{_FIRST}{unused}{body}\n}}\n'
    made.target = task_pb2.TARGET_CUDA
    made.sources[0].name, made.sources[0].text = "kernel.cu", text
    for step in made.steps:
        step.launch.grid.CopyFrom(candidate_pb2.Extent3(x=launch.blocks, y=1, z=1))
        step.launch.block.CopyFrom(candidate_pb2.Extent3(x=launch.threads, y=1, z=1))
        step.launch.shared_bytes = launch.shared_bytes
        if launch.cluster > 1:
            step.launch.cluster.CopyFrom(candidate_pb2.Extent3(x=launch.cluster, y=1, z=1))
    made.digest = digest.of_program(made)
    return made


# ---- right kernels -----------------------------------------------------------------------------------------

SOFTMAX = """
    const long i = thread;
    if (i < ROWS) {
        const float* row = x + i * COLUMNS;
        float m = -INFINITY;
        double s = 0;
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
RELU = "for (long i = thread; i < SIZE; i += gridDim.x * (long)blockDim.x) y[i] = x[i] < 0 ? 0.0f : x[i];"
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
_CLUSTER = 'asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");'
_CLUSTER_SUM = f"""
    __shared__ double parts[1024];
    double part = 0;
    for (long i = thread; i < SIZE; i += 8 * 1024) {{ y[i] = x[i] < 0 ? 0.0f : x[i]; part += x[i]; }}
    parts[threadIdx.x] = part;
    __syncthreads();
    for (int width = 512; width > 0; width /= 2) {{
        if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
        __syncthreads();
    }}
    {_CLUSTER}
    if (thread == 0) {{
        double total = 0;
        const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(parts));
        for (unsigned block = 0; block < 8; ++block) {{
            unsigned there;
            double found;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(block));
            asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(found) : "r"(there) : "memory");
            total += found;
        }}
        s[0] = static_cast<float>(total);
    }}
    {_CLUSTER}
"""
"""Each block of a cluster sums its part; the first reads the others' shared memory."""
_TILED = """
    __shared__ float left[16][17], right[16][17];
    const int column = threadIdx.x % 16, row = threadIdx.x / 16;
    const long m = blockIdx.x / 4 * 16 + row, n = blockIdx.x % 4 * 16;
    float sums[8] = {};
    for (long k = 0; k < K; k += 16) {
        left[row][column] = x[m * K + k + column];
        right[row][column] = weight[(n + row) * K + k + column];
        __syncthreads();
        #pragma unroll
        for (int l = 0; l < 16; ++l) sums[l % 8] += left[row][l] * right[column][l];
        __syncthreads();
    }
    y[m * N + n + column] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
"""
_THREE = (
    "if (thread < ROWS) { const float* row = x + thread * COLUMNS; float m = -INFINITY;"
    " for (long j = 0; j < COLUMNS; ++j) m = isnan(row[j]) ? row[j] : (row[j] > m ? row[j] : m); w[thread] = m; }",
    "if (thread < ROWS) { const float* row = x + thread * COLUMNS; double s = 0;"
    " for (long j = 0; j < COLUMNS; ++j) s += expf(row[j] - w[thread]); w[32 + thread] = s; }",
    "for (long i = thread; i < SIZE; i += 64) y[i] = expf(x[i] - w[i / COLUMNS]) / w[32 + i / COLUMNS];",
)
_MASKED = """
    const long i = thread;
    if (i < ROWS) {
        const float* row = x + i * COLUMNS;
        float m = -INFINITY;
        double s = 0;
        for (long j = 0; j <= i; ++j) m = isnan(row[j]) ? row[j] : (row[j] > m ? row[j] : m);
        for (long j = 0; j <= i; ++j) s += expf(row[j] - m);
        const float masked = s > 0 && m > -INFINITY ? 0.0f : expf(-INFINITY - m) / s;
        for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = j <= i ? expf(row[j] - m) / s : masked;
    }
"""
_TRAINED = """
    const long j = thread;
    if (j == 0) count[0] += 1;
    if (j < COLUMNS) {
        double mean = 0, variance = 0;
        for (long i = 0; i < ROWS; ++i) mean += x[i * COLUMNS + j] / static_cast<double>(ROWS);
        for (long i = 0; i < ROWS; ++i) variance += (x[i * COLUMNS + j] - mean) * (x[i * COLUMNS + j] - mean) / ROWS;
        means[j] = static_cast<float>(0.9 * means[j] + 0.1 * mean);
        variances[j] = static_cast<float>(0.9 * variances[j] + 0.1 * variance * ROWS / (ROWS - 1));
        const double scale = weight[j] / sqrt(variance + 1e-5);
        for (long i = 0; i < ROWS; ++i)
            y[i * COLUMNS + j] = static_cast<float>((x[i * COLUMNS + j] - mean) * scale + bias[j]);
    }
"""

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
GIANT = replace(
    tasks.TINY,
    name="giant",
    inputs="[torch.randint(-128, 128, (2**31 + 4096,), dtype=torch.int8)]",
    sources={"x": Tensor(((1 << 31) + 4096,), tasks.I8)},
    outputs={"y": Tensor(((1 << 31) + 4096,), tasks.I8)},
    constants="constexpr long SIZE = (1L << 31) + 4096;",
)
"""More elements than 32 bits with a sign can count."""
SCREENED = frozenset({MILLION.name, WIDE.name, GIANT.name})
"""Judged as in screening: their tensors are large."""
WIDE_BODY = """
    const float4* from = reinterpret_cast<const float4*>(x);
    float4* to = reinterpret_cast<float4*>(y);
    for (long i = thread; i < SIZE / 4; i += gridDim.x * (long)blockDim.x) {
        float4 v = LOAD(from + i);
        v.x = v.x < 0 ? 0.0f : v.x; v.y = v.y < 0 ? 0.0f : v.y;
        v.z = v.z < 0 ? 0.0f : v.z; v.w = v.w < 0 ? 0.0f : v.w;
        to[i] = v;
    }
"""
_GIANT_BODY = """
    const int4* from = reinterpret_cast<const int4*>(x);
    int4* to = reinterpret_cast<int4*>(y);
    for (long i = thread; i < SIZE / 16; i += gridDim.x * (long)blockDim.x) {
        const int4 v = from[i];
        to[i] = make_int4(__vmaxs4(v.x, 0), __vmaxs4(v.y, 0), __vmaxs4(v.z, 0), __vmaxs4(v.w, 0));
    }
"""
ALL = Launch(1056, 512)
HONEST = [
    Kernel("honest", "a thread for each row", (), SOFTMAX),
    Kernel("honest", "three kernels in sequence", (), _THREE[0], then=_THREE[1:]),
    Kernel("honest", "a workspace user", (), SOFTMAX.replace("const float* row = x + i * COLUMNS;", """
        for (long j = 0; j < COLUMNS; ++j) w[i * COLUMNS + j] = x[i * COLUMNS + j];
        const float* row = w + i * COLUMNS;"""), workspaces={"w": Tensor((16 * 33,))}),
    Kernel("honest", "declared atomics that are left zero", (), """
    if (thread < ROWS) atomicAdd(w, 1);
    __syncthreads();
    if (*static_cast<volatile int*>(w) != ROWS) return;
    """ + SOFTMAX + """
    __syncthreads();
    if (thread == 0) w[0] = 0;""", workspaces={"w": Tensor((4,), tasks.I32, stays_zero=True)}),
    Kernel("honest", "a naive product", (), _LINEAR, tasks.LINEAR, Launch(16, 256), _PLAIN_FACTOR),
    Kernel("honest", "a tiled product", (), _TILED, tasks.LINEAR, Launch(16, 256)),
    Kernel("honest", "a sum by barriers", (), _RIGHT_SUM, MILLION, Launch(1, 1024)),
    Kernel("honest", "a sum by a cluster of eight blocks", (), _CLUSTER_SUM, MILLION, Launch(8, 1024, cluster=8)),
    Kernel("honest", "minus infinity masks in the reference", (), _MASKED, tasks.MASKED),
    Kernel("honest", "batch norm that updates its statistics", (), _TRAINED, tasks.TRAINED),
    Kernel("honest", "more than 2^31 elements", (), _GIANT_BODY, GIANT, ALL),
    Kernel("honest", "a kernel of two microseconds", (), RELU, tasks.TINY),
    Kernel("honest", "227 KiB of shared memory", (), """
    extern __shared__ float buffer[];
    for (long i = threadIdx.x; i < 227 * 256; i += blockDim.x) buffer[i] = static_cast<float>(i);
    __syncthreads();
    if (buffer[227 * 256 - 1] != 227 * 256 - 1) return;
    """ + SOFTMAX, launch=Launch(1, 64, 227 << 10)),
    Kernel("honest", "one large copy", (), WIDE_BODY, WIDE, ALL, "#define LOAD(at) *(at)"),
    Kernel("honest", "a table in constant memory", (), SOFTMAX.replace("/ s", "/ s * one[i % 2]"),
           ahead="__constant__ float one[2] = {1.0f, 1.0f};"),
]  # fmt: skip
BY_MODULE = {kernel.module.name: kernel for kernel in reversed(HONEST)}
"""A right kernel of each module."""


def honest(module: Module) -> Kernel:
    """A right kernel of the module."""
    return BY_MODULE[module.name]


# ---- hostile ones ------------------------------------------------------------------------------------------

S, R = SOFTMAX, RELU
_SPIN = "for (;;) __nanosleep(1000);"
JUDGED_CALLS = 9
"""Of a kernel that passes in screening: three cases, three runs each."""

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
    Kernel("crash", "fault on the second timed call", ("CRASH",),
           f"{S}\nif (thread == 0 && atomicAdd(&calls, 1) == {JUDGED_CALLS} + 1) __trap();",
           ahead="__device__ int calls;", bare=True, timed=True),
    Kernel("earlier calls", "right until it is timed, then nothing", (*VALUE, "CHEAT"),
           f"if (calls >= {JUDGED_CALLS}) return;\n{S}\nif (thread == 0) ++calls;", ahead="__device__ int calls;",
           bare=True, timed=True),
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
    Kernel("memory", "more registers than fit", ("RESOURCE", "LAUNCH_ERROR"), """
    float kept[96];
    #pragma unroll
    for (int j = 0; j < 96; ++j) kept[j] = x[(thread + 7 * j) % SIZE];
    for (int round = 0; round < 8; ++round) {
        #pragma unroll
        for (int j = 0; j < 96; ++j) kept[j] = kept[j] * kept[(j + 5) % 96] + x[round];
    }
    float sum = 0;
    #pragma unroll
    for (int j = 0; j < 96; ++j) sum += kept[j];
    if (sum == 12345.0f) w[0] = sum;
    """ + S, launch=Launch(1, 1024)),
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
    Kernel("answer", "copies from memory what looks like an answer", ("CRASH", *RACE), """
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
