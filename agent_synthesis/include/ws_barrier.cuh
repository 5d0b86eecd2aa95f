// Barriers in shared memory that copies complete (mbarrier), blocks of a cluster, and registers of a warpgroup, for sm_90a.
#pragma once
#include "ws_types.cuh"

namespace ws {

using SharedAddress = unsigned;  // of the shared window, as PTX takes it

WS_INLINE SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// A barrier's phase ends when `arrivals` threads have arrived and every expected byte has come.
struct alignas(8) Barrier {
  uint64 state;

  WS_INLINE void begin(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals));
  }

  // One arrival that also announces bytes.
  WS_INLINE void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
  }

  // One arrival of this block's own.
  WS_INLINE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }

  // One arrival at the same barrier of another block of the cluster (or of this one, by its own rank). It orders the
  // copy engine's and the tensor cores' accesses, which is what it is for: a release to the cluster would order ordinary
  // ones too, by a fence of the whole GPU's memory at every stage.
  WS_INLINE void arrive_at(int block) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(shared_address(&state)), "r"(block)
        : "memory");
  }

  // Waits until the phase of that parity is over.
  WS_INLINE void wait(int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&state)), "r"(parity)
        : "memory");
  }
};

// After the first `begin`s, before any other thread or the copy engine uses the barriers.
WS_INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

WS_INLINE int rank_in_cluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster meet.
WS_INLINE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Some threads of a block, whole warps, by a barrier that they have the number of (1 to 15): those that meet wait until as many
// threads have come as are meant to, those that arrive go on.
template <int kThreads> WS_INLINE void meet_at(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}
template <int kThreads> WS_INLINE void arrive_at(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// What this thread has written to shared memory can then be read by the copy engine and the tensor cores.
WS_INLINE void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// All threads of a warpgroup hand registers back, or take more, of those that the block has (multiples of 8).
template <int kCount> WS_INLINE void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount> WS_INLINE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace ws
