"""System calls without a C library, for kernels that are assumed to have passed the compile policy.

The one idea: the process that runs a kernel gives it no function that opens, starts or sends anything, so a kernel that
wants to must itself contain the instruction of a system call. C++ text; x86-64 and aarch64.
"""

from __future__ import annotations

RAW = """
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((noinline)) static long raw(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0) {
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#else
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = 0;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#endif
}
template <class T> static long at(T* pointer) { return reinterpret_cast<long>(pointer); }
[[maybe_unused]] static long opened(const char* path, long flags = O_RDONLY) {
    return raw(SYS_openat, AT_FDCWD, at(path), flags, 0600);
}
"""

THREAD = """
#if defined(__x86_64__)
static char its_stack[65536];
static long words[4];
// A thread that adds to a number for ever, as the C library would start it, where no function does.
static void start_counting(volatile long* number) {
    long result;
    register long r10 __asm__("r10") = reinterpret_cast<long>(words + 2);
    register long r8 __asm__("r8") = reinterpret_cast<long>(words);
    register volatile long* r12 __asm__("r12") = number;
    __asm__ volatile(
        "syscall\\n test %%rax, %%rax\\n jnz 1f\\n 2: addq $1, (%%r12)\\n jmp 2b\\n 1:"
        : "=a"(result) : "a"(56L), "D"(0x3d0f00L), "S"(its_stack + sizeof its_stack), "d"(words + 1), "r"(r10), "r"(r8),
          "r"(r12) : "rcx", "r11", "memory");
}
#endif
"""
"""Flags of pthread_create: the only ones that are let through."""
