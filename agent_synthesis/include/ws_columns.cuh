// Reductions along a strided axis, such as column sums: rows are read as they lie, and a thread reduces a vector of columns.
// The one idea: threads of a block lie next to each other along the columns; those above each other, and blocks that share
// columns, have other rows of the same ones, and what each has found is joined in a fixed order.
//
// A nest is a struct with the arguments of the kernel, `kTiling`, `Offset`, and for each visit of the rows:
//   `Row load(ColumnVisit<v>, k, column)`           what of row k is asked for ahead of its use
//   `fold(const Row&, k, column, part)`       takes the row into the visit's running results
//   `results(ColumnVisit<v>)`                       where the visit's results stay; later visits read them
// It may have `begin(outer)`, the coordinates of the other axes and what only they decide; `store_columns(column)`, what is
// stored once a column; and, with a `load` of its own, `store_row(const Row&, k, column)`, what is stored of every row.
#pragma once
#include "ws_reduce.cuh"

namespace ws {

struct ColumnTiling {
  int rows;             // elements of a column
  int64 columns;        // neighbours in memory
  int64 others;         // points of the other axes, each with columns of its own
  int visits;           // of the rows, before anything is stored
  int vector_width;     // columns of a thread
  int threads;          // of a block
  int lanes;            // of them next to each other
  int ctas_per_column;  // blocks that share the rows of a column
  int rows_in_flight;   // of a thread
  bool overlap;         // programmatic dependent launch
};

template <int kNumber> struct ColumnVisit {};

// A thread's running results of the reductions of one visit, each of them `Lanes`; a thread's columns are their elements.
template <class... All> struct Results {
  template <int kThreads> struct Box {};
  WS_INLINE void join(const Results&) {}
  template <int kThreads> WS_INLINE void put(Box<kThreads>&) const {}
  template <int kLanes, int kThreads> WS_INLINE void collect(const Box<kThreads>&) {}
  WS_INLINE void store_to(int64) const {}
  template <int kDepth, int kCtas> WS_INLINE void join_from(int, int64, int64) {}
};
template <class Op, class T, int N, class... Rest> struct Results<Lanes<Op, T, N>, Rest...> {
  Lanes<Op, T, N> first;
  Results<Rest...> rest;

  // Of reduction number i, a thread's column number e.
  template <int i, class Value> WS_INLINE void take(int e, Value value) {
    if constexpr (i == 0) first.take(e, value);
    else rest.template take<i - 1>(e, value);
  }
  template <int i> WS_INLINE auto value(int e) const {
    if constexpr (i == 0) return first.lane[e];
    else return rest.template value<i - 1>(e);
  }
  WS_INLINE void join(const Results& other) {
    first.join(other.first.pack());
    rest.join(other.rest);
  }

  // Shared memory in which the threads of a block leave them.
  template <int kThreads> struct Box : Results<Rest...>::template Box<kThreads> {
    Pack<T, N> pack[kThreads];
  };
  template <int kThreads> WS_INLINE void put(Box<kThreads>& box) const {
    box.pack[threadIdx.x] = first.pack();
    rest.template put<kThreads>(box);
  }
  // Of all threads that have the same columns, which are kLanes apart.
  template <int kLanes, int kThreads> WS_INLINE void collect(const Box<kThreads>& box) {
    Lanes<Op, T, N> all;
#pragma unroll 8
    for (int depth = 0; depth < kThreads / kLanes; ++depth) all.join(box.pack[depth * kLanes + threadIdx.x % kLanes]);
    first = all;
    rest.template collect<kLanes, kThreads>(box);
  }

  // Partial results in memory, an array for each reduction.
  template <class... Spaces> WS_INLINE void store_to(int64 place, T* space, Spaces*... spaces) const {
    store(space + place, first.pack());
    rest.store_to(place, spaces...);
  }
  template <int kDepth, int kCtas, class... Spaces>
  WS_INLINE void join_from(int depth, int64 points, int64 point, const T* space, const Spaces*... spaces) {
    Lanes<Op, T, N> all;
#pragma unroll 8
    for (int cta = depth; cta < kCtas; cta += kDepth) all.join(load<N, kWritten>(space + (cta * points + point)));
    first = all;
    rest.template join_from<kDepth, kCtas>(depth, points, point, spaces...);
  }
};

// The columns and rows of a thread.
template <class P> struct ColumnTile {
  static constexpr ColumnTiling kTiling = P::kTiling;
  static constexpr int kLanes = kTiling.lanes, kDepth = kTiling.threads / kLanes, kCtas = kTiling.ctas_per_column;
  static constexpr int kColumns = kLanes * kTiling.vector_width;  // of a block
  static constexpr int kTiles = (kTiling.columns + kColumns - 1) / kColumns;
  static constexpr int kChunk = kTiling.rows_in_flight * kDepth;  // rows that a block has in flight
  static constexpr bool kWholeTiles = kTiling.columns % kColumns == 0;
  static constexpr bool kWholeChunks = kTiling.rows % (kCtas * kChunk) == 0;
  static constexpr int64 kPoints = kTiling.others * kTiling.columns;

  using Offset = typename P::Offset;
  int tile, cta, depth;
  unsigned outer;
  bool inside;  // else the thread has columns of the tile that are another's
  Offset column;
  int first, end;

  WS_INLINE ColumnTile()
      : tile(blockIdx.x % kTiles), cta(blockIdx.x / kTiles % kCtas), depth(threadIdx.x / kLanes),
        outer(kTiling.others == 1 ? 0 : blockIdx.x / (kTiles * kCtas)) {
    const Offset first_of_tile = static_cast<Offset>(tile) * kColumns;
    const Offset own = first_of_tile + kTiling.vector_width * static_cast<int>(threadIdx.x % kLanes);
    inside = kWholeTiles || own < static_cast<Offset>(kTiling.columns);
    column = inside ? own : first_of_tile;
    first = rows_before(cta) + depth;
    end = rows_before(cta + 1);
  }
  // Rows of the blocks before one.
  static WS_INLINE int rows_before(int cta) {
    if constexpr (kCtas == 1) return cta * kTiling.rows;
    else if constexpr (static_cast<int64>(kTiling.rows) * kCtas < 1ll << 31) return kTiling.rows * cta / kCtas;
    else return static_cast<int64>(kTiling.rows) * cta / kCtas;
  }
  // Number of the thread's first column among those of all blocks.
  WS_INLINE Offset point() const { return static_cast<Offset>(outer) * static_cast<Offset>(kTiling.columns) + column; }
  WS_INLINE bool has_row(int k) const { return kWholeChunks || k < end; }
  WS_INLINE bool is_top() const { return depth == 0 && inside; }
};

// What a visit loads of a thread's rows from `chunk` on, before any of them is used.
template <int kVisit, class P, class Row, int kRows>
WS_INLINE void load_rows(const P& nest, const ColumnTile<P>& at, int chunk, Row (&rows)[kRows]) {
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int k = chunk + u * at.kDepth;
    if (at.has_row(k)) rows[u] = nest.load(ColumnVisit<kVisit>(), k, at.column);
  }
}

template <int kVisit, class P, class Found> WS_INLINE void fold_rows(const P& nest, const ColumnTile<P>& at, Found& results) {
  constexpr int kRows = P::kTiling.rows_in_flight;
  for (int chunk = at.first; chunk < at.end; chunk += at.kChunk) {
    decltype(nest.load(ColumnVisit<kVisit>(), 0, at.column)) rows[kRows];
    load_rows<kVisit>(nest, at, chunk, rows);
    Found part;  // a sum of sums, so that many rows stay exact
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int k = chunk + u * at.kDepth;
      if (at.has_row(k)) nest.fold(rows[u], k, at.column, part);
    }
    results.join(part);
  }
}

template <int kVisit, class P> WS_INLINE void store_rows(const P& nest, const ColumnTile<P>& at) {
  constexpr int kRows = P::kTiling.rows_in_flight;
  for (int chunk = at.first; chunk < at.end; chunk += at.kChunk) {
    decltype(nest.load(ColumnVisit<kVisit>(), 0, at.column)) rows[kRows];
    load_rows<kVisit>(nest, at, chunk, rows);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int k = chunk + u * at.kDepth;
      if (at.has_row(k)) nest.store_row(rows[u], k, at.column);
    }
  }
}

// Every thread gets its columns' results over the block. Between two calls of one visit the block has met.
template <int kVisit, class P, class Found> WS_INLINE void join_threads(const ColumnTile<P>& at, Found& results) {
  if constexpr (ColumnTile<P>::kDepth > 1) {
    constexpr int kThreads = P::kTiling.threads;
    __shared__ typename Found::template Box<kThreads> box;
    results.template put<kThreads>(box);
    __syncthreads();
    results.template collect<ColumnTile<P>::kLanes, kThreads>(box);
  }
}

// The last block to arrive joins, in order, what all that share its columns have left; returns whether this one is that.
// `arrived` has a counter for each tile, zero between calls.
template <class P, class Found, class... Spaces>
WS_INLINE bool join_ctas(const ColumnTile<P>& at, Found& results, unsigned* arrived, Spaces*... partials) {
  const int64 point = at.point();
  if (at.is_top()) results.store_to(point + at.cta * at.kPoints, partials...);
  __threadfence();
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = arrived + (at.outer * at.kTiles + at.tile);
    is_last = arrive(counter) == at.kCtas - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  if (!is_last) return false;
  results.template join_from<ColumnTile<P>::kDepth, ColumnTile<P>::kCtas>(at.depth, at.kPoints, point, partials...);
  join_threads<0>(at, results);
  return true;
}

template <int kVisit, class P> WS_INLINE void visit_columns(P& nest, const ColumnTile<P>& at) {
  auto& results = nest.results(ColumnVisit<kVisit>());
  fold_rows<kVisit>(nest, at, results);
  constexpr bool kLast = kVisit == P::kTiling.visits - 1;
  if constexpr (P::kTiling.overlap && kLast) launch_dependents();
  join_threads<kVisit>(at, results);
  if constexpr (!kLast) visit_columns<kVisit + 1>(nest, at);
}

// The kernel. Where blocks share columns there is one visit, and memory for counters and for each reduction's partial results.
template <class P, class... Spaces> WS_INLINE void reduce_columns(P nest, unsigned* arrived = nullptr, Spaces*... partials) {
  if constexpr (P::kTiling.overlap) wait_for_previous();
  const ColumnTile<P> at;
  if constexpr (requires { nest.begin(at.outer); }) nest.begin(at.outer);
  visit_columns<0>(nest, at);
  if constexpr (ColumnTile<P>::kCtas > 1)
    if (!join_ctas(at, nest.results(ColumnVisit<0>()), arrived, partials...)) return;
  if constexpr (requires { nest.store_columns(at.column); })
    if (at.is_top()) nest.store_columns(at.column);
  constexpr int kVisits = P::kTiling.visits;
  if constexpr (requires { nest.load(ColumnVisit<kVisits>(), 0, at.column); })
    if (at.inside) store_rows<kVisits>(nest, at);
}

}  // namespace ws
