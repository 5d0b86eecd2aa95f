// The process in which kernels for the processor run, and nothing else: no interpreter, no torch, no loader.
//
// Its one idea: it is stopped between calls. The bench writes what to run into shared memory and continues the process;
// the process runs it and stops itself. The operating system tells the bench when all of its threads have stopped, so
// nothing in here works ahead or late, and "done" means done.
//
// Before a byte of a candidate's can run, all threads are there and the system calls are cut down to what OpenMP and the
// C library's allocator need; anything else ends the process. Whatever is wrong with a candidate's code happens here,
// and the bench trusts nothing that this process says: it has the clock itself and looks at the outputs.
//
// Started as: runner DESCRIPTOR ADDRESS OFFSET GIVEN: the shared memory's file, where `Control` lies here and there, and
// the file of what may only be read, open for no more than that. Linked statically.

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

enum Trouble { BAD_MEMORY = 101, BAD_IMAGE = 102, NO_FILTER = 103 };

// ---- what bench and runner tell each other; `runner.py` has the same numbers ----------------------------------

constexpr std::uint64_t MOST_FUNCTIONS = 1024, MOST_SEGMENTS = 16, MOST_WINDOWS = 1024, MOST_WORDS = 1 << 16;

struct Segment {
    std::uint64_t address, bytes, protection;
};

struct Window {
    std::uint64_t address, bytes, offset, protection, is_given;  // of what is given, no page can be written from here
};

struct Control {
    std::uint64_t function_count, functions[MOST_FUNCTIONS];  // what a kernel may call; 0 where there is none here
    std::uint64_t image_address, image_bytes, image_offset;   // the candidate's code, already relocated
    std::uint64_t segment_count;
    Segment segments[MOST_SEGMENTS];
    std::uint64_t window_count;  // parts of the shared memory to map before the calls; without protection: to unmap
    Window windows[MOST_WINDOWS];
    std::uint64_t word_count;  // the calls: address of an entry, number of arguments, arguments; and so on
    std::uint64_t words[MOST_WORDS];
};

void trap() { __builtin_trap(); }

// What a call costs that does nothing, with all threads.
void empty(void**) {
#pragma omp parallel
    __asm__ volatile("" ::: "memory");
}

}  // namespace

#define FUNCTION(name) extern "C" char function_##name[] __asm__(#name);
#include "kernel_functions.h"
#undef FUNCTION

namespace {

void write_functions(Control& control) {
    const void* const known[] = {
        reinterpret_cast<const void*>(trap),
        reinterpret_cast<const void*>(empty),
#define FUNCTION(name) function_##name,
#include "kernel_functions.h"
#undef FUNCTION
    };
    control.function_count = sizeof known / sizeof *known;
    for (std::size_t i = 0; i < control.function_count; ++i)
        control.functions[i] = reinterpret_cast<std::uint64_t>(known[i]);
}

// ---- the lock ----------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
constexpr unsigned ARCHITECTURE = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr unsigned ARCHITECTURE = AUDIT_ARCH_AARCH64;
#endif

// glibc's, of pthread_create: a thread of this process, and never a process.
constexpr unsigned THREAD_FLAGS = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
                                  CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;

// For all threads, at once and for good. Nothing here opens, reads or writes a file, starts a process, sends anything
// anywhere, or makes memory executable. Threads may come: OpenMP ends those that a small team leaves over.
bool lock() {
    sock_filter filter[128];
    unsigned short size = 0;
    const auto add = [&](unsigned code, unsigned value, unsigned char yes = 0, unsigned char no = 0) {
        filter[size++] = {static_cast<unsigned short>(code), yes, no, value};
    };
    constexpr unsigned LOAD = BPF_LD | BPF_W | BPF_ABS, EQUAL = BPF_JMP | BPF_JEQ | BPF_K,
                       ANY_BIT = BPF_JMP | BPF_JSET | BPF_K, AT_LEAST = BPF_JMP | BPF_JGE | BPF_K,
                       RETURN = BPF_RET | BPF_K;
    const auto load_argument = [&](int which) { add(LOAD, offsetof(seccomp_data, args) + 8 * which); };
    const auto load_number = [&] { add(LOAD, offsetof(seccomp_data, nr)); };
    add(LOAD, offsetof(seccomp_data, arch));
    add(EQUAL, ARCHITECTURE, 1, 0);
    add(RETURN, SECCOMP_RET_KILL_PROCESS);
    load_number();
    add(AT_LEAST, 0x40000000, 0, 1);  // other entry points have other numbers
    add(RETURN, SECCOMP_RET_KILL_PROCESS);
    for (const int allowed : {
             SYS_futex, SYS_sched_yield, SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_rt_sigprocmask,
             SYS_restart_syscall, SYS_madvise, SYS_brk, SYS_munmap, SYS_mremap, SYS_sched_getaffinity, SYS_getpid,
             SYS_gettid, SYS_set_robust_list, SYS_rseq, SYS_clock_gettime,
         }) {
        add(EQUAL, allowed, 0, 1);
        add(RETURN, SECCOMP_RET_ALLOW);
    }
    add(EQUAL, SYS_clone3, 0, 1);  // its flags lie in memory; the C library then takes the other one
    add(RETURN, SECCOMP_RET_ERRNO | 38);
    add(EQUAL, SYS_clone, 0, 4);
    load_argument(0);
    add(EQUAL, THREAD_FLAGS, 0, 1);
    add(RETURN, SECCOMP_RET_ALLOW);
    load_number();
    for (const int mapping : {SYS_mmap, SYS_mprotect}) {  // of files, only the shared memory is open
        add(EQUAL, mapping, 0, 4);
        load_argument(2);
        add(ANY_BIT, PROT_EXEC, 1, 0);
        add(RETURN, SECCOMP_RET_ALLOW);
        load_number();
    }
    for (const int signalling : {SYS_kill, SYS_tgkill}) {
        add(EQUAL, signalling, 0, 4);
        load_argument(0);
        add(EQUAL, static_cast<unsigned>(getpid()), 0, 1);
        add(RETURN, SECCOMP_RET_ALLOW);
        load_number();
    }
    add(RETURN, SECCOMP_RET_KILL_PROCESS);
    const sock_fprog program{size, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return false;
    // SPEC_ALLOW: before Linux 5.16 a filter would otherwise slow down what it is laid on.
    constexpr unsigned long FLAGS = SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, FLAGS, &program) == 0;
}

// ---- the candidate's code ------------------------------------------------------------------------------------------

void* mapped(std::uint64_t address, std::uint64_t bytes, int protection, int flags, int file, std::uint64_t offset) {
    return mmap(reinterpret_cast<void*>(address), bytes, protection, flags, file, static_cast<off_t>(offset));
}

bool load(const Control& control, int file) {
    if (control.image_bytes == 0) return true;
    const auto fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    void* const at = mapped(control.image_address, control.image_bytes, PROT_READ | PROT_WRITE, fixed, -1, 0);
    void* const from = mapped(0, control.image_bytes, PROT_READ, MAP_SHARED, file, control.image_offset);
    if (at == MAP_FAILED || from == MAP_FAILED) return false;
    std::memcpy(at, from, control.image_bytes);
    munmap(from, control.image_bytes);
    for (std::uint64_t i = 0; i < control.segment_count; ++i) {
        const Segment& part = control.segments[i];
        void* const begin = reinterpret_cast<void*>(part.address);
        if (mprotect(begin, part.bytes, static_cast<int>(part.protection)) != 0) return false;
        __builtin___clear_cache(static_cast<char*>(begin), static_cast<char*>(begin) + part.bytes);
    }
    return true;
}

void open_windows(const Control& control, int file, int given) {
    for (std::uint64_t i = 0; i < control.window_count; ++i) {
        const Window& window = control.windows[i];
        const int protection = static_cast<int>(window.protection);
        if (protection == PROT_NONE) {
            munmap(reinterpret_cast<void*>(window.address), window.bytes);
            continue;
        }
        // With its pages, or else the first call on it would wait for them.
        constexpr int FLAGS = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
        const int of = window.is_given ? given : file;
        if (mapped(window.address, window.bytes, protection, FLAGS, of, window.offset) == MAP_FAILED) trap();
    }
}

void call(const Control& control) {
    using Entry = void (*)(void**);
    for (std::uint64_t at = 0; at + 2 <= control.word_count;) {
        const auto entry = reinterpret_cast<Entry>(control.words[at]);
        const std::uint64_t count = control.words[at + 1];
        entry(reinterpret_cast<void**>(const_cast<std::uint64_t*>(control.words + at + 2)));
        at += 2 + count;
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 5) return BAD_MEMORY;
    const int file = std::atoi(arguments[1]), given = std::atoi(arguments[4]);
    const std::uint64_t address = std::strtoull(arguments[2], nullptr, 16);
    const int first = file < given ? file : given, second = file < given ? given : file;
    if (first > 0) syscall(SYS_close_range, 0, first - 1, 0);
    if (second > first + 1) syscall(SYS_close_range, first + 1, second - 1, 0);
    syscall(SYS_close_range, second + 1, ~0U, 0);
    const int both = PROT_READ | PROT_WRITE;
    void* const shared = mapped(address, sizeof(Control), both, MAP_SHARED | MAP_FIXED_NOREPLACE, file, std::strtoull(arguments[3], nullptr, 10));
    if (shared != reinterpret_cast<void*>(address)) return BAD_MEMORY;
    Control& control = *static_cast<Control*>(shared);
    const pid_t self = getpid();
    write_functions(control);
    // All threads are there before the lock is; and with the first one what the C library needs for any.
#pragma omp parallel num_threads(2)
    __asm__ volatile("" ::: "memory");
#pragma omp parallel
    __asm__ volatile("" ::: "memory");
    kill(self, SIGSTOP);
    if (!load(control, file)) return BAD_IMAGE;
    if (!lock()) return NO_FILTER;
    for (;;) {
        kill(self, SIGSTOP);
        open_windows(control, file, given);
        call(control);
    }
}
