// Floats as two 16-bit floats each, so that tensor cores can multiply them at the accuracy of floats.
//
// A row is scaled by a power of two to just below 2^15 and split: x * up = high + low / 2048, both halves. That keeps 22
// bits of every element down to 2^-29 of the row's greatest, and 18 bits down to 2^-33. A row with a smaller element,
// an infinity, a NaN or nothing above 2^-110 has no such form: its scale is NaN, and its products are made another way.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.
#pragma once
#include "ws_types.cuh"

namespace ws {

constexpr float kLowScale = 2048.0f;

// Range of a row's sizes: bits of the greatest, bits of the least that is not zero, less one (all ones for none).
struct SizeRange {
  unsigned greatest = 0;
  unsigned least = 0xffffffffu;

  WS_INLINE void add(float x) {
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    greatest = max(greatest, bits);
    least = min(least, bits - 1);
  }
  WS_INLINE void add(SizeRange other) {
    greatest = max(greatest, other.greatest);
    least = min(least, other.least);
  }
};

// `up` brings a row to the halves' range; `root_down` squared takes it back. root_down is NaN where there is no such scale.
struct RowScale {
  float up;
  float root_down;
};

WS_INLINE RowScale row_scale(SizeRange range) {
  if (range.greatest == 0) return {1.0f, 1.0f};
  const int exponent = static_cast<int>(range.greatest >> 23) - 127;
  const int even = (exponent + 1) & ~1;
  const bool fits = exponent >= -110 && exponent <= 110;
  const float up = fits ? __uint_as_float(static_cast<unsigned>(127 + 14 - even) << 23) : 0.0f;
  const float root_down = __uint_as_float(static_cast<unsigned>(127 + (even - 14) / 2) << 23);
  const bool precise = __uint_as_float(range.least + 1) * up >= 0x1p-18f;
  return {up, fits && precise ? root_down : quiet_nan<float>()};
}

struct Halves {
  half high;
  half low;
};

WS_INLINE Halves split(float x, float up) {
  const float scaled = x * up;
  const half high = narrow<half>(scaled);
  return {high, narrow<half>((scaled - widen(high)) * kLowScale)};
}

// The range over `kLanes` threads: a warp's part, or a block of whole warps (`scratch` holds one range a warp).
template <int kLanes> WS_INLINE SizeRange range_of_all(SizeRange range, SizeRange* scratch) {
#pragma unroll
  for (int step = (kLanes < 32 ? kLanes : 32) / 2; step > 0; step /= 2) {
    range.add(SizeRange{__shfl_xor_sync(0xffffffffu, range.greatest, step), __shfl_xor_sync(0xffffffffu, range.least, step)});
  }
  if constexpr (kLanes > 32) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = range;
    __syncthreads();
    range = scratch[lane % (kLanes / 32)];
#pragma unroll
    for (int step = kLanes / 64; step > 0; step /= 2) {
      range.add(SizeRange{__shfl_xor_sync(0xffffffffu, range.greatest, step), __shfl_xor_sync(0xffffffffu, range.least, step)});
    }
  }
  return range;
}

// Four neighbours; zeros beyond the end of the row.
template <bool kAligned> WS_INLINE Pack<float, 4> four_of(const float* row, int first, int count) {
  Pack<float, 4> pack;
  if constexpr (kAligned) {
    if (first < count) pack = load<4, kOnce>(row + first);
    else pack = {0.0f, 0.0f, 0.0f, 0.0f};
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) pack[e] = first + e < count ? row[first + e] : 0.0f;
  }
  return pack;
}

WS_INLINE void store_four(const Pack<float, 4>& values, float up, half* high, half* low) {
  Pack<half, 4> highs, lows;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Halves parts = split(values[e], up);
    highs[e] = parts.high;
    lows[e] = parts.low;
  }
  store(high, highs);
  store(low, lows);
}

// `kLanes` threads split one row of `count` floats to `padded` halves each (a multiple of 8; zeros beyond the row) and
// write its scale. Rows of at most 4 * kLanes * kHeld stay in registers between the two uses; kHeld 0 reads twice.
template <int kLanes, int kHeld, bool kAligned>
WS_INLINE void split_row(const float* __restrict__ row, int count, int padded, half* __restrict__ high,
                         half* __restrict__ low, float* __restrict__ root_down) {
  __shared__ SizeRange scratch[kLanes > 32 ? kLanes / 32 : 1];
  const int lane = threadIdx.x % kLanes;
  SizeRange range;
  if constexpr (kHeld > 0) {
    Pack<float, 4> held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = four_of<kAligned>(row, 4 * (lane + i * kLanes), count);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) range.add(held[i][e]);
    }
    const RowScale scale = row_scale(range_of_all<kLanes>(range, scratch));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int first = 4 * (lane + i * kLanes);
      if (first < padded) store_four(held[i], scale.up, high + first, low + first);
    }
    if (lane == 0) *root_down = scale.root_down;
  } else {
    for (int first = 4 * lane; first < count; first += 4 * kLanes) {
      const Pack<float, 4> values = four_of<kAligned>(row, first, count);
#pragma unroll
      for (int e = 0; e < 4; ++e) range.add(values[e]);
    }
    const RowScale scale = row_scale(range_of_all<kLanes>(range, scratch));
    for (int first = 4 * lane; first < padded; first += 4 * kLanes)
      store_four(four_of<kAligned>(row, first, count), scale.up, high + first, low + first);
    if (lane == 0) *root_down = scale.root_down;
  }
}

// The same for a matrix whose rows' elements are `stride` apart and whose rows are neighbours: a block of kThreads splits
// rows [first, first + 32) in two passes, the second through a transposing tile of 64 elements a row. `high` and `low` are
// the first of these rows' places, `padded` apart.
template <int kThreads>
WS_INLINE void split_columns(const float* __restrict__ matrix, int64 stride, int first, int rows, int count, int padded,
                             half* __restrict__ high, half* __restrict__ low, float* __restrict__ root_down) {
  constexpr int kWarps = kThreads / 32, kDepth = 64;
  __shared__ SizeRange ranges[kWarps][32];
  __shared__ float tile[kDepth][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool inside = first + lane < rows;
  const float* column = matrix + first + lane;
  SizeRange range;
#pragma unroll 8
  for (int k = warp; k < count; k += kWarps) range.add(inside ? column[k * stride] : 0.0f);
  ranges[warp][lane] = range;
  __syncthreads();
  for (int other = 0; other < kWarps; ++other) range.add(ranges[other][lane]);
  const RowScale scale = row_scale(range);
  if (warp == 0 && inside) root_down[first + lane] = scale.root_down;
  for (int begin = 0; begin < padded; begin += kDepth) {
    __syncthreads();
#pragma unroll
    for (int k = warp; k < kDepth; k += kWarps)
      tile[k][lane] = inside && begin + k < count ? column[(begin + k) * stride] * scale.up : 0.0f;
    __syncthreads();
#pragma unroll
    for (int row = warp; row < 32; row += kWarps) {
      const int k = begin + 2 * lane;
      if (first + row >= rows || k >= padded) continue;
      Pack<half, 2> highs, lows;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Halves parts = split(tile[2 * lane + e][row], 1.0f);
        highs[e] = parts.high;
        lows[e] = parts.low;
      }
      store(high + static_cast<int64>(row) * padded + k, highs);
      store(low + static_cast<int64>(row) * padded + k, lows);
    }
  }
}

}  // namespace ws
