// A matrix product of floats of 8 bits on tensor cores, which keep about 14 bits of a sum of them: so what a stage adds is
// promoted to float registers, 128 of depth at a time (DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.3.2), while the other
// warpgroup multiplies.
#pragma once
#include "ws_product.cuh"

namespace ws {

// The sums of one tile's 64 rows; what lies in `place` moves on by the steps taken.
template <class P>
WS_INLINE void multiply_tile_promoted(Ring<P>& shared, RingPlace<P::kStages>& place, int warpgroup, float (&sums)[P::kSums]) {
  const int rows = own_rows<P>(warpgroup), columns = own_columns<P>(warpgroup);
  float some[P::kSums];
#pragma unroll
  for (int i = 0; i < P::kSums; ++i) sums[i] = some[i] = 0.0f;
  for (int step = 0; step < P::kSteps; ++step) {
    Stage<P>& stage = shared.stages[place.stage];
    shared.filled[place.stage].wait(place.parity);
    products_begin();
    multiply_stage<P>(some, operand_at<P::kLeft>(stage.left[0] + rows), operand_at<P::kRight>(stage.right[0] + columns), 0);
    products_commit();
    products_wait<0>();
    settle(some);
    release<P>(shared.free[place.stage]);
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) sums[i] += some[i];
    place.advance();
  }
}

// As `multiply`, of operands that were not scaled.
template <class P, class Finish>
WS_INLINE void multiply_promoted(const TensorMap& left, const TensorMap& right, const float*, const float*, const Finish& finish) {
  with_operands<P>(left, right, [&](Ring<P>& shared, int rank, int warpgroup) {
    RingPlace<P::kStages> place;
    for (int number = blockIdx.x / P::kCluster; number < P::kTiles; number += gridDim.x / P::kCluster) {
      float sums[P::kSums];
      multiply_tile_promoted<P>(shared, place, warpgroup, sums);
      finish_tile<P>({P::tile_at(number), rank, warpgroup}, sums, nullptr, nullptr, finish);
    }
  });
}

}  // namespace ws
