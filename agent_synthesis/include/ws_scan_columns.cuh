// Scans down columns: threads of a block lie next to each other along the columns; those above each other have the next rows of
// the same ones, and a block takes one chunk of rows after the other.
// Where columns are few, blocks share the rows of a column: one kernel leaves the totals of their parts, and a second scans
// each part from the totals above it on.
//
// A nest is a struct with the arguments of the kernel, `kTiling`, `Offset`, `Scans` (a `ScanList`), and for each row k:
//   `Vector load(k, column)`                             what is asked for ahead of its use
//   `value(scan, Values&, v, const Vector&, k, column)`  what a scan takes; `Values` has room for a thread's rows of a chunk
//   `store(const Values&, v, const Vector&, k, column)`  what is stored of running results
// It may have `begin(outer)`, the coordinates of the other axes and what only they decide.
#pragma once
#include "ws_scan.cuh"

namespace ws {

struct ColumnScanTiling {
  int rows;             // elements of a column
  int64 columns;        // neighbours in memory
  int64 others;         // points of the other axes, each with columns of its own
  int vector_width;     // columns of a thread
  int rows_in_flight;   // of a thread, in a chunk
  int threads;          // of a block
  int lanes;            // of them next to each other
  int ctas_per_column;  // blocks that share the rows of a column
  bool reverse;         // from the last row on
  bool overlap;         // programmatic dependent launch
};

// The columns and rows of a thread. A place counts rows in the order of the scan.
template <class P> struct ColumnScan {
  static constexpr ColumnScanTiling kTiling = P::kTiling;
  static constexpr int kWidth = kTiling.vector_width, kVectors = kTiling.rows_in_flight, kCtas = kTiling.ctas_per_column;
  static constexpr int kLanes = kTiling.lanes, kDepth = kTiling.threads / kLanes;
  static constexpr int kColumns = kLanes * kWidth;  // of a block
  static constexpr int kTiles = (kTiling.columns + kColumns - 1) / kColumns;
  static constexpr int kChunk = kDepth * kVectors;
  static constexpr int kPart = ((kTiling.rows + kCtas - 1) / kCtas + kChunk - 1) / kChunk * kChunk;  // rows of a block
  static constexpr bool kWholeTiles = kTiling.columns % kColumns == 0, kWholeChunks = kTiling.rows % kChunk == 0;
  static constexpr int64 kPoints = kTiling.others * kTiling.columns;

  using Offset = typename P::Offset;
  int cta, depth;
  unsigned outer;
  bool inside;  // else the thread has the first columns, which it does not store
  Offset column;

  WS_INLINE ColumnScan()
      : cta(blockIdx.x / kTiles % kCtas), depth(kDepth == 1 ? 0 : threadIdx.x / kLanes),
        outer(kTiling.others == 1 ? 0 : blockIdx.x / (kTiles * kCtas)) {
    const Offset own = static_cast<Offset>(blockIdx.x % kTiles) * kColumns + kWidth * static_cast<int>(threadIdx.x % kLanes);
    inside = kWholeTiles || own < static_cast<Offset>(kTiling.columns);
    column = inside ? own : 0;
  }
  WS_INLINE int first() const { return cta * kPart; }
  WS_INLINE int end() const { return kCtas == 1 ? kTiling.rows : min(kTiling.rows, (cta + 1) * kPart); }
  WS_INLINE int place(int chunk, int v) const { return chunk + depth * kVectors + v; }
  static WS_INLINE bool is_inside(int place) { return kWholeChunks || place < kTiling.rows; }
  static WS_INLINE Offset row(int place) { return kTiling.reverse ? kTiling.rows - 1 - place : place; }
  // Of a block's totals of this thread's columns.
  WS_INLINE int64 point(int block) const {
    return static_cast<Offset>(outer) * static_cast<Offset>(kTiling.columns) + column + block * kPoints;
  }
};

// What comes before the next rows of a thread's columns.
template <class One, int N> struct Above {
  Lanes<typename One::Op, typename One::Value, N> before;
  WS_INLINE auto& of(One) { return before; }
};
template <int N, class... All> struct AllAbove : Above<All, N>... {
  using Above<All, N>::of...;
};

// One scan of the nest, of a chunk.
template <class One, class P, class Vector, class Before>
WS_INLINE void scan_of_rows(const P& nest, const ColumnScan<P>& at, int chunk, typename P::Values& values,
                            const Vector (&vectors)[ColumnScan<P>::kVectors], Before& before) {
  using Part = ColumnScan<P>;
#pragma unroll
  for (int v = 0; v < Part::kVectors; ++v) {
    const int place = at.place(chunk, v);
    if (Part::is_inside(place)) nest.value(One(), values, v, vectors[v], Part::row(place), at.column);
  }
  using Box = Pack<typename One::Value, Part::kWidth>;
  if constexpr (Part::kDepth > 1) {
    __shared__ Box boxes[2][Part::kDepth * Part::kLanes];
    scan_columns<typename One::Op, Part::kDepth, Part::kLanes, One::kExclusive>(
        values.of(One()), before, boxes[chunk / Part::kChunk % 2]);
  } else {
    scan_columns<typename One::Op, 1, Part::kLanes, One::kExclusive>(values.of(One()), before, static_cast<Box*>(nullptr));
  }
}

template <bool kStores, class P, class Before, class... Scans>
WS_INLINE void scan_part(const P& nest, const ColumnScan<P>& at, Before& before, ScanList<Scans...>) {
  using Part = ColumnScan<P>;
  for (int chunk = at.first(); chunk < at.end(); chunk += Part::kChunk) {
    decltype(nest.load(0, at.column)) vectors[Part::kVectors];
#pragma unroll
    for (int v = 0; v < Part::kVectors; ++v) {
      const int place = at.place(chunk, v);
      if (Part::is_inside(place)) vectors[v] = nest.load(Part::row(place), at.column);
    }
    typename P::Values values;
    (scan_of_rows<Scans>(nest, at, chunk, values, vectors, before.of(Scans())), ...);
    if constexpr (kStores) {
#pragma unroll
      for (int v = 0; v < Part::kVectors; ++v) {
        const int place = at.place(chunk, v);
        if (Part::is_inside(place) && at.inside) nest.store(values, v, vectors[v], Part::row(place), at.column);
      }
    }
  }
}

template <class P, class... Scans> WS_INLINE auto nothing_above(ScanList<Scans...>) {
  return AllAbove<P::kTiling.vector_width, Scans...>();
}

// Begins a kernel: where the thread is.
template <class P> WS_INLINE ColumnScan<P> begin_columns(P& nest) {
  if constexpr (P::kTiling.overlap) wait_for_previous(), launch_dependents();
  const ColumnScan<P> at;
  if constexpr (requires { nest.begin(at.outer); }) nest.begin(at.outer);
  return at;
}

// The kernel where a block has all rows of its columns.
template <class P> WS_INLINE void scan_whole_columns(P nest) {
  const ColumnScan<P> at = begin_columns(nest);
  auto before = nothing_above<P>(typename P::Scans());
  scan_part<true>(nest, at, before, typename P::Scans());
}

// The first kernel where blocks share columns, by one scan: it leaves the totals of every block's rows.
template <class P, class T> WS_INLINE void total_parts_of_columns(P nest, T* totals) {
  const ColumnScan<P> at = begin_columns(nest);
  auto above = nothing_above<P>(typename P::Scans());
  scan_part<false>(nest, at, above, typename P::Scans());
  if (at.depth == 0 && at.inside) store(totals + at.point(at.cta), above.before.pack());
}

// The second one.
template <class P, class T> WS_INLINE void scan_parts_of_columns(P nest, const T* totals) {
  const ColumnScan<P> at = begin_columns(nest);
  auto above = nothing_above<P>(typename P::Scans());
#pragma unroll 8
  for (int cta = 0; cta < at.cta; ++cta) above.before.join(load<P::kTiling.vector_width, kWritten>(totals + at.point(cta)));
  scan_part<true>(nest, at, above, typename P::Scans());
}

}  // namespace ws
