// What a kernel that runs on a CPU can ask of the machine that runs it. The kernel's side is `device.hpp` and
// `ptx.hpp`, compiled with the kernel into a shared object; the machine's side is `runner.cpp`, which loads it.
//
// The one idea: every CUDA thread is a fiber, and a fiber runs until it reaches a barrier, a warp operation, an access
// that other blocks may wait for, or its end. So a run is one sequence of steps, the same at every call with one seed.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace simt {

struct Extent {
  unsigned x, y, z;
  constexpr unsigned count() const { return x * y * z; }
};

// A copy that a thread has asked for and not waited for (cp.async).
struct Copy {
  void* to;
  const void* from;
  int bytes;
  int group;
};

constexpr int kMostCopies = 512;  // under way in one thread

// What the thread that runs now can see of itself.
struct Here {
  Extent thread, block, block_extent, grid_extent, block_in_cluster, cluster_extent;
  Copy* copies = nullptr;  // room for kMostCopies, once there was one
  int copy_count = 0, copy_group = 0;
};
extern Here* here;

enum class WarpOperation { kBarrier, kShuffle, kBallot };

// Waits for all threads of the block that have not ended; the number of them whose predicate holds.
int block_barrier(bool predicate = false);
// Waits for the lanes of `mask`. Shuffle: the value of lane `source`; ballot: the lanes whose value is not zero.
uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, int source);
void cluster_arrive();
void cluster_wait();
// The place in another block of the cluster that corresponds to one in this block's shared memory.
void* in_block_of_cluster(void* place, unsigned rank);
void* dynamic_shared_memory();
// Lets others run. Every access to memory through which blocks talk comes with one; `wrote`: the access may end a wait.
Copy* room_for_copies();
void pause(bool wrote);
void wait_for_previous();
// Ends the program with a finding.
[[noreturn]] void fail(const char* kind, const char* detail);

// ---- what the shared object tells the machine --------------------------------------------------------

struct Entry {
  const char* name;
  void (*call)(void* const* arguments);  // each points to an argument's value
};
struct Unit {
  const Entry* entries;
  int entry_count;
  char *shared_begin, *shared_end;  // all static shared memory, the same of every copy of the object
};

}  // namespace simt

extern "C" simt::Unit simt_unit();
