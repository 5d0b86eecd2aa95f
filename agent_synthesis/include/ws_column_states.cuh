// What tiles of a product leave of each column for its mean and variance, and how a column's tiles are joined.
//
// Sums are taken about a value near the column's, so that data far from zero keeps its digits, and in a fixed order.
// An `End` here has `stored(m, n)`, the stored value as a float, and `states`, room for all of `ColumnStates`.
#pragma once
#include "ws_product_shape.cuh"
#include "ws_math.cuh"

namespace ws {

// Of a column's rows in one tile: their mean is `origin` + `apart`, `squares` the sum of squares about it.
struct ColumnState {
  float origin, apart, squares;
};

// Rows of a product in so many that begin at one.
template <class P> WS_INLINE int rows_inside(int first, int rows) { return max(0, min(rows, P::kM - first)); }

// States in memory, in three planes, each of them columns beside each other and tiles below each other.
template <class P> struct ColumnStates {
  static constexpr int kTiles = (P::kM + kTileRows - 1) / kTileRows;
  static constexpr int64 kPlane = static_cast<int64>(kTiles) * P::kN;

  static WS_INLINE int rows_of(int tile) { return rows_inside<P>(tile * kTileRows, kTileRows); }
  static WS_INLINE void write(float* states, int tile, int n, const ColumnState& state) {
    states += static_cast<int64>(tile) * P::kN + n;
    states[0] = state.origin, states[kPlane] = state.apart, states[2 * kPlane] = state.squares;
  }
  static WS_INLINE ColumnState read(const float* states, int tile, int n) {
    states += static_cast<int64>(tile) * P::kN + n;
    return {states[0], states[kPlane], states[2 * kPlane]};
  }
};

// What sums are taken about, given an element.
WS_INLINE float origin_of(float element) { return ws::isinf(element) ? 0.0f : element; }

// The states of a tile that was stored, by a block of at least as many threads as there are columns, all of them here.
template <class P, class End> WS_INLINE void states_of_stored(const End& end, int first_row, int first_column, int columns) {
  __syncthreads();
  const int n = first_column + threadIdx.x, rows = ColumnStates<P>::rows_of(first_row / kTileRows);
  if (static_cast<int>(threadIdx.x) >= columns || n >= P::kN) return;
  const float origin = origin_of(end.stored(first_row, n));
  double sum = 0.0, squares = 0.0;
  for (int i = 0; i < rows; ++i) sum += end.stored(first_row + i, n) - origin;
  const float apart = static_cast<float>(sum / rows);
  for (int i = 0; i < rows; ++i) {
    const double distance = end.stored(first_row + i, n) - origin - apart;
    squares += distance * distance;
  }
  ColumnStates<P>::write(end.states, first_row / kTileRows, n, {origin, apart, static_cast<float>(squares)});
}

constexpr int kJoinThreads = 256;
constexpr int kJoinedColumns = 32;  // of a block: a warp reads tiles of all of them, every eighth

// Of a whole column.
struct ColumnTotal {
  double mean, squares;
};

// The sum of the warps' values for the thread's column, in the order of warps; every thread gets it.
WS_INLINE double over_warps(double mine) {
  __shared__ double box[kJoinThreads / kJoinedColumns][kJoinedColumns];
  const int lane = threadIdx.x % kJoinedColumns;
  __syncthreads();
  box[threadIdx.x / kJoinedColumns][lane] = mine;
  __syncthreads();
  double all = 0.0;
#pragma unroll
  for (int warp = 0; warp < kJoinThreads / kJoinedColumns; ++warp) all += box[warp][lane];
  return all;
}

// The statistics of column n, which is that of all threads of the block that have one place in their warps.
template <class P> WS_INLINE ColumnTotal joined_column(const float* states, int n) {
  using States = ColumnStates<P>;
  constexpr int kWarps = kJoinThreads / kJoinedColumns;
  const int first = threadIdx.x / kJoinedColumns, end = n < P::kN ? States::kTiles : 0;
  double sum = 0.0, squares = 0.0;
#pragma unroll 4
  for (int tile = first; tile < end; tile += kWarps) {
    const ColumnState state = States::read(states, tile, n);
    sum += (static_cast<double>(state.origin) + state.apart) * States::rows_of(tile);
  }
  const double mean = over_warps(sum) / P::kM;
#pragma unroll 4
  for (int tile = first; tile < end; tile += kWarps) {
    const ColumnState state = States::read(states, tile, n);
    const double distance = static_cast<double>(state.origin) + state.apart - mean;
    squares += state.squares + States::rows_of(tile) * distance * distance;
  }
  return {mean, over_warps(squares)};
}

}  // namespace ws
