// Reductions over parts of the rows of a matrix, such as an embedding bag: the gradient of a lookup has one for each word.
// The one idea: threads of a block lie next to each other along the columns, and those above each other have other parts. A part
// may be nothing, a row or two, or all there is, which only the data knows. So rows come in pieces of equal size too: a kernel
// ahead reduces the pieces that lie within one part, and the part then takes what that left. Which rows are joined in which
// order follows from where parts begin and end: results are the same to the bit each time.
//
// A nest is a struct with the arguments of the kernel, `kTiling`, `Offset`, and
//   `begin(part)`                        the coordinates of the other axes, and `first_row` and `end_row`
//   `load(k, column)`                    what of row k is asked for ahead of its use, a `Row`
//   `fold(const Row&, k, column, few)`   takes the row into the `Found` of a few rows
//   `found`                              a part's `Found`, which `store_columns(column)` stores
#pragma once
#include "ws_columns.cuh"

namespace ws {

struct SegmentTiling {
  int64 parts;         // each with columns of its own
  int64 columns;       // neighbours in memory
  int rows;            // of all parts
  int piece;           // rows that are reduced ahead where they lie in one part; 0: none are
  int vector_width;    // columns of an access
  int vectors;         // accesses of a thread in a row
  int rows_in_flight;  // of a thread
  int threads;         // of a block
  int lanes;           // of them next to each other
  bool overlap;        // programmatic dependent launch
};

// The columns of a thread, of a part or a piece.
template <class P> struct SegmentTile {
  static constexpr SegmentTiling kTiling = P::kTiling;
  static constexpr int kLanes = kTiling.lanes, kDepth = kTiling.threads / kLanes, kVectors = kTiling.vectors;
  static constexpr int kWidth = kTiling.vector_width, kColumns = kLanes * kVectors * kWidth;  // of a block
  static constexpr int kTiles = (kTiling.columns + kColumns - 1) / kColumns;
  static constexpr bool kWhole = kTiling.columns % kColumns == 0;

  using Offset = typename P::Offset;
  using Found = typename P::Found;
  Offset number, first;  // of the part or piece; of the columns

  WS_INLINE SegmentTile()
      : number(static_cast<Offset>(blockIdx.x / kTiles) * kDepth + threadIdx.x / kLanes),
        first(static_cast<Offset>(blockIdx.x % kTiles) * kColumns + static_cast<int>(threadIdx.x % kLanes) * kWidth) {}
  WS_INLINE Offset column(int v) const { return first + v * (kLanes * kWidth); }
  WS_INLINE bool inside(int v) const { return kWhole || column(v) < static_cast<Offset>(kTiling.columns); }

  // Some rows from `k` on, all asked for before the first is used; kEvery: as many as there is room for.
  template <bool kEvery> WS_INLINE void take_few(const P& nest, int k, int end, Found (&found)[kVectors]) const {
    constexpr int kRows = kTiling.rows_in_flight;
    typename P::Row rows[kRows][kVectors];
#pragma unroll
    for (int u = 0; u < kRows; ++u)
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if ((kEvery || k + u < end) && inside(v)) rows[u][v] = nest.load(k + u, column(v));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Found few;  // a sum of sums, so that many rows stay exact
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        if ((kEvery || k + u < end) && inside(v)) nest.fold(rows[u][v], k + u, column(v), few);
      found[v].join(few);
    }
  }
  WS_INLINE void take(const P& nest, int k, int end, Found (&found)[kVectors]) const {
    for (; k + kTiling.rows_in_flight <= end; k += kTiling.rows_in_flight) take_few<true>(nest, k, end, found);
    if (k < end) take_few<false>(nest, k, end, found);
  }
};

// The last part that begins at a row or before it.
template <class P> WS_INLINE void begin_part_of(P& nest, int row) {
  using Offset = typename P::Offset;
  Offset low = 0, high = static_cast<Offset>(P::kTiling.parts) - 1;
  while (low < high) {
    const Offset middle = low + (high - low + 1) / 2;
    nest.begin(middle);
    if (nest.first_row <= row) low = middle;
    else high = middle - 1;
  }
  nest.begin(low);
}

// Of each piece that lies within a part, what its rows come to: arrays of [pieces, columns] for each reduction.
template <class P, class... Spaces> WS_INLINE void reduce_pieces(P nest, Spaces*... partials) {
  using Tile = SegmentTile<P>;
  if constexpr (P::kTiling.overlap) wait_for_previous();
  const Tile at;
  launch_dependents();
  if (at.number >= P::kTiling.rows / P::kTiling.piece) return;
  const int first = static_cast<int>(at.number) * P::kTiling.piece, end = first + P::kTiling.piece;
  begin_part_of(nest, first);
  if (nest.first_row > first || nest.end_row < end) return;
  typename P::Found found[Tile::kVectors];
  at.take(nest, first, end, found);
#pragma unroll
  for (int v = 0; v < Tile::kVectors; ++v)
    if (at.inside(v)) found[v].store_to(static_cast<int64>(at.number) * P::kTiling.columns + at.column(v), partials...);
}

template <class P, class... Spaces> WS_INLINE void reduce_segments(P nest, Spaces*... partials) {
  using Tile = SegmentTile<P>;
  if constexpr (P::kTiling.overlap || P::kTiling.piece) wait_for_previous();
  const Tile at;
  if constexpr (P::kTiling.overlap) launch_dependents();
  if (at.number >= static_cast<typename P::Offset>(P::kTiling.parts)) return;
  nest.begin(at.number);
  typename P::Found found[Tile::kVectors];
  int row = nest.first_row;
  if constexpr (P::kTiling.piece > 0) {
    constexpr int kPiece = P::kTiling.piece;
    const int first = (row + kPiece - 1) / kPiece, last = nest.end_row / kPiece;
    if (first < last) {
      at.take(nest, row, first * kPiece, found);
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        if (!at.inside(v)) continue;
        typename P::Found pieces;
        pieces.template join_from<1>(first, last, P::kTiling.columns, at.column(v), partials...);
        found[v].join(pieces);
      }
      row = last * kPiece;
    }
  }
  at.take(nest, row, nest.end_row, found);
#pragma unroll
  for (int v = 0; v < Tile::kVectors; ++v) {
    if (!at.inside(v)) continue;
    nest.found = found[v];
    nest.store_columns(at.column(v));
  }
}

}  // namespace ws
