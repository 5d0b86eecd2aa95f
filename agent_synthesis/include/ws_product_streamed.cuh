// A product of few rows with a long operand, which is read once as floats and split on its way into registers:
// sums[m, n] = sum over k of held[m, k] * streamed[n, k], for sm_90a.
//
// Splitting in memory would write and read the long operand once more, and it is all the traffic there is. Here a warp
// splits 16 of its rows into registers (`ws_product_rows.cuh`) and multiplies them with the halves of the held operand, which
// the copy engine brings: the tile is the result's transpose.
// Rows come through shared memory (0.37 ms at 128 x 16384 x 16384, H200): loads to registers a step before took 0.43, with boxes
// asked for to the second-level cache 0.41; splitting a step while the one before is multiplied gained nothing.
#pragma once
#include "ws_product_rows.cuh"

namespace ws {

constexpr int kMostHeld = 128;     // rows of the held operand
constexpr int kStreamedTile = 128;  // rows of the streamed operand in a block's tile: 64 for each multiplying warpgroup
constexpr int kStreamThreads = 384, kStreamingWarps = 8;
constexpr int kHoldThreads = 256;

// `row_stride` of the streamed operand, in elements; steps in shared memory of the held operand, and of the streamed one.
struct StreamedExtents {
  int m, n, k;
  int64 row_stride;
  int held, streamed;
};

template <StreamedExtents kExtents> struct StreamedProduct {
  static constexpr int kM = kExtents.m, kN = kExtents.n, kK = kExtents.k;
  static constexpr int64 kRowStride = kExtents.row_stride;
  static constexpr int kCluster = 2, kStages = kExtents.held, kRowStages = kExtents.streamed;
  static constexpr int kSteps = kK / kTileDepth;
  static constexpr int kTiles = (kN + kStreamedTile * kCluster - 1) / (kStreamedTile * kCluster) * kCluster;
  static constexpr int kSums = kMostHeld / 2;

  struct alignas(1024) Stage { half held[2][kMostHeld * kTileDepth]; };
  struct Shared {
    Stage stages[kStages];
    StagedRows rows[kRowStages][8];
    Barrier filled[kStages];
    Barrier free[kStages];
  };
};

// Splits one row of the held operand, kHoldThreads to a row, in the order of `place_of`.
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
  const RowScale scale = row_scale<half>(range_of_all<kHoldThreads>(range, scratch));
  for (int first = 4 * threadIdx.x; first < kDepth; first += 4 * kHoldThreads) {
    const Pack<float, 4> values = load<4, kOnce>(row + first);
    const int place = first / 16 * 16 + place_of(first % 16);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      Pack<half, 2> highs, lows;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float scaled = values[2 * pair + e] * scale.up;
        highs[e] = narrow<half>(scaled);
        lows[e] = narrow<half>(scaled - widen(highs[e]));
      }
      store(high + place + place_of(2 * pair), highs);
      store(low + place + place_of(2 * pair), lows);
    }
  }
  if (threadIdx.x == 0) write_root(root, scale.root_down, marks);
}

// One thread copies the held operand's boxes, each block of the cluster half of the rows to both, as many steps ahead as
// there are stages.
template <class P>
WS_INLINE void copy_held(typename P::Shared& shared, const TensorMap& held, int rank) {
  constexpr int kShare = kMostHeld / P::kCluster;
  RingPlace<P::kStages> place;
  for (int tile = blockIdx.x; tile < P::kTiles; tile += gridDim.x) {
    for (int step = 0; step < P::kSteps; ++step) {
      typename P::Stage& stage = shared.stages[place.stage];
      Barrier& filled = shared.filled[place.stage];
      shared.free[place.stage].wait(place.parity ^ 1);
      filled.expect(sizeof(typename P::Stage));
      copy_rows<2, kAlong, LayerAxes{}, kShare, kMostHeld, P::kCluster>(held, filled, stage.held[0] + rank * kShare * kTileDepth,
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

// Where a warp's streamed rows come from: step after step, tile after tile.
template <class P> struct StreamedRows {
  const float* streamed;
  int tile = blockIdx.x, step = 0;  // asked for next

  static WS_INLINE int first_row(int tile) { return tile * kStreamedTile + 16 * (threadIdx.x / 32 - 4); }

  WS_INLINE void ask(StagedRows& to) {
    if (tile >= P::kTiles) return;
    ask_for_rows<P::kN, P::kRowStride, P::kN % (kStreamedTile * P::kCluster) == 0>(to, streamed + step * kTileDepth,
                                                                                   first_row(tile));
    if (++step == P::kSteps) step = 0, tile += gridDim.x;
  }
};

// What a multiplying thread adds up of a tile, and whether a row's elements were too far.
template <class P> struct StreamedTile {
  float sums[P::kSums];
  bool upper_far = false, lower_far = false;

  WS_INLINE StreamedTile() {
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] = 0.0f;
  }

  WS_INLINE void add(typename P::Shared& shared, RingPlace<P::kStages>& place, const StreamedStep& step) {
    const StepScale upper = scale_of_four(step.upper), lower = scale_of_four(step.lower);
    upper_far |= upper.far;
    lower_far |= lower.far;
    float step_sums[P::kSums];
    typename P::Stage& stage = shared.stages[place.stage];
    multiply_step<1>(step_sums, step, upper.up, lower.up, stage.held[0], stage.held[1], shared.filled[place.stage],
                     place.parity);
    release<P>(shared.free[place.stage]);
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] = fmaf(step_sums[i], i % 4 < 2 ? upper.down : lower.down, sums[i]);
    place.advance();
  }
};

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
// NaN in `streamed_roots`, all others 1: the repair makes their products.
template <class P, class Finish>
WS_INLINE void multiply_streamed(const TensorMap& held, const float* __restrict__ streamed, const float* held_roots,
                                 float* streamed_roots, Marks* marks, const Finish& finish) {
  extern __shared__ char memory[];
  char* aligned = memory + (0u - shared_address(memory)) % 1024;
  typename P::Shared& shared = *reinterpret_cast<typename P::Shared*>(aligned);
  const int rank = rank_in_cluster();
  if (threadIdx.x == 0) {
    prefetch_map(held);
    for (int i = 0; i < P::kStages; ++i) {
      shared.filled[i].begin(1);
      shared.free[i].begin(kStreamingWarps * P::kCluster);
    }
    publish_barriers();
  }
  meet_cluster();

  if (threadIdx.x < 128) {
    keep_registers<24>();
    if (threadIdx.x == 0) copy_held<P>(shared, held, rank);
    return;
  }
  take_registers<240>();
  RingPlace<P::kStages> place;
  StepsAhead<P::kRowStages, StreamedRows<P>> ahead(shared.rows, {streamed});
  for (int tile = blockIdx.x; tile < P::kTiles; tile += gridDim.x) {
    StreamedTile<P> made;
    for (int step = 0; step < P::kSteps; ++step) made.add(shared, place, ahead.take());
    const int row = StreamedRows<P>::first_row(tile) + threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0) {
      if (row < P::kN) write_root(streamed_roots + row, made.upper_far ? quiet_nan<float>() : 1.0f, marks);
      if (row + 8 < P::kN) write_root(streamed_roots + row + 8, made.lower_far ? quiet_nan<float>() : 1.0f, marks);
    }
    finish_streamed_tile<P>(row, made.sums, held_roots, finish);
  }
}

}  // namespace ws
