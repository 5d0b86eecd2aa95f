// The tiles of a product that tensor cores could not make: those with a row or column whose scale is NaN (see
// `ws_split.cuh`). Plain floats, any strides; each sum is made of sums over 256 elements of k, as accurate as a library's.
#pragma once
#include "ws_product.cuh"

namespace ws {

// Steps between neighbours of an operand, in elements.
struct Strides {
  int64 batch, row, depth;
};

constexpr int kRepairThreads = 256;

WS_INLINE bool any_nan(const float* values, int count) {
  bool found = false;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += kRepairThreads) found |= values[i] != values[i];
  return __syncthreads_or(found);
}

// One 128 x 128 tile.
template <class P, Strides kLeft, Strides kRight, class Finish>
WS_INLINE void repair_tile(const float* __restrict__ left, const float* __restrict__ right, int batch, int first_row,
                           int first_column, const Finish& finish) {
  constexpr int kTile = 128, kDepth = 16, kEach = 8, kChunk = 256;
  __shared__ float left_tile[kDepth][kTile + 4], right_tile[kDepth][kTile + 4];
  left += batch * kLeft.batch;
  right += batch * kRight.batch;
  // Eight rows 16 apart, and four pairs of columns 32 apart, so that neighbours read different banks.
  const int row_inside = threadIdx.x / 16, column_inside = 2 * (threadIdx.x % 16);
  float totals[kEach][kEach] = {}, sums[kEach][kEach] = {};
  for (int begin = 0; begin < P::kK; begin += kDepth) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * kDepth; i += kRepairThreads) {
      const int k = begin + i % kDepth, at = i / kDepth;
      const int row = first_row + at, column = first_column + at;
      left_tile[i % kDepth][at] = k < P::kK && row < P::kM ? left[row * kLeft.row + k * kLeft.depth] : 0.0f;
      right_tile[i % kDepth][at] = k < P::kK && column < P::kN ? right[column * kRight.row + k * kRight.depth] : 0.0f;
    }
    __syncthreads();
    // Only as deep as the operands are: zeros beyond would be products with infinities.
    for (int k = 0; k < min(kDepth, P::kK - begin); ++k) {
      float a[kEach], b[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        a[i] = left_tile[k][row_inside + 16 * i];
        b[i] = right_tile[k][column_inside + 32 * (i / 2) + i % 2];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    if ((begin + kDepth) % kChunk == 0 || begin + kDepth >= P::kK) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) totals[i][j] += sums[i][j], sums[i][j] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = first_row + row_inside + 16 * i;
#pragma unroll
    for (int j = 0; j < kEach; j += 2) {
      const int column = first_column + column_inside + 16 * j;
      if (row < P::kM && column < P::kN) finish(batch, row, column, Pack<float, 2>{totals[i][j], totals[i][j + 1]});
    }
  }
}

// Launched with a block an SM; where every row and column has a scale, as is usual, all end after reading the scales.
template <class P, Strides kLeft, Strides kRight, class Finish>
WS_INLINE void repair(const float* __restrict__ left, const float* __restrict__ right, const float* left_roots,
                      const float* right_roots, const Finish& finish) {
  const bool left_marked = any_nan(left_roots, P::kBatch * P::kM), right_marked = any_nan(right_roots, P::kBatch * P::kN);
  if (!left_marked && !right_marked) return;
  constexpr int kTile = 128, kRows = (P::kM + kTile - 1) / kTile, kColumns = (P::kN + kTile - 1) / kTile;
  for (int tile = blockIdx.x; tile < P::kBatch * kRows * kColumns; tile += gridDim.x) {
    const int batch = tile / (kRows * kColumns);
    const int row = tile / kColumns % kRows * kTile, column = tile % kColumns * kTile;
    const bool rows_marked = any_nan(left_roots + batch * P::kM + row, min(kTile, P::kM - row));
    const bool columns_marked = any_nan(right_roots + batch * P::kN + column, min(kTile, P::kN - column));
    if (rows_marked || columns_marked) repair_tile<P, kLeft, kRight>(left, right, batch, row, column, finish);
  }
}

}  // namespace ws
