// A matrix product of floats of 8 bits on tensor cores, which keep about 14 bits of a sum of them: so what a stage adds is
// promoted to float registers, 128 of depth at a time (DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.3.2), while the other
// warpgroup multiplies. On the way it may be scaled, by what is one number for a row of an operand and a stage. Such a scale is a
// generated struct with `kIsShared`, whether all columns of a tile have the same one, and `at(layer, row, k)`.
#pragma once
#include "ws_product.cuh"

namespace ws {

// Of operands that have no such scale.
struct NoScale {
  static constexpr bool kIsShared = true;
  WS_INLINE float at(int, int, int) const { return 1.0f; }
};

// What a thread's sums of a stage are multiplied by. It asks for scales before the products, and uses them afterwards.
template <class P, class Left, class Right> struct StageScales {
  static constexpr int kColumns = Right::kIsShared ? 1 : P::kSums / 2;
  const Left& left;
  const Right& right;
  int layer, row, column;
  float rows[2], columns[kColumns];

  WS_INLINE StageScales(const Left& left_, const Right& right_, const typename P::Tile& tile, int rank, int warpgroup)
      : left(left_), right(right_), layer(tile.layer),
        row(tile.first_row(rank) + warpgroup % 2 * 64 + 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4),
        column(tile.first_column() + warpgroup / 2 * P::kOwnColumns + 2 * (threadIdx.x % 4)) {}

  WS_INLINE void ask(int k) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) rows[lower] = left.at(layer, min(row + 8 * lower, P::kM - 1), k);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) columns[i] = right.at(layer, min(column + 8 * (i / 2) + i % 2, P::kN - 1), k);
  }

  WS_INLINE void add(float (&sums)[P::kSums], const float (&some)[P::kSums]) const {
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) {
      const float scale = rows[i % 4 / 2] * columns[Right::kIsShared ? 0 : i / 4 * 2 + i % 2];
      sums[i] += some[i] * scale;
    }
  }
};
template <class P> struct StageScales<P, NoScale, NoScale> {
  WS_INLINE StageScales(const NoScale&, const NoScale&, const typename P::Tile&, int, int) {}
  WS_INLINE void ask(int) {}
  WS_INLINE void add(float (&sums)[P::kSums], const float (&some)[P::kSums]) const {
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] += some[i];
  }
};

// The sums of one tile's 64 rows; what lies in `place` moves on by the steps taken.
template <class P, class Scales>
WS_INLINE void multiply_tile_promoted(Ring<P>& shared, RingPlace<P::kStages>& place, int warpgroup, Scales scales,
                                      float (&sums)[P::kSums]) {
  const int rows = own_rows<P>(warpgroup), columns = own_columns<P>(warpgroup);
  float some[P::kSums];
#pragma unroll
  for (int i = 0; i < P::kSums; ++i) sums[i] = some[i] = 0.0f;
  for (int step = 0; step < P::kSteps; ++step) {
    scales.ask(step * P::kStageDepth);
    Stage<P>& stage = shared.stages[place.stage];
    shared.filled[place.stage].wait(place.parity);
    products_begin();
    multiply_stage<P>(some, operand_at<P::kLeft>(stage.left[0] + rows), operand_at<P::kRight>(stage.right[0] + columns), 0);
    products_commit();
    products_wait<0>();
    settle(some);
    release<P>(shared.free[place.stage]);
    scales.add(sums, some);
    place.advance();
  }
}

// As `multiply`, with a scale for each operand in the place of the roots of scales.
template <class P, class Left, class Right, class Finish>
WS_INLINE void multiply_promoted(const TensorMap& left, const TensorMap& right, const Left& left_scale, const Right& right_scale,
                                 const Finish& finish) {
  with_operands<P>(left, right, [&](Ring<P>& shared, int rank, int warpgroup) {
    RingPlace<P::kStages> place;
    for (int number = blockIdx.x / P::kCluster; number < P::kTiles; number += gridDim.x / P::kCluster) {
      const typename P::Tile tile = P::tile_at(number);
      float sums[P::kSums];
      multiply_tile_promoted<P>(
          shared, place, warpgroup, StageScales<P, Left, Right>(left_scale, right_scale, tile, rank, warpgroup), sums);
      finish_tile<P>({tile, rank, warpgroup}, sums, nullptr, nullptr, finish);
    }
  });
}

}  // namespace ws
