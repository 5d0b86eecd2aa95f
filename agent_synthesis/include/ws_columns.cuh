// Reductions along a strided axis, such as column sums: rows are read as they lie, and a thread reduces a vector of columns.
// The one idea: threads of a block lie next to each other along the columns; those above each other, and blocks that share
// columns, have other rows of the same ones, and what each has found is joined in a fixed order: by the last of the blocks where
// there is one visit of the rows and nothing is stored of them, else by all blocks of the next kernel.
//
// A nest is a struct with the arguments of the kernel, `kTiling`, `Offset`, and for each visit of the rows:
//   `Row load(ColumnVisit<v>, k, column)`           what of row k is asked for ahead of its use
//   `few(ColumnVisit<v>)`                           room for the results of a few rows, which the visit's join
//   `fold(const Row&, k, column, few)`              takes the row into them
//   `results(ColumnVisit<v>)`                       where the visit's results stay; later visits read them
// It may have `settle(ColumnVisit<v>, column)`, which makes what a visit's rows, or the stores, need of a column and no row
// changes; and where visits are kernels `finish(ColumnVisit<v>)`, which makes of what all have found what is wanted.
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
  bool counts;          // whether a visit has moments (`FewMoments`), which divide by how many rows they have
};

template <int kNumber> struct ColumnVisit {};

// Of a few rows of each column: their sum, and the sum of squares about their mean (Welford 1962).
template <class T, int N> struct FewMoments {
  T sum[N] = {}, count[N] = {}, mean[N] = {}, squares[N] = {};
  template <int> WS_INLINE void take(int e, T value) {
    sum[e] += value, count[e] += T(1);
    const T apart = value - mean[e];
    mean[e] += apart * (T(1) / count[e]);
    squares[e] += apart * (value - mean[e]);
  }
};

// A thread's running results of the reductions of one visit, each of them `Lanes`; a thread's columns are their elements.
template <class... All> struct Results {
  static constexpr int kCount = 0;
  template <int kThreads> struct Box {};
  WS_INLINE void join(const Results&) {}
  template <int kThreads> WS_INLINE void put(Box<kThreads>&) const {}
  template <int kLanes, int kThreads> WS_INLINE void collect(const Box<kThreads>&) {}
  template <int kApart, int kThreads> WS_INLINE void collect_some(const Box<kThreads>&) {}
  template <class... Others> WS_INLINE void store_to(int64, Others*...) const {}
  template <int kDepth, class... Others> WS_INLINE void join_from(int, int, int64, int64, Others*...) {}
};
template <class Op, class T, int N, class... Rest> struct Results<Lanes<Op, T, N>, Rest...> {
  static constexpr int kCount = 1 + sizeof...(Rest);
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
  // Of two sums in float64, of rows and of their squares. What squares lose about zero, in float64, is less than what the few
  // rows' own sums are rounded by, which are rounded alike for no two of them.
  template <class Few> WS_INLINE void join(const FewMoments<Few, N>& few) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const T sum = few.sum[e];
      first.take(e, sum);
      rest.first.take(e, few.squares[e] + (few.count[e] > 0 ? sum * sum * (T(1) / few.count[e]) : T(0)));
    }
  }
  // The sum of squares becomes that about the mean of so many rows.
  WS_INLINE void about_mean(int64 rows) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const T squares = rest.first.lane[e] - first.lane[e] * first.lane[e] / rows;
      rest.first.lane[e] = squares < T(0) ? T(0) : squares;
    }
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
  // The same of those that are kApart threads apart alone, from this thread's place among them on.
  template <int kApart, int kThreads> WS_INLINE void collect_some(const Box<kThreads>& box) {
    Lanes<Op, T, N> all;
#pragma unroll
    for (int place = 0; place < kThreads; place += kApart) all.join(box.pack[place + threadIdx.x % kApart]);
    first = all;
    rest.template collect_some<kApart, kThreads>(box);
  }

  // Partial results in memory, an array for each reduction; arrays of later visits may follow.
  template <class... Spaces> WS_INLINE void store_to(int64 place, T* space, Spaces*... spaces) const {
    store(space + place, first.pack());
    rest.store_to(place, spaces...);
  }
  // Those from `begin` on, of which each kDepth-th is this thread's.
  template <int kDepth, class... Spaces>
  WS_INLINE void join_from(int begin, int end, int64 points, int64 point, const T* space, const Spaces*... spaces) {
    Lanes<Op, T, N> all;
#pragma unroll 8
    for (int part = begin; part < end; part += kDepth) all.join(load<N, kWritten>(space + (part * points + point)));
    first = all;
    rest.template join_from<kDepth>(begin, end, points, point, spaces...);
  }
  // The same with arrays of earlier visits before theirs.
  template <int kSkipped, class First, class... Spaces> WS_INLINE void store_after(int64 place, First* one, Spaces*... spaces) const {
    if constexpr (kSkipped == 0) store_to(place, one, spaces...);
    else store_after<kSkipped - 1>(place, spaces...);
  }
  template <int kSkipped, class Tile, class First, class... Spaces>
  WS_INLINE void join_after(const Tile& at, First* one, Spaces*... spaces) {
    if constexpr (kSkipped == 0) join_from<Tile::kDepth>(at.depth, Tile::kCtas, at.kPoints, at.point(), one, spaces...);
    else join_after<kSkipped - 1>(at, spaces...);
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

  WS_INLINE explicit ColumnTile(unsigned block = blockIdx.x)
      : tile(block % kTiles), cta(block / kTiles % kCtas), depth(threadIdx.x / kLanes),
        outer(kTiling.others == 1 ? 0 : block / (kTiles * kCtas)) {
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
template <int kVisit, bool kWhole = false, class P, class Row, int kRows>
WS_INLINE void load_rows(const P& nest, const ColumnTile<P>& at, int chunk, Row (&rows)[kRows]) {
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int k = chunk + u * at.kDepth;
    if (kWhole || at.has_row(k)) rows[u] = nest.load(ColumnVisit<kVisit>(), k, at.column);
  }
}

// Rows from `first` on that a thread has in flight; kWhole: all of them are there.
template <int kVisit, bool kWhole, class P, class Found>
WS_INLINE void fold_chunk(const P& nest, const ColumnTile<P>& at, int first, Found& results) {
  constexpr int kRows = P::kTiling.rows_in_flight;
  decltype(nest.load(ColumnVisit<kVisit>(), 0, at.column)) rows[kRows];
  load_rows<kVisit, kWhole>(nest, at, first, rows);
  auto part = P::few(ColumnVisit<kVisit>());  // a sum of sums, so that many rows stay exact
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int k = first + u * at.kDepth;
    if (kWhole || at.has_row(k)) nest.fold(rows[u], k, at.column, part);
  }
  results.join(part);
}

template <int kVisit, class P, class Found> WS_INLINE void fold_rows(const P& nest, const ColumnTile<P>& at, Found& results) {
  int chunk = at.first;
  // Where counts are divided by, they are constants in what is whole.
  if constexpr (P::kTiling.counts && !ColumnTile<P>::kWholeChunks)
    for (; chunk + (P::kTiling.rows_in_flight - 1) * at.kDepth < at.end; chunk += at.kChunk)
      fold_chunk<kVisit, true>(nest, at, chunk, results);
  for (; chunk < at.end; chunk += at.kChunk) fold_chunk<kVisit, false>(nest, at, chunk, results);
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

constexpr int kGathered = 8;  // threads above each other that have what there is at last

// Every thread gets its columns' results over the block. Between two calls of one visit the block has met.
template <int kVisit, class P, class Found> WS_INLINE void join_threads(const ColumnTile<P>& at, Found& results) {
  if constexpr (ColumnTile<P>::kDepth > 1) {
    constexpr int kThreads = P::kTiling.threads, kLanes = ColumnTile<P>::kLanes;
    __shared__ typename Found::template Box<kThreads> box;
    results.template put<kThreads>(box);
    __syncthreads();
    if constexpr (ColumnTile<P>::kDepth >= 4 * kGathered) {  // in two steps
      __shared__ typename Found::template Box<kGathered * kLanes> some;
      if (threadIdx.x < kGathered * kLanes) {
        results.template collect_some<kGathered * kLanes, kThreads>(box);
        results.template put<kGathered * kLanes>(some);
      }
      __syncthreads();
      results.template collect<kLanes, kGathered * kLanes>(some);
    } else {
      results.template collect<kLanes, kThreads>(box);
    }
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
  results.template join_from<ColumnTile<P>::kDepth>(at.depth, ColumnTile<P>::kCtas, at.kPoints, point, partials...);
  join_threads<0>(at, results);
  return true;
}

// What a visit's rows need of a column, if anything.
template <int kVisit, class P> WS_INLINE void settle_columns(P& nest, const ColumnTile<P>& at) {
  if constexpr (requires { nest.settle(ColumnVisit<kVisit>(), at.column); }) nest.settle(ColumnVisit<kVisit>(), at.column);
}

template <int kVisit, class P> WS_INLINE void visit_columns(P& nest, const ColumnTile<P>& at) {
  settle_columns<kVisit>(nest, at);
  auto& results = nest.results(ColumnVisit<kVisit>());
  fold_rows<kVisit>(nest, at, results);
  constexpr bool kLast = kVisit == P::kTiling.visits - 1;
  if constexpr (P::kTiling.overlap && kLast) launch_dependents();
  join_threads<kVisit>(at, results);
  if constexpr (!kLast) visit_columns<kVisit + 1>(nest, at);
}

// ---- several kernels, one for each visit and one that stores --------------------------------------------------

// The results of visits before kEnd, of which all blocks have left what they found; kBefore: arrays of visits before kVisit.
template <int kVisit, int kEnd, int kBefore, class P, class... Spaces>
WS_INLINE void learn_columns(P& nest, const ColumnTile<P>& at, Spaces*... partials) {
  if constexpr (kVisit < kEnd) learn_visit<kVisit, kEnd, kBefore>(nest, at, nest.results(ColumnVisit<kVisit>()), partials...);
}
template <int kVisit, int kEnd, int kBefore, class P, class Found, class... Spaces>
WS_INLINE void learn_visit(P& nest, const ColumnTile<P>& at, Found& results, Spaces*... partials) {
  results.template join_after<kBefore>(at, partials...);
  join_threads<kVisit>(at, results);
  if constexpr (requires { nest.finish(ColumnVisit<kVisit>()); }) nest.finish(ColumnVisit<kVisit>());
  learn_columns<kVisit + 1, kEnd, kBefore + Found::kCount>(nest, at, partials...);
}

// The kernel of a visit: what each block finds goes to the last of the partial results.
template <int kVisit, int kBefore, class P, class... Spaces> WS_INLINE void leave_columns(P nest, Spaces*... partials) {
  if constexpr (kVisit > 0 || P::kTiling.overlap) wait_for_previous();
  const ColumnTile<P> at;
  if constexpr (requires { nest.begin(at.outer); }) nest.begin(at.outer);
  learn_columns<0, kVisit, 0>(nest, at, partials...);
  settle_columns<kVisit>(nest, at);
  auto& results = nest.results(ColumnVisit<kVisit>());
  fold_rows<kVisit>(nest, at, results);
  launch_dependents();
  join_threads<kVisit>(at, results);
  if (at.is_top()) results.template store_after<kBefore>(at.point() + at.cta * at.kPoints, partials...);
}

// The kernel that stores. The blocks walk backwards: what was read last is still near; where nothing is stored of rows, the
// first of those that share columns are all.
template <class P, class... Spaces> WS_INLINE void store_columns(P nest, Spaces*... partials) {
  wait_for_previous();
  constexpr int kVisits = P::kTiling.visits, kTiles = ColumnTile<P>::kTiles, kCtas = ColumnTile<P>::kCtas;
  constexpr bool kStoresRows = requires(const P& each) { each.load(ColumnVisit<kVisits>(), 0, typename P::Offset()); };
  const unsigned first = blockIdx.x / kTiles * (kTiles * kCtas) + blockIdx.x % kTiles;
  const ColumnTile<P> at(kStoresRows ? gridDim.x - 1 - blockIdx.x : first);
  if constexpr (requires { nest.begin(at.outer); }) nest.begin(at.outer);
  learn_columns<0, kVisits, 0>(nest, at, partials...);
  if constexpr (P::kTiling.overlap) launch_dependents();
  settle_columns<kVisits>(nest, at);
  if constexpr (requires { nest.store_columns(at.column); })
    if (at.is_top() && at.cta == 0) nest.store_columns(at.column);
  if constexpr (kStoresRows)
    if (at.inside) store_rows<kVisits>(nest, at);
}

// ---- one kernel ------------------------------------------------------------------------------------------------

// Where blocks share columns there is one visit, and memory for counters and for each reduction's partial results.
template <class P, class... Spaces> WS_INLINE void reduce_columns(P nest, unsigned* arrived = nullptr, Spaces*... partials) {
  if constexpr (P::kTiling.overlap) wait_for_previous();
  const ColumnTile<P> at;
  if constexpr (requires { nest.begin(at.outer); }) nest.begin(at.outer);
  visit_columns<0>(nest, at);
  if constexpr (ColumnTile<P>::kCtas > 1)
    if (!join_ctas(at, nest.results(ColumnVisit<0>()), arrived, partials...)) return;
  constexpr int kVisits = P::kTiling.visits;
  settle_columns<kVisits>(nest, at);  // stores of columns may use it too
  if constexpr (requires { nest.store_columns(at.column); })
    if (at.is_top()) nest.store_columns(at.column);
  if constexpr (requires { nest.load(ColumnVisit<kVisits>(), 0, at.column); })
    if (at.inside) store_rows<kVisits>(nest, at);
}

}  // namespace ws
