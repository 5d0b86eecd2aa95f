// A product of few rows with a long operand, which is read once as floats and split on its way into registers:
// sums[m, n] = sum over k of held[m, k] * streamed[n, k], for sm_90a.
//
// Splitting in memory would write and read the long operand once more, and it is all the traffic there is. Here a thread
// loads its part of 64 rows by 64 of depth, scales each row's 64 elements by a power of two, and multiplies the halves
// from registers with those of the held operand, which the copy engine brings: the tile is the result's transpose. Scales
// differ from step to step, so sums are promoted to float registers at every step.
// Low parts are not scaled up as those of `ws_split.cuh` are: 22 bits of an element remain down to 2^-17 of the greatest
// of its 64 neighbours, and below that what counts against it, to 2^-39. They are multiplied first, while the tensor
// cores' accumulators, which round towards zero, are small.
#pragma once
#include "ws_product.cuh"

namespace ws {

constexpr int kMostHeld = 128;     // rows of the held operand
constexpr int kStreamedTile = 128;  // rows of the streamed operand in a block's tile: 64 for each multiplying warpgroup
constexpr int kStreamThreads = 384, kStreamingWarps = 8;
constexpr int kHoldThreads = 256;
constexpr int kFarthestExponent = 127 + 90;  // beyond which a row's products could leave the range of floats on the way

// `row_stride` of the streamed operand, in elements; `ahead`: whether it is asked for some steps before it is read.
struct StreamedExtents {
  int m, n, k;
  int64 row_stride;
  bool ahead;
};

template <StreamedExtents kExtents> struct StreamedProduct {
  static constexpr int kM = kExtents.m, kN = kExtents.n, kK = kExtents.k;
  static constexpr int64 kRowStride = kExtents.row_stride;
  static constexpr bool kAhead = kExtents.ahead;
  static constexpr int kCluster = 2, kStages = 6;
  static constexpr int kSteps = kK / kTileDepth;
  static constexpr int kTiles = (kN + kStreamedTile * kCluster - 1) / (kStreamedTile * kCluster) * kCluster;
  static constexpr int kSums = kMostHeld / 2;

  struct alignas(1024) Stage { half held[2][kMostHeld * kTileDepth]; };
  struct Shared {
    Stage stages[kStages];
    Barrier filled[kStages];
    Barrier free[kStages];
  };
};

// Splits one row of the held operand, kHoldThreads to a row. Of sixteen elements 4 q to 4 q + 3 go to places 2 q, 2 q + 1,
// 2 q + 8 and 2 q + 9: those that thread q of four holds of the streamed rows, so that it can load them at once.
template <int kDepth>
WS_INLINE void split_held(const float* __restrict__ row, half* __restrict__ high, half* __restrict__ low,
                          float* __restrict__ root, Marks* marks) {
  __shared__ SizeRange scratch[kHoldThreads / 32];
  SizeRange range;
  for (int first = 4 * threadIdx.x; first < kDepth; first += 4 * kHoldThreads) {
    const Pack<float, 4> values = load<4, kOnce>(row + first);
#pragma unroll
    for (int e = 0; e < 4; ++e) range.add(values[e]);
  }
  const RowScale scale = row_scale(range_of_all<kHoldThreads>(range, scratch));
  for (int first = 4 * threadIdx.x; first < kDepth; first += 4 * kHoldThreads) {
    const Pack<float, 4> values = load<4, kOnce>(row + first);
    const int place = first / 16 * 16 + first % 16 / 2;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      Pack<half, 2> highs, lows;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float scaled = values[2 * pair + e] * scale.up;
        highs[e] = narrow<half>(scaled);
        lows[e] = narrow<half>(scaled - widen(highs[e]));
      }
      store(high + place + 8 * pair, highs);
      store(low + place + 8 * pair, lows);
    }
  }
  if (threadIdx.x == 0) write_root(root, scale.root_down, marks);
}

// Two floats as halves in one register, the first in the lower bits; and what they leave.
WS_INLINE unsigned halves_of(float first, float second) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
WS_INLINE unsigned rest_of(float first, float second, unsigned pair) {
  float high_first, high_second;
  asm("{\n.reg .b16 lower, upper;\nmov.b32 {lower, upper}, %2;\ncvt.f32.f16 %0, lower;\ncvt.f32.f16 %1, upper;\n}"
      : "=f"(high_first), "=f"(high_second) : "r"(pair));
  return halves_of(first - high_first, second - high_second);
}

// sums (+)= A * B^T of 64 rows by 128, 16 deep, A in registers; see `ws_wgmma.cuh`.
#define WS_SUMS_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
WS_INLINE void multiply_add_held(float (&sums)[64], const unsigned (&a)[4], uint64 b, int keep) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.ne.b32 keep, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, keep, 1, 1, 0;\n"
      "}"
      : WS_SUMS_8(sums, 0), WS_SUMS_8(sums, 8), WS_SUMS_8(sums, 16), WS_SUMS_8(sums, 24), WS_SUMS_8(sums, 32),
        WS_SUMS_8(sums, 40), WS_SUMS_8(sums, 48), WS_SUMS_8(sums, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
#undef WS_SUMS_8

// Asks for the map's box at (x, y) to come to the second-level cache: one call for many rows, since each takes the copy
// engine's time.
WS_INLINE void fetch_box(const TensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(0)
               : "memory");
}

// What a thread has of 64 rows by 64 of depth: two rows, 8 apart; of each sixteen elements, four neighbours.
struct StreamedStep {
  Pack<float, 4> upper[4], lower[4];

  WS_INLINE void read(const float* upper_row, const float* lower_row, int depth) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      upper[i] = load<4, kOnce>(upper_row + depth + 16 * i);
      lower[i] = load<4, kOnce>(lower_row + depth + 16 * i);
    }
  }
};

// The power of two that takes 64 elements of a row to just below 2^15, and back; four threads hold them together.
struct StepScale {
  float up, down;
  bool far;

  WS_INLINE explicit StepScale(const Pack<float, 4> (&row)[4]) {
    unsigned greatest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) greatest = max(greatest, __float_as_uint(row[i][e]) & 0x7fffffffu);
    }
    greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, 1));
    greatest = max(greatest, __shfl_xor_sync(0xffffffffu, greatest, 2));
    const unsigned exponent = max(greatest >> 23, 15u);
    up = __uint_as_float((127 + 127 + 14 - exponent) << 23);
    down = __uint_as_float((exponent - 14) << 23);
    far = exponent > kFarthestExponent;
  }
};

// Halves of a step as the tensor cores take them: for each sixteen of depth, both rows' first pairs, then their second.
struct StepHalves {
  unsigned high[4][4], low[4][4];

  WS_INLINE StepHalves(const StreamedStep& step, float upper_up, float lower_up) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float a = step.upper[i][2 * pair] * upper_up, b = step.upper[i][2 * pair + 1] * upper_up;
        const float c = step.lower[i][2 * pair] * lower_up, d = step.lower[i][2 * pair + 1] * lower_up;
        high[i][2 * pair] = halves_of(a, b);
        high[i][2 * pair + 1] = halves_of(c, d);
        low[i][2 * pair] = rest_of(a, b, high[i][2 * pair]);
        low[i][2 * pair + 1] = rest_of(c, d, high[i][2 * pair + 1]);
      }
    }
  }

  // Keeps the registers until the products that read them are done.
  WS_INLINE void settle() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(high[i][j]), "+r"(low[i][j])::"memory");
    }
  }
};

// One thread copies the held operand's boxes, each block of the cluster half of the rows to both, as many steps ahead as
// there are stages; where wanted, it asks for the streamed rows of the same step to come to the second-level cache.
template <class P>
WS_INLINE void copy_held(typename P::Shared& shared, const TensorMap& held, const TensorMap& streamed, int rank) {
  constexpr int kShare = kMostHeld / P::kCluster;
  RingPlace<P::kStages> place;
  for (int tile = blockIdx.x; tile < P::kTiles; tile += gridDim.x) {
    for (int step = 0; step < P::kSteps; ++step) {
      typename P::Stage& stage = shared.stages[place.stage];
      Barrier& filled = shared.filled[place.stage];
      shared.free[place.stage].wait(place.parity ^ 1);
      if constexpr (P::kAhead) fetch_box(streamed, step * kTileDepth, tile * kStreamedTile);
      filled.expect(sizeof(typename P::Stage));
      copy_rows<2, kAlong, kShare, kMostHeld, P::kCluster>(held, filled, stage.held[0] + rank * kShare * kTileDepth,
                                                           step * kTileDepth, rank * kShare, 0);
      place.advance();
    }
  }
  // No block may leave while another still fills its memory or arrives at its barriers.
  for (int i = 0; i < P::kStages; ++i) {
    shared.free[place.stage].wait(place.parity ^ 1);
    place.advance();
  }
}

// The sums of one tile's 64 rows, by the scale of the held operand; says whether a row's elements were too far or no
// numbers at all.
template <class P>
WS_INLINE void multiply_streamed_tile(typename P::Shared& shared, RingPlace<P::kStages>& place, const float* upper_row,
                                      const float* lower_row, float (&sums)[P::kSums], bool& upper_far, bool& lower_far) {
#pragma unroll
  for (int i = 0; i < P::kSums; ++i) sums[i] = 0.0f;
  StreamedStep next;
  next.read(upper_row, lower_row, 0);
  for (int step = 0; step < P::kSteps; ++step) {
    const StepScale upper(next.upper), lower(next.lower);
    upper_far |= upper.far;
    lower_far |= lower.far;
    StepHalves halves(next, upper.up, lower.up);
    if (step + 1 < P::kSteps) next.read(upper_row, lower_row, (step + 1) * kTileDepth);
    typename P::Stage& stage = shared.stages[place.stage];
    shared.filled[place.stage].wait(place.parity);
    const uint64 held = operand_at<kAlong>(stage.held[0]), held_low = operand_at<kAlong>(stage.held[1]);
    float step_sums[P::kSums];
    halves.settle();
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply_add_held(step_sums, halves.high[i], further<kAlong>(held_low, 16 * i), i > 0);
      multiply_add_held(step_sums, halves.low[i], further<kAlong>(held, 16 * i), 1);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_add_held(step_sums, halves.high[i], further<kAlong>(held, 16 * i), 1);
    products_commit();
    products_wait<0>();
    settle(step_sums);
    halves.settle();
    release<P>(shared.free[place.stage]);
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] = fmaf(step_sums[i], i % 4 < 2 ? upper.down : lower.down, sums[i]);
    place.advance();
  }
}

// Takes a tile's sums to the end: neighbouring rows of the tile, which are columns of the result, by pairs.
template <class P, class Finish>
WS_INLINE void finish_streamed_tile(int first_row, const float (&sums)[P::kSums], const float* held_roots,
                                    const Finish& finish) {
  const int odd = threadIdx.x / 4 % 2, quarter = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < P::kSums / 4; ++i) {
    const int m = 8 * i + 2 * quarter + odd;
    const float root = m < P::kM ? held_roots[m] : 0.0f;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const float first = sums[4 * i + 2 * lower], second = sums[4 * i + 2 * lower + 1];
      const float mine = odd ? second : first;
      const float theirs = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
      Pack<float, 2> pair{odd ? theirs : mine, odd ? mine : theirs};
#pragma unroll
      for (int e = 0; e < 2; ++e) pair[e] = pair[e] * root * root;
      const int n = first_row + 8 * lower - odd;
      if (m < P::kM && n < P::kN) finish(0, m, n, pair);
    }
  }
}

// The whole product. `finish(0, m, n, sums)` gets the sums of row m at columns n and n + 1. Rows that have no scale get
// NaN in `streamed_roots`, all others 1: the repair makes their products. `streamed_map` is used by kAhead only.
template <class P, class Finish>
WS_INLINE void multiply_streamed(const TensorMap& held, const TensorMap& streamed_map,
                                 const float* __restrict__ streamed, const float* held_roots, float* streamed_roots,
                                 Marks* marks, const Finish& finish) {
  extern __shared__ char memory[];
  typename P::Shared& shared =
      *reinterpret_cast<typename P::Shared*>((reinterpret_cast<uint64>(memory) + 1023) / 1024 * 1024);
  const int rank = rank_in_cluster();
  if (threadIdx.x == 0) {
    prefetch_map(held);
    if constexpr (P::kAhead) prefetch_map(streamed_map);
    for (int i = 0; i < P::kStages; ++i) {
      shared.filled[i].begin(1);
      shared.free[i].begin(kStreamingWarps * P::kCluster);
    }
    publish_barriers();
  }
  meet_cluster();

  const int warpgroup = threadIdx.x / 128 - 1;
  if (warpgroup < 0) {
    keep_registers<24>();
    if (threadIdx.x == 0) copy_held<P>(shared, held, streamed_map, rank);
    return;
  }
  take_registers<240>();
  RingPlace<P::kStages> place;
  for (int tile = blockIdx.x; tile < P::kTiles; tile += gridDim.x) {
    const int row = tile * kStreamedTile + 64 * warpgroup + 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4;
    const float* rows = streamed + 4 * (threadIdx.x % 4);
    const float* upper_row = rows + min(row, P::kN - 1) * P::kRowStride;
    const float* lower_row = rows + min(row + 8, P::kN - 1) * P::kRowStride;
    float sums[P::kSums];
    bool upper_far = false, lower_far = false;
    multiply_streamed_tile<P>(shared, place, upper_row, lower_row, sums, upper_far, lower_far);
    if (threadIdx.x % 4 == 0) {
      if (row < P::kN) write_root(streamed_roots + row, upper_far ? quiet_nan<float>() : 1.0f, marks);
      if (row + 8 < P::kN) write_root(streamed_roots + row + 8, lower_far ? quiet_nan<float>() : 1.0f, marks);
    }
    finish_streamed_tile<P>(row, sums, held_roots, finish);
  }
}

}  // namespace ws
