// What `ws_attention_split.cuh` needs before and after: operands as pairs of halves, and attention in plain floats for layers
// that have none.
//
// A layer of queries, keys or values has one scale, a power of two, which keeps 22 bits of each element down to 2^-29 of the
// layer's greatest. What is smaller is rounded at 2^-51 of that: below a float's rounding of the element's row and of its
// column, unless one of these has nothing greater than 2^-27 of the layer's greatest. Such a layer, and one with an infinity, a
// NaN or nothing above 2^-110, has no halves: its scale is NaN, and the repair makes all that depends on it.
#pragma once
#include "ws_attention_split.cuh"

namespace ws {

constexpr int kHalvesThreads = 256, kHalvesRows = 256;  // of a block that measures or splits
constexpr float kLeastOfRow = 0x1p-12f;                 // that the greatest of a row or column must be, once scaled

// Queries, keys or values in memory: element (outer, inner, row, column), `inner` layers being walked first. `wide`: neighbours
// that one access takes.
struct Factor {
  int layers, inner, rows, columns, wide;
  int64 outer_stride, inner_stride, row_stride;
};

template <Factor kFactor> struct FactorRows {
  static constexpr int kPacks = (kFactor.columns + kFactor.wide - 1) / kFactor.wide;  // of a row
  static constexpr int kLanes = kPacks <= 8 ? 8 : kPacks <= 16 ? 16 : 32;             // that share a row
  static constexpr int kHeld = (kPacks + kLanes - 1) / kLanes;                        // packs of a lane
  static constexpr int kAside = kHalvesThreads / kLanes;                              // rows of a block at once
  static constexpr int kChunks = (kFactor.rows + kHalvesRows - 1) / kHalvesRows;
  static constexpr int kPadded = padded(kFactor.columns);
  static constexpr int kWords = kFactor.columns + 1;  // known of a layer: each column's greatest, and the least row's complement

  int layer, first;
  const float* from;
  WS_INLINE FactorRows(int block, const float* operand)
      : layer(block / kChunks), first(block % kChunks * kHalvesRows),
        from(operand + layer / kFactor.inner * kFactor.outer_stride + layer % kFactor.inner * kFactor.inner_stride) {}
  WS_INLINE int end() const { return min(first + kHalvesRows, kFactor.rows); }
  static WS_INLINE int column(int i) { return (threadIdx.x % kLanes + i * kLanes) * kFactor.wide; }
  // Zeros beyond the row.
  WS_INLINE Pack<float, kFactor.wide> at(int row, int i) const {
    Pack<float, kFactor.wide> pack = {};
    if (column(i) < kFactor.columns) pack = load<kFactor.wide, kShared>(from + row * kFactor.row_stride + column(i));
    return pack;
  }
};

// Sizes as the bits of floats, which are in the same order.
WS_INLINE unsigned size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Finds the greatest of each column, and of the row whose greatest is the least. `ranges` are zeros at first.
template <Factor kFactor>
WS_INLINE void measure_rows(int block, const float* __restrict__ operand, unsigned* __restrict__ ranges) {
  using R = FactorRows<kFactor>;
  __shared__ unsigned found[R::kWords];
  for (int i = threadIdx.x; i < R::kWords; i += kHalvesThreads) found[i] = 0;
  __syncthreads();
  const R rows(block, operand);
  unsigned columns[R::kHeld][kFactor.wide] = {}, row_complement = 0;
  // All lanes of a warp take as many rows, so that they can compare.
  for (int first = rows.first; first < rows.end(); first += R::kAside) {
    const int row = first + threadIdx.x / R::kLanes;
    unsigned greatest = 0;
#pragma unroll
    for (int i = 0; i < R::kHeld; ++i) {
      if (row >= rows.end()) continue;
      const Pack<float, kFactor.wide> pack = rows.at(row, i);
#pragma unroll
      for (int e = 0; e < kFactor.wide; ++e) {
        columns[i][e] = max(columns[i][e], size_of(pack[e]));
        greatest = max(greatest, size_of(pack[e]));
      }
    }
#pragma unroll
    for (int step = R::kLanes / 2; step > 0; step /= 2) greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
    if (greatest > 0) row_complement = max(row_complement, ~greatest);
  }
#pragma unroll
  for (int i = 0; i < R::kHeld; ++i) {
#pragma unroll
    for (int e = 0; e < kFactor.wide; ++e)
      if (R::column(i) < kFactor.columns) atomicMax(&found[R::column(i) + e], columns[i][e]);
  }
  atomicMax(&found[kFactor.columns], row_complement);
  __syncthreads();
  for (int i = threadIdx.x; i < R::kWords; i += kHalvesThreads)
    atomicMax(&ranges[rows.layer * static_cast<int64>(R::kWords) + i], found[i]);
}

// Splits measured rows, to [layer][part][row][column].
template <Factor kFactor>
WS_INLINE void split_rows(int block, const float* __restrict__ operand, const unsigned* __restrict__ ranges,
                          half* __restrict__ halves, float* __restrict__ roots) {
  using R = FactorRows<kFactor>;
  __shared__ SizeRange scratch[kHalvesThreads / 32];
  const R rows(block, operand);
  ranges += rows.layer * static_cast<int64>(R::kWords);
  SizeRange range;
  for (int i = threadIdx.x; i < kFactor.columns; i += kHalvesThreads) range.add(__uint_as_float(ranges[i]));
  range.least = min(range.least, ~ranges[kFactor.columns] - 1);  // none: 0xfffffffe, more than any size
  const RowScale scale = row_scale<half>(range_of_all<kHalvesThreads>(range, scratch), kLeastOfRow);
  half* high = halves + rows.layer * (2LL * kFactor.rows * R::kPadded);
  half* low = high + static_cast<int64>(kFactor.rows) * R::kPadded;
  for (int row = rows.first + threadIdx.x / R::kLanes; row < rows.end(); row += R::kAside) {
#pragma unroll
    for (int i = 0; i < R::kHeld; ++i) {
      if (R::column(i) >= kFactor.columns) continue;
      const Pack<float, kFactor.wide> pack = rows.at(row, i);
      Pack<half, kFactor.wide> highs, lows;
#pragma unroll
      for (int e = 0; e < kFactor.wide; ++e) {
        const Parts<half> parts = split<half>(pack[e], scale.up);
        highs[e] = parts.high;
        lows[e] = parts.low;
      }
      store(high + row * static_cast<int64>(R::kPadded) + R::column(i), highs);
      store(low + row * static_cast<int64>(R::kPadded) + R::column(i), lows);
    }
  }
  if (rows.first == 0 && threadIdx.x == 0) roots[rows.layer] = scale.root_down;
}

// Makes the ranges zeros again, for the next call.
template <Factor kFactor> WS_INLINE void forget_rows(unsigned* __restrict__ ranges) {
  constexpr int64 kCount = static_cast<int64>(kFactor.layers) * FactorRows<kFactor>::kWords;
  for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i < kCount; i += gridDim.x * blockDim.x)
    ranges[i] = 0;
}

// ---- without halves --------------------------------------------------------------------------------------

constexpr int kRepairRows = 16, kRepairKeys = 32;  // of a block, two a warp; of a tile, one a lane

// What a warp knows of one of its rows.
template <class A> struct PlainRow {
  static constexpr int kPacks = (A::kN + 32 * A::kPack - 1) / (32 * A::kPack);  // of a lane
  float pivot = -infinity<float>(), total = 0.0f;
  Pack<float, A::kPack> sums[kPacks] = {};

  static WS_INLINE int column(int i) { return (threadIdx.x % 32 + 32 * i) * A::kPack; }

  // `score` is of the lane's key.
  template <int kCount, int kWidth>
  WS_INLINE void take(float score, int count, float to_log2, const float (&values)[kCount][kWidth]) {
    float most = score;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    float rescale = 1.0f;
    if ((most - pivot) * to_log2 > 0.0f) {
      rescale = ptx::flushed_exp2((pivot - most) * to_log2);
      pivot = most;
    }
    const float from = pivot == -infinity<float>() ? 0.0f : pivot;
    float weight = threadIdx.x % 32 < count ? ptx::flushed_exp2((score - from) * to_log2) : 0.0f, sum = weight;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    total = total * rescale + sum;
    Pack<float, A::kPack> parts[kPacks] = {};
    for (int key = 0; key < count; ++key) {
      const float each = __shfl_sync(0xffffffffu, weight, key);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int e = 0; e < A::kPack; ++e)
          if (column(i) < A::kN) parts[i][e] = fmaf(each, values[key][column(i) + e], parts[i][e]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int e = 0; e < A::kPack; ++e) sums[i][e] = sums[i][e] * rescale + parts[i][e];
    }
  }
};

// Copies rows of an operand's layer to shared memory, those beyond the last as zeros.
template <Factor kFactor, int kRows, int kWidth>
WS_INLINE void fetch_rows(float (&to)[kRows][kWidth], const float* __restrict__ operand, int layer, int first) {
  operand += layer / kFactor.inner * kFactor.outer_stride + layer % kFactor.inner * kFactor.inner_stride;
  for (int i = threadIdx.x; i < kRows * kFactor.columns; i += kHalvesThreads) {
    const int row = first + i / kFactor.columns, column = i % kFactor.columns;
    to[i / kFactor.columns][column] = row < kFactor.rows ? operand[row * kFactor.row_stride + column] : 0.0f;
  }
}

// Sixteen rows of queries.
template <class A, Factor kQueries, Factor kKeys, Factor kValues, class Finish>
WS_INLINE void attend_plainly(const float* __restrict__ queries, const float* __restrict__ keys,
                              const float* __restrict__ values, float scale,
                              const typename A::Mask::Element* __restrict__ mask, int layer, int first, const Finish& finish) {
  __shared__ float query_rows[kRepairRows][kQueries.columns];
  __shared__ float key_rows[kRepairKeys][kKeys.columns | 1];  // lanes that read below each other meet in no bank
  __shared__ float value_rows[kRepairKeys][(kValues.columns + A::kPack - 1) / A::kPack * A::kPack];
  constexpr int kOwn = kRepairRows / (kHalvesThreads / 32);
  const float to_log2 = A::Mask::kIsAdded ? 1.4426950408889634f : scale;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  PlainRow<A> rows[kOwn];
  if constexpr (A::Mask::kIsGiven) mask += MaskTile<A>::layer_at(layer);
  fetch_rows<kQueries>(query_rows, queries, layer, first);
  for (int begin = 0; begin < A::kKeys; begin += kRepairKeys) {
    __syncthreads();
    fetch_rows<kKeys>(key_rows, keys, layer / A::kKeyGroup, begin);
    fetch_rows<kValues>(value_rows, values, layer / A::kValueGroup, begin);
    __syncthreads();
    const int key = begin + lane;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int inside = warp * kOwn + own, m = first + inside;
      float score = 0.0f;
      for (int k = 0; k < A::kDepth; ++k) score = fmaf(query_rows[inside][k], key_rows[lane][k], score);
      if constexpr (A::Mask::kIsGiven) {
        const int64 at = min(m, A::kM - 1) * A::Mask::kSteps.row + min(key, A::kKeys - 1) * A::Mask::kSteps.key;
        score = MaskTile<A>::masked(score, mask[at], scale);
      }
      if (key >= A::kKeys || (A::kCausal && key > m)) score = -infinity<float>();
      rows[own].take(score, min(kRepairKeys, A::kKeys - begin), to_log2, value_rows);
    }
  }
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    const int m = first + warp * kOwn + own;
    const float reciprocal = rows[own].total == 0.0f ? 0.0f : 1.0f / rows[own].total;
#pragma unroll
    for (int i = 0; i < PlainRow<A>::kPacks; ++i) {
      const int column = PlainRow<A>::column(i);
      Pack<float, A::kPack> pack = rows[own].sums[i];
#pragma unroll
      for (int e = 0; e < A::kPack; ++e) pack[e] *= reciprocal;
      if (m < A::kM && column < A::kN) finish(layer, m, column, pack);
    }
  }
  __syncthreads();
}

// Launched with a block an SM; where all layers have halves, as is usual, all end at once.
template <class A, Factor kQueries, Factor kKeys, Factor kValues, class Finish>
WS_INLINE void repair_attention(const float* __restrict__ queries, const float* __restrict__ keys,
                                const float* __restrict__ values, const AttentionRoots& roots, float scale,
                                const typename A::Mask::Element* __restrict__ mask, const Finish& finish) {
  constexpr int kDown = (A::kM + kRepairRows - 1) / kRepairRows;
  bool found = false;
  for (int layer = threadIdx.x; layer < A::kLayers; layer += kHalvesThreads) found |= !has_halves<A>(roots, layer);
  if (!__syncthreads_or(found)) return;
  for (int tile = blockIdx.x; tile < A::kLayers * kDown; tile += gridDim.x) {
    const int layer = tile / kDown;
    if (!has_halves<A>(roots, layer))
      attend_plainly<A, kQueries, kKeys, kValues>(queries, keys, values, scale, mask, layer, tile % kDown * kRepairRows, finish);
  }
}

}  // namespace ws
