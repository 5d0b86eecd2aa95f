// A matrix product on tensor cores: sums[layer][m, n] = sum over k of left[layer][m, k] * right[layer][n, k], for sm_90a.
//
// One warp copies boxes of both operands through a ring of stages; two warpgroups multiply 64 rows each, or four half of
// the columns of 64 rows, which ends short products sooner. Blocks stay and take tile after tile. Two blocks of a cluster
// take tiles one above the other and share the columns' copies.
// With kParts = 2 the operands are the two parts that `ws_split.cuh` made: the product of the high parts is summed in float
// registers every kPromote stages, since tensor cores round towards zero; the two cross products, 2048 times smaller,
// need no such care. Their own product (low by low) is below a float's rounding.
// The depth may be cut into slices, each a layer like those of a batch: `ws_product_slices.cuh` adds them up.
#pragma once
#include "ws_product_shape.cuh"
#include "ws_tensor_copy.cuh"
#include "ws_wgmma.cuh"

namespace ws {

// Boxes of both operands, and the barriers of a ring of them.
template <class P> struct alignas(1024) Stage {
  typename P::Element left[P::kParts][kTileRows * P::kStageDepth];
  typename P::Element right[P::kParts][P::kTileColumns * P::kStageDepth];
};
template <class P> struct Ring {
  Stage<P> stages[P::kStages];
  Barrier filled[P::kStages];
  Barrier free[P::kStages];
};

// The stage that comes next, and the parity of its phase.
template <int kStages> struct RingPlace {
  int stage = 0;
  int parity = 0;
  WS_INLINE void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Copies the box at these coordinates; to every block of the cluster where there are several `kReceivers`.
template <int kReceivers, class... Coordinates>
WS_INLINE void copy_to(const TensorMap& map, Barrier& filled, void* to, Coordinates... at) {
  if constexpr (kReceivers == 1) copy_box(map, filled, to, at...);
  else copy_box_to((1 << kReceivers) - 1, map, filled, to, at...);
}

// Copies the box at (x, y) of a part and layer, or of the layer where the map has its axes.
template <LayerAxes kLayers, int kReceivers>
WS_INLINE void copy_layer(const TensorMap& map, Barrier& filled, void* to, int x, int y, int part, int layer) {
  if constexpr (kLayers.third.extent == 0) {
    copy_to<kReceivers>(map, filled, to, x, y, part, layer);
  } else {
    const int z = kLayers.third.of(layer), w = kLayers.fourth.of(layer);
    if constexpr (kLayers.fifth.extent > 1) copy_to<kReceivers>(map, filled, to, x, y, z, w, kLayers.fifth.of(layer));
    else copy_to<kReceivers>(map, filled, to, x, y, z, w);
  }
}

// Copies `kRows` rows of all parts of an operand to `to`, where each part has `kPartRows`.
template <int kParts, Direction kDirection, LayerAxes kLayers, int kRows, int kPartRows, int kReceivers, class Element>
WS_INLINE void copy_rows(const TensorMap& map, Barrier& filled, Element* to, int depth, int row, int layer) {
  constexpr int kBoxRows = kDirection == kAcross ? 64 : kRows, kRowElements = 128 / sizeof(Element);
  static_assert(kRows % kBoxRows == 0, "across, rows come in blocks of 64");
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int begin = 0; begin < kRows; begin += kBoxRows) {
      Element* place = to + (part * kPartRows + begin) * kRowElements;
      const int x = kDirection == kAcross ? row + begin : depth, y = kDirection == kAcross ? depth : row + begin;
      copy_layer<kLayers, kReceivers>(map, filled, place, x, y, part, layer);
    }
  }
}

template <class P>
WS_INLINE void copy_operands(Ring<P>& shared, const TensorMap& left, const TensorMap& right, int rank) {
  constexpr int kShare = P::kTileColumns / P::kCluster;
  RingPlace<P::kStages> place;
  for (int number = blockIdx.x / P::kCluster; number < P::kTiles; number += gridDim.x / P::kCluster) {
    const typename P::Tile tile = P::tile_at(number);
    if (!tile.is_wanted()) continue;
    for (int step = 0; step < P::kSteps; ++step) {
      Stage<P>& stage = shared.stages[place.stage];
      Barrier& filled = shared.filled[place.stage];
      shared.free[place.stage].wait(place.parity ^ 1);
      filled.expect(sizeof(Stage<P>));
      copy_rows<P::kParts, P::kLeft, P::kLeftLayers, kTileRows, kTileRows, 1>(
          left, filled, stage.left[0], step * P::kStageDepth, tile.first_row(rank), tile.layer);
      copy_rows<P::kParts, P::kRight, P::kRightLayers, kShare, P::kTileColumns, P::kCluster>(
          right, filled, stage.right[0] + rank * kShare * P::kStageDepth, step * P::kStageDepth,
          tile.first_column() + rank * kShare, tile.layer);
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

// `sums` (+)= the products of a stage's rows; `keep` as `multiply_add` takes it.
template <class P>
WS_INLINE void multiply_stage(float (&sums)[P::kSums], uint64 left, uint64 right, int keep) {
  using Element = typename P::Element;
#pragma unroll
  for (int k = 0; k < P::kStepDepth; k += P::kProductDepth)
    multiply_add<Element, P::kLeft, P::kRight>(sums, further<P::kLeft, Element>(left, k),
                                               further<P::kRight, Element>(right, k), keep + k > 0);
}

// A warpgroup's part of a stage: its rows of the left, its columns of the right.
template <class P> WS_INLINE int own_rows(int warpgroup) { return warpgroup % 2 * 64 * P::kStageDepth; }
template <class P> WS_INLINE int own_columns(int warpgroup) { return warpgroup / 2 * P::kOwnColumns * P::kStageDepth; }

// The steps of one tile of operands in one part, one after the other; what lies in `place` moves on.
template <class P> struct TileSteps {
  Ring<P>& shared;
  RingPlace<P::kStages>& place;
  int rows, columns, previous = 0;

  WS_INLINE TileSteps(Ring<P>& shared_, RingPlace<P::kStages>& place_, int warpgroup)
      : shared(shared_), place(place_), rows(own_rows<P>(warpgroup)), columns(own_columns<P>(warpgroup)) {}

  // Begins the products of a step, and waits for those of the one before.
  WS_INLINE void take(float (&sums)[P::kSums], int step) {
    Stage<P>& stage = shared.stages[place.stage];
    shared.filled[place.stage].wait(place.parity);
    products_begin();
    multiply_stage<P>(sums, operand_at<P::kLeft>(stage.left[0] + rows), operand_at<P::kRight>(stage.right[0] + columns), step);
    products_commit();
    products_wait<1>();
    if (step > 0) release<P>(shared.free[previous]);
    previous = place.stage;
    place.advance();
  }

  WS_INLINE void end(float (&sums)[P::kSums]) {
    products_wait<0>();
    settle(sums);
    release<P>(shared.free[previous]);
  }
};

// The sums of one tile's 64 rows; what lies in `place` moves on by the steps taken. kFresh: all accumulators begin with zeros,
// so that none of them keeps its register while the tile before comes to a long end.
template <class P, bool kFresh = false>
WS_INLINE void multiply_tile(Ring<P>& shared, RingPlace<P::kStages>& place, int warpgroup,
                             float (&sums)[P::kSums]) {
  if constexpr (P::kParts == 1) {
    if constexpr (kFresh) {
#pragma unroll
      for (int i = 0; i < P::kSums; ++i) sums[i] = 0.0f;
    }
    TileSteps<P> steps(shared, place, warpgroup);
    for (int step = 0; step < P::kSteps; ++step) steps.take(sums, step);
    steps.end(sums);
  } else {
    const int rows = own_rows<P>(warpgroup), columns = own_columns<P>(warpgroup);
    int previous = 0;
    float main[P::kSums], cross[P::kSums];
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) {
      sums[i] = 0.0f;
      if constexpr (kFresh) main[i] = cross[i] = 0.0f;
    }
    for (int step = 0; step < P::kSteps; ++step) {
      Stage<P>& stage = shared.stages[place.stage];
      shared.filled[place.stage].wait(place.parity);
      const uint64 left = operand_at<P::kLeft>(stage.left[0] + rows), left_low = operand_at<P::kLeft>(stage.left[1] + rows);
      const uint64 right = operand_at<P::kRight>(stage.right[0] + columns);
      const uint64 right_low = operand_at<P::kRight>(stage.right[1] + columns);
      products_begin();
      multiply_stage<P>(main, left, right, step % P::kPromote);
      products_commit();
      multiply_stage<P>(cross, left, right_low, step);
      multiply_stage<P>(cross, left_low, right, 1);
      products_commit();
      products_wait<1>();  // the main product of this step and all before; the cross products run on
      settle(main);
      if (step > 0) release<P>(shared.free[previous]);
      if (step % P::kPromote == P::kPromote - 1 || step == P::kSteps - 1) {
#pragma unroll
        for (int i = 0; i < P::kSums; ++i) sums[i] = P::kSteps == 1 ? main[i] : sums[i] + main[i];
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

// A thread's next pack of neighbouring columns of one row: pairs that its warpgroup holds eight columns apart, exchanged
// with the threads that hold the pairs between, so that stores are wide. `pairs` are the thread's of kPack / 2 times eight
// columns; the pack's first column, counted from theirs, is `first_of_pack`.
template <int kPack> WS_INLINE int first_of_pack() {
  const int quarter = threadIdx.x % 4;
  return kPack == 2 ? 2 * quarter : kPack == 4 ? 8 * (quarter % 2) + 4 * (quarter / 2) : 8 * quarter;
}

template <int kPack> WS_INLINE Pack<float, kPack> gathered(const Pack<float, 2> (&pairs)[kPack / 2]) {
  const int quarter = threadIdx.x % 4;
  if constexpr (kPack == 2) {
    return pairs[0];
  } else {
    // Neighbours exchange: a thread has four columns of every second eight.
    constexpr int kFours = kPack / 4;
    const bool odd = quarter % 2, upper = quarter / 2;
    Pack<float, 4> fours[kFours];
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float mine = odd ? pairs[2 * i + 1][e] : pairs[2 * i][e], other = odd ? pairs[2 * i][e] : pairs[2 * i + 1][e];
        const float theirs = __shfl_xor_sync(0xffffffffu, other, 1);
        fours[i][e] = odd ? theirs : mine;
        fours[i][2 + e] = odd ? mine : theirs;
      }
    }
    if constexpr (kPack == 4) {
      return fours[0];
    } else {
      // Then those two apart: a thread has all columns of every fourth eight.
      Pack<float, 8> eight;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float mine = upper ? fours[1][e] : fours[0][e], other = upper ? fours[0][e] : fours[1][e];
        const float theirs = __shfl_xor_sync(0xffffffffu, other, 2);
        eight[e] = upper ? theirs : mine;
        eight[4 + e] = upper ? mine : theirs;
      }
      return eight;
    }
  }
}

template <bool kFirst, class First, class Second> struct EitherOf { using Type = First; };
template <class First, class Second> struct EitherOf<false, First, Second> { using Type = Second; };
template <bool kFirst, class First, class Second> using Either = typename EitherOf<kFirst, First, Second>::Type;

// Where a thread's packs of a tile lie: two rows, and packs that are 4 * kPack columns apart.
template <class P> struct ThreadPlace {
  static constexpr int kPacks = P::kOwnColumns / 4 / P::kPack;
  int layer, first_row, first_column;

  WS_INLINE ThreadPlace(const typename P::Tile& tile, int rank, int warpgroup)
      : layer(tile.layer),
        first_row(tile.first_row(rank) + warpgroup % 2 * 64 + 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4),
        first_column(tile.first_column() + warpgroup / 2 * P::kOwnColumns + first_of_pack<P::kPack>()) {}
  WS_INLINE int row(int lower) const { return first_row + 8 * lower; }
  WS_INLINE int column(int pack) const { return first_column + 4 * P::kPack * pack; }
};

// Takes packs of a scaled product to the operands' own scale. By roots, so that no step leaves the range of floats where
// the result does not; those of half a tile all asked for before the first store: stores might change them, for all that
// the compiler knows, and each would wait for the one before (2.40 ms instead of 1.65 at 32768 x 64 x 32768, H200).
template <class P> struct Unscaling {
  float rows[2];
  Pack<float, P::kPack> columns[ThreadPlace<P>::kPacks / 2];

  WS_INLINE Unscaling(const ThreadPlace<P>& place, int half, const float* left_roots, const float* right_roots) {
    left_roots += place.layer * static_cast<int64>(P::kM);
    right_roots += place.layer * static_cast<int64>(P::kN);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) rows[lower] = place.row(lower) < P::kM ? left_roots[place.row(lower)] : 0.0f;
#pragma unroll
    for (int i = 0; i < ThreadPlace<P>::kPacks / 2; ++i) {
      const int column = place.column(half * ThreadPlace<P>::kPacks / 2 + i);
      if constexpr (P::kN % P::kPack == 0 && P::kPack > 2) {
        if (column < P::kN) columns[i] = load<P::kPack, kShared>(right_roots + column);
      } else {
#pragma unroll
        for (int e = 0; e < P::kPack; ++e) columns[i][e] = column + e < P::kN ? right_roots[column + e] : 0.0f;
      }
    }
  }

  WS_INLINE void apply(Pack<float, P::kPack>& sums, int lower, int pack) const {
#pragma unroll
    for (int e = 0; e < P::kPack; ++e) {
      const float root = rows[lower] * columns[pack][e];
      sums[e] = sums[e] * root * root;
    }
  }
};

// Of operands that were not scaled.
template <class P> struct NoUnscaling {
  WS_INLINE NoUnscaling(const ThreadPlace<P>&, int, const float*, const float*) {}
  WS_INLINE void apply(Pack<float, P::kPack>&, int, int) const {}
};

// Takes a tile's sums to the end.
template <class P, class Finish>
WS_INLINE void finish_tile(const ThreadPlace<P>& place, const float (&sums)[P::kSums], const float* left_roots,
                           const float* right_roots, const Finish& finish) {
  constexpr int kPairs = P::kPack / 2, kHalf = ThreadPlace<P>::kPacks / 2;
  RowEnds<P, Finish, 2> rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Either<P::kParts == 1, NoUnscaling<P>, Unscaling<P>> unscaling(place, half, left_roots, right_roots);
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      const int lower = i / kHalf, number = half * kHalf + i % kHalf, row = place.row(lower), column = place.column(number);
      Pack<float, 2> pairs[kPairs];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int first = 4 * (number * kPairs + j) + 2 * lower;
        pairs[j] = {sums[first], sums[first + 1]};
      }
      Pack<float, P::kPack> pack = gathered<P::kPack>(pairs);
      unscaling.apply(pack, lower, i % kHalf);
      if (row < P::kM && column < P::kN) rows.take(lower, finish, place.layer, row, column, pack);
    }
  }
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) rows.template leave<4>(lower, finish, place.layer, place.row(lower), place.first_column);
}

// Sets up the ring; one warp copies, and each warpgroup that multiplies calls `multiply_tiles(shared, rank, warpgroup)`.
template <class P, class MultiplyTiles>
WS_INLINE void with_operands(const TensorMap& left, const TensorMap& right, const MultiplyTiles& multiply_tiles) {
  extern __shared__ char memory[];
  Ring<P>& shared =
      *reinterpret_cast<Ring<P>*>((reinterpret_cast<uint64>(memory) + 1023) / 1024 * 1024);
  const int rank = P::kCluster > 1 ? rank_in_cluster() : 0;
  if (threadIdx.x == 0) {
    prefetch_map(left);
    prefetch_map(right);
    for (int i = 0; i < P::kStages; ++i) {
      shared.filled[i].begin(1);
      shared.free[i].begin(4 * P::kWarpgroups * P::kCluster);
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
  take_registers<P::kRegisters>();
  multiply_tiles(shared, rank, warpgroup);
}

// The whole product. `finish(layer, m, n, sums)` gets the sums of row m at columns n to n + kPack - 1; n is a multiple of
// kPack and inside. The roots of scales are those of `split_row`; with one part there are none.
template <class P, class Finish>
WS_INLINE void multiply(const TensorMap& left, const TensorMap& right, const float* left_roots, const float* right_roots,
                        const Finish& finish) {
  with_operands<P>(left, right, [&](Ring<P>& shared, int rank, int warpgroup) {
    RingPlace<P::kStages> place;
    for (int number = blockIdx.x / P::kCluster; number < P::kTiles; number += gridDim.x / P::kCluster) {
      float sums[P::kSums];
      if (P::tile_at(number).is_wanted()) {
        multiply_tile<P>(shared, place, warpgroup, sums);
      } else {
#pragma unroll
        for (int i = 0; i < P::kSums; ++i) sums[i] = 0.0f;
      }
      finish_tile<P>({P::tile_at(number), rank, warpgroup}, sums, left_roots, right_roots, finish);
    }
  });
}

}  // namespace ws
