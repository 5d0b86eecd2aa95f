// Fibers: stacks of their own on one host thread, known to the sanitizer that watches (-DSIMT_ADDRESS, -DSIMT_THREAD).
//
// To ThreadSanitizer each fiber is a thread, and a switch orders nothing: what CUDA orders is said at barriers, and all
// else is a race that is found at every run, whatever order the fibers took.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <deque>

#ifdef SIMT_ADDRESS
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef SIMT_THREAD
#include <sanitizer/tsan_interface.h>
#endif

#ifndef __x86_64__
#error "fibers switch on x86-64 only"
#endif

// Saves what a call must keep on the old stack, and goes on where the new one was left.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

namespace simt {

#ifdef SIMT_THREAD
constexpr size_t kStackBytes = 64 << 10;  // each byte has four of shadow, which a fresh stack clears
#else
constexpr size_t kStackBytes = 256 << 10;
#endif
constexpr size_t kGuardBytes = 4096;

// What happened before a release of `order` happened before what follows an acquire of it.
inline void release(void* order) {
#ifdef SIMT_THREAD
  __tsan_release(order);
#else
  (void)order;
#endif
}
inline void acquire(void* order) {
#ifdef SIMT_THREAD
  __tsan_acquire(order);
#else
  (void)order;
#endif
}

class Fiber {
 public:
  using Body = void (*)();

  // The context that calls this first, on the host thread's own stack.
  Fiber() {
#ifdef SIMT_THREAD
    thread_ = __tsan_get_current_fiber();
#endif
  }
  // A fiber that begins with `body`, which must not return.
  explicit Fiber(Body body) {
    // Fresh memory each time, so that a stack's earlier life is no part of a race.
    constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, kKind, -1, 0);
    if (memory == MAP_FAILED) {
      perror("simt: no memory for a stack");
      exit(3);
    }
    mprotect(memory, kGuardBytes, PROT_NONE);
    stack_ = static_cast<char*>(memory);
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack_ + kStackBytes) - 1;
    *top = 0;  // where `body` would return to; on its entry the stack is 8 bytes off a multiple of 16
    *--top = reinterpret_cast<uintptr_t>(body);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    place_ = top;
#ifdef SIMT_THREAD
    thread_ = __tsan_create_fiber(0);
#endif
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (stack_ == nullptr) return;
#ifdef SIMT_ADDRESS
    __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
#ifdef SIMT_THREAD
    retire(thread_);
#endif
    munmap(stack_, kStackBytes);
  }

  // Leaves this fiber, which runs, for another. `last`: this one will not run again.
  void switch_to(Fiber& other, bool last = false) {
#ifdef SIMT_ADDRESS
    __sanitizer_start_switch_fiber(last ? nullptr : &shadow_, other.bottom_or_host(), other.size_or_host());
#endif
#ifdef SIMT_THREAD
    __tsan_switch_to_fiber(other.thread_, __tsan_switch_to_fiber_no_sync);
#endif
    (void)last;
    simt_switch(&place_, other.place_);
    arrived(shadow_);
  }
  // To be called first in a fiber's body.
  static void begin() { arrived(nullptr); }

 private:
  static void arrived(void* shadow) {
#ifdef SIMT_ADDRESS
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(shadow, &bottom, &size);
    if (host_bottom() == nullptr) {
      host_bottom() = bottom;  // the first switch of all came from the host thread
      host_size() = size;
    }
#else
    (void)shadow;
#endif
  }
  const void* bottom_or_host() const { return stack_ != nullptr ? stack_ : host_bottom(); }
  size_t size_or_host() const { return stack_ != nullptr ? kStackBytes : host_size(); }
  static const void*& host_bottom() {
    static const void* bottom = nullptr;
    return bottom;
  }
  static size_t& host_size() {
    static size_t size = 0;
    return size;
  }

#ifdef SIMT_THREAD
  // What a thread did is forgotten with it, so that later blocks could not race with it: the youngest are kept.
  static constexpr size_t kMostKept = 512;
  static void retire(void* thread) {
    static std::deque<void*> kept;
    kept.push_back(thread);
    if (kept.size() <= kMostKept) return;
    __tsan_destroy_fiber(kept.front());
    kept.pop_front();
  }
#endif

  char* stack_ = nullptr;
  void* place_ = nullptr;
  void* shadow_ = nullptr;
  void* thread_ = nullptr;
};

}  // namespace simt
