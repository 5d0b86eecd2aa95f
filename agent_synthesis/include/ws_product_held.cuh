// A product of 16-bit operands whose ends are made while the next tile is multiplied, for sm_90a.
//
// A tile's sums are rounded to the operands' type, as PyTorch rounds a product before it goes on; so they take half the
// registers of accumulators, and tensor cores can begin the next tile. After every second of its steps a pack of what is held
// comes to its end: with a GELU 1.55 ms instead of 1.64 at 8192 x 8192 x 8192, without any end 1.56 instead of 1.59 (H200, bf16).
#pragma once
#include "ws_product.cuh"

namespace ws {

// Two neighbours as 16-bit values in one register, the first in the lower bits.
template <class T> WS_INLINE unsigned joined(float first, float second) {
  unsigned pair;
  if constexpr (kIsHalf<T>) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
template <class T> WS_INLINE Pack<float, 2> apart(unsigned pair) {
  return {widen(T{static_cast<unsigned short>(pair)}), widen(T{static_cast<unsigned short>(pair >> 16)})};
}

// A thread's sums of one tile, pack after pack.
template <class P> struct HeldTile {
  static constexpr int kPairs = P::kPack / 2, kPacks = 2 * ThreadPlace<P>::kPacks;
  static constexpr int kSteps = 2;  // to a pack: with one 1.58 ms, with four 1.57
  static_assert(P::kParts == 1 && kPacks * kSteps <= P::kSteps, "the next tile is long enough for the ends of this one");
  ThreadPlace<P> place;
  unsigned pairs[kPacks * kPairs];

  WS_INLINE void hold(const ThreadPlace<P>& of, const float (&sums)[P::kSums]) {
    place = of;
#pragma unroll
    for (int i = 0; i < kPacks * kPairs; ++i) {
      const int from = 4 * (i % (P::kSums / 4)) + i / (P::kSums / 4) * 2;  // all of the upper row, then of the lower
      pairs[i] = joined<typename P::Element>(sums[from], sums[from + 1]);
    }
  }

  // The end of pack `i`, whose pairs begin at `first`.
  template <class Finish> WS_INLINE void finish_pack(int i, int first, const Finish& finish) const {
    Pack<float, 2> own[kPairs];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) own[j] = apart<typename P::Element>(pairs[first + j]);
    const Pack<float, P::kPack> pack = gathered<P::kPack>(own);
    const int row = place.row(i / ThreadPlace<P>::kPacks), column = place.column(i % ThreadPlace<P>::kPacks);
    if (row < P::kM && column < P::kN) finish(place.layer, row, column, pack);
  }

  // All packs, of a tile that no other follows. Registers have no numbers to loop over: those behind move up.
  template <class Finish> WS_INLINE void finish_all(const Finish& finish) {
#pragma unroll 1
    for (int i = 0; i < kPacks; ++i) {
      finish_pack(i, 0, finish);
#pragma unroll
      for (int j = kPairs; j < kPacks * kPairs; ++j) pairs[j - kPairs] = pairs[j];
    }
  }
};

// The whole product; `finish` as `multiply` has it. The steps that packs follow are unrolled, which takes two seconds to compile:
// one body for all of them, with packs that move up, takes a tenth of that, but 1.50 ms where this takes 1.44 (and `multiply` 1.51).
template <class P, class Finish>
WS_INLINE void multiply_holding(const TensorMap& left, const TensorMap& right, const Finish& finish) {
  with_operands<P>(left, right, [&](Ring<P>& shared, int rank, int warpgroup) {
    RingPlace<P::kStages> place;
    HeldTile<P> held{{P::tile_at(0), rank, warpgroup}};
    const int first = blockIdx.x / P::kCluster;
    for (int number = first; number < P::kTiles; number += gridDim.x / P::kCluster) {
      float sums[P::kSums];
      TileSteps<P> steps(shared, place, warpgroup);
#pragma unroll
      for (int i = 0; i < held.kPacks; ++i) {
        steps.take(sums, i * held.kSteps);
        if (number > first) held.finish_pack(i, i * held.kPairs, finish);
#pragma unroll
        for (int more = 1; more < held.kSteps; ++more) steps.take(sums, i * held.kSteps + more);
      }
      for (int step = held.kPacks * held.kSteps; step < P::kSteps; ++step) steps.take(sums, step);
      steps.end(sums);
      held.hold({P::tile_at(number), rank, warpgroup}, sums);
    }
    held.finish_all(finish);
  });
}

}  // namespace ws
