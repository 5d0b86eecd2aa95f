// Matrix products in plain floats, of any strides: those that are too small for tensor cores, and the tiles of a product of
// halves with a row or column whose scale is NaN (see `ws_split.cuh`). Each sum is made of sums over 256 elements of depth,
// as accurate as a library's.
#pragma once
#include "ws_product_shape.cuh"

namespace ws {

constexpr int kSimtThreads = 256;  // that repair

WS_INLINE float widen(float value) { return value; }

// How a block shares out a tile: a thread has kDown * kBeside sums. Its columns are packs, each beside the next thread's; its
// rows are fours (or fewer), each below the next thread's.
template <class P, int kRows, int kColumns, int kThreads> struct SimtTile {
  static constexpr int kSums = kRows * kColumns / kThreads;
  static constexpr int kSquare = kSums >= 64 ? 8 : kSums >= 8 ? 4 : 2;
  static constexpr int kLeast = kSums / kRows > kSquare ? kSums / kRows : kSquare;  // a thread has no more rows than the tile
  static constexpr int kBeside = P::kPack > kLeast ? P::kPack : kLeast, kDown = kSums / kBeside;
  static constexpr int kAcross = kColumns / kBeside;  // threads
  static constexpr int kFew = kDown < 4 ? kDown : 4;
  // Depth in shared memory at once.
  static constexpr int kMost = kRows + kColumns <= 128 ? 32 : 16;
  static constexpr int kDepth = P::kSlice >= kMost ? kMost : P::kSlice <= 4 ? 4 : P::kSlice <= 8 ? 8 : P::kSlice <= 16 ? 16 : 32;
  static_assert(kBeside % P::kPack == 0 && kDown * kBeside == kSums && kAcross * kBeside == kColumns, "whole packs");

  static WS_INLINE int row(int i) { return threadIdx.x / kAcross * kFew + i / kFew * (kRows / kDown * kFew) + i % kFew; }
  static WS_INLINE int column(int j) {
    return threadIdx.x % kAcross * P::kPack + j / P::kPack * (kAcross * P::kPack) + j % P::kPack;
  }
};

// A tile of an operand on its way: from memory to registers of the block while the one before is multiplied, then to shared
// memory. Neighbours in memory go to neighbouring threads, up to four to one; zeros outside.
template <Operand kOperand, int kTile, int kDepth, int kThreads, class Element> struct SimtOperand {
  static constexpr bool kAlong = kOperand.depth_stride == 1, kByRows = !kAlong && kOperand.row_stride == 1;
  static constexpr int kWide = kAlong || kByRows ? kOperand.wide : 1;
  static constexpr int kPacks = kTile * kDepth / kWide, kCount = (kPacks + kThreads - 1) / kThreads;
  // Of those whose neighbours lie along the depth, a warp takes four packs of eight rows, or sixteen elements of two.
  static constexpr int kAhead = kDepth / kWide < 16 / kWide ? kDepth / kWide : 16 / kWide;

  Pack<Element, kWide> held[kCount];

  static WS_INLINE int inside(int i) { return kByRows ? i % (kTile / kWide) * kWide : i / kAhead % kTile; }
  static WS_INLINE int step(int i) {
    return kByRows ? i / (kTile / kWide) : (i % kAhead + i / (kAhead * kTile) * kAhead) * kWide;
  }
  // Rows of shared memory are turned, so that few threads that store beside each other along the depth meet in a bank.
  static WS_INLINE constexpr int turned(int row, int step) {
    if (kByRows || kTile < 8) return row;
    return row ^ ((step / 4 % 4 * 8 + step % 2 * 4) & (kTile < 32 ? kTile - 1 : 31));
  }

  WS_INLINE void load(const Element* __restrict__ operand, int first, int begin, int depth) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int i = threadIdx.x + n * kThreads;
      const int row = first + inside(i), k = begin + step(i);
      held[n] = {};
      if ((kPacks % kThreads == 0 || i < kPacks) && k < depth && row < kOperand.rows)
        held[n] = ws::load<kWide, kShared>(operand + row * kOperand.row_stride + k * kOperand.depth_stride);
    }
  }

  WS_INLINE void store(float (&tile)[kDepth][kTile]) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int i = threadIdx.x + n * kThreads;
      if (kPacks % kThreads != 0 && i >= kPacks) continue;
#pragma unroll
      for (int e = 0; e < kWide; ++e) {
        const int row = inside(i) + (kByRows ? e : 0), k = step(i) + (kByRows ? 0 : e);
        tile[k][turned(row, k)] = widen(held[n][e]);
      }
    }
  }

  // Neighbouring rows, at most four, at one depth.
  template <int kLength> static WS_INLINE void read(const float (&tile)[kDepth][kTile], int row, int step, float* to) {
    const auto pack = *reinterpret_cast<const Pack<float, kLength>*>(&tile[step][turned(row, step)]);
#pragma unroll
    for (int e = 0; e < kLength; ++e) to[e] = pack[e];
  }
};

// One tile.
template <class P, Operand kLeft, Operand kRight, int kRows, int kColumns, int kThreads, class Element, class Finish>
WS_INLINE void multiply_floats(const Element* __restrict__ left, const Element* __restrict__ right, int layer,
                               int first_row, int first_column, const Finish& finish) {
  using Tile = SimtTile<P, kRows, kColumns, kThreads>;
  constexpr int kDown = Tile::kDown, kBeside = Tile::kBeside, kDepth = Tile::kDepth, kChunk = 256;
  constexpr int kFew = Tile::kFew, kPack = P::kPack < 4 ? P::kPack : 4;
  using Left = SimtOperand<kLeft, kRows, kDepth, kThreads, Element>;
  using Right = SimtOperand<kRight, kColumns, kDepth, kThreads, Element>;
  __shared__ __align__(16) float left_tile[kDepth][kRows], right_tile[kDepth][kColumns];
  left += Split<kLeft>::layer_at(layer);
  right += Split<kRight>::layer_at(layer);
  const int depth = P::depth_of(layer);
  float totals[kDown][kBeside] = {}, sums[kDown][kBeside] = {};
  Left next_left;
  Right next_right;
  next_left.load(left, first_row, 0, depth);
  next_right.load(right, first_column, 0, depth);
  for (int begin = 0; begin < depth; begin += kDepth) {
    __syncthreads();
    next_left.store(left_tile);
    next_right.store(right_tile);
    __syncthreads();
    if (begin + kDepth < depth) {
      next_left.load(left, first_row, begin + kDepth, depth);
      next_right.load(right, first_column, begin + kDepth, depth);
    }
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float a[kDown], b[kBeside];
#pragma unroll
      for (int i = 0; i < kDown; i += kFew) Left::template read<kFew>(left_tile, Tile::row(i), k, a + i);
#pragma unroll
      for (int j = 0; j < kBeside; j += kPack) Right::template read<kPack>(right_tile, Tile::column(j), k, b + j);
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kBeside; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    if constexpr (P::kSlice > kChunk) {
      if ((begin + kDepth) % kChunk != 0 && begin + kDepth < depth) continue;
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
    const int row = first_row + Tile::row(i);
#pragma unroll
    for (int j = 0; j < kBeside; j += P::kPack) {
      const int column = first_column + Tile::column(j);
      if (row >= P::kM || column >= P::kN) continue;
      Pack<float, P::kPack> pack;
#pragma unroll
      for (int e = 0; e < P::kPack; ++e) pack[e] = P::kSlice > kChunk ? totals[i][j + e] : sums[i][j + e];
      rows.take(i, finish, layer, row, column, pack);
    }
    rows.template leave<Tile::kAcross>(i, finish, layer, row, first_column);
  }
}

// A whole product, a block a tile.
template <class P, Operand kLeft, Operand kRight, int kRows, int kThreads, class Element, class Finish>
WS_INLINE void multiply_small(const Element* __restrict__ left, const Element* __restrict__ right, const Finish& finish) {
  constexpr int kDown = (P::kM + kRows - 1) / kRows, kAside = P::kColumnTiles;
  const int layer = blockIdx.x / (kDown * kAside), row = blockIdx.x / kAside % kDown, column = blockIdx.x % kAside;
  multiply_floats<P, kLeft, kRight, kRows, P::kTileColumns, kThreads>(left, right, layer, row * kRows,
                                                                      column * P::kTileColumns, finish);
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
      multiply_floats<P, kLeft, kRight, kTile, kTile, kSimtThreads>(left, right, layer, row, column, finish);
      if constexpr (requires { finish.repaired(row, column, kTile); }) finish.repaired(row, column, kTile);
    }
  }
}

}  // namespace ws
