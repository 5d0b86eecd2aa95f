"""What a kernel for the processor may call: arithmetic, memory and OpenMP, by name.

The one idea: the policy that refuses a binary and the process that runs it read the same lists, so what the one lets
through the other provides, and nothing else is there. It checks and runs nothing.
"""

from __future__ import annotations

import itertools

MEMORY = ("memcpy", "memmove", "memset", "memcmp")
MATHEMATICS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh",
    "erf", "erfc", "exp", "exp10", "exp2", "expm1", "fabs", "fdim", "floor", "fma", "fmax", "fmin", "fmod",
    "frexp", "hypot", "ilogb", "ldexp", "lgamma", "llrint", "llround", "log", "log10", "log1p", "log2", "logb",
    "lrint", "lround", "modf", "nearbyint", "nextafter", "pow", "remainder", "remquo", "rint", "round",
    "roundeven", "scalbln", "scalbn", "sin", "sincos", "sinh", "sqrt", "tan", "tanh", "tgamma", "trunc",
)  # fmt: skip
"""Of double; with an f at the end of float, with an l of long double."""

_SCHEDULES = ("dynamic", "guided", "runtime", "nonmonotonic_dynamic", "nonmonotonic_guided", "nonmonotonic_runtime",
              "maybe_nonmonotonic_runtime")  # fmt: skip
_LOOPS = (*_SCHEDULES, "static", *(f"ordered_{schedule}" for schedule in ("static", "dynamic", "guided", "runtime")))
# OpenMP without what outlives the call: teams that are started and not joined, tasks, settings of the whole process.
OPENMP = (
    "GOMP_barrier", "GOMP_parallel", "GOMP_parallel_loop_static", "GOMP_parallel_sections", "GOMP_parallel_reductions",
    *(f"GOMP_parallel_loop_{schedule}" for schedule in _SCHEDULES),
    *(f"GOMP_loop_{width}{loop}_{part}" for width, loop, part in
      itertools.product(("", "ull_"), _LOOPS, ("start", "next"))),
    "GOMP_loop_start", "GOMP_loop_ordered_start", "GOMP_loop_ull_start", "GOMP_loop_ull_ordered_start",
    "GOMP_loop_end", "GOMP_loop_end_nowait", "GOMP_loop_end_cancel",
    "GOMP_sections_start", "GOMP_sections_next", "GOMP_sections_end", "GOMP_sections_end_nowait",
    "GOMP_sections_end_cancel", "GOMP_single_start", "GOMP_single_copy_start", "GOMP_single_copy_end",
    "GOMP_ordered_start", "GOMP_ordered_end", "GOMP_critical_start", "GOMP_critical_end",
    "GOMP_critical_name_start", "GOMP_critical_name_end", "GOMP_atomic_start", "GOMP_atomic_end",
    "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads", "omp_get_num_procs", "omp_in_parallel",
)  # fmt: skip

ENDS = ("abort", "__stack_chk_fail", "__assert_fail", "__cxa_pure_virtual", "__cxa_begin_catch", "__cxa_end_catch",
        "__gxx_personality_v0", "_Unwind_Resume", "_ZSt9terminatev", "__cxa_call_unexpected",
        "__clang_call_terminate")  # fmt: skip
"""End the process: nothing throws, so nothing is caught."""
ENDING_PREFIXES = ("_ZSt17__throw_", "_ZSt19__throw_", "_ZSt20__throw_", "_ZSt24__throw_", "_ZSt28__throw_")
ABSENT = ("_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize")
"""Asked for by what a linker adds, and not there."""

FUNCTIONS = (*MEMORY, *(name + width for name in MATHEMATICS for width in ("", "f", "l")), *OPENMP)
"""All that a kernel gets from the process that it runs in; not every C library has each of them."""
_KNOWN = frozenset((*FUNCTIONS, *ENDS, *ABSENT))


def may_call(name: str) -> bool:
    """Whether a kernel may call a function of this name."""
    return name in _KNOWN or ends(name)


def ends(name: str) -> bool:
    """Whether a call of this name is the end of the kernel's process."""
    return name in ENDS or name.startswith(ENDING_PREFIXES)
