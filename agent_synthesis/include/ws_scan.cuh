// Scans: what a thread holds of a row becomes, in place, the running result up to each element.
// The one idea: packs are scanned by threads, packs of a warp by its lanes, warps by their block, blocks by a board in global
// memory; each level only needs to know what comes before it. All joins have a fixed order: results repeat to the bit.
#pragma once
#include "ws_reduce.cuh"

namespace ws {

// A scan of a nest. `Carried_` is the type of what a row carries from chunk to chunk.
template <int kNumber_, class Op_, class T, class Carried_, bool kExclusive_> struct Scan {
  using Op = Op_;
  using Value = T;
  using Carried = Carried_;
  static constexpr int kNumber = kNumber_;
  static constexpr bool kExclusive = kExclusive_;
};
template <class... All> struct ScanList {
  static constexpr int kCount = sizeof...(All);
};

// What the scans of a row carry.
template <class One> struct Carry {
  typename One::Carried before = One::Op::template neutral<typename One::Carried>();
  WS_INLINE typename One::Carried& of(One) { return before; }
};
template <class... All> struct Carries : Carry<All>... {
  using Carry<All>::of...;
};

// ---- a pack, a warp, a block -----------------------------------------------------------------------------

// Running results along a pack (from its last element on, with kReverse); the pack's total.
template <class Op, bool kReverse, class T, int N> WS_INLINE T scan_pack(Lanes<Op, T, N>& pack) {
#pragma unroll
  for (int i = 1; i < N; ++i) {
    const int e = kReverse ? N - 1 - i : i;
    pack.lane[e] = Op::template of<T>(pack.lane[kReverse ? e + 1 : e - 1], pack.lane[e]);
  }
  return pack.lane[kReverse ? 0 : N - 1];
}

// Running results over kLanes neighbouring lanes.
template <class Op, int kLanes, class T> WS_INLINE T scan_lanes(T value) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, distance, kLanes);
    if (threadIdx.x % kLanes >= distance) value = Op::template of<T>(before, value);
  }
  return value;
}

// Scans the packs of kLanes lanes, where pack v of every lane comes before pack v + 1 of any. Leaves what comes before each pack
// in `before`; every lane gets the total.
template <class Op, int kLanes, bool kReverse, class T, int N, int kPacks>
WS_INLINE T scan_warp(Lanes<Op, T, N> (&packs)[kPacks], T (&before)[kPacks]) {
  T total = Op::template neutral<T>();
#pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const T upto = scan_lanes<Op, kLanes>(scan_pack<Op, kReverse>(packs[v]));
    const T left = __shfl_up_sync(kAllLanes, upto, 1, kLanes);
    before[v] = threadIdx.x % kLanes == 0 ? total : Op::template of<T>(total, left);
    total = Op::template of<T>(total, __shfl_sync(kAllLanes, upto, kLanes - 1, kLanes));
  }
  return total;
}

// The same over a block of kWarps warps that have one part each. `box` has kWarps places; it is used again only after another
// barrier of the block.
template <class Op, int kWarps, bool kReverse, class T, int N, int kPacks>
WS_INLINE T scan_block(Lanes<Op, T, N> (&packs)[kPacks], T (&before)[kPacks], T* box) {
  T total = scan_warp<Op, 32, kReverse>(packs, before);
  if constexpr (kWarps > 1) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) box[warp] = total;
    __syncthreads();
    const T upto = scan_lanes<Op, 32>(lane < kWarps ? box[lane] : Op::template neutral<T>());
    total = __shfl_sync(kAllLanes, upto, kWarps - 1);
    const T left = __shfl_sync(kAllLanes, upto, warp == 0 ? 0 : warp - 1);
#pragma unroll
    for (int v = 0; v < kPacks; ++v)
      if (warp > 0) before[v] = Op::template of<T>(left, before[v]);
  }
  return total;
}

// Joins to every element what comes before its pack, and before all packs; with kExclusive leaves the element itself out.
template <class Op, bool kReverse, bool kExclusive, class T, int N, int kPacks>
WS_INLINE void finish_scan(Lanes<Op, T, N> (&packs)[kPacks], const T (&before)[kPacks], T before_all) {
#pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const T start = Op::template of<T>(before_all, before[v]);
    if constexpr (kExclusive) {
#pragma unroll
      for (int i = N - 1; i > 0; --i) {
        const int e = kReverse ? N - 1 - i : i;
        packs[v].lane[e] = Op::template of<T>(start, packs[v].lane[kReverse ? e + 1 : e - 1]);
      }
      packs[v].lane[kReverse ? N - 1 : 0] = start;
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) packs[v].lane[e] = Op::template of<T>(start, packs[v].lane[e]);
    }
  }
}

// ---- columns ---------------------------------------------------------------------------------------------

// Running results down kRows rows of a thread's columns, and over the kDepth threads of a block, kLanes apart, that have the next
// rows. `before` is what comes before the block's rows, and becomes what comes before its next ones. `box` has a place for each
// thread; it is used again only after another barrier of the block.
template <class Op, int kDepth, int kLanes, bool kExclusive, class T, int N, int kRows>
WS_INLINE void scan_columns(Lanes<Op, T, N> (&rows)[kRows], Lanes<Op, T, N>& before, Pack<T, N>* box) {
#pragma unroll
  for (int r = 1; r < kRows; ++r)
#pragma unroll
    for (int e = 0; e < N; ++e) rows[r].lane[e] = Op::template of<T>(rows[r - 1].lane[e], rows[r].lane[e]);
  Lanes<Op, T, N> start = before;
  if constexpr (kDepth == 1) {
    before.join(rows[kRows - 1].pack());
  } else {
    box[threadIdx.x] = rows[kRows - 1].pack();
    __syncthreads();
#pragma unroll 8
    for (int depth = 0; depth < kDepth; ++depth) {
      const Pack<T, N> part = box[depth * kLanes + threadIdx.x % kLanes];
      if (depth < threadIdx.x / kLanes) start.join(part);
      before.join(part);
    }
  }
#pragma unroll
  for (int r = kRows - 1; r >= 0; --r)
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if (kExclusive && r == 0) rows[r].lane[e] = start.lane[e];
      else rows[r].lane[e] = Op::template of<T>(start.lane[e], rows[kExclusive ? r - 1 : r].lane[e]);
    }
}

// ---- blocks of one row -------------------------------------------------------------------------------------

// Where the blocks of a row leave their totals (decoupled look-back: Merrill and Garland 2016). To repeat to the bit, the tiles of
// a group are joined in a fixed tree, and groups in order, whichever block joins them. A board is zero between calls.
template <class Op, class T, int kTiles> struct Board {
  using State = Fold<Op, T>;
  static constexpr int kGroups = (kTiles + 31) / 32;
  Slot<State> tile[kTiles];    // total of a tile
  Slot<State> group[kGroups];  // total of the 32 tiles of a group
  Slot<State> upto[kGroups];   // total of a group and all before it
};

template <class State> WS_INLINE State wait_for(const Slot<State>* slot) {
  uint64 word[Slot<State>::kWords];
  do look_into(slot, word);
  while (!is_complete<State>(word));
  return state_in<State>(word);
}

// What comes before a group: the nearest known total up to a group, on by the totals of the groups after that one. By one warp.
template <class Op, class T, int kTiles> WS_INLINE T before_group(const Board<Op, T, kTiles>* board, int group) {
  using State = Fold<Op, T>;
  const int lane = threadIdx.x % 32, other = group - 1 - lane;
  State state = State::empty();
  unsigned upto = 0, known = 0;  // lanes that know the total up to their group, and those that know some total
  unsigned nearest = 0;
  do {
    uint64 word[Slot<State>::kWords];
    bool has_upto = other < 0, has_total = false;
    if (other >= 0) {
      look_into(board->upto + other, word);
      has_upto = is_complete<State>(word);
      if (!has_upto) {
        look_into(board->group + other, word);
        has_total = is_complete<State>(word);
      }
      if (has_upto || has_total) state = state_in<State>(word);
    }
    upto = __ballot_sync(kAllLanes, has_upto);
    known = __ballot_sync(kAllLanes, has_upto || has_total);
    nearest = upto & (0u - upto);
  } while (nearest == 0 || (known & (nearest - 1)) != nearest - 1);
  const int from = __ffs(nearest) - 1;
  T all = __shfl_sync(kAllLanes, state.value, from);
#pragma unroll
  for (int i = 30; i >= 0; --i) {
    const T total = __shfl_sync(kAllLanes, state.value, i);
    if (i < from) all = Op::template of<T>(all, total);
  }
  return all;
}

// What comes before a tile of a row, whose total is `mine`; by all threads of a block, who get it. One warp looks at the tiles of
// the group and another at the groups, both at once. `box` has two places and is used once. Tiles begin in order.
template <class Op, class T, int kTiles> WS_INLINE T before_tile(T mine, int tile, Board<Op, T, kTiles>* board, T* box) {
  using State = Fold<Op, T>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = tile / 32, place = tile % 32;
  if (warp == 0) {
    if (lane == 0) write_slot(board->tile + tile, State{mine});
    const T other = lane < place ? wait_for(board->tile + group * 32 + lane).value : Op::template neutral<T>();
    __syncwarp();
    const T within = __shfl_sync(kAllLanes, scan_lanes<Op, 32>(other), 31);
    if (place == 31 && lane == 0) write_slot(board->group + group, State{Op::template of<T>(within, mine)});
    if (lane == 0) box[0] = within;
  } else if (warp == 1) {
    const T before = group > 0 ? before_group(board, group) : Op::template neutral<T>();
    if (lane == 0) box[1] = before;
  }
  __syncthreads();
  if (place == 31 && threadIdx.x == 0) {
    const T total = Op::template of<T>(box[0], mine);
    write_slot(board->upto + group, State{Op::template of<T>(box[1], total)});
  }
  return Op::template of<T>(box[1], box[0]);
}

// Leaves a board as a call finds it, by all threads of the last block.
template <class Board_> WS_INLINE void clear_boards(Board_* boards, int count) {
  uint64* word = reinterpret_cast<uint64*>(boards);
  for (int64 i = threadIdx.x; i < int64(sizeof(Board_) / 8) * count; i += blockDim.x) word[i] = 0;
}

}  // namespace ws
