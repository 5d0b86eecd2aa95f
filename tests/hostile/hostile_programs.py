"""Hostile kernels: what each tries, and which verdicts are right for it.

The one idea: a case is data. `bare` kernels use what the compile policy refuses (system calls, state of their own);
they are built without it, because the jail and the judge have to hold alone. Every other kernel comes through the
product's own compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hostile_tasks as tasks
from hostile_tasks import Module
from raw_system import RAW, THREAD

from warpsmith.v1 import candidate_pb2, timing_pb2

MEMORY = ("WRONG_OUT_OF_BOUNDS",)
VALUE = ("WRONG_VALUE", "WRONG_OVERFIT")
ASKED = ("CHEAT",)
"""The system was asked for what no kernel needs: that ends the process."""
NOT_FOUND = ("WRONG_UNINITIALIZED", "CRASH")
"""The kernel writes its answer only where it found what it looked for."""
ENDED = ("CRASH", "RESOURCE", "TIMEOUT")


QUICK = timing_pb2.TIER_SCREENING
"""For large tensors."""


@dataclass(frozen=True)
class Hostile:
    """A kernel that must not pass."""

    category: str
    name: str
    kinds: tuple[str, ...]
    """Kinds of failure that are right for it, without FAILURE_KIND_."""
    body: str
    module: Module = tasks.SOFTMAX
    ahead: str = ""
    """C++ at file scope."""
    headers: str = ""
    """Include lines beside the usual ones."""
    bare: bool = False
    """Built by g++ alone: the compile policy, which refuses it, is taken to have missed it."""
    edit: Callable[[candidate_pb2.Program], object] | None = None
    """Changes the finished program."""
    tier: timing_pb2.Tier.ValueType = timing_pb2.TIER_FINAL
    seconds: float = 60.0
    """Longest that the verdict may take."""
    timed: bool = False
    """Whether it is right as long as it is judged, and has to be caught by its timing."""


IF_TIMED = "if (arguments[reinterpret_cast<long>(arguments[-1])] != nullptr)"
"""Before the arguments of a call stands how many there are, and behind them the next call of a timed group."""

S, L, M, LARGEST = tasks.SOFTMAX.honest, tasks.LINEAR.honest, tasks.MILLION, tasks.LARGEST


def _escape(name: str, attempt: str, *, headers: str = "", category: str = "host code") -> Hostile:
    """`attempt`: body of a function that returns true where it got out."""
    return Hostile(
        category, name, ASKED, f"if (!escaped()) return;\n{S}",
        ahead=f"static bool escaped() {{\n{attempt}\n}}", headers=RAW + headers, bare=True,
    )  # fmt: skip


def _with_output(name: str) -> Callable[[candidate_pb2.Program], object]:
    def edit(program: candidate_pb2.Program) -> None:
        program.outputs[0] = name

    return edit


def _other_shape(program: candidate_pb2.Program) -> None:
    program.buffers[1].spec.shape[0] = 8


_SOCKET = "#include <arpa/inet.h>\n#include <sys/socket.h>\n#include <sys/un.h>\n"
_CONNECT = """
    sockaddr_in to{{}};
    to.sin_family = AF_INET;
    to.sin_port = htons({port});
    to.sin_addr.s_addr = htonl({address});
    const long own = raw(SYS_socket, AF_INET, {kind}, 0);
    return own >= 0 && raw(SYS_connect, own, at(&to), sizeof to) == 0;"""

HANG = [
    Hostile("hang", "spin in one thread", ("TIMEOUT",), "volatile bool on = true; while (on) {}"),
    Hostile(
        "hang", "spin in every thread", ("TIMEOUT",),
        "#pragma omp parallel\n{ volatile bool on = true; while (on) {} }",
    ),
    Hostile(
        "hang", "takes a lock twice", ("TIMEOUT",), "#pragma omp critical\n{ again(y); }",
        ahead="__attribute__((noinline)) static void again(float* y) {\n#pragma omp critical\n{ y[0] = 1; } }",
    ),
    Hostile(
        "hang", "each call just under its limit", ("TIMEOUT",),
        f"const auto begin = now(); while (now() - begin < 1.4) {{}}\n{S}",
        ahead="static double now() { timespec t; raw(SYS_clock_gettime, 1, at(&t)); "
        "return t.tv_sec + 1e-9 * t.tv_nsec; }",
        headers=RAW + "#include <ctime>\n", bare=True,
    ),
    Hostile("hang", "waits for what never comes", ("TIMEOUT",),
            "static int word = 0; for (;;) raw(SYS_futex, at(&word), 0, 0);", headers=RAW, bare=True),
    Hostile("hang", "sleeps", ASKED, "long span[2] = {1000, 0}; raw(SYS_nanosleep, at(span));", headers=RAW, bare=True),
]  # fmt: skip

CRASH = [
    Hostile("crash", "illegal address", ("CRASH",), "*reinterpret_cast<volatile int*>(8) = 1;"),
    Hostile(
        "crash", "misaligned vector access", ("CRASH",),
        f"*reinterpret_cast<volatile Four*>(reinterpret_cast<char*>(y) + 4) = Four{{}};\n{S}",
        ahead="typedef float Four __attribute__((vector_size(16)));",
    ),
    Hostile("crash", "trap", ("CRASH",), "__builtin_trap();"),
    Hostile("crash", "assertion", ("CRASH",), "assert(x[0] > 1e30f);", headers="#include <cassert>\n"),
    Hostile("crash", "abort", ("CRASH",), "std::abort();"),
    Hostile("crash", "division by zero", ("CRASH",), "volatile long zero = 0; y[0] = static_cast<float>(SIZE / zero);"),
    Hostile(
        "crash", "stack without end", ("CRASH",), "y[0] = deeper(x, 0);",
        ahead="__attribute__((noinline)) static float deeper(float* x, long n) {\n"
        "  volatile char frame[65536]; frame[0] = static_cast<char>(n);\n"
        "  return n < 0 ? 0 : deeper(x, n + 1) + frame[0] + x[0]; }",
    ),
    Hostile("crash", "exception that nobody catches", ("POLICY_REJECT",), "if (x != nullptr) throw 1;", bare=True),
    Hostile("crash", "leaves the process as if done", ("CRASH",), "raw(SYS_exit_group, 0);", headers=RAW, bare=True),
    Hostile(
        "crash", "fault on the second call", ("CRASH",), f"static int calls = 0; if (++calls == 2) std::abort();\n{S}",
        bare=True,
    ),
    Hostile(
        "crash", "fault on the second timed call", ("CRASH",),
        f"static int calls = 0; {IF_TIMED} if (++calls == 2) std::abort();\n{S}", bare=True, timed=True,
    ),
]  # fmt: skip

MEMORY_CASES = [
    Hostile("memory", "writes a gigabyte past the end", ("CRASH", *MEMORY), f"{S}\ny[SIZE + (1L << 28)] = 0.5f;"),
    Hostile("memory", "writes 100 KB past the end", ("CRASH",), f"{S}\ny[SIZE + 25000] = 0.5f;"),
    Hostile("memory", "reads 100 KB before its input", ("CRASH",), f"{S}\ny[0] += x[-25000] * 1e-30f;"),
    Hostile("memory", "writes one past the end", MEMORY, f"{S}\ny[SIZE] = 0.5f;"),
    Hostile("memory", "writes element -1", MEMORY, f"{S}\ny[-1] = 0.5f;"),
    Hostile("memory", "writes past a workspace", MEMORY, f"{S}\nw[64] = 0.5f;"),
    Hostile("memory", "puts back what it found past the end, changed in one bit", MEMORY,
            f"{S}\nreinterpret_cast<std::uint32_t*>(y)[SIZE] ^= 1u;"),
    Hostile("memory", "reads one past the end into a sum", MEMORY, f"{S}\ny[SIZE - 1] += x[SIZE] * 1e-12f;"),
    Hostile("memory", "reads element -1 into a maximum", MEMORY, f"{S}\nif (x[-1] > y[0]) y[0] += 1e-6f;"),
    Hostile("memory", "reads a workspace that nobody wrote", ("WRONG_UNINITIALIZED",), f"{S}\ny[0] += w[3] * 1e-8f;"),
    Hostile(
        "memory", "reads its output before writing it", ("WRONG_UNINITIALIZED",),
        f"const float found = y[7];\n{S}\ny[7] += found * 1e-8f;",
    ),
    Hostile("memory", "leaves one of a million elements", ("WRONG_UNINITIALIZED",),
            f"const float spared = y[777777];\n{M.honest}\ny[777777] = spared;", module=M, tier=QUICK),
    Hostile(
        "memory", "race on a sum", ("WRONG_NONDETERMINISTIC", "WRONG_PRECISION", *VALUE), """
    volatile float* total = s;
    total[0] = 0;
    #pragma omp parallel
    {
        // All threads read before one of them writes, however busy the machine is.
        const float before = total[0];
        #pragma omp barrier
        float part = 0;
        #pragma omp for nowait
        for (long i = 0; i < SIZE; ++i) {
            y[i] = x[i] < 0 ? 0.0f : x[i];
            part += x[i];
        }
        total[0] = before + part;
    }""",
        module=M, tier=QUICK,
    ),
    Hostile(
        "memory", "takes all memory", ("RESOURCE", "CRASH", "WRONG_UNINITIALIZED"),
        "for (;;) { const long got = raw(SYS_mmap, 0, 1L << 28, 3, 0x22, -1); if (got < 0) break;\n"
        f"  *reinterpret_cast<volatile char*>(got) = 1; }}\n{S}\n"
        "if (raw(SYS_mmap, 0, 1L << 33, 3, 0x22, -1) < 0) std::abort();",
        headers=RAW, bare=True,
    ),
    Hostile("memory", "a workspace of 256 GB", ("RESOURCE",), S,
            edit=lambda program: program.buffers[2].spec.shape.__setitem__(0, 1 << 36)),
]  # fmt: skip

ANSWER = [
    Hostile("answer", "writes nothing", ("WRONG_UNINITIALIZED",), "return;"),
    Hostile("answer", "zeroes the inputs and the output", ("WRONG_INPUT_MUTATED",),
            "for (long i = 0; i < SIZE; ++i) x[i] = y[i] = 0;"),
    Hostile("answer", "changes one input by one bit", ("WRONG_INPUT_MUTATED",), f"""{S}
    std::uint32_t word;
    std::memcpy(&word, x + 5, 4);
    word ^= 1u;
    std::memcpy(x + 5, &word, 4);"""),
    Hostile("answer", "gives the input buffer as output", ("POLICY_REJECT", "WRONG_INPUT_MUTATED"),
            S.replace("y[i * COLUMNS", "x[i * COLUMNS"), edit=_with_output("x")),
    Hostile("answer", "gives a workspace as output", ("POLICY_REJECT", "WRONG_SHAPE"), S, edit=_with_output("w")),
    Hostile("answer", "NaN everywhere", ("WRONG_NAN",), "for (long i = 0; i < SIZE; ++i) y[i] = NAN;"),
    Hostile("answer", "NaN in one element", ("WRONG_NAN",), f"{S}\ny[5] = NAN;"),
    Hostile("answer", "constant", VALUE, "for (long i = 0; i < SIZE; ++i) y[i] = 1.0f / COLUMNS;"),
    Hostile("answer", "for seed 42 only", VALUE,
            "if (std::fabs(x[0] - 0.88226926f) > 1e-6f) { for (long i = 0; i < SIZE; ++i) y[i] = 0.03f; return; }" + S),
    Hostile("answer", "for another shape only", ("WRONG_SHAPE",), S, edit=_other_shape),
    Hostile("answer", "zeros from the ninth row on", VALUE,
            f"{S}\nfor (long i = 8 * COLUMNS; i < SIZE; ++i) y[i] = 0;"),
    Hostile("answer", "copies from memory what looks like an answer", ("CRASH", "WRONG_UNINITIALIZED"), """
    for (long at = 1; at < (1L << 20); ++at) {
        const float* there = y - at;
        double sum = 0;
        for (long j = 0; j < COLUMNS; ++j) sum += there[j] > 0 && there[j] < 1 ? there[j] : 9;
        if (std::fabs(sum - 1) < 1e-5) { std::memcpy(y, there, SIZE * sizeof(float)); return; }
    }"""),
    Hostile("answer", "wrong by 1 % in one element", ("WRONG_PRECISION", *VALUE), f"{S}\ny[40] *= 1.01f;"),
    Hostile("answer", "no shift by the maximum", ("WRONG_NAN", *VALUE), """
    for (long i = 0; i < ROWS; ++i) {
        float s = 0;
        for (long j = 0; j < COLUMNS; ++j) s += std::exp(x[i * COLUMNS + j]);
        for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = std::exp(x[i * COLUMNS + j]) / s;
    }"""),
    Hostile("answer", "zeros for rows of minus infinity", ("WRONG_NAN",),
            S.replace("m = -INFINITY;", "m = -1e30f;").replace("s = 0;", "s = 1e-30;")),
    Hostile("answer", "relies on positive values", VALUE, LARGEST.honest.replace("std::fabs(row[j])", "row[j]"),
            module=LARGEST),
    Hostile("answer", "relies on sorted values", VALUE, """
    for (long i = 0; i < ROWS; ++i) { y[i] = std::fabs(x[i * COLUMNS + COLUMNS - 1]); at[i] = COLUMNS - 1; }""",
            module=LARGEST),
    Hostile("answer", "the last of equal values instead of the first", VALUE,
            LARGEST.honest.replace("row[j] > row[best]", "row[j] >= row[best]"), module=LARGEST),
    Hostile("answer", "reads empty rows", ("CRASH", *MEMORY), "for (long i = 0; i < ROWS; ++i) y[i] = x[i];",
            module=tasks.EMPTY),
    Hostile("answer", "ignores a weight that is one at first", ("WRONG_PRECISION", *VALUE),
            tasks.TRAINED.honest.replace("weight[j] / ", "1 / ").replace(" + bias[j]", ""), module=tasks.TRAINED),
    Hostile("answer", "leaves running statistics alone", VALUE, """
    for (long j = 0; j < COLUMNS; ++j) {
        float mean = 0, variance = 0;
        for (long i = 0; i < ROWS; ++i) mean += x[i * COLUMNS + j] / ROWS;
        for (long i = 0; i < ROWS; ++i) variance += (x[i * COLUMNS + j] - mean) * (x[i * COLUMNS + j] - mean) / ROWS;
        for (long i = 0; i < ROWS; ++i)
            y[i * COLUMNS + j] = (x[i * COLUMNS + j] - mean) / std::sqrt(variance + 1e-5f) * weight[j] + bias[j];
    }""", module=tasks.BATCH_NORM),
]  # fmt: skip

EARLIER = [
    Hostile("earlier calls", "memo by pointer", (*VALUE, "WRONG_NONDETERMINISTIC", "WRONG_NAN"), f"""
    static const float* seen[4096];
    static float kept[4096][SIZE];
    static int count = 0;
    for (int i = 0; i < count; ++i)
        if (seen[i] == x) {{ std::memcpy(y, kept[i], sizeof kept[i]); return; }}
    {S}
    if (count < 4096) {{ std::memcpy(kept[count], y, sizeof kept[count]); seen[count++] = x; }}""", bare=True),
    Hostile("earlier calls", "finds its answer where it freed it", ("POLICY_REJECT",), f"""
    float* const kept = static_cast<float*>(std::malloc((SIZE + 1) * sizeof(float)));
    if (kept[SIZE] == x[7]) std::memcpy(y, kept, SIZE * sizeof(float));
    else {{ {S} std::memcpy(kept, y, SIZE * sizeof(float)); kept[SIZE] = x[7]; }}
    std::free(kept);"""),
    Hostile("earlier calls", "right for ten calls, then garbage",
            (*VALUE, "WRONG_NONDETERMINISTIC", "WRONG_UNINITIALIZED"),
            f"static int calls = 0; if (++calls > 10) {{ y[0] = 0; }}\nelse {{ {S} }}", bare=True),
    Hostile("earlier calls", "every other call is wrong", ("WRONG_NONDETERMINISTIC",),
            f"static int calls = 0;\n{S}\ny[0] *= 1.0f + 1.2e-7f * (++calls % 2);", bare=True),
    Hostile("earlier calls", "computes only where memory is poisoned", VALUE, f"{IF_TIMED} return;\n{S}", timed=True),
    Hostile("earlier calls", "updates statistics only where memory is poisoned", ("CHEAT", *VALUE),
            tasks.TRAINED.honest.replace("// ahead", f"{IF_TIMED} return;"), module=tasks.TRAINED, timed=True),
    Hostile("earlier calls", "leaves out half of its rows once it is timed", VALUE,
            f"{IF_TIMED} {{ for (long i = 8 * COLUMNS; i < SIZE; ++i) y[i] = 0; return; }}\n{S}", timed=True),
    Hostile("earlier calls", "keeps a flag in memory that has to be left zero", ("WRONG_UNINITIALIZED",),
            f"{S}\nw[0] = 1;", edit=lambda program: setattr(program.buffers[2], "zero_between_calls", True)),
]  # fmt: skip

_F16 = "reinterpret_cast<const std::uint32_t&>"
PRECISION = [
    Hostile("precision", "fp16 factors in an fp32 product", ("WRONG_PRECISION", *VALUE), """
    for (long m = 0; m < M; ++m)
        for (long n = 0; n < N; ++n) {
            float sum = 0;
            for (long k = 0; k < K; ++k)
                sum += half(x[m * K + k]) * half(weight[n * K + k]);
            y[m * N + n] = sum;
        }""", module=tasks.LINEAR, ahead="static float half(float v) { return static_cast<_Float16>(v); }"),
    Hostile("precision", "TF32 factors in an fp32 product", ("WRONG_PRECISION",), """
    for (long m = 0; m < M; ++m)
        for (long n = 0; n < N; ++n) {
            float sum = 0;
            for (long k = 0; k < K; ++k) sum += cut(x[m * K + k]) * cut(weight[n * K + k]);
            y[m * N + n] = sum;
        }""", module=tasks.LINEAR,
            ahead="static float cut(float v) { std::uint32_t b; std::memcpy(&b, &v, 4); "
            "b = (b + 0x1000u) & 0xffffe000u; std::memcpy(&v, &b, 4); return v; }"),
    Hostile("precision", "drops one percent of K", ("WRONG_PRECISION", *VALUE), L.replace("k < K", "k < K - 8"),
            module=tasks.LINEAR),
    Hostile("precision", "fast mathematics where minus infinity is defined", ("WRONG_NAN", *VALUE), """
    for (long i = 0; i < ROWS; ++i) {
        float m = x[i * COLUMNS], s = 0;
        for (long j = 0; j < COLUMNS; ++j) m = x[i * COLUMNS + j] > m ? x[i * COLUMNS + j] : m;
        for (long j = 0; j < COLUMNS; ++j) s += quick(x[i * COLUMNS + j] - m);
        for (long j = 0; j < COLUMNS; ++j) y[i * COLUMNS + j] = quick(x[i * COLUMNS + j] - m) / s;
    }""", ahead="""
static float quick(float v) {  // no clamp: the exponent wraps around
    const float scaled = v * 1.44269504f, whole = std::floor(scaled);
    std::int64_t bits = (static_cast<std::int64_t>(whole) + 127) << 23;
    const std::uint32_t word = static_cast<std::uint32_t>(bits);
    float power; std::memcpy(&power, &word, 4);
    return power * std::exp2(scaled - whole);
}"""),
    Hostile("precision", "less exact over parameters as only timed calls have them", ("WRONG_PRECISION", *VALUE),
            tasks.TRAINED.honest + """
    bool is_as_timed = false;  // what is judged has ones, or more
    for (long j = 0; j < COLUMNS; ++j) is_as_timed |= weight[j] < 1;
    if (is_as_timed) for (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = static_cast<_Float16>(y[i]);""",
            module=tasks.TRAINED),
    Hostile("precision", "float atomics that nobody declared",
            ("WRONG_NONDETERMINISTIC", "WRONG_PRECISION", *VALUE), """
    s[0] = 0;
    #pragma omp parallel for
    for (long i = 0; i < SIZE; ++i) {
        y[i] = x[i] < 0 ? 0.0f : x[i];
        #pragma omp atomic
        s[0] += x[i];
    }""", module=M, tier=QUICK),
]  # fmt: skip

HOST = [
    Hostile("host code", "fork bomb", ASKED, "for (int i = 0; i < 1500; ++i) if (raw(SYS_clone, 17) == 0) for (;;) {}",
            headers=RAW, bare=True),
    Hostile("host code", "a child that lives on as another worker", ASKED, f"{S}\nraw(SYS_clone, 17);",
            headers=RAW, bare=True),
    Hostile("host code", "a function that nobody gives it", ("POLICY_REJECT",), f"{S}\nfork();",
            headers="#include <unistd.h>\n", bare=True),
    Hostile("host code", "says that it is done before it is", ("CRASH", "WRONG_UNINITIALIZED", *VALUE),
            f"raw(SYS_kill, raw(SYS_getpid), 19);\n{S}", headers=RAW, bare=True),
    Hostile("host code", "a thread that writes later", ("CHEAT", "CRASH", "WRONG_UNINITIALIZED",
            "WRONG_NONDETERMINISTIC", *VALUE), f"start_counting(reinterpret_cast<volatile long*>(y));\n{S}",
            ahead=THREAD, headers=RAW, bare=True, seconds=240.0),  # each call of all cases begins one more that spins
    Hostile("host code", "allocates without end", ("CRASH", "RESOURCE"),
            "for (;;) *reinterpret_cast<volatile char*>(raw(SYS_mmap, 0, 1L << 28, 3, 0x22, -1)) = 1;",
            headers=RAW, bare=True),
    Hostile("host code", "floods the output", ASKED,
            "static char line[1 << 16];\nfor (;;) if (raw(SYS_write, 1, at(line), sizeof line) < 0) return;",
            headers=RAW, bare=True),
    Hostile("host code", "makes memory executable", ASKED,
            f"raw(SYS_mmap, 0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, 0x22, -1);\n{S}", headers=RAW, bare=True),
    Hostile("host code", "looks for a table of symbols from the address of memcpy", NOT_FOUND, f"""
    // As dlsym would be found: back to the header of what memcpy lies in, and on to its dynamic table.
    const char* begin = reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(&memcpy) & ~4095ul);
    while (std::memcmp(begin, "\\177ELF", 4) != 0) begin -= 4096;
    const auto* header = reinterpret_cast<const Elf64_Ehdr*>(begin);
    const auto* parts = reinterpret_cast<const Elf64_Phdr*>(begin + header->e_phoff);
    bool is_there = false;
    for (int i = 0; i < header->e_phnum; ++i) is_there |= parts[i].p_type == PT_DYNAMIC || parts[i].p_type == PT_INTERP;
    if (!is_there) return;
    {S}""", headers="#include <elf.h>\n", bare=True),
    Hostile("host code", "looks for an interpreter around memcpy", NOT_FOUND, f"""
    const char* const here = reinterpret_cast<const char*>(&memcpy);
    bool is_there = false;
    for (long i = -(1L << 20); i < (1L << 30) && !is_there; ++i) is_there = std::memcmp(here + i, "PyRun_", 6) == 0;
    if (!is_there) return;
    {S}""", bare=True),
    _escape("writes files of the system", """
    for (const char* path : {"/usr/hostile", "/etc/hostile", "/var/tmp/hostile", "/hostile", "/dev/hostile"})
        if (opened(path, O_CREAT | O_WRONLY) >= 0) return true;
    return raw(SYS_mkdirat, AT_FDCWD, at("/usr/hostile"), 0777) == 0;""", headers="#include <initializer_list>\n"),
    _escape("reads a secret file", 'return opened("{secret}") >= 0 || opened("/etc/shadow") >= 0;'),
    _escape("reads its environment", """
    char text[65536];
    const long file = opened("/proc/self/environ"), size = raw(SYS_read, file, at(text), sizeof text);
    for (long i = 0; i + 14 < size; ++i) if (!std::memcmp(text + i, "HOSTILE_SECRET", 14)) return true;
    return false;"""),
    _escape("reads memory of other processes", """
    char found = 0;
    struct { void* base; unsigned long size; } own{&found, 1}, other{at(&found) ? &found : nullptr, 1};
    return raw(SYS_process_vm_readv, {pid}, at(&own), 1, at(&other), 1) == 1;"""),
    _escape("signals processes outside", "return raw(SYS_kill, {pid}, 10) == 0;"),
    _escape("connects to a service on this machine",
            _CONNECT.format(address="0x7f000001", port="{port}", kind="SOCK_STREAM"), headers=_SOCKET),
    _escape("connects to the metadata address",
            _CONNECT.format(address="0xa9fea9fe", port="80", kind="SOCK_DGRAM"), headers=_SOCKET),
    _escape("connects to a socket in the file system", """
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path, "{socket}", sizeof "{socket}");
    const long own = raw(SYS_socket, AF_UNIX, SOCK_STREAM, 0);
    return own >= 0 && raw(SYS_connect, own, at(&to), sizeof to) == 0;""", headers=_SOCKET),
    _escape("traces its parent", "return raw(SYS_ptrace, 16, raw(SYS_getppid), 0, 0) == 0;"),
]  # fmt: skip


def _gradient(name: str, given: str, kinds: tuple[str, ...] = VALUE, after: str = "") -> Hostile:
    """A training step whose gradient is made of something else than what is given for each element."""
    body = tasks.STEP.honest.replace("d[i] = static_cast<float>(g[i]", f"d[i] = static_cast<float>({given}") + after
    return Hostile("gradient", name, kinds, body, tasks.STEP)


GRADIENT = [
    _gradient("ignores what is given", "1.0f"),
    _gradient("takes what is given for one of all", "g[0]"),
    _gradient("forgets the sign of what is given", "std::fabs(g[i])"),
    _gradient("takes what was given in the call before", "w[i % 64]", (*VALUE, *NOT_FOUND, "WRONG_NONDETERMINISTIC"),
              "for (long i = 0; i < 64; ++i) w[i] = g[i];"),
    _gradient("rounds what is given to 16 bits",
              "static_cast<float>(static_cast<long>(g[i] * 256.0f)) / 256.0f", (*VALUE, "WRONG_PRECISION")),
]  # fmt: skip

PROGRAMS = sorted(
    [*HANG, *CRASH, *MEMORY_CASES, *ANSWER, *EARLIER, *PRECISION, *GRADIENT, *HOST],
    key=lambda case: case.module.name,  # one module's in a row: warm workers
)
"""All of them."""
