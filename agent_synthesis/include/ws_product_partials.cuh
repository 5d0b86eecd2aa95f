// An end of a product's tiles that reduces their rows to one state each, instead of storing sums.
//
// Such an end has a type `State` (see `ws_reduce.cuh`), `of(layer, m, n, sums)` with the state of a pack, and `partials`, a
// state for each row and tile of columns. A kernel of its own joins them; nothing of the product is stored.
#pragma once
#include "ws_product_shape.cuh"
#include "ws_reduce.cuh"

namespace ws {

template <class P, class Finish, int kRows>
  requires requires { typename Finish::State; }
struct RowEnds<P, Finish, kRows> {
  using State = typename Finish::State;
  State states[kRows];

  WS_INLINE RowEnds() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) states[i] = State::empty();
  }
  WS_INLINE void take(int i, const Finish& finish, int layer, int m, int n, const Pack<float, P::kPack>& sums) {
    states[i] = State::join(states[i], finish.of(layer, m, n, sums));
  }
  // kLanes neighbouring threads have the row, whose columns in this tile begin at `first_column`.
  template <int kLanes> WS_INLINE void leave(int i, const Finish& finish, int layer, int m, int first_column) {
    const State all = State::template over_lanes<kLanes>(states[i]);
    if (threadIdx.x % kLanes == 0 && m < P::kM)
      finish.partials[(layer * static_cast<int64>(P::kM) + m) * P::kColumnTiles + first_column / P::kTileColumns] = all;
  }
};

// What the values of a pack come to.
template <class Op, class T, int N> WS_INLINE T folded(const Pack<T, N>& values) {
  T all = values[0];
#pragma unroll
  for (int e = 1; e < N; ++e) all = Op::template of<T>(all, values[e]);
  return all;
}
template <class T, int N> WS_INLINE ShiftedSum<T, false> shifted(const Pack<T, N>& values) {
  using State = ShiftedSum<T, false>;
  const T greatest = folded<Maximum>(values), about = State::pivot(greatest);
  T sum = T(0);
#pragma unroll
  for (int e = 0; e < N; ++e) sum += State::exponential(values[e] - about);
  return {greatest, sum};
}

// The sum of exp(v - greatest) as logsumexp has it: about 0 where the greatest is infinite.
template <class T> WS_INLINE T sum_about_finite(const ShiftedSum<T, false>& all) {
  return all.greatest == infinity<T>() ? all.greatest : all.sum;
}

}  // namespace ws
