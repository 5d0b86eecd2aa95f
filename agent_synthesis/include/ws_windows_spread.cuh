// Ends of a convolution's tiles that leave a state of each of their channels, where what is reduced goes beyond a tile: space,
// images, groups of channels. A kernel of its own joins the states of a row.
//
// Such an end has
//   Spread                    `SpreadFold<functor>`, or `SpreadMoments`
//   value(batch, m, n, sum)   what a state is of, of an output
//   states                    memory for all of `SpreadStates`
//   kStores                   whether the sums themselves are stored, by `operator()` as of every end
// A tile's mean is found before the squares about it, so that data far from zero keeps its digits; tiles are joined in double.
#pragma once
#include "ws_product_windows.cuh"
#include "ws_reduce.cuh"

namespace ws {

// States in memory: planes of [group][tile][channel], and of moments how many outputs each tile has.
template <class P> struct SpreadStates {
  static constexpr int kTiles = P::tiles(0) * P::tiles(1) * P::tiles(2) * P::tiles(3) * P::kPhases;
  static constexpr int kTilesOfImage = kTiles / P::kShape.images;
  static constexpr int64 kPlane = static_cast<int64>(P::kBatch) * kTiles * P::kN;
  static WS_INLINE int64 place(int layer, int tile, int n) { return (static_cast<int64>(layer) * kTiles + tile) * P::kN + n; }
};

template <class Op> struct SpreadFold {
  using Functor = Op;
  static constexpr bool kIsMoments = false;
};
struct SpreadMoments {
  using Functor = Sum;
  static constexpr bool kIsMoments = true;
};

template <class P, class Finish>
  requires requires { typename Finish::Spread; }
struct WindowTileEnd<P, Finish> {
  using Spread = typename Finish::Spread;
  using State = Fold<typename Spread::Functor, float>;
  using States = SpreadStates<P>;
  static_assert(P::kSlices == 1 && P::tile(3) == 1, "sums are whole, and a tile is of one image");
  static constexpr int kPairThreads = 256, kPairBarrier = 5, kLanes = 8, kOwnRows = kTileRows / kLanes;

  WS_INLINE void take(const typename P::Tile& tile, int rank, int warpgroup, float (&sums)[P::kSums],
                      typename P::Shared& shared, const Finish& finish) {
    if constexpr (Finish::kStores) finish_positions<P>(tile, rank, warpgroup, sums, shared, finish);
    const int quarter = threadIdx.x % 4, own_row = 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4;
    const int first_row = tile.first_row(rank), first_column = tile.first_column() + warpgroup / 2 * P::kOwnColumns;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int m = P::position(first_row + warpgroup % 2 * 64 + own_row + 8 * lower);
#pragma unroll
      for (int i = 0; i < P::kOwnColumns / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = first_column + 8 * i + 2 * quarter + e;
          float& sum = sums[4 * i + 2 * lower + e];
          sum = m >= 0 && n < P::kN ? finish.value(tile.layer, m, n, sum) : 0.0f;
        }
      }
    }
    // A column's eight threads are neighbours; each has every eighth row.
    const int pair = warpgroup / 2, thread = threadIdx.x % 128 + warpgroup % 2 * 128, part = thread % kLanes;
    unsigned is_one = 0;
#pragma unroll 1
    for (int k = 0; k < kOwnRows; ++k) is_one |= (P::position(first_row + part + kLanes * k) >= 0 ? 1u : 0u) << k;
    const float count = fold_lanes<Sum, kLanes>(static_cast<float>(__popc(is_one)));
    const int number = first_row / kTileRows;
    if (Spread::kIsMoments && thread == 0 && first_column == 0 && tile.layer == 0 && number < States::kTiles)
      finish.states[2 * States::kPlane + number] = count;
    Turned* turned = shared.turned + 2 * pair;
#pragma unroll
    for (int begin = 0; begin < P::kOwnColumns; begin += kTurnedColumns) {
      meet_at<kPairThreads>(kPairBarrier + pair);
      turned[warpgroup % 2].take(sums, begin);
      meet_at<kPairThreads>(kPairBarrier + pair);
      const int column = thread / kLanes, n = first_column + begin + column;
      const auto value = [&](int k) { return turned[k / (kOwnRows / 2)].sums[(part + kLanes * k) % 64][column]; };
      State all = State::empty();
#pragma unroll 4
      for (int k = 0; k < kOwnRows; ++k)
        if (is_one >> k & 1) all = State::join(all, {value(k)});
      all = State::template over_lanes<kLanes>(all);
      float squares = 0.0f;
      if constexpr (Spread::kIsMoments) {
        all.value = count > 0.0f ? all.value / count : 0.0f;
#pragma unroll 4
        for (int k = 0; k < kOwnRows; ++k)
          if (is_one >> k & 1) squares += (value(k) - all.value) * (value(k) - all.value);
        squares = fold_lanes<Sum, kLanes>(squares);
      }
      if (part == 0 && n < P::kN && number < States::kTiles) {
        float* to = finish.states + States::place(tile.layer, number, n);
        to[0] = all.value;
        if constexpr (Spread::kIsMoments) to[States::kPlane] = squares;
      }
    }
  }
};

// ---- the kernel that joins the states of a row, a block to each ----------------------------------------------------

constexpr int kSpreadThreads = 256;

// An image, a group and a channel of a row.
struct SpreadColumn {
  int image, layer, n;
};

// Of a row. Of a fold: `mean` is what it comes to.
struct SpreadTotal {
  double mean, count, squares;
};

template <class Op> WS_INLINE double over_block(double (&box)[kSpreadThreads / 32], double mine) {
  mine = fold_lanes<Op, 32>(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = mine;
  __syncthreads();
  double all = box[0];
#pragma unroll
  for (int warp = 1; warp < kSpreadThreads / 32; ++warp) all = Op::template of<double>(all, box[warp]);
  return all;
}

// The states of a row: `column(each)` is one of `count` that it has, each with the tiles of its image.
template <class P, class Column> struct SpreadRow {
  using States = SpreadStates<P>;
  const float* __restrict__ states;
  int count;
  const Column& column;

  // `take(tile, state)` for those of the thread.
  template <class Take> WS_INLINE void each(const Take& take) const {
    for (int64 i = threadIdx.x; i < static_cast<int64>(count) * States::kTilesOfImage; i += kSpreadThreads) {
      const SpreadColumn own = column(static_cast<int>(i % count));
      const int tile = own.image * States::kTilesOfImage + static_cast<int>(i / count);
      take(tile, states + States::place(own.layer, tile, own.n));
    }
  }
};

template <class P, class Spread, class Column>
WS_INLINE SpreadTotal joined_row(double (&box)[kSpreadThreads / 32], const float* __restrict__ states, int count,
                                 const Column& column) {
  constexpr int64 kPlane = SpreadStates<P>::kPlane;
  using Op = typename Spread::Functor;
  const SpreadRow<P, Column> row{states, count, column};
  double all = Op::template neutral<double>(), outputs = 0.0, squares = 0.0;
  if constexpr (!Spread::kIsMoments) {
    row.each([&](int, const float* from) { all = Op::template of<double>(all, from[0]); });
    return {over_block<Op>(box, all), 0.0, 0.0};
  } else {
    const float* counts = states + 2 * kPlane;
    row.each([&](int tile, const float* from) { all += static_cast<double>(from[0]) * counts[tile], outputs += counts[tile]; });
    outputs = over_block<Sum>(box, outputs);
    const double mean = over_block<Sum>(box, all) / outputs;
    row.each([&](int tile, const float* from) { squares += from[kPlane] + (from[0] - mean) * (from[0] - mean) * counts[tile]; });
    return {mean, outputs, over_block<Sum>(box, squares)};
  }
}

}  // namespace ws
