// Operands as two narrow floats each, so that tensor cores can multiply them at the accuracy of floats.
//
// A row is scaled by a power of two to just below 2^15 and split: x * up = high + low / 2048, both halves. That keeps 22
// bits of every element down to 2^-29 of the row's greatest, and 18 bits down to 2^-33. A row with a smaller element,
// an infinity, a NaN or nothing above 2^-110 has no such form: its scale is NaN, and its products are made another way.
// Parts in TF32, which takes twice as long to multiply, keep 22 bits down to 2^-115 of the greatest.
// Source: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022.
#pragma once
#include "ws_types.cuh"

namespace ws {

constexpr float kLowScale = 2048.0f;

// A float of eleven bits and eight of exponent; of any other float tensor cores would leave the other bits aside.
struct tf32 { float value; };
template <> WS_INLINE tf32 narrow<tf32>(float value) { return {ptx::rounded_to_tf32(value)}; }
WS_INLINE float widen(tf32 value) { return value.value; }

// The least of a scaled row's elements whose parts are as precise as floats need.
template <class Part> constexpr float kLeastScaled = 0x1p-18f;
template <> constexpr float kLeastScaled<tf32> = 0x1p-100f;

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

// `least`: what the least of the sizes must be, once it is scaled.
template <class Part> WS_INLINE RowScale row_scale(SizeRange range, float least = kLeastScaled<Part>) {
  if (range.greatest == 0) return {1.0f, 1.0f};
  const int exponent = static_cast<int>(range.greatest >> 23) - 127;
  const int even = (exponent + 1) & ~1;
  const bool fits = exponent >= -110 && exponent <= 110;
  const float up = fits ? __uint_as_float(static_cast<unsigned>(127 + 14 - even) << 23) : 0.0f;
  const float root_down = __uint_as_float(static_cast<unsigned>(127 + (even - 14) / 2) << 23);
  const bool precise = __uint_as_float(range.least + 1) * up >= least;
  return {up, fits && precise ? root_down : quiet_nan<float>()};
}

// What splitting leaves for the repair: whether there is a row without a scale; and how many blocks have looked.
struct Marks {
  unsigned marked, looked;
};

WS_INLINE void write_root(float* to, float root, Marks* marks) {
  *to = root;
  if (root != root) atomicOr(&marks->marked, 1u);  // as others may do at the same time
}

template <class Part> struct Parts {
  Part high;
  Part low;
};

template <class Part> WS_INLINE Parts<Part> split(float x, float up) {
  const float scaled = x * up;
  const Part high = narrow<Part>(scaled);
  return {high, narrow<Part>((scaled - widen(high)) * kLowScale)};
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

template <class Part> WS_INLINE void store_four(const Pack<float, 4>& values, float up, Part* high, Part* low) {
  Pack<Part, 4> highs, lows;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const Parts<Part> parts = split<Part>(values[e], up);
    highs[e] = parts.high;
    lows[e] = parts.low;
  }
  store(high, highs);
  store(low, lows);
}

// `kLanes` threads split one row of `count` floats to `padded` parts each (a multiple of 8; zeros beyond the row) and
// write its scale. Rows of at most 4 * kLanes * kHeld stay in registers between the two uses; kHeld 0 reads twice.
template <int kLanes, int kHeld, bool kAligned, class Part>
WS_INLINE void split_row(const float* __restrict__ row, int count, int padded, Part* __restrict__ high,
                         Part* __restrict__ low, float* __restrict__ root, Marks* marks) {
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
    const RowScale scale = row_scale<Part>(range_of_all<kLanes>(range, scratch));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int first = 4 * (lane + i * kLanes);
      if (first < padded) store_four(held[i], scale.up, high + first, low + first);
    }
    if (lane == 0) write_root(root, scale.root_down, marks);
  } else {
    for (int first = 4 * lane; first < count; first += 4 * kLanes) {
      const Pack<float, 4> values = four_of<kAligned>(row, first, count);
#pragma unroll
      for (int e = 0; e < 4; ++e) range.add(values[e]);
    }
    const RowScale scale = row_scale<Part>(range_of_all<kLanes>(range, scratch));
    for (int first = 4 * lane; first < padded; first += 4 * kLanes)
      store_four(four_of<kAligned>(row, first, count), scale.up, high + first, low + first);
    if (lane == 0) write_root(root, scale.root_down, marks);
  }
}

// ---- operands ------------------------------------------------------------------------------------------

// An axis of a batch: layer b is at b / inside % extent along it, `stride` elements apart.
struct LayerAxis {
  int inside = 1, extent = 1;
  int64 stride = 0;

  WS_INLINE constexpr int of(int layer) const { return layer / inside % extent; }
};
constexpr int kMostLayerAxes = 8;

// An operand of a product: `rows` rows of `depth` elements in each layer of the batch, and steps between neighbours in
// elements. Its depth is cut into `slices`, each split by a scale of its own; `wide`: neighbours that one access takes;
// `chunk`: elements of depth that a block splits where rows are neighbours in memory; `layers`: axes of the batch.
struct Operand {
  int batch, rows, depth, slices;
  int64 row_stride, depth_stride;
  int wide, chunk;
  LayerAxis layers[kMostLayerAxes] = {};
};

constexpr int kSplitThreads = 256;

WS_INLINE constexpr int slice_of(int depth, int slices) {
  return slices == 1 ? depth : ((depth + slices - 1) / slices + 63) / 64 * 64;
}

// Parts of a row or of a depth begin at multiples of 128 bytes, so that rows of boxes are whole lines of the second-level
// cache: 1.34 ms instead of 1.73 for the product of 8205 x 2949 x 5921 (H200).
WS_INLINE constexpr int padded(int count) { return count <= 32 ? 32 : (count + 63) / 64 * 64; }

WS_INLINE constexpr int threads_aside(int packs) {
  int threads = 32;
  while (threads < packs && threads < kSplitThreads) threads *= 2;
  return threads;
}

template <Operand kOperand> struct Split {
  static constexpr int kSlice = slice_of(kOperand.depth, kOperand.slices);
  static constexpr int kLayers = kOperand.batch * kOperand.slices;
  static constexpr bool kAligned = kOperand.wide >= 4;
  // Rows whose elements are neighbours: a warp or a block each.
  static constexpr int kLanes = kSlice <= 1024 ? 32 : kSplitThreads;
  static constexpr int kPaddedDepth = padded(kSlice);
  static constexpr int kPacks = (kSlice + 4 * kLanes - 1) / (4 * kLanes);
  static constexpr int kHeld = kPacks <= 8 ? kPacks : 0;
  // Rows that are neighbours: a group of them and a chunk of the depth are a block's; the more of its threads lie side by
  // side, the longer the pieces of memory that it reads and writes.
  static constexpr int kAside = threads_aside((kOperand.rows + kOperand.wide - 1) / kOperand.wide);
  static constexpr int kDown = kSplitThreads / kAside;
  static constexpr int kGroupRows = kAside * kOperand.wide;
  static constexpr int kGroups = (kOperand.rows + kGroupRows - 1) / kGroupRows;
  static constexpr int kChunks = (kSlice + kOperand.chunk - 1) / kOperand.chunk;
  static constexpr int kPaddedRows = padded(kOperand.rows);

  // A layer of batch and slice: where it begins, and the elements of depth it has.
  static WS_INLINE int64 layer_at(int layer) {
    int64 at = layer % kOperand.slices * (kSlice * kOperand.depth_stride);
#pragma unroll
    for (int i = 0; i < kMostLayerAxes; ++i) {
      const LayerAxis axis = kOperand.layers[i];
      const int batch = layer / kOperand.slices;
      at += (axis.inside * axis.extent == kOperand.batch ? batch / axis.inside : axis.of(batch)) * axis.stride;
    }
    return at;
  }
  static WS_INLINE int depth_of(int layer) { return min(kSlice, kOperand.depth - layer % kOperand.slices * kSlice); }

  // A block's rows and depth in a layer, where rows are neighbours.
  struct Part {
    int layer, chunk, first;
    WS_INLINE explicit Part(int block)
        : layer(block / (kGroups * kChunks)), chunk(block / kGroups % kChunks), first(block % kGroups * kGroupRows) {}
    WS_INLINE int begin() const { return chunk * kOperand.chunk; }
    WS_INLINE int end() const { return min(begin() + kOperand.chunk, kSlice); }
    WS_INLINE int row() const { return first + threadIdx.x % kAside * kOperand.wide; }
    WS_INLINE int down() const { return threadIdx.x / kAside; }
  };
};

// Splits rows whose elements are neighbours, to [layer][part][row][depth].
template <Operand kOperand, class Part>
WS_INLINE void split_along(int block, const float* __restrict__ operand, Part* __restrict__ parts,
                           float* __restrict__ roots, Marks* marks) {
  using S = Split<kOperand>;
  const int64 number = block * static_cast<int64>(kSplitThreads / S::kLanes) + threadIdx.x / S::kLanes;
  if (number >= static_cast<int64>(S::kLayers) * kOperand.rows) return;
  const int layer = number / kOperand.rows, row = number % kOperand.rows;
  Part* high = parts + (number + layer * static_cast<int64>(kOperand.rows)) * S::kPaddedDepth;
  split_row<S::kLanes, S::kHeld, S::kAligned>(operand + S::layer_at(layer) + row * kOperand.row_stride, S::depth_of(layer),
                                              S::kPaddedDepth, high, high + kOperand.rows * static_cast<int64>(S::kPaddedDepth),
                                              roots + number, marks);
}

// The elements of neighbouring rows at one depth; zeros outside.
template <int kWide> WS_INLINE Pack<float, kWide> neighbours(const float* from, bool inside) {
  if (inside) return load<kWide, kShared>(from);
  Pack<float, kWide> zeros;
#pragma unroll
  for (int e = 0; e < kWide; ++e) zeros[e] = 0.0f;
  return zeros;
}

// What blocks know together of a row's sizes; all zeros at first. `not_least` is the complement.
struct Measured {
  unsigned greatest, not_least;
};

// Ranges of the sizes of rows that are neighbours, by [layer][row].
template <Operand kOperand>
WS_INLINE void measure_across(int block, const float* __restrict__ operand, Measured* __restrict__ ranges) {
  using S = Split<kOperand>;
  constexpr int kWide = kOperand.wide;
  __shared__ SizeRange found[S::kDown][S::kGroupRows];
  const typename S::Part part(block);
  const float* from = operand + S::layer_at(part.layer) + part.row();
  SizeRange range[kWide];
  const int end = min(part.end(), S::depth_of(part.layer));
#pragma unroll 8
  for (int k = part.begin() + part.down(); k < end; k += S::kDown) {
    const Pack<float, kWide> values = neighbours<kWide>(from + k * kOperand.depth_stride, part.row() < kOperand.rows);
#pragma unroll
    for (int e = 0; e < kWide; ++e) range[e].add(values[e]);
  }
#pragma unroll
  for (int e = 0; e < kWide; ++e) found[part.down()][part.row() - part.first + e] = range[e];
  __syncthreads();
  for (int inside = threadIdx.x; inside < min(S::kGroupRows, kOperand.rows - part.first); inside += kSplitThreads) {
    SizeRange all;
#pragma unroll
    for (int other = 0; other < S::kDown; ++other) all.add(found[other][inside]);
    Measured& whole = ranges[part.layer * static_cast<int64>(kOperand.rows) + part.first + inside];
    atomicMax(&whole.greatest, all.greatest);
    atomicMax(&whole.not_least, ~all.least);
  }
}

// Makes the ranges zeros again, for the next call.
template <Operand kOperand> WS_INLINE void forget(Measured* __restrict__ ranges) {
  constexpr int64 kCount = static_cast<int64>(Split<kOperand>::kLayers) * kOperand.rows;
  for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i < kCount; i += gridDim.x * blockDim.x)
    ranges[i] = {0, 0};
}

// Splits measured rows, to [layer][part][depth][row].
template <Operand kOperand, class Part>
WS_INLINE void split_across(int block, const float* __restrict__ operand, const Measured* __restrict__ ranges,
                            Part* __restrict__ parts, float* __restrict__ roots, Marks* marks) {
  using S = Split<kOperand>;
  constexpr int kWide = kOperand.wide;
  const typename S::Part part(block);
  if (part.row() >= kOperand.rows) return;
  float up[kWide];
#pragma unroll
  for (int e = 0; e < kWide; ++e) {
    const int64 row = part.layer * static_cast<int64>(kOperand.rows) + part.row() + e;
    const Measured measured = ranges[row];
    const RowScale scale = row_scale<Part>({measured.greatest, ~measured.not_least});
    up[e] = scale.up;
    if (part.chunk == 0 && part.down() == 0) write_root(roots + row, scale.root_down, marks);
  }
  const float* from = operand + S::layer_at(part.layer) + part.row();
  Part* high = parts + part.layer * (2LL * S::kSlice * S::kPaddedRows) + part.row();
  Part* low = high + static_cast<int64>(S::kSlice) * S::kPaddedRows;
  const int depth = S::depth_of(part.layer);
#pragma unroll 8
  for (int k = part.begin() + part.down(); k < part.end(); k += S::kDown) {
    const Pack<float, kWide> values = neighbours<kWide>(from + k * kOperand.depth_stride, k < depth);
    Pack<Part, kWide> highs, lows;
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      const Parts<Part> both = split<Part>(values[e], up[e]);
      highs[e] = both.high;
      lows[e] = both.low;
    }
    store(high + static_cast<int64>(k) * S::kPaddedRows, highs);
    store(low + static_cast<int64>(k) * S::kPaddedRows, lows);
  }
}

}  // namespace ws
