// Matrix products in plain floats, of any strides: those that are too small for tensor cores, and the tiles of a product of
// halves with a row or column whose scale is NaN (see `ws_split.cuh`). Each sum is made of sums over 256 elements of depth,
// as accurate as a library's.
#pragma once
#include "ws_product_shape.cuh"

namespace ws {

constexpr int kSimtThreads = 256;
constexpr int kSimtDepth = 16;

WS_INLINE float widen(float value) { return value; }

// Rows of an operand at depths [begin, begin + 16), to shared memory; zeros outside. Neighbours in memory go to neighbouring
// threads.
template <Operand kOperand, int kTile, class Element>
WS_INLINE void load_tile(const Element* __restrict__ operand, int first, int begin, int depth,
                         float (&tile)[kSimtDepth][kTile + 4]) {
#pragma unroll
  for (int i = threadIdx.x; i < kTile * kSimtDepth; i += kSimtThreads) {
    const int inside = kOperand.row_stride == 1 ? i % kTile : i / kSimtDepth;
    const int step = kOperand.row_stride == 1 ? i / kTile : i % kSimtDepth;
    const int row = first + inside, k = begin + step;
    const bool is_inside = k < depth && row < kOperand.rows;
    tile[step][inside] = is_inside ? widen(operand[row * kOperand.row_stride + k * kOperand.depth_stride]) : 0.0f;
  }
}

// One tile; a thread has rows 16 apart, and packs of columns side by side with the next thread's.
template <class P, Operand kLeft, Operand kRight, int kRows, int kColumns, class Element, class Finish>
WS_INLINE void multiply_floats(const Element* __restrict__ left, const Element* __restrict__ right, int layer,
                               int first_row, int first_column, const Finish& finish) {
  constexpr int kDown = kRows / 16, kBeside = kColumns / 16, kChunk = 256;
  static_assert(kBeside % P::kPack == 0, "a thread's columns are whole packs");
  __shared__ float left_tile[kSimtDepth][kRows + 4], right_tile[kSimtDepth][kColumns + 4];
  left += Split<kLeft>::layer_at(layer);
  right += Split<kRight>::layer_at(layer);
  const int depth = P::depth_of(layer);
  const int row_inside = threadIdx.x / 16, column_inside = P::kPack * (threadIdx.x % 16);
  float totals[kDown][kBeside] = {}, sums[kDown][kBeside] = {};
  for (int begin = 0; begin < depth; begin += kSimtDepth) {
    __syncthreads();
    load_tile<kLeft, kRows>(left, first_row, begin, depth, left_tile);
    load_tile<kRight, kColumns>(right, first_column, begin, depth, right_tile);
    __syncthreads();
    // Only as deep as the operands are: zeros beyond would be products with infinities.
    for (int k = 0; k < min(kSimtDepth, depth - begin); ++k) {
      float a[kDown], b[kBeside];
#pragma unroll
      for (int i = 0; i < kDown; ++i) a[i] = left_tile[k][row_inside + 16 * i];
#pragma unroll
      for (int j = 0; j < kBeside; ++j) b[j] = right_tile[k][column_inside + 16 * P::kPack * (j / P::kPack) + j % P::kPack];
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kBeside; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    if ((begin + kSimtDepth) % kChunk == 0 || begin + kSimtDepth >= depth) {
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kBeside; ++j) totals[i][j] += sums[i][j], sums[i][j] = 0.0f;
      }
    }
  }
  RowEnds<P, Finish, kDown> rows;
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
    const int row = first_row + row_inside + 16 * i;
#pragma unroll
    for (int j = 0; j < kBeside; j += P::kPack) {
      const int column = first_column + column_inside + 16 * j;
      if (row >= P::kM || column >= P::kN) continue;
      Pack<float, P::kPack> pack;
#pragma unroll
      for (int e = 0; e < P::kPack; ++e) pack[e] = totals[i][j + e];
      rows.take(i, finish, layer, row, column, pack);
    }
    rows.template leave<16>(i, finish, layer, row, first_column);
  }
}

// A whole product, a block a tile.
template <class P, Operand kLeft, Operand kRight, int kRows, class Element, class Finish>
WS_INLINE void multiply_small(const Element* __restrict__ left, const Element* __restrict__ right, const Finish& finish) {
  constexpr int kDown = (P::kM + kRows - 1) / kRows, kAside = P::kColumnTiles;
  const int layer = blockIdx.x / (kDown * kAside), row = blockIdx.x / kAside % kDown, column = blockIdx.x % kAside;
  multiply_floats<P, kLeft, kRight, kRows, P::kTileColumns>(left, right, layer, row * kRows, column * P::kTileColumns, finish);
}

WS_INLINE bool any_nan(const float* values, int count) {
  bool found = false;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += kSimtThreads) found |= values[i] != values[i];
  return __syncthreads_or(found);
}

// Launched with a block an SM; where every row and column has a scale, as is usual, all end at once. The last block to
// look clears the marks for the next call.
template <class P, Operand kLeft, Operand kRight, class Finish>
WS_INLINE void repair(const float* __restrict__ left, const float* __restrict__ right, const float* left_roots,
                      const float* right_roots, Marks* marks, const Finish& finish) {
  __shared__ bool marked;
  if (threadIdx.x == 0) {
    marked = marks->marked;
    if (ptx::increment(&marks->looked) == gridDim.x - 1) *marks = {0, 0};
  }
  __syncthreads();
  if (!marked) return;
  constexpr int kTile = 128, kDown = (P::kM + kTile - 1) / kTile, kAside = (P::kN + kTile - 1) / kTile;
  for (int tile = blockIdx.x; tile < P::kLayers * kDown * kAside; tile += gridDim.x) {
    const int layer = tile / (kDown * kAside);
    const int row = tile / kAside % kDown * kTile, column = tile % kAside * kTile;
    const bool rows_marked = any_nan(left_roots + layer * static_cast<int64>(P::kM) + row, min(kTile, P::kM - row));
    const bool columns_marked = any_nan(right_roots + layer * static_cast<int64>(P::kN) + column, min(kTile, P::kN - column));
    if (rows_marked || columns_marked) {
      multiply_floats<P, kLeft, kRight, kTile, kTile>(left, right, layer, row, column, finish);
      if constexpr (requires { finish.repaired(row, column, kTile); }) finish.repaired(row, column, kTile);
    }
  }
}

}  // namespace ws
