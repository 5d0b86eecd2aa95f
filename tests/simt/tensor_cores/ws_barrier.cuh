// What `ws_barrier.cuh` does, on a CPU: barriers are words that threads look at until they change. Of blocks of one alone.
#pragma once
#include "ws_types.cuh"

#define __grid_constant__

namespace ws {

// A phase ends when all have arrived and all bytes have come.
struct alignas(8) Barrier {
  struct State {
    unsigned phase : 1, arrivals : 10, missing : 10;
    int bytes : 30;
  };
  uint64 word;

  WS_INLINE void begin(int arrivals) { write({0, static_cast<unsigned>(arrivals), static_cast<unsigned>(arrivals), 0}); }
  WS_INLINE void expect(int bytes) { change(1, bytes); }
  WS_INLINE void arrive() { change(1, 0); }
  WS_INLINE void arrive_at(int block) {
    if (block != 0) simt::fail("unsupported", "a barrier of another block");
    arrive();
  }
  WS_INLINE void complete(int bytes) { change(0, -bytes); }
  WS_INLINE void wait(int parity) const {
    while (read().phase == static_cast<unsigned>(parity)) simt::pause(false);
  }

  WS_INLINE State read() const { return simt::bits_as<State>(__atomic_load_n(&word, __ATOMIC_ACQUIRE)); }
  WS_INLINE void write(State state) {
    __atomic_store_n(&word, simt::bits_as<uint64>(state), __ATOMIC_RELEASE);
    simt::pause(true);
  }
  WS_INLINE void change(int arrivals, int bytes) {
    State state = read();
    if (state.missing < static_cast<unsigned>(arrivals)) simt::fail("unsupported", "more arrivals at a barrier than it has");
    state.missing -= arrivals;
    state.bytes += bytes;
    if (state.missing == 0 && state.bytes == 0) state.phase ^= 1, state.missing = state.arrivals;
    write(state);
  }
};
static_assert(sizeof(Barrier::State) == sizeof(uint64));

// How many threads have come to each barrier that has a number.
__shared__ unsigned comers[16];

WS_INLINE void publish_barriers() {
  for (unsigned& each : comers) __atomic_store_n(&each, 0u, __ATOMIC_RELEASE);
}
template <int kThreads> WS_INLINE void arrive_at(int number) {
  __atomic_fetch_add(&comers[number], 1u, __ATOMIC_ACQ_REL);
  simt::pause(true);
}
template <int kThreads> WS_INLINE void meet_at(int number) {
  const unsigned before = __atomic_fetch_add(&comers[number], 1u, __ATOMIC_ACQ_REL);
  simt::pause(true);
  while (__atomic_load_n(&comers[number], __ATOMIC_ACQUIRE) < (before / kThreads + 1) * kThreads) simt::pause(false);
}

WS_INLINE int rank_in_cluster() { return 0; }
WS_INLINE void meet_cluster() {}
WS_INLINE void publish_writes() {}
template <int kCount> WS_INLINE void keep_registers() {}
template <int kCount> WS_INLINE void take_registers() {}

}  // namespace ws
