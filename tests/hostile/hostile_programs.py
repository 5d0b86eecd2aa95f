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

from warpsmith.v1 import candidate_pb2, timing_pb2

MEMORY = ("WRONG_OUT_OF_BOUNDS",)
VALUE = ("WRONG_VALUE", "WRONG_OVERFIT")
ESCAPE_FAILED = ("WRONG_UNINITIALIZED",)
"""The kernel writes its answer only where the escape worked."""
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


IF_TIMED = "if (!(std::fabs(y[-1]) > 9e3f))"
"""Before an output that is judged lies a canary, which is large; before one that is timed, what malloc keeps."""

S, L, M, LARGEST = tasks.SOFTMAX.honest, tasks.LINEAR.honest, tasks.MILLION, tasks.LARGEST


def _escape(name: str, attempt: str, *, headers: str, category: str = "host code") -> Hostile:
    """`attempt`: body of a function that returns true where it got out of the jail."""
    return Hostile(
        category, name, ESCAPE_FAILED, f"if (!escaped()) return;\n{S}",
        ahead=f"static bool escaped() {{\n{attempt}\n}}", headers=headers, bare=True,
    )  # fmt: skip


def _with_output(name: str) -> Callable[[candidate_pb2.Program], object]:
    def edit(program: candidate_pb2.Program) -> None:
        program.outputs[0] = name

    return edit


def _other_shape(program: candidate_pb2.Program) -> None:
    program.buffers[1].spec.shape[0] = 8


_SOCKET = (
    "#include <arpa/inet.h>\n#include <netdb.h>\n#include <sys/socket.h>\n#include <sys/un.h>\n#include <unistd.h>\n"
)
_SYSTEM = "".join(
    f"#include <{name}>\n"
    for name in ("cstdio", "dirent.h", "fcntl.h", "initializer_list", "signal.h", "sys/stat.h", "unistd.h")
)
_CONNECT = """
    sockaddr_in to{{}};
    to.sin_family = AF_INET;
    to.sin_port = htons({port});
    inet_pton(AF_INET, "{address}", &to.sin_addr);
    const int own = socket(AF_INET, {kind}, 0);
    if (own < 0) return false;
    return connect(own, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;"""

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
        ahead="static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); "
        "return t.tv_sec + 1e-9 * t.tv_nsec; }",
        headers="#include <ctime>\n", bare=True,
    ),
    Hostile("hang", "sleeps when the process ends", ("TIMEOUT",), "std::atexit(sleep_on); std::exit(0);",
            ahead="static void sleep_on() { for (;;) sleep(1000); }", headers=_SYSTEM, bare=True),
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
    Hostile("crash", "exception that nobody catches", ("CRASH",), "if (x != nullptr) throw 1;", bare=True),
    Hostile("crash", "leaves the process as if done", ("CRASH",), "std::_Exit(0);", bare=True),
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
    #pragma omp parallel for
    for (long i = 0; i < SIZE; ++i) {
        y[i] = x[i] < 0 ? 0.0f : x[i];
        const float before = total[0];
        // Or else a busy machine, which runs one thread after the other, seldom stops one in between.
        if (i % 64 == 0) for (volatile int pause = 0; pause < 200; ++pause) {}
        total[0] = before + x[i];
    }""",
        module=M, tier=QUICK,
    ),
    Hostile(
        "memory", "takes all memory", ("RESOURCE", "CRASH", "WRONG_UNINITIALIZED"),
        "for (;;) { void* got = std::malloc(1L << 28); if (!got) break; *static_cast<volatile char*>(got) = 1; }\n"
        f"{S}\nvoid* last = std::malloc(1L << 33); if (!last) std::abort(); *static_cast<char*>(last) = 1;",
        bare=True,
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
    Hostile("answer", "copies from memory what looks like an answer", ("CRASH", *ESCAPE_FAILED), """
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
    Hostile("host code", "fork bomb", (*ENDED, *ESCAPE_FAILED),
            "for (int i = 0; i < 1500; ++i) if (fork() == 0) for (;;) pause();", headers=_SYSTEM, bare=True),
    Hostile("host code", "a child that lives on as another worker", ("CHEAT",), f"{S}\nfork();",
            headers=_SYSTEM, bare=True),
    Hostile("host code", "a child in a session of its own", ("CHEAT",),
            f"{S}\nif (fork() == 0) {{ setsid(); if (fork() == 0) for (;;) pause(); _exit(0); }}",
            headers=_SYSTEM, bare=True),
    Hostile("host code", "a thread that writes later", ("CHEAT", "CRASH", "WRONG_UNINITIALIZED"), """
    float* const out = y;
    std::thread([out] { for (;;) { usleep(1000); out[0] = 7; } }).detach();""" + S,
            headers="#include <thread>\n#include <unistd.h>\n", bare=True),
    Hostile("host code", "allocates without end", ("CRASH", "RESOURCE"),
            "for (;;) { volatile char* taken = new char[1L << 28]; taken[0] = 1; }", bare=True),
    Hostile("host code", "floods the output", ("TIMEOUT",),
            "static char line[1 << 16];\n"
            "for (;;) if (write(1, line, sizeof line) < 0 || write(2, line, sizeof line) < 0) return;",
            headers=_SYSTEM, bare=True),
    _escape("writes files of the system", """
    for (const char* path : {"/usr/hostile", "/etc/hostile", "/var/tmp/hostile", "/hostile", "/dev/hostile"})
        if (open(path, O_CREAT | O_WRONLY, 0600) >= 0) return true;
    return chmod("/usr/bin/env", 0777) == 0 || mkdir("/usr/hostile", 0777) == 0;""", headers=_SYSTEM),
    _escape("reads a secret file", 'return open("{secret}", O_RDONLY) >= 0 || open("/etc/shadow", O_RDONLY) >= 0;',
            headers=_SYSTEM),
    _escape("reads the environment", """
    for (char** line = environ; *line; ++line) if (std::strstr(*line, "HOSTILE_SECRET")) return true;
    return std::getenv("HOSTILE_SECRET") != nullptr;""", headers=_SYSTEM),
    _escape("reads other processes", """
    DIR* processes = opendir("/proc");
    if (!processes) return false;
    while (dirent* entry = readdir(processes)) {
        char path[300], text[65536];
        std::snprintf(path, sizeof path, "/proc/%s/environ", entry->d_name);
        const int file = open(path, O_RDONLY);
        if (file < 0) continue;
        const long size = read(file, text, sizeof text);
        close(file);
        for (long i = 0; i + 14 < size; ++i) if (!std::memcmp(text + i, "HOSTILE_SECRET", 14)) return true;
    }
    return false;""", headers=_SYSTEM),
    _escape("signals processes outside", "return kill({pid}, SIGUSR2) == 0;", headers=_SYSTEM),
    _escape("connects to a service on this machine",
            _CONNECT.format(address="127.0.0.1", port="{port}", kind="SOCK_STREAM"),
            headers=_SOCKET),
    _escape("connects to the metadata address",
            _CONNECT.format(address="169.254.169.254", port="80", kind="SOCK_DGRAM"),
            headers=_SOCKET),
    _escape("asks DNS", """
    addrinfo* found = nullptr;
    if (getaddrinfo("example.com", "80", nullptr, &found) == 0 && found) return true;
    return socket(AF_INET, SOCK_DGRAM, 0) >= 0;""", headers=_SOCKET),
    _escape("connects to a socket in the file system", """
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::strcpy(to.sun_path, "{socket}");
    const int own = socket(AF_UNIX, SOCK_STREAM, 0);
    return own >= 0 && connect(own, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;""", headers=_SOCKET),
    _escape("traces its parent", "return ptrace(PTRACE_ATTACH, getppid(), 0, 0) == 0;",
            headers="#include <sys/ptrace.h>\n#include <unistd.h>\n"),
]  # fmt: skip

PROGRAMS = sorted(
    [*HANG, *CRASH, *MEMORY_CASES, *ANSWER, *EARLIER, *PRECISION, *HOST],
    key=lambda case: case.module.name,  # one module's in a row: warm workers
)
"""All of them."""
