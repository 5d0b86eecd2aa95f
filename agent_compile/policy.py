"""What a program may not ask of a compiler, and what a binary may not ask of the process that loads it.

The one idea: a kernel needs its own sources, a known set of headers and arithmetic; everything else is refused by
name before it can matter. The jail holds whatever these checks miss; they make the refusal early and readable.
Whether the code is right is not judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from agent_compile import elf
from agent_compile.toolchains.toolchain import Rejected
from warpsmith.sandbox import kernel_calls
from warpsmith.v1 import candidate_pb2, task_pb2, verdict_pb2

SOURCE_BYTES = 4 << 20
"""Most bytes of all sources of a program together: a network of 120 batch norms, each a kernel, takes 1.2 MB."""

BINARY_BYTES = 32 << 20
"""Most bytes of the machine code of all parts of a program together: it travels in one message."""

SOURCE_COUNT = 64
"""Most sources of a program."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}\.(?:cu|cuh|cpp|hpp)")
_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")

_STANDARD = frozenset({
    "algorithm", "array", "atomic", "bit", "bitset", "cassert", "cfloat", "charconv", "cinttypes", "climits",
    "cmath", "compare", "complex", "concepts", "cstddef", "cstdint", "cstdlib", "cstring", "functional",
    "initializer_list", "iterator", "limits", "memory", "new", "numbers", "numeric", "optional", "ratio",
    "span", "string_view", "tuple", "type_traits", "utility", "valarray", "variant", "vector", "version",
    "assert.h", "float.h", "limits.h", "math.h", "stdbool.h", "stddef.h", "stdint.h", "stdlib.h", "string.h",
    "tgmath.h", "omp.h", "immintrin.h", "x86intrin.h", "emmintrin.h", "xmmintrin.h", "avxintrin.h",
    "arm_neon.h", "arm_sve.h", "experimental/simd",
})  # fmt: skip
_CUDA = frozenset({
    "cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_fp6.h",
    "cuda_fp4.h", "cuda_tf32.h", "cuda_pipeline.h", "cuda_pipeline_primitives.h", "cuda_awbarrier.h",
    "cuda_awbarrier_primitives.h", "cooperative_groups.h", "cooperative_groups/memcpy_async.h",
    "cooperative_groups/reduce.h", "cooperative_groups/scan.h", "crt/mma.h", "mma.h", "math_constants.h",
    "vector_types.h", "vector_functions.h", "device_launch_parameters.h", "cuComplex.h",
})  # fmt: skip
# Header-only libraries of the toolkit, by folder; a path may not climb out of them.
_CUDA_FOLDERS = ("cuda/", "cub/", "cute/", "cutlass/", "nv/")

# Phases 1 to 3 of translation undone just enough: spliced lines joined (GCC also splices over trailing blanks).
_SPLICE = re.compile(r"\\[ \t\f\v\r]*\n")
_GAP = r"(?:[ \t\f\v]|/\*.*?\*/)*"
# Matched wherever it stands, inside comments and strings too: a false alarm there is cheap, a miss is not.
_INCLUDE = re.compile(rf"(?:\#|%:|\?\?=){_GAP}(include_next|include|import|embed)\b{_GAP}([^\n]*)", re.DOTALL)
# Any other directive is refused: one that names a line's file (`#line`, `# 1 "file"`) has a compiler quote that file in
# its messages, and GCC takes \\u0064 in a directive's name for the letter.
_DIRECTIVE = re.compile(rf"(?:^|\*/)[ \t\f\v]*(?:\#|%:|\?\?=){_GAP}([\w$\\]*)([^\n]*)", re.DOTALL | re.MULTILINE)
_PLACE = re.compile(rf'\s+\d+(?:\s+"{_NAME.pattern}")?\s*')
_DIRECTIVES = frozenset({
    "", "define", "undef", "if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif", "include", "pragma",
    "error", "warning",
})  # fmt: skip
_OPERAND = re.compile(r'(?:"([^"\n]+)"|<([^>\n]+)>)')
_FORBIDDEN = re.compile(
    # A file's date, or that it is not there.
    r"__has_include(?:_next)?|__has_embed|\.incbin|\bGCC\s+dependency\b|^\s*(?:export\s+)?(?:import|module)\b",
    re.M,
)


def check_sources(program: candidate_pb2.Program) -> Rejected | None:
    """Why the sources are refused; None when they are not."""
    names = [source.name for source in program.sources]
    if len(names) > SOURCE_COUNT:
        return _refuse(f"{len(names)} sources; a program may have {SOURCE_COUNT}")
    for name in names:
        if not _NAME.fullmatch(name):
            return _refuse(f"{name[:100]!r} is not a plain file name ending in .cu, .cuh, .cpp or .hpp")
    if len({name.lower() for name in names}) != len(names):
        return _refuse("two sources have the same name")
    size = sum(len(source.text.encode()) for source in program.sources)
    if size > SOURCE_BYTES:
        return _refuse(f"the sources take {size} bytes; a program may have {SOURCE_BYTES}")
    if names and not names[0].endswith((".cu", ".cpp")):
        return _refuse(f"{names[0]}: the first source is the one compiled, and must end in .cu or .cpp")
    for entry in entries(program):
        if not _ENTRY.fullmatch(entry):
            return _refuse(f"{entry[:100]!r} is not the name of a function")
    allowed = _STANDARD | (_CUDA if program.target == task_pb2.TARGET_CUDA else frozenset()) | frozenset(names)
    folders = _CUDA_FOLDERS if program.target == task_pb2.TARGET_CUDA else ()
    for source in program.sources:
        if refusal := _check_text(source.name, source.text, allowed, folders):
            return refusal
    return None


def entries(program: candidate_pb2.Program) -> list[str]:
    """Names of the functions that the program launches, each once, in order."""
    launched = (step.launch.entry for step in program.steps if step.WhichOneof("kind") == "launch")
    return list(dict.fromkeys(launched))


def _check_text(name: str, text: str, allowed: frozenset[str], folders: tuple[str, ...]) -> Rejected | None:
    for at, character in enumerate(text):
        carriage_return = character == "\r" and text[at + 1 : at + 2] == "\n"
        if character < " " and character not in "\n\t\f\v" and not carriage_return:
            line = text.count("\n", 0, at) + 1
            return _refuse(f"{name}:{line}: error: control character {ord(character):#04x}")
    spliced = _SPLICE.sub("", text)
    for match in _INCLUDE.finditer(spliced):
        directive, rest = match.group(1), match.group(2).strip()
        operand = _OPERAND.match(rest)
        header = (operand.group(1) or operand.group(2)).strip() if operand else ""
        if directive == "include" and _is_allowed(header, allowed, folders):
            continue
        return _refuse(f"{name}:{_line(text, header or directive)}: error: #{directive} {rest[:80]} is not allowed")
    for match in _DIRECTIVE.finditer(spliced):
        directive, rest = match.groups()
        is_own_line = directive == "line" and _PLACE.fullmatch(rest)
        if directive not in _DIRECTIVES and not is_own_line:
            return _refuse(f"{name}:{_line(text, directive)}: error: #{directive[:80]} is not allowed")
    if forbidden := _FORBIDDEN.search(spliced):
        word = forbidden.group().strip()
        return _refuse(f"{name}:{_line(text, word)}: error: {word} is not allowed")
    return None


def _is_allowed(header: str, allowed: frozenset[str], folders: tuple[str, ...]) -> bool:
    if header in allowed:
        return True
    return header.startswith(folders) and ".." not in header and bool(re.fullmatch(r"[\w./-]+", header))


def _line(text: str, word: str) -> int:
    at = text.find(word)
    return text.count("\n", 0, at) + 1 if at >= 0 else 1


def _refuse(message: str) -> Rejected:
    return Rejected(verdict_pb2.FAILURE_KIND_POLICY_REJECT, message)


# ---- what came out ------------------------------------------------------------------------------------

# Assembly that a compiler wrote has none of these unless the source put them there: through asm statements (whose
# text is between APP marks), through asm labels, or through section attributes.
# The directives that read files or make text are refused wherever they stand: a comment may stand before one.
_ASSEMBLY = re.compile(
    r"^\s*(?:#+|//)\s*APP|file scope inline assembly|(\.(?:incbin|include|macro|irpc?|rept|altmacro))\b",
    re.MULTILINE | re.IGNORECASE,
)


def check_assembly(name: str, text: str) -> Rejected | None:
    """Why the assembly of a CPU kernel is refused: it holds text of the source's own. None when it does not."""
    if found := _ASSEMBLY.search(text):
        return _refuse(f"{name}: error: {found.group(1) or 'inline assembly'} is not allowed in a kernel for the CPU")
    return None


# `kernel_calls` has what arithmetic and OpenMP call; to open files, start processes or threads, or read the environment
# takes other calls. No kernel may allocate: the next call could find an answer in memory that the last one freed.
_ALLOCATIONS = ("malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign", "free", "_Zn", "_Zd")


def check_shared_object(content: bytes, wanted: Iterable[str]) -> Rejected | None:
    """Why a CPU binary is refused; None for fine.

    It runs code on loading, keeps memory of its own from call to call (so that it could remember answers or count
    calls), calls what it may not, or lacks an entry.
    """
    try:
        binary = elf.read(content)
    except elf.NotElf as error:
        return _refuse(f"the compiler's output is no shared object: {error}")
    if binary.startup:
        return _refuse(f"the kernel would run code when it is loaded ({', '.join(binary.startup)})")
    if binary.kept_bytes:
        return _refuse(
            f"error: the kernel keeps {binary.kept_bytes} bytes from call to call; give it a workspace in place of "
            "static or thread-local variables"
        )
    for name in sorted(binary.undefined):
        if not kernel_calls.may_call(name):
            remedy = "; give it a workspace" if name.startswith(_ALLOCATIONS) else ""
            return _refuse(f"error: the kernel calls {name[:100]!r}, which a kernel may not{remedy}")
    return check_entries(binary, wanted)


def check_cubin(content: bytes, wanted: Iterable[str]) -> Rejected | None:
    """Why a cubin is refused; None for fine. Raises NotElf.

    It keeps variables in global memory, which live from launch to launch, calls what the device's runtime would have
    to give it (its heap, its printer), or lacks an entry.
    """
    binary = elf.read(content)
    if binary.device_variables:
        return _refuse(
            f"error: the variable {binary.device_variables[0][:100]!r} lives from launch to launch; use a workspace, "
            "or __constant__ for a table"
        )
    if called := sorted(name for name in binary.undefined if not name.startswith(".nv.")):
        return _refuse(f"error: the kernel calls {called[0][:100]!r} of the device's runtime, which a kernel may not")
    return check_entries(binary, wanted)


def check_entries(binary: elf.Elf, wanted: Iterable[str]) -> Rejected | None:
    """COMPILE_ERROR when a function that the program launches is not in the binary; else None."""
    if missing := [entry for entry in wanted if entry not in binary.defined]:
        text = f'error: no function is called {missing[0]!r}; declare it extern "C"'
        return Rejected(verdict_pb2.FAILURE_KIND_COMPILE_ERROR, text)
    return None
