// Partial results of reductions and how they travel: between the lanes of a warp, the warps of a block, the blocks of a
// cluster and the blocks of a grid. The one idea: a thread, a warp and a block all summarise elements as the same state, so
// every exchange is the same merge. Merges run in a fixed order: results repeat to the bit. Nothing here knows a row's layout.
#pragma once
#include "ws_math.cuh"

namespace ws {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  template <class T> static WS_INLINE T neutral() { return T(0); }
  template <class T> static WS_INLINE T of(T a, T b) {
    if constexpr (is_real<T>) return a + b;
    else return wrap_add(a, b);
  }
};
struct Product {
  template <class T> static WS_INLINE T neutral() { return T(1); }
  template <class T> static WS_INLINE T of(T a, T b) {
    if constexpr (is_real<T>) return a * b;
    else return wrap_mul(a, b);
  }
};
template <class T> WS_INLINE T least() {
  if constexpr (is_real<T>) return -infinity<T>();
  else if constexpr (is_signed<T>) return static_cast<T>(1ull << (8 * sizeof(T) - 1));
  else return T(0);
}
struct Maximum {
  template <class T> static WS_INLINE T neutral() { return least<T>(); }
  template <class T> static WS_INLINE T of(T a, T b) { return ws::max<T>(a, b); }
};
struct Minimum {
  template <class T> static WS_INLINE T neutral() {
    if constexpr (is_real<T>) return infinity<T>();
    else return static_cast<T>(~least<T>());
  }
  template <class T> static WS_INLINE T of(T a, T b) { return ws::min<T>(a, b); }
};


// A value and where it stands. Of equal values the least position wins, and the first NaN beats all, as PyTorch has it: so the
// order of joins does not matter.
template <class T, class I> struct At {
  T value;
  I position;
};
template <class Better> struct ArgExtreme {
  template <class A> static WS_INLINE A neutral() {
    return {Better::template neutral<decltype(A::value)>(), Minimum::neutral<decltype(A::position)>()};
  }
  template <class A> static WS_INLINE A of(A a, A b) {
    const bool a_is_nan = ws::isnan(a.value), b_is_nan = ws::isnan(b.value);
    const bool tie = a.value == b.value || (a_is_nan && b_is_nan);
    const bool b_is_better = Better::is(b.value, a.value) || (b_is_nan && !a_is_nan);
    return b_is_better || (tie && b.position < a.position) ? b : a;
  }
};
struct Greater : Maximum {
  template <class T> static WS_INLINE bool is(T a, T b) { return a > b; }
};
struct Less : Minimum {
  template <class T> static WS_INLINE bool is(T a, T b) { return a < b; }
};
using ArgMaximum = ArgExtreme<Greater>;
using ArgMinimum = ArgExtreme<Less>;

template <class T> WS_INLINE T from_lane_xor(T value, int lane) { return __shfl_xor_sync(kAllLanes, value, lane); }
template <class T, class I> WS_INLINE At<T, I> from_lane_xor(At<T, I> value, int lane) {
  return {from_lane_xor(value.value, lane), from_lane_xor(value.position, lane)};
}

template <class Op, int kOver, class T> WS_INLINE T fold_lanes(T value) {
#pragma unroll
  for (int lane = kOver / 2; lane > 0; lane /= 2) value = Op::template of<T>(value, from_lane_xor(value, lane));
  return value;
}

// ---- states: `empty()`, `join` of two, `over_lanes` of kOver lanes (every lane gets the same) --------

// One reduction.
template <class Op, class T> struct Fold {
  T value;
  static WS_INLINE Fold empty() { return {Op::template neutral<T>()}; }
  static WS_INLINE Fold join(Fold a, Fold b) { return {Op::template of<T>(a.value, b.value)}; }
  template <int kOver> static WS_INLINE Fold over_lanes(Fold mine) { return {fold_lanes<Op, kOver>(mine.value)}; }
};

// The maximum of v, and the sum of exp(v - maximum) (times a weight). The sum of an empty part is 0.
// kFast: use fast_exp.
template <class T, bool kFast> struct ShiftedSum {
  T greatest, sum;
  static WS_INLINE T exponential(T x) { return kFast ? fast_exp(x) : ws::exp(x); }
  // What to subtract instead of a part's own maximum, so that a part of only -inf sums to 0 and not to NaN.
  static WS_INLINE T pivot(T greatest) { return greatest == -infinity<T>() ? T(0) : greatest; }
  // The factor that brings a sum about `from` to one about `to`.
  static WS_INLINE T factor(T from, T to) { return from == -infinity<T>() ? T(0) : exponential(from - to); }
  static WS_INLINE ShiftedSum empty() { return {-infinity<T>(), T(0)}; }
  static WS_INLINE ShiftedSum join(ShiftedSum a, ShiftedSum b) {
    const T greatest = ws::max(a.greatest, b.greatest);
    return {greatest, a.sum * factor(a.greatest, greatest) + b.sum * factor(b.greatest, greatest)};
  }
  template <int kOver> static WS_INLINE ShiftedSum over_lanes(ShiftedSum mine) {
    const T greatest = fold_lanes<Maximum, kOver>(mine.greatest);
    return {greatest, fold_lanes<Sum, kOver>(mine.sum * factor(mine.greatest, greatest))};
  }
  // Of a whole row: where all of it is -inf the sum is of exp(-inf + inf).
  WS_INLINE T total() const { return greatest == -infinity<T>() ? quiet_nan<T>() : sum; }
};

// Mean, count, and sum of squares about the mean (Chan, Golub, LeVeque 1979).
// kEven: the lanes of an exchange have equally many elements each, so counts need not travel. M: the type of the mean.
template <class T, bool kEven = false, class M = T> struct Moments {
  M mean;
  T count, squares;
  static WS_INLINE Moments empty() { return {M(0), T(0), T(0)}; }
  static WS_INLINE Moments join(Moments a, Moments b) {
    const T count = a.count + b.count;
    if (count == T(0)) return a;
    const M apart = b.mean - a.mean;
    const T near = static_cast<T>(apart), share = b.count / count;
    return {a.mean + apart * share, count, a.squares + b.squares + near * near * a.count * share};
  }
  template <int kOver> static WS_INLINE Moments over_lanes(Moments mine) {
    T count;
    M mean;
    if constexpr (kEven) {
      // About one of the means, so that a large common offset costs no bits.
      const M about = __shfl_sync(kAllLanes, mine.mean, 0, kOver);
      count = mine.count * kOver;
      mean = about + fold_lanes<Sum, kOver>(mine.mean - about) * (M(1) / kOver);
    } else {
      // The mean in two steps: what the first rounded away, the second adds back.
      count = fold_lanes<Sum, kOver>(mine.count);
      const M share = count > T(0) ? M(mine.count) / count : M(0);
      const M about = fold_lanes<Sum, kOver>(share * mine.mean);
      mean = about + fold_lanes<Sum, kOver>(share * (mine.mean - about));
    }
    const T apart = static_cast<T>(mine.mean - mean);
    return {mean, count, fold_lanes<Sum, kOver>(mine.squares + mine.count * apart * apart)};
  }
};

// `all` holds `count` states, of as many elements each as `next` where states are even.
template <class State> WS_INLINE State join_next(const State& all, const State& next, int count) {
  (void)count;
  return State::join(all, next);
}
template <class T, class M>
WS_INLINE Moments<T, true, M> join_next(const Moments<T, true, M>& all, const Moments<T, true, M>& next, int count) {
  const M apart = next.mean - all.mean;
  const T near = static_cast<T>(apart), share = T(1) / (count + 1);  // a constant where the loop is unrolled
  return {all.mean + apart * share, all.count + next.count, all.squares + next.squares + near * near * all.count * share};
}

// Two states that travel together.
template <class First, class Second> struct Both {
  First first;
  Second second;
  static WS_INLINE Both empty() { return {First::empty(), Second::empty()}; }
  static WS_INLINE Both join(Both a, Both b) { return {First::join(a.first, b.first), Second::join(a.second, b.second)}; }
  template <int kOver> static WS_INLINE Both over_lanes(Both mine) {
    return {First::template over_lanes<kOver>(mine.first), Second::template over_lanes<kOver>(mine.second)};
  }
};

// A thread's running results of one reduction, one for each element of a pack, so that sums do not wait for each other.
template <class Op, class T, int N> struct Lanes {
  T lane[N];
  WS_INLINE Lanes() {
#pragma unroll
    for (int e = 0; e < N; ++e) lane[e] = Op::template neutral<T>();
  }
  WS_INLINE void take(int e, T value) { lane[e] = Op::template of<T>(lane[e], value); }
  WS_INLINE void join(const Pack<T, N>& other) {
#pragma unroll
    for (int e = 0; e < N; ++e) take(e, other[e]);
  }
  WS_INLINE Pack<T, N> pack() const {
    Pack<T, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result[e] = lane[e];
    return result;
  }
  WS_INLINE T folded() const {
    T part[N];
#pragma unroll
    for (int e = 0; e < N; ++e) part[e] = lane[e];
#pragma unroll
    for (int width = N / 2; width > 0; width /= 2)
#pragma unroll
      for (int e = 0; e < width; ++e) part[e] = Op::template of<T>(part[e], part[e + width]);
    return part[0];
  }
};

// ---- exchanges -----------------------------------------------------------------------------------------

// Merge of kCount states that lie one after the other, by every warp for itself.
template <int kCount, class State> WS_INLINE State over_array(const State* states) {
  const int lane = threadIdx.x % 32;
  if constexpr (kCount <= 32 && (kCount & (kCount - 1)) == 0) {
    return State::template over_lanes<kCount>(states[lane % kCount]);
  } else {
    State mine = State::empty();
#pragma unroll
    for (int i = 0; i < (kCount + 31) / 32; ++i)
      if (i * 32 + lane < kCount) mine = i == 0 ? states[lane] : join_next(mine, states[i * 32 + lane], i);
    __syncwarp();
    return State::template over_lanes<32>(mine);
  }
}

// Over a block of kWarps warps; every thread gets the result. `box` has kWarps places and is used once between barriers.
template <int kWarps, class State> WS_INLINE State over_block(State mine, State* box) {
  mine = State::template over_lanes<32>(mine);
  if constexpr (kWarps > 1) {
    if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = over_array<kWarps>(box);
  }
  return mine;
}

// Thread-block clusters.
WS_INLINE void cluster_arrive() { ptx::cluster_arrive(); }
WS_INLINE void cluster_wait() { ptx::cluster_wait(); }

template <class State> WS_INLINE void store_to_rank(State* place, int rank, const State& state) {
  static_assert(sizeof(State) % 4 == 0, "states are whole words");
  const ptx::ClusterAddress remote = ptx::in_block_of_cluster(ptx::shared_address(place), rank);
#pragma unroll
  for (int i = 0; i < int(sizeof(State) / 4); ++i)
    ptx::store_to_cluster(remote + 4 * i, reinterpret_cast<const unsigned*>(&state)[i]);
}

// Over a cluster; every thread gets the result. `box` has kBlocks * kWarps places in each block and is used once.
// Every block of the cluster has begun (cluster_arrive, cluster_wait).
template <int kWarps, int kBlocks, class State> WS_INLINE State over_cluster(State mine, State* box, int rank) {
  mine = State::template over_lanes<32>(mine);
  const int lane = threadIdx.x % 32;
  if (lane < kBlocks) store_to_rank(box + rank * kWarps + threadIdx.x / 32, lane, mine);
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  return over_array<kWarps * kBlocks>(box);
}

// A slot in global memory carries a state from one block to one other of its row: each 32-bit word travels with a flag in one
// 64-bit word, so there is no fence and no second round trip. A row of kCount blocks has kCount mailboxes of kCount slots; the
// block that reads a slot clears it, so all slots are zero between calls, and no block waits for that.
template <class State> struct Slot {
  static constexpr int kWords = (sizeof(State) / 4 + 1) / 2 * 2;
  uint64 word[kWords];
};

template <class State> WS_INLINE void write_slot(Slot<State>* slot, const State& state, unsigned flag = 1) {
  uint64 word[Slot<State>::kWords];
#pragma unroll
  for (int i = 0; i < Slot<State>::kWords; ++i)
    word[i] = uint64(flag) << 32 | (i < int(sizeof(State) / 4) ? reinterpret_cast<const unsigned*>(&state)[i] : 0u);
#pragma unroll
  for (int i = 0; i < Slot<State>::kWords; i += 2)
    ptx::store_relaxed(slot->word + i, word[i], word[i + 1]);
}

// Reads all words of a slot at once, as they are now.
template <class State> WS_INLINE void look_into(const Slot<State>* slot, uint64* word) {
#pragma unroll
  for (int i = 0; i < Slot<State>::kWords; i += 2)
    ptx::load_relaxed(slot->word + i, word[i], word[i + 1]);
}

// Whether the words carry the flag, all of them.
template <class State> WS_INLINE bool is_complete(const uint64* word, unsigned flag = 1) {
  bool complete = true;
#pragma unroll
  for (int i = 0; i < Slot<State>::kWords; ++i) complete &= word[i] >> 32 == flag;
  return complete;
}

template <class State> WS_INLINE State state_in(const uint64* word) {
  State state;
#pragma unroll
  for (int i = 0; i < int(sizeof(State) / 4); ++i) reinterpret_cast<unsigned*>(&state)[i] = static_cast<unsigned>(word[i]);
  return state;
}

template <class State> WS_INLINE void clear_slot(Slot<State>* slot) {
#pragma unroll
  for (int i = 0; i < Slot<State>::kWords; i += 2)
    ptx::store_relaxed(slot->word + i, 0, 0);
}

// Lanes of a warp over which kCount states are merged, one or more a lane.
template <int kCount> inline constexpr int lanes_of = kCount < 32 && (kCount & (kCount - 1)) == 0 ? kCount : 32;

// Over the kCount blocks of a row, all of them resident: the row's state, in the first lanes of the one warp of each block that
// calls it. `mailboxes` are the row's.
template <int kCount, class State> WS_INLINE State over_blocks(const State& mine, Slot<State>* mailboxes, int rank) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < (kCount + 31) / 32; ++i)
    if (i * 32 + lane < kCount) write_slot(mailboxes + (i * 32 + lane) * kCount + rank, mine);
  State all = State::empty();
#pragma unroll
  for (int i = 0; i < (kCount + 31) / 32; ++i) {
    if (i * 32 + lane < kCount) {
      Slot<State>* slot = mailboxes + rank * kCount + i * 32 + lane;
      uint64 word[Slot<State>::kWords];
      do look_into(slot, word);
      while (!is_complete<State>(word));
      clear_slot(slot);
      const State other = state_in<State>(word);
      all = i == 0 ? other : join_next(all, other, i);
    }
  }
  __syncwarp();
  return State::template over_lanes<lanes_of<kCount>>(all);
}

// Counts an arrival after all that this block did; the number of arrivals before it.
WS_INLINE unsigned arrive(unsigned* counter) { return ptx::increment(counter); }

}  // namespace ws
