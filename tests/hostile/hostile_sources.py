"""Hostile sources for the compiler, hostile plans, and hostile modules: what each tries, and what is right for it.

The one idea: a case is data, as in `hostile_programs`; these never reach a candidate's process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent_compile.policy import SOURCE_BYTES
from warpsmith.v1 import candidate_pb2, graph_pb2, task_pb2

POLICY, LIMIT = ("POLICY_REJECT",), ("COMPILE_LIMIT",)
_ENTRY = 'extern "C" void run0(void* const* arguments) { static_cast<float*>(arguments[1])[0] = 1; }\n'


@dataclass(frozen=True)
class Source:
    """A source that must not become a binary."""

    name: str
    kinds: tuple[str, ...]
    text: str
    file: str = "kernel.cpp"
    category: str = "compile"
    seconds: float = 60.0


def _body(text: str, ahead: str = "") -> str:
    return (
        "#include <cmath>\n#include <cstdint>\n#include <cstdlib>\n#include <cstring>\n"
        f"{ahead}\n"
        'extern "C" void run0(void* const* arguments) {\n    const float* x = static_cast<float*>(arguments[0]);\n'
        f"    float* y = static_cast<float*>(arguments[1]);\n{text}\n}}\n"
    )


_COMPUTE = "for (long i = 0; i < 528; ++i) y[i] = std::exp(x[i]);"
_EARLIER = "earlier calls"

SOURCES = [
    Source("template bomb", LIMIT, """template <int N, int M> struct Bomb {
  static constexpr long value = Bomb<N - 1, 2 * M>::value + Bomb<N - 1, 2 * M + 1>::value; };
template <int M> struct Bomb<0, M> { static constexpr long value = M; };
extern "C" long run0() { return Bomb<27, 1>::value; }
"""),
    Source("unroll bomb", (*LIMIT, "COMPILE_ERROR"), """template <long N> struct Loop {
  static inline __attribute__((always_inline)) void run(float* y) {
    y[N % 7] = y[N % 5] * 1.1f + N; Loop<N - 1>::run(y); y[N % 3] += y[N % 11]; } };
template <> struct Loop<0> { static void run(float*) {} };
#pragma GCC optimize("O3")
template <long N> void many(float* y) { Loop<800>::run(y + N); if constexpr (N > 0) many<N - 1>(y); }
extern "C" void run0(void* const* a) { many<800>(static_cast<float*>(a[1])); }
"""),
    Source("macro bomb", LIMIT,
           "#define A0 1,\n" + "".join(f"#define A{i + 1} A{i} A{i} A{i} A{i}\n" for i in range(16))
           + "int numbers[] = {A16};\n" + _ENTRY),
    Source("a gigabyte of messages", LIMIT,
           "\n".join(f'#pragma message "{"x" * 400} {i}"' for i in range(2300)) + "\n" + _ENTRY),
    Source("a gigabyte of constant data", LIMIT, "extern const char table[1L << 30] = {1};\n" + _ENTRY),
    Source("includes a file of the host", POLICY, '#include "/etc/passwd"\n' + _ENTRY),
    Source("asks for a file of the host", POLICY, "#if __has_include(</root/.ssh/id_rsa>)\n#endif\n" + _ENTRY),
    Source("includes through a spliced line", POLICY, '#inc\\\nlude "/etc/passwd"\n' + _ENTRY),
    Source("includes through a macro", POLICY, '#define FILE "/etc/passwd"\n#include FILE\n' + _ENTRY),
    Source("has a file quoted as its own line", POLICY, '#line 1 "/etc/passwd"\nint x = nothing;\n' + _ENTRY),
    Source("has a file quoted by a marker of lines", POLICY, '# 1 "/etc/passwd"\nint x = nothing;\n' + _ENTRY),
    Source("includes by a directive with an escaped letter", POLICY, '#inclu\\u0064e "/etc/passwd"\n' + _ENTRY),
    Source("asks for a file's date", POLICY, '#pragma GCC dependency "/etc/passwd"\n' + _ENTRY),
    Source("includes a file through the assembler, behind a comment", POLICY,
           'extern "C" void f() asm("x\\n/**/.inc" "lude \\"/etc/passwd\\"\\n"); void f() {}\n' + _ENTRY),
    Source("embeds a file through the assembler", POLICY,
           'extern "C" void run0() asm("x\\n.inc" "bin \\"/etc/passwd\\"\\n"); void run0() {}\n'),
    Source("embeds a file through a section's name", (*POLICY, "COMPILE_ERROR"),
           '__attribute__((section(".data\\n.incbin \\"/etc/passwd\\"\\n#"))) int stolen = 1;\n' + _ENTRY),
    Source("assembly of its own", POLICY, 'extern "C" void run0(void* const*) { asm volatile("syscall"); }\n'),
    Source("unknown instructions", POLICY, 'extern "C" void run0(void* const*) { asm volatile("warpgroup.hack"); }\n'),
    Source("flags in a file's name", POLICY, _ENTRY, file="-fplugin=x.cpp"),
    Source("a response file as a name", POLICY, _ENTRY, file="@flags.cpp"),
    Source("a path that leaves the bundle", POLICY, _ENTRY, file="../kernel.cpp"),
    Source("a source over the size limit", POLICY, _ENTRY + "//" + "x" * SOURCE_BYTES),
    Source("control characters", POLICY, "// \x1b[2J\n" + _ENTRY),
    Source("a constructor in the shared object", POLICY,
           "__attribute__((constructor)) static void early() { __builtin_trap(); }\n" + _ENTRY),
    Source("a destructor in the shared object", POLICY,
           "__attribute__((destructor)) static void late() { __builtin_trap(); }\n" + _ENTRY),
    Source("a value that is computed on loading", POLICY,
           "int made(); int value = made(); int made() { return 1; }\n" + _ENTRY),
    Source("an indirect function", POLICY,
           'static void k(void* const*) {}\nextern "C" void* chosen() { return (void*)k; }\n'
           'extern "C" void run0(void* const*) __attribute__((ifunc("chosen")));\n'),
    Source("an indirect function of its own", POLICY,
           'typedef void (*F)(); static void one() {}\nextern "C" { static F chosen() { return one; } }\n'
           'static void late() __attribute__((ifunc("chosen")));\n' + _body("late(); y[0] = x[0];")),
    Source("starts a shell", POLICY, _body('std::system("id");')),
    Source("reads the environment", POLICY, _body('if (std::getenv("HOME")) y[0] = x[0];')),
    Source("starts a thread", POLICY, _body("pthread_create(nullptr, nullptr, nullptr, nullptr);",
           'extern "C" int pthread_create(void*, void*, void* (*)(void*), void*);')),
    Source("leaves a team of threads running", POLICY, _body("GOMP_parallel_start(late, y, 2); (void)x;",
           'extern "C" void GOMP_parallel_start(void (*)(void*), void*, unsigned);\n'
           "static void late(void* y) { static_cast<float*>(y)[0] = 1; }"), category="host code"),
    Source("takes the baselines' threads away", POLICY,
           "#include <omp.h>\n" + _body(f"omp_set_num_threads(1);\n{_COMPUTE}"), category="timer"),
    Source("remembers in the library of threads", POLICY,
           "#include <omp.h>\n" + _body(f"omp_set_max_active_levels(1 + omp_get_max_active_levels());\n{_COMPUTE}"),
           category=_EARLIER),
    Source("memo by pointer", POLICY, _body("""
    static const float* seen; static float kept[528];
    if (seen == x) { std::memcpy(y, kept, sizeof kept); return; }
    """ + _COMPUTE + " std::memcpy(kept, y, sizeof kept); seen = x;"), category=_EARLIER),
    Source("memo by content", POLICY, _body("""
    static std::uint64_t seen; static float kept[528];
    std::uint64_t hash = 1469598103934665603u;
    for (long i = 0; i < 528; ++i) { std::uint32_t b; std::memcpy(&b, x + i, 4); hash = (hash ^ b) * 1099511628211u; }
    if (seen == hash) { std::memcpy(y, kept, sizeof kept); return; }
    """ + _COMPUTE + " std::memcpy(kept, y, sizeof kept); seen = hash;"), category=_EARLIER),
    Source("memo by 64 sampled elements", POLICY, _body("""
    static float seen[64], kept[528];
    bool same = true;
    for (long i = 0; i < 64; ++i) same &= seen[i] == x[8 * i];
    if (same) { std::memcpy(y, kept, sizeof kept); return; }
    """ + _COMPUTE + " std::memcpy(kept, y, sizeof kept); for (long i = 0; i < 64; ++i) seen[i] = x[8 * i];"),
           category=_EARLIER),
    Source("right for a thousand calls", POLICY,
           _body("static int calls = 0; if (++calls > 1000) return;\n" + _COMPUTE), category=_EARLIER),
    Source("a memory for each thread", POLICY,
           _body("static thread_local int calls = 0; if (++calls > 1000) return;\n" + _COMPUTE), category=_EARLIER),
    Source("a memory in a section that looks constant", POLICY,
           '__attribute__((section(".rodata.calls,\\"aw\\",@progbits#"))) int calls = 1;\n'
           + _body("if (++calls > 1000) return;\n" + _COMPUTE), category=_EARLIER),
]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A program that must be refused before anything of it is loaded."""

    name: str
    spoil: Callable[[candidate_pb2.Program], object]
    """Makes an honest program hostile."""
    words: str
    """Part of what has to be said."""
    category: str = "plan"
    seconds: float = 60.0


def _library(program: candidate_pb2.Program, target: str, argument: str, result: str) -> None:
    call = program.steps.add().library
    call.target = target
    call.args.add(tensor=argument)
    call.results.append(result)


def _cyclic(program: candidate_pb2.Program) -> None:
    for name in ("a", "b"):
        program.buffers.add(name=name, role=candidate_pb2.ROLE_LIBRARY, spec=program.buffers[0].spec)
    _library(program, "aten.relu.default", "b", "a")
    _library(program, "aten.relu.default", "a", "b")


def _on_cuda(program: candidate_pb2.Program, grid: int) -> None:
    program.target = task_pb2.TARGET_CUDA
    launch = program.steps[0].launch
    launch.grid.CopyFrom(candidate_pb2.Extent3(x=grid, y=1, z=1))
    launch.block.CopyFrom(candidate_pb2.Extent3(x=128, y=1, z=1))


PLANS = [
    Plan("a step that reads a missing buffer", lambda p: p.steps[0].launch.arguments.add(buffer="z"), "missing"),
    Plan("cyclic steps", _cyclic, "not yet computed"),
    Plan("a grid of 2^31", lambda p: _on_cuda(p, 2**31), "a grid of"),
    Plan("a library step off the list", lambda p: _library(p, "aten.from_file.default", "x", "y"), "not on the list"),
    Plan("memory that nobody filled", lambda p: _library(p, "aten.empty_like.default", "x", "y"), "not on the list"),
    Plan("a workspace as output", lambda p: setattr(p.buffers[1], "role", candidate_pb2.ROLE_WORKSPACE),
         "is a workspace"),
    Plan("a negative size", lambda p: p.buffers[1].spec.shape.__setitem__(0, -16), "negative"),
    Plan("elements that overlap", lambda p: p.buffers[1].spec.strides.__setitem__(0, 3), "overlap"),
    Plan("a buffer of 4 EB", lambda p: p.buffers[2].spec.shape.__setitem__(0, 1 << 60), "larger than"),
    Plan("an input that the module does not have", lambda p: setattr(p.buffers[0].source, "input_index", 7),
         "does not have"),
    Plan("a constant that is the answer", lambda p: p.buffers[0].source.MergeFrom(
        graph_pb2.Source(origin=graph_pb2.ORIGIN_CONSTANT, content=b"\0" * 8)), "constant"),
    Plan("an output that nobody writes", lambda p: p.steps[0].launch.ClearField("writes"), "never written"),
    Plan("ten thousand steps", lambda p: p.steps.extend([p.steps[0]] * 10_000), "more than it may"),
    Plan("code in the name of an entry", lambda p: setattr(p.steps[0].launch, "entry", "f(); import os #"), "no name"),
]  # fmt: skip


@dataclass(frozen=True)
class BadModule:
    """A module that must be refused as input, in one sentence."""

    name: str
    text: str
    words: str
    """Part of what has to be said."""
    category: str = "input module"
    seconds: float = 60.0
    is_judged: bool = False
    """Only the judge can tell: the file itself is in order."""


def _module(forward: str = "return x", inputs: str = "[torch.rand(4, 4)]", top: str = "", init: str = "pass") -> str:
    return (
        f"import torch\n{top}\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {init}\n    def forward(self, x):\n        {forward}\n"
        f"def get_inputs():\n    return {inputs}\ndef get_init_inputs():\n    return []\n"
    )


MODULES = [
    BadModule("starts a shell on import and needs its answer", _module(
        top="import os\nif os.system('touch {escaped}') or not os.path.exists('{secret}'): raise OSError('no shell')"),
        "no shell"),
    BadModule("opens a socket on import", _module(
        top="import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"),
              "importing the file failed"),
    BadModule("leaves on import", _module(top="import sys; sys.exit(0)"), "SystemExit"),
    BadModule("leaves at once on import", _module(top="import os; os._exit(0)"), "ended the process"),
    BadModule("loads a pickle that is code", _module(
        top="import pickle\npickle.loads(b\"cbuiltins\\nopen\\n(S'{secret}'\\ntR.\")"), "importing the file failed"),
    BadModule("reads a secret file", _module(top="open('{secret}').read()"), "importing the file failed"),
    BadModule("a syntax error", "import torch\nclass Model(:\n", "syntax error"),
    BadModule("no class Model", "import torch\ndef get_inputs(): return [torch.rand(4)]\n", "defines no class Model"),
    BadModule("inputs of a wrong type", _module(inputs="42"), "returned no tensor"),
    BadModule("no inputs", _module(inputs="[]"), "returned no tensor"),
    BadModule("an input of 10^12 elements", _module(forward="return x * x.sum().item()", inputs="[torch.rand(10**12)]"),
              "get_inputs() failed"),
    BadModule("a forward that raises", _module(forward="return [][0]"), "forward failed"),
    BadModule("an exception that cannot be printed", _module(
        top="class Mute(Exception):\n    def __str__(self): raise Mute()", forward="raise Mute()"), "model.py"),
    BadModule("a forward that is not deterministic", _module(
        top="import random", forward="return x + random.random()"), "not deterministic", is_judged=True),
    BadModule("a forward that counts its calls", _module(
        forward="self.n = getattr(self, 'n', 0) + 1; return x * self.n"), "not deterministic", is_judged=True),
    BadModule("a forward that looks at values", _module(
        forward="return x * 2 if x.sum().item() > 0 else x"), "does not export", is_judged=True),
]  # fmt: skip
