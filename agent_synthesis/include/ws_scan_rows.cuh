// Scans along rows: every element is read once and written once, vector by vector, in chunks of a row.
// The one idea: a chunk is what the threads of a row hold in registers; what comes before it is carried on by the same threads,
// or, where rows are few and long, left by other blocks on a board.
//
// A nest is a struct with the arguments of the kernel, `kTiling`, `Offset`, `Scans` (a `ScanList`), and for a vector of a row,
// whose first element is number `begin`:
//   `Vector load(begin)`                          what is asked for ahead of its use
//   `value(scan, Values&, v, const Vector&, begin)`   what a scan takes; `Values` has room for a thread's part of the chunk
//   `store(const Values&, v, const Vector&, begin)`   what is stored of running results
// It may have `begin(row)`, the row's coordinates and what only they decide.
#pragma once
#include "ws_scan.cuh"

namespace ws {

struct RowScanTiling {
  int rows, columns;  // elements of a row are its columns
  int vector_width;   // elements of one access
  int vectors;        // of a thread, in a chunk
  int threads;        // of a block
  int lanes;          // threads of a row: some of a warp, or all of the block
  bool reverse;       // from the last element on
  bool prefetch;      // the next chunk of a row is loaded while this one is scanned
  bool overlap;       // programmatic dependent launch
};

// The part of a chunk that a thread has. A place counts elements in the order of the scan.
template <class P> struct RowScan {
  static constexpr RowScanTiling kTiling = P::kTiling;
  static constexpr int kLanes = kTiling.lanes, kWidth = kTiling.vector_width, kVectors = kTiling.vectors;
  static constexpr bool kIsBlock = kLanes > 32;
  static constexpr int kWarps = kIsBlock ? kLanes / 32 : 1;
  static constexpr int kStride = kWidth * (kIsBlock ? 32 : kLanes);  // a warp's vectors lie together
  static constexpr int kChunk = kLanes * kWidth * kVectors;
  static constexpr int kChunks = (kTiling.columns + kChunk - 1) / kChunk;
  static constexpr int kRowsOfBlock = kTiling.threads / kLanes;
  static constexpr bool kWholeChunks = kTiling.columns % kChunk == 0;
  static constexpr bool kPrefetches = kTiling.prefetch && kChunks > 1;

  // Of the thread's first vector.
  static WS_INLINE int first() {
    if constexpr (kIsBlock) return threadIdx.x / 32 * (kStride * kVectors) + kWidth * (threadIdx.x % 32);
    else return kWidth * (threadIdx.x % kLanes);
  }
  static WS_INLINE bool is_inside(int place) { return kWholeChunks || place < kTiling.columns; }
  static WS_INLINE int begin(int place) { return kTiling.reverse ? kTiling.columns - kWidth - place : place; }
};

template <class P, class Vector> WS_INLINE void load_chunk(const P& nest, int first, Vector (&vectors)[RowScan<P>::kVectors]) {
  using Part = RowScan<P>;
#pragma unroll
  for (int v = 0; v < Part::kVectors; ++v) {
    const int place = first + v * Part::kStride;
    if (Part::is_inside(place)) vectors[v] = nest.load(Part::begin(place));
  }
}

template <class Scan, class P, class Vector>
WS_INLINE void take_chunk(
    const P& nest, int first, typename P::Values& values, const Vector (&vectors)[RowScan<P>::kVectors]) {
  using Part = RowScan<P>;
#pragma unroll
  for (int v = 0; v < Part::kVectors; ++v) {
    const int place = first + v * Part::kStride;
    if (Part::is_inside(place)) nest.value(Scan(), values, v, vectors[v], Part::begin(place));
  }
}

template <class P, class Vector>
WS_INLINE void store_chunk(
    const P& nest, int first, const typename P::Values& values, const Vector (&vectors)[RowScan<P>::kVectors]) {
  using Part = RowScan<P>;
#pragma unroll
  for (int v = 0; v < Part::kVectors; ++v) {
    const int place = first + v * Part::kStride;
    if (Part::is_inside(place)) nest.store(values, v, vectors[v], Part::begin(place));
  }
}

// Scans a chunk as if it were the row's first: leaves in `before` what comes before each of the thread's vectors, and returns
// the total. Chunks that follow each other have different boxes, so that one barrier is enough.
template <class Scan, class P, int kBoxes>
WS_INLINE typename Scan::Value scan_chunk(
    typename P::Values& values, typename Scan::Value (&before)[RowScan<P>::kVectors], int box) {
  using Part = RowScan<P>;
  if constexpr (Part::kIsBlock) {
    __shared__ typename Scan::Value boxes[kBoxes][Part::kWarps];
    return scan_block<typename Scan::Op, Part::kWarps, P::kTiling.reverse>(values.of(Scan()), before, boxes[box]);
  } else {
    return scan_warp<typename Scan::Op, Part::kLanes, P::kTiling.reverse>(values.of(Scan()), before);
  }
}

// ---- the threads of a row take its chunks one after the other ----------------------------------------------

// One scan of the nest; `before` is what comes before the chunk, and then what comes before the next one.
template <class Scan, class P, class Vector>
WS_INLINE void scan_of_chunk(const P& nest, int chunk, int first, typename P::Values& values,
                             Vector (&vectors)[RowScan<P>::kVectors], typename Scan::Carried& before) {
  using Part = RowScan<P>;
  using Op = typename Scan::Op;
  using Value = typename Scan::Value;
  take_chunk<Scan>(nest, chunk + first, values, vectors);
  if constexpr (Part::kPrefetches && Scan::kNumber == P::Scans::kCount - 1)
    if (chunk + Part::kChunk < P::kTiling.columns) load_chunk(nest, chunk + Part::kChunk + first, vectors);
  Value starts[Part::kVectors];
  const Value total = scan_chunk<Scan, P, Part::kChunks == 1 ? 1 : 2>(values, starts, chunk / Part::kChunk % 2);
  finish_scan<Op, P::kTiling.reverse, Scan::kExclusive>(values.of(Scan()), starts, static_cast<Value>(before));
  before = Op::template of<typename Scan::Carried>(before, total);
}

template <class P, class... Scans> WS_INLINE void scan_row(const P& nest, bool inside, ScanList<Scans...>) {
  using Part = RowScan<P>;
  Carries<Scans...> before;
  decltype(nest.load(0)) vectors[Part::kVectors];
  const int first = Part::first();
  const auto scan = [&](int chunk) {
    typename P::Values values;
    (scan_of_chunk<Scans>(nest, chunk, first, values, vectors, before.of(Scans())), ...);
    if (inside) store_chunk(nest, chunk + first, values, vectors);
  };
  if constexpr (Part::kPrefetches) {
    load_chunk(nest, first, vectors);
#pragma unroll 1
    for (int chunk = 0; chunk < P::kTiling.columns; chunk += Part::kChunk) scan(chunk);
  } else {
    for (int chunk = 0; chunk < P::kTiling.columns; chunk += Part::kChunk) {
      load_chunk(nest, chunk + first, vectors);
      scan(chunk);
    }
  }
}

// The kernel.
template <class P> WS_INLINE void scan_rows(P nest) {
  using Part = RowScan<P>;
  using Offset = typename P::Offset;
  constexpr int kRows = P::kTiling.rows;
  if constexpr (P::kTiling.overlap) wait_for_previous(), launch_dependents();
  const Offset block = blockIdx.x;
  const Offset row = Part::kIsBlock ? block : block * Part::kRowsOfBlock + threadIdx.x / Part::kLanes;
  const bool inside = kRows % Part::kRowsOfBlock == 0 || row < kRows;
  if constexpr (requires { nest.begin(row); }) nest.begin(inside ? row : kRows - 1);
  scan_row(nest, inside, typename P::Scans());
}

// ---- a block for each chunk of a row -------------------------------------------------------------------------

template <class Scan, class P, class Vector, class Board_>
WS_INLINE void scan_of_tile(const P& nest, int tile, int first, typename P::Values& values,
                            const Vector (&vectors)[RowScan<P>::kVectors], Board_* board) {
  using Part = RowScan<P>;
  using Value = typename Scan::Value;
  using Carried = typename Scan::Carried;
  take_chunk<Scan>(nest, first, values, vectors);
  Value starts[Part::kVectors];
  const Value total = scan_chunk<Scan, P, 1>(values, starts, 0);
  __shared__ Carried box[2];
  const Carried before = before_tile(static_cast<Carried>(total), tile, board, box);
  finish_scan<typename Scan::Op, P::kTiling.reverse, Scan::kExclusive>(
      values.of(Scan()), starts, static_cast<Value>(before));
}

template <class P, class... Scans, class... Boards>
WS_INLINE void scan_tile(const P& nest, int tile, ScanList<Scans...>, Boards*... boards) {
  using Part = RowScan<P>;
  decltype(nest.load(0)) vectors[Part::kVectors];
  const int first = tile * Part::kChunk + Part::first();
  load_chunk(nest, first, vectors);
  typename P::Values values;
  (scan_of_tile<Scans>(nest, tile, first, values, vectors, boards), ...);
  store_chunk(nest, first, values, vectors);
}

// The kernel. `counts` are of blocks that have begun and of those that have ended; there is a board for each scan and row. All
// of that is zero between calls.
template <class P, class... Boards> WS_INLINE void scan_rows_by_tiles(P nest, unsigned* counts, Boards*... boards) {
  using Part = RowScan<P>;
  if constexpr (P::kTiling.overlap) wait_for_previous(), launch_dependents();
  __shared__ unsigned number;  // blocks take tiles in the order in which they begin
  if (threadIdx.x == 0) number = arrive(counts);
  __syncthreads();
  const typename P::Offset row = number / Part::kChunks;
  if constexpr (requires { nest.begin(row); }) nest.begin(row);
  scan_tile(nest, number % Part::kChunks, typename P::Scans(), boards + row...);
  __shared__ bool is_last;
  if (threadIdx.x == 0) is_last = arrive(counts + 1) == P::kTiling.rows * Part::kChunks - 1;
  __syncthreads();
  if (is_last) {
    (clear_boards(boards, P::kTiling.rows), ...);
    if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  }
}

}  // namespace ws
