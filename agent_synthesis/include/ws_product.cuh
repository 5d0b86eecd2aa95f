// A matrix product on tensor cores: sums[batch][m, n] = sum over k of left[batch][m, k] * right[batch][n, k], for sm_90a.
//
// One warp copies boxes of both operands through a ring of stages; two warpgroups multiply 64 rows each. Blocks stay and
// take tile after tile. Two blocks of a cluster take tiles one above the other and share the columns' copies.
// With kParts = 2 the operands are halves from `ws_split.cuh`: the product of the high parts is summed in float
// registers every kPromote stages, since tensor cores round towards zero; the two cross products, 2048 times smaller,
// need no such care. Their own product (low by low) is below a float's rounding.
#pragma once
#include "ws_split.cuh"
#include "ws_tensor_copy.cuh"
#include "ws_wgmma.cuh"

namespace ws {

constexpr int kTileRows = 128;   // of a block: 64 for each multiplying warpgroup
constexpr int kTileDepth = 64;   // elements of k in a stage: 128 bytes, the swizzle's width
constexpr int kProductThreads = 384;
constexpr int kMultiplyingWarps = 8;

struct Extents {
  int batch, m, n, k;
};

// `group`: rows of tiles that are walked together, so that the second-level cache helps; `promote`: stages between promotions.
struct Tiling {
  int columns, stages, cluster, group, promote;
};

template <class Element_, int kParts_, Extents kExtents, Tiling kTiling> struct MatrixProduct {
  using Element = Element_;
  static constexpr int kParts = kParts_;
  static constexpr int kBatch = kExtents.batch, kM = kExtents.m, kN = kExtents.n, kK = kExtents.k;
  static constexpr int kTileColumns = kTiling.columns, kStages = kTiling.stages, kCluster = kTiling.cluster;
  static constexpr int kGroup = kTiling.group, kPromote = kTiling.promote;
  static constexpr int kRowTiles = (kM + kTileRows * kCluster - 1) / (kTileRows * kCluster);  // of a whole cluster
  static constexpr int kColumnTiles = (kN + kTileColumns - 1) / kTileColumns;
  static constexpr int kTiles = kRowTiles * kColumnTiles * kBatch;
  static constexpr int kSteps = (kK + kTileDepth - 1) / kTileDepth;
  static constexpr int kSums = kTileColumns / 2;  // accumulators of a thread

  struct alignas(1024) Stage {
    Element left[kParts][kTileRows][kTileDepth];
    Element right[kParts][kTileColumns][kTileDepth];
  };
  struct Shared {
    Stage stages[kStages];
    Barrier filled[kStages];
    Barrier free[kStages];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;  // dynamic shared memory begins anywhere

  struct Tile {
    int batch, row, column;
  };

  // Tiles in the order in which clusters take them: groups of rows of tiles, in each column by column.
  static WS_INLINE Tile tile_at(int number) {
    const int batch = number / (kRowTiles * kColumnTiles);
    const int place = number % (kRowTiles * kColumnTiles);
    const int first = place / (kGroup * kColumnTiles) * kGroup;
    const int rows = min(kGroup, kRowTiles - first);
    const int inside = place % (kGroup * kColumnTiles);
    return {batch, first + inside % rows, inside / rows};
  }
};

// The stage that comes next, and the parity of its phase.
template <int kStages> struct RingPlace {
  int stage = 0;
  int parity = 0;
  WS_INLINE void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <class P>
WS_INLINE void copy_operands(typename P::Shared& shared, const TensorMap& left, const TensorMap& right, int rank) {
  constexpr int kShare = P::kTileColumns / P::kCluster;
  RingPlace<P::kStages> place;
  for (int number = blockIdx.x / P::kCluster; number < P::kTiles; number += gridDim.x / P::kCluster) {
    const typename P::Tile tile = P::tile_at(number);
    const int row = (tile.row * P::kCluster + rank) * kTileRows;
    for (int step = 0; step < P::kSteps; ++step) {
      typename P::Stage& stage = shared.stages[place.stage];
      Barrier& filled = shared.filled[place.stage];
      shared.free[place.stage].wait(place.parity ^ 1);
      filled.expect(sizeof(typename P::Stage));
      copy_box(left, filled, stage.left, step * kTileDepth, row, 0, tile.batch);
      if constexpr (P::kCluster == 1) {
        copy_box(right, filled, stage.right, step * kTileDepth, tile.column * P::kTileColumns, 0, tile.batch);
      } else {
        // One box a part, since a block's share of the rows of both parts is not one piece.
#pragma unroll
        for (int part = 0; part < P::kParts; ++part) {
          copy_box_to((1 << P::kCluster) - 1, right, filled, stage.right[part][rank * kShare], step * kTileDepth,
                      tile.column * P::kTileColumns + rank * kShare, part, tile.batch);
        }
      }
      place.advance();
    }
  }
  // No block may leave while another still fills its memory or arrives at its barriers.
  for (int i = 0; i < P::kStages; ++i) {
    shared.free[place.stage].wait(place.parity ^ 1);
    place.advance();
  }
}

// A warp has read the stage: it says so to every block that fills it.
template <class P> WS_INLINE void release(Barrier& free) {
  if (threadIdx.x % 32 < P::kCluster) free.arrive_at(threadIdx.x % 32);
}

// The sums of one tile's 64 rows; what lies in `place` moves on by the steps taken.
template <class P>
WS_INLINE void multiply_tile(typename P::Shared& shared, RingPlace<P::kStages>& place, int warpgroup,
                             float (&sums)[P::kSums]) {
  using T = typename P::Element;
  int previous = 0;
  if constexpr (P::kParts == 1) {
    for (int step = 0; step < P::kSteps; ++step) {
      typename P::Stage& stage = shared.stages[place.stage];
      shared.filled[place.stage].wait(place.parity);
      const uint64 left = operand_at(stage.left[0][64 * warpgroup]), right = operand_at(stage.right[0]);
      products_begin();
#pragma unroll
      for (int k = 0; k < kTileDepth; k += 16) multiply_add<T>(sums, further(left, k), further(right, k), step + k > 0);
      products_commit();
      products_wait<1>();
      if (step > 0) release<P>(shared.free[previous]);
      previous = place.stage;
      place.advance();
    }
    products_wait<0>();
    settle(sums);
    release<P>(shared.free[previous]);
  } else {
    float main[P::kSums], cross[P::kSums];
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] = 0.0f;
    for (int step = 0; step < P::kSteps; ++step) {
      typename P::Stage& stage = shared.stages[place.stage];
      shared.filled[place.stage].wait(place.parity);
      const uint64 left = operand_at(stage.left[0][64 * warpgroup]), right = operand_at(stage.right[0]);
      const uint64 left_low = operand_at(stage.left[1][64 * warpgroup]), right_low = operand_at(stage.right[1]);
      products_begin();
#pragma unroll
      for (int k = 0; k < kTileDepth; k += 16)
        multiply_add<T>(main, further(left, k), further(right, k), step % P::kPromote + k > 0);
      products_commit();
#pragma unroll
      for (int k = 0; k < kTileDepth; k += 16) {
        multiply_add<T>(cross, further(left, k), further(right_low, k), step + k > 0);
        multiply_add<T>(cross, further(left_low, k), further(right, k), 1);
      }
      products_commit();
      products_wait<1>();  // the main product of this step and all before; the cross products run on
      settle(main);
      if (step > 0) release<P>(shared.free[previous]);
      if (step % P::kPromote == P::kPromote - 1 || step == P::kSteps - 1) {
#pragma unroll
        for (int i = 0; i < P::kSums; ++i) sums[i] += main[i];
      }
      previous = place.stage;
      place.advance();
    }
    products_wait<0>();
    settle(cross);
    release<P>(shared.free[previous]);
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] += cross[i] * (1.0f / kLowScale);
  }
}

// A pair of neighbouring sums, from scaled operands' to the operands' own scale. Roots, so that no step leaves the range
// of floats where the result does not.
template <class P>
WS_INLINE Pack<float, 2> unscaled(Pack<float, 2> sums, float left_root, const float* right_roots, int column) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float right_root = P::kN % 2 == 0 || column + e < P::kN ? right_roots[column + e] : 0.0f;
    sums[e] = sums[e] * left_root * right_root * left_root * right_root;
  }
  return sums;
}

// The whole product. `finish(batch, m, n, sums)` gets the sums of row m at columns n and n + 1; n is even and inside. The
// roots of scales are those of `split_row`; with one part there are none.
template <class P, class Finish>
WS_INLINE void multiply(const TensorMap& left, const TensorMap& right, const float* left_roots, const float* right_roots,
                        const Finish& finish) {
  extern __shared__ char memory[];
  typename P::Shared& shared =
      *reinterpret_cast<typename P::Shared*>((reinterpret_cast<uint64>(memory) + 1023) / 1024 * 1024);
  const int rank = P::kCluster > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    prefetch_map(left);
    prefetch_map(right);
    for (int i = 0; i < P::kStages; ++i) {
      shared.filled[i].begin(1);
      shared.free[i].begin(kMultiplyingWarps * P::kCluster);
    }
    publish_barriers();
  }
  if constexpr (P::kCluster > 1) meet_cluster();
  else __syncthreads();

  const int warpgroup = threadIdx.x / 128 - 1;
  if (warpgroup < 0) {
    keep_registers<24>();
    if (threadIdx.x == 0) copy_operands<P>(shared, left, right, rank);
    return;
  }
  take_registers<240>();
  RingPlace<P::kStages> place;
  const int row_inside = 64 * warpgroup + 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4;
  const int column_inside = 2 * (threadIdx.x % 4);
  for (int number = blockIdx.x / P::kCluster; number < P::kTiles; number += gridDim.x / P::kCluster) {
    float sums[P::kSums];
    multiply_tile<P>(shared, place, warpgroup, sums);
    const typename P::Tile tile = P::tile_at(number);
    const int first_row = (tile.row * P::kCluster + rank) * kTileRows + row_inside;
    const int first_column = tile.column * P::kTileColumns + column_inside;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int row = first_row + 8 * lower;
      if (row >= P::kM) continue;
      const float root = P::kParts == 2 ? left_roots[tile.batch * P::kM + row] : 1.0f;
#pragma unroll
      for (int i = 0; i < P::kSums / 4; ++i) {
        const int column = first_column + 8 * i;
        if (column >= P::kN) continue;
        Pack<float, 2> pair{sums[4 * i + 2 * lower], sums[4 * i + 2 * lower + 1]};
        if constexpr (P::kParts == 2) pair = unscaled<P>(pair, root, right_roots + tile.batch * P::kN, column);
        finish(tile.batch, row, column, pair);
      }
    }
  }
}

}  // namespace ws
