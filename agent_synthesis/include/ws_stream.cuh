// Rows that stream through shared memory: asynchronous copies, and exchanges whose answer is fetched some rows later.
// The one idea: while a row's blocks agree on its result, the next rows are on their way. Nothing here knows a row's layout.
#pragma once
#include "ws_reduce.cuh"

namespace ws {

// Copies a pack to the caller's place in shared memory; it is there once its group has been waited for.
template <Reuse kReuse = kOnce, class T, int N> WS_INLINE void copy_async(Pack<T, N>* to, const T* from) {
  constexpr int kBytes = sizeof(T) * N;
  static_assert(kBytes % 16 == 0, "asynchronous copies are of 16 bytes");
  const ptx::SharedAddress place = ptx::shared_address(to);
#pragma unroll
  for (int i = 0; i < kBytes / 16; ++i) {
    const auto* word = reinterpret_cast<const uint4*>(from) + i;
    if constexpr (kReuse == kLast) ptx::copy_async_16_last(place + 16 * i, word);
    else ptx::copy_async_16(place + 16 * i, word);
  }
}
// Copies one element, of 4 or 8 bytes, to the caller's place.
template <class T> WS_INLINE void copy_async(T* to, const T* from) {
  ptx::copy_async<sizeof(T)>(ptx::shared_address(to), from);
}
// Of a pack that begins before a row of kColumns elements, or ends behind it, what lies inside; otherwise as load_inside.
template <int kColumns, class T, int N>
WS_INLINE void copy_inside_async(Pack<T, N>* to, const T* from, int begin, bool whole = false) {
  if (whole || (begin >= 0 && begin + N <= kColumns)) {
    copy_async(to, from);
    return;
  }
#pragma unroll
  for (int e = 0; e < N; ++e) {
    if (!is_inside<kColumns>(begin + e)) continue;
    if constexpr (sizeof(T) >= 4) copy_async(&to->lane[e], from + e);
    else to->lane[e] = from[e];
  }
}
// Ends a group of copies; it may be empty.
WS_INLINE void commit_copies() { ptx::commit_copies(); }
// Waits until at most kPending of the caller's groups, the youngest, are under way.
template <int kPending> WS_INLINE void wait_copies() { ptx::wait_copies<kPending>(); }

// A pack that the next row needs again, unless this is the `last`: until then the second-level cache keeps it before all else.
template <int N, class T> WS_INLINE Pack<T, N> load_again(const T* from, bool last) {
  constexpr int kBytes = sizeof(T) * N;
  if constexpr (kBytes % 16 != 0) {
    return load<N, kShared>(from);
  } else {
    Pack<T, N> pack;
    const uint64 policy = last ? ptx::last_use() : ptx::used_again();
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(&pack)[i] = ptx::load_constant_by(reinterpret_cast<const uint4*>(from) + i, policy);
    return pack;
  }
}

// Mailboxes of one turn: kCount for each of the kCount blocks of a row. A slot's flag is the turn that it belongs to, so slots
// are used again without being cleared; a call clears its own at its end. By one warp.
template <int kCount, class State>
WS_INLINE void send_to_blocks(const State& mine, Slot<State>* mailboxes, int rank, unsigned turn) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < (kCount + 31) / 32; ++i)
    if (i * 32 + lane < kCount) write_slot(mailboxes + (i * 32 + lane) * kCount + rank, mine, turn + 1);
}

// What lay in a lane's slots when they were looked at.
template <int kCount, class State> struct Mail {
  static constexpr int kSlots = (kCount + 31) / 32;
  uint64 word[kSlots][Slot<State>::kWords];
};

// Looks without waiting, so that the answer is on its way while the warp does something else.
template <int kCount, class State> WS_INLINE Mail<kCount, State> look(const Slot<State>* mailboxes, int rank) {
  const int lane = threadIdx.x % 32;
  Mail<kCount, State> mail;
#pragma unroll
  for (int i = 0; i < mail.kSlots; ++i)
    if (i * 32 + lane < kCount) look_into(mailboxes + rank * kCount + i * 32 + lane, mail.word[i]);
  return mail;
}

// The row's state, in the first lanes of the warp; waits for what had not come when the warp looked.
template <int kCount, class State>
WS_INLINE State take_from_blocks(Mail<kCount, State>& mail, const Slot<State>* mailboxes, int rank, unsigned turn) {
  const int lane = threadIdx.x % 32;
  State all = State::empty();
#pragma unroll
  for (int i = 0; i < mail.kSlots; ++i) {
    if (i * 32 + lane < kCount) {
      const Slot<State>* slot = mailboxes + rank * kCount + i * 32 + lane;
      while (!is_complete<State>(mail.word[i], turn + 1)) look_into(slot, mail.word[i]);
      const State other = state_in<State>(mail.word[i]);
      all = i == 0 ? other : join_next(all, other, i);
    }
  }
  __syncwarp();
  return State::template over_lanes<lanes_of<kCount>>(all);
}

// Leaves a block's mailboxes of one turn as a call finds them: zero. No block writes there any more.
template <int kCount, class State> WS_INLINE void clear_mailboxes(Slot<State>* mailboxes, int rank) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < (kCount + 31) / 32; ++i)
    if (i * 32 + lane < kCount) clear_slot(mailboxes + rank * kCount + i * 32 + lane);
}

// Over the kCount blocks of a row, all of them resident: a block tells the others its state of the row, and hears the row's,
// every thread of it, as late as it likes. A block has one slot, which all read; its flag is the row's turn. Two sets of slots
// take turns: who writes to one has heard all of the other, as have all who wrote there. As few warps as have a lane for each
// block listen to the others. `box` has kWarps places, one such for telling and one for hearing.
template <int kWarps, class State>
WS_INLINE void tell_team(const State& mine, State* box, Slot<State>* slots, int rank, unsigned turn) {
  const State block = over_block<kWarps>(mine, box);
  if (threadIdx.x == 0) write_slot(slots + rank, block, turn);
}
template <int kWarps, int kCount, class State>
WS_INLINE State hear_team(State* box, const Slot<State>* slots, unsigned turn) {
  constexpr int kListeners = (kCount + 31) / 32 < kWarps ? (kCount + 31) / 32 : kWarps;
  if (threadIdx.x < 32 * kListeners) {
    State all = State::empty();
    for (int from = threadIdx.x; from < kCount; from += 32 * kListeners) {
      uint64 word[Slot<State>::kWords];
      do look_into(slots + from, word);
      while (!is_complete<State>(word, turn));
      const State other = state_in<State>(word);
      all = from < 32 * kListeners ? other : State::join(all, other);
    }
    __syncwarp();
    all = State::template over_lanes<lanes_of<kCount>>(all);
    if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = all;
  }
  __syncthreads();
  return kListeners == 1 ? box[0] : over_array<kListeners>(box);
}
template <int kWarps, int kCount, class State>
WS_INLINE State over_team(const State& mine, State (*box)[kWarps], Slot<State>* slots, int rank, unsigned turn) {
  tell_team<kWarps>(mine, box[0], slots, rank, turn);
  return hear_team<kWarps, kCount>(box[1], slots, turn);
}

// Leaves a team's two sets of slots as a call finds them, zero: by the last of its kCount blocks that gets here.
template <int kCount, class State> WS_INLINE void clear_slots(Slot<State>* slots, uint64* arrivals) {
  __shared__ bool is_last;
  __syncthreads();
  auto* counter = reinterpret_cast<unsigned*>(arrivals);
  if (threadIdx.x == 0) is_last = arrive(counter) == kCount - 1;
  __syncthreads();
  if (is_last) {
    for (int slot = threadIdx.x; slot < 2 * kCount; slot += blockDim.x) clear_slot(slots + slot);
    if (threadIdx.x == 0) *counter = 0;
  }
}

}  // namespace ws
