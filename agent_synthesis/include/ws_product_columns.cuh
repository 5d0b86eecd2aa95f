// A matrix product whose tiles leave the statistics of their columns beside what they store: see `ws_column_states.cuh`.
//
// `finish(layer, m, n, sums)` makes the stores and gives the values back that the statistics are of. A warp has 16 rows; a
// column's eight threads hand each other halves of eight columns until each has one whole, which takes a third of the
// exchanges that a sum of every column by all of them would. Then the block joins its eight warps.
#pragma once
#include "ws_column_states.cuh"
#include "ws_product.cuh"

namespace ws {

// What the warps of a block leave of a tile's columns: means, and squares about them.
template <class P> struct WarpStates {
  static constexpr int kWarps = 8, kRows = kTileRows / kWarps;
  static_assert(P::kWarpgroups == 2 && P::kBatch == 1 && P::kSlices == 1, "a warpgroup has whole rows of one product");
  float mean[kWarps][P::kTileColumns], squares[kWarps][P::kTileColumns];

  // All warps that multiply.
  static WS_INLINE void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

  // One column of the tile whose rows begin at `first_row`.
  WS_INLINE ColumnState joined(int first_row, int column) const {
    const float about = origin_of(mean[0][column]), share = 1.0f / rows_inside<P>(first_row, kTileRows);
    float distance[kWarps], apart = 0.0f, all = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float rows = rows_inside<P>(first_row + warp * kRows, kRows);
      distance[warp] = rows > 0.0f ? mean[warp][column] - about : 0.0f;
      apart += distance[warp] * rows;
    }
    apart *= share;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float rows = rows_inside<P>(first_row + warp * kRows, kRows);
      all += squares[warp][column] + (distance[warp] - apart) * (distance[warp] - apart) * rows;
    }
    return {about, apart, all};
  }
};

// Means and squares of kColumns columns of a thread, of so many rows.
template <int kColumns> struct ThreadColumns {
  float mean[kColumns], squares[kColumns];

  // Shares the columns with the thread `kLane` apart, which has other rows: each keeps half of the columns. `rows` here, which
  // are as many there where all of a tile are inside (kEven).
  template <int kLane, bool kEven> WS_INLINE ThreadColumns<kColumns / 2> halved(int lane, float& rows) const {
    ThreadColumns<kColumns / 2> half;
    const bool upper = lane & kLane;
    const float others = kEven ? rows : __shfl_xor_sync(0xffffffffu, rows, kLane), all = rows + others;
    // No branches, which would part the registers of what was computed from those of what is next.
    const float share = kEven ? 0.5f : all > 0.0f ? __fdividef(others, all) : 0.0f, weight = rows * share;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int j = i + kColumns / 2;
      const float own = upper ? mean[j] : mean[i], own_squares = upper ? squares[j] : squares[i];
      const float theirs = __shfl_xor_sync(0xffffffffu, upper ? mean[i] : mean[j], kLane);
      const float their_squares = __shfl_xor_sync(0xffffffffu, upper ? squares[i] : squares[j], kLane);
      const float apart = theirs - own, sum = own + theirs;
      // What is infinite stays so; equal means stay as they are.
      half.mean[i] = kEven ? 0.5f * sum : ws::isinf(sum) ? sum : own + apart * share;
      half.squares[i] = own_squares + their_squares + apart * apart * weight;
    }
    rows = all;
    return half;
  }
};

// Leaves the statistics of eight columns of each thread, of a warp's rows. `values` by row and pack, zero outside.
template <class P, int kPacks>
WS_INLINE void leave_columns(WarpStates<P>& box, int warp, int first_row, int first_column,
                             const Pack<float, P::kPack> (&values)[2][kPacks]) {
  constexpr int kPack = P::kPack, kColumns = kPacks * kPack;
  static_assert(kColumns == 8, "a column for each of the threads that share them");
  constexpr bool kEven = P::kM % (P::kCluster * kTileRows) == 0;
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // what follows from it is made here, and not held while a tile is multiplied
  const int rank = lane / 4;
  const bool is_pair = kEven || first_row + rank + 8 < P::kM;
  float rows = is_pair ? 2.0f : first_row + rank < P::kM ? 1.0f : 0.0f;
  ThreadColumns<kColumns> columns;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float first = values[0][c / kPack][c % kPack], second = values[1][c / kPack][c % kPack], apart = first - second;
    columns.mean[c] = is_pair ? 0.5f * (first + second) : first;
    columns.squares[c] = is_pair ? 0.5f * apart * apart : 0.0f;
  }
  const ThreadColumns<1> own = columns.template halved<16, kEven>(lane, rows)
                                   .template halved<8, kEven>(lane, rows)
                                   .template halved<4, kEven>(lane, rows);
  const int c = rank / 4 * 4 + rank / 2 % 2 * 2 + rank % 2, column = first_column + 4 * kPack * (c / kPack) + c % kPack;
  box.mean[warp][column] = own.mean[0];
  box.squares[warp][column] = own.squares[0];
}

// Takes a tile's sums to the end, and its columns to states: eight columns of a thread at once.
template <class P, class Finish>
WS_INLINE void finish_columns(WarpStates<P>& box, const typename P::Tile& tile, int rank, int warpgroup,
                              const float (&sums)[P::kSums], const float* left_roots, const float* right_roots,
                              const Finish& finish) {
  constexpr int kPairs = P::kPack / 2, kHalf = ThreadPlace<P>::kPacks / 2, kPacks = 8 / P::kPack;
  const ThreadPlace<P> place(tile, rank, warpgroup);
  const int warp = 4 * warpgroup + threadIdx.x % 128 / 32, first_row = tile.first_row(rank);
  box.meet();  // the states of the tile before are read
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Either<P::kParts == 1, NoUnscaling<P>, Unscaling<P>> unscaling(place, half, left_roots, right_roots);
#pragma unroll
    for (int begin = 0; begin < kHalf; begin += kPacks) {
      Pack<float, P::kPack> values[2][kPacks] = {};
#pragma unroll
      for (int i = 0; i < 2 * kPacks; ++i) {
        const int lower = i / kPacks, inside = begin + i % kPacks, number = half * kHalf + inside;
        const int row = place.row(lower), column = place.column(number);
        Pack<float, 2> pairs[kPairs];
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const int first = 4 * (number * kPairs + j) + 2 * lower;
          pairs[j] = {sums[first], sums[first + 1]};
        }
        Pack<float, P::kPack> pack = gathered<P::kPack>(pairs);
        unscaling.apply(pack, lower, inside);
        if (row < P::kM && column < P::kN) values[lower][i % kPacks] = finish(place.layer, row, column, pack);
      }
      leave_columns<P>(box, warp, first_row + 16 * warp, place.column(half * kHalf + begin) - tile.first_column(), values);
    }
  }
  box.meet();
  const int column = threadIdx.x - 128, n = tile.first_column() + column;
  if (column < P::kTileColumns && n < P::kN && first_row < P::kM)
    ColumnStates<P>::write(finish.states, first_row / kTileRows, n, box.joined(first_row, column));
}

// The whole product, as `multiply`.
template <class P, class Finish>
WS_INLINE void multiply_columns(const TensorMap& left, const TensorMap& right, const float* left_roots,
                                const float* right_roots, const Finish& finish) {
  __shared__ WarpStates<P> box;
  with_operands<P>(left, right, [&](Ring<P>& shared, int rank, int warpgroup) {
    RingPlace<P::kStages> place;
    for (int number = blockIdx.x / P::kCluster; number < P::kTiles; number += gridDim.x / P::kCluster) {
      float sums[P::kSums];
      multiply_tile<P, true>(shared, place, warpgroup, sums);
      finish_columns<P>(box, P::tile_at(number), rank, warpgroup, sums, left_roots, right_roots, finish);
    }
  });
}

}  // namespace ws
