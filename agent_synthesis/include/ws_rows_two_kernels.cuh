// Two-kernel reductions: a kernel for each stage leaves the states of slices in a workspace, one more joins them and stores.
//
// Any row length and any number of CTAs; each kernel reads the row again, from the second-level cache where it fits. Each overlaps
// the start of the next.
#pragma once
#include "ws_rows.cuh"

namespace ws {

// One of several values.
template <int kNumber, class First, class... Rest> WS_INLINE auto nth(First first, Rest... rest) {
  if constexpr (kNumber == 0) return first;
  else return nth<kNumber - 1>(rest...);
}

// In which order CTAs take the parts of rows: `kRowByRow`; or so many parts of a row that lie together before the next row's do,
// so that CTAs follow each other as memory does.
constexpr int kRowByRow = 0;
template <class Shape, class Index, int kTogether, bool kBackwards> struct RowPart {
  int rank;
  Index number;

  WS_INLINE RowPart() {
    constexpr int kCtas = Shape::kCtas, kRows = Shape::kRows;
    const unsigned block = kBackwards ? unsigned(kRows) * kCtas - 1 - blockIdx.x : blockIdx.x;  // what was read last first
    if constexpr (kTogether == kRowByRow) {
      rank = block % kCtas;
      number = block / kCtas;
    } else {
      rank = block / (unsigned(kRows) * kTogether) * kTogether + block % kTogether;
      number = block / kTogether % kRows;
    }
  }
};

// Joins the states of a row, `kCount` of each of the first stages: every warp for itself.
template <int kStages, int kCount, int kStage = 0, class Row, class... Partials>
WS_INLINE void learn_partials(Row& row, typename Row::Index number, Partials... partials) {
  if constexpr (kStage < kStages) {
    const auto state = over_array<kCount>(nth<kStage>(partials...) + number * kCount);
    row.learn(RowNumber<kStage>(), state, state);
    learn_partials<kStages, kCount, kStage + 1>(row, number, partials...);
  }
}

// The same of several rows and all stages, for all threads: a warp joins a row's, and leaves them at its place.
template <int kCount, int kStage = 0, class Row, class Boxes, class... Partials>
WS_INLINE void join_partials(const Row& row, Boxes& boxes, int place, typename Row::Index number, Partials... partials) {
  if constexpr (kStage < Row::Stages::kCount) {
    const auto whole = over_array<kCount>(nth<kStage>(partials...) + number * kCount);
    if (threadIdx.x % 32 == 0) boxes.template of<kStage>()[place] = whole;
    join_partials<kCount, kStage + 1>(row, boxes, place, number, partials...);
  }
}
template <int kStage = 0, class Row, class Boxes> WS_INLINE void learn_joined(Row& row, Boxes& boxes, int place) {
  if constexpr (kStage < Row::Stages::kCount) {
    const auto state = boxes.template of<kStage>()[place];
    row.learn(RowNumber<kStage>(), state, state);
    learn_joined<kStage + 1>(row, boxes, place);
  }
}

// The kernel of a stage: the state of each CTA's slice goes to the workspace, the last of the partial results.
template <RowTiling kTiling, int kTogether, int kStage, class Row, class State, class... Partials>
WS_INLINE void leave_states(Row row, State* box, Partials... partials) {
  using Shape = RowShape<kTiling>;
  using Stage = StageOf<Row, kStage>;
  constexpr LoadSet kHeld = Shape::kHoldsRow ? (Stage::kFirst | Stage::kSecond) & ~Row::kScalars : 0;

  const RowPart<Shape, typename Row::Index, kTogether, false> part;
  row.at(part.number);
  const int shift = row.shift(), first = Shape::first(part.rank, shift), end = Shape::end(part.rank, shift);
  if constexpr (kStage == 0 && Row::kAsked != 0)
    if (threadIdx.x == 0)
      row.template each_load<Row::kAsked>(part.rank * Shape::kSlice, Prefetch<Shape::kSlice>());
  if constexpr (kStage > 0 || kTiling.overlap) wait_for_previous();
  row.once();
  row.start();
  learn_partials<kStage, Shape::kCtas>(row, part.number, partials...);
  typename Row::Vector held[Shape::kVectors];
  fill<Shape, kHeld, true>(row, held, FromMemory<Shape>(), first, end);
  const State own = accumulate_row<Shape, kStage, kHeld>(row, held, first, end);
  launch_dependents();
  const State cta = over_block<Shape::kWarps>(own, box);
  if (threadIdx.x == 0) nth<kStage>(partials...)[part.number * Shape::kCtas + part.rank] = cta;
}

// The kernel that stores, each CTA a slice of a row; `kStates` of each stage are joined. With boxes, the first warp joins them for
// all, while the row is on its way; else every warp for itself.
template <RowTiling kTiling, int kTogether, bool kBackwards, int kStates, class Row, class Boxes, class... Partials>
WS_INLINE void store_rows(Row row, Boxes& boxes, Partials... partials) {
  using Shape = RowShape<kTiling>;
  constexpr bool kFirstWarp = sizeof(Boxes) >= sizeof(StateOf<Row, 0>);
  constexpr LoadSet kHeld = Shape::kHoldsRow ? Row::kStoreLoads & ~Row::kScalars : 0;

  const RowPart<Shape, typename Row::Index, kTogether, kBackwards> part;
  row.at(part.number);
  const int shift = row.shift(), first = Shape::first(part.rank, shift), end = Shape::end(part.rank, shift);
  typename Row::Vector held[Shape::kVectors];
  wait_for_previous();
  row.once();
  row.start();
  if constexpr (kFirstWarp) {
    fill<Shape, kHeld, true>(row, held, FromMemory<Shape>(), first, end);
    if (threadIdx.x < 32) join_partials<kStates>(row, boxes, 0, part.number, partials...);
    __syncthreads();
    learn_joined(row, boxes, 0);
  } else {
    learn_partials<Row::Stages::kCount, kStates>(row, part.number, partials...);
  }
  if constexpr (kTiling.overlap) launch_dependents();
  if constexpr (!kFirstWarp) fill<Shape, kHeld, true>(row, held, FromMemory<Shape>(), first, end);
  store_both(row, part.rank == 0 && threadIdx.x == 0, [&] {
    if constexpr (Row::kStoresElements) store_row_elements<Shape, kHeld>(row, held, first, end);
  });
}

// Every warp for itself.
template <RowTiling kTiling, bool kBackwards, int kStates, class Row, class... Partials>
WS_INLINE void store_slices(Row row, Partials... partials) {
  StageBoxes<Row, 0> none;
  store_rows<kTiling, kRowByRow, kBackwards, kStates>(row, none, partials...);
}

// The kernel that stores, each CTA its columns of `kRows` rows: CTAs at work then are neighbours in memory, and rows share what
// they can. What was read last comes first.
template <RowTiling kTiling, int kRows, int kStates, class Row, class Boxes, class... Partials>
WS_INLINE void store_several_rows(Row row, Boxes& boxes, Partials... partials) {
  using Shape = RowShape<kTiling>;
  constexpr int kGroups = (Shape::kRows + kRows - 1) / kRows;
  constexpr LoadSet kStored = Row::kStoreLoads & ~Row::kScalars, kCommon = Shape::kHoldsRow ? kStored & Row::kCommon : 0;
  constexpr LoadSet kOwn = Shape::kHoldsRow ? kStored & ~Row::kCommon : 0;

  const int rank = Shape::kCtas - 1 - int(blockIdx.x / kGroups), first_row = blockIdx.x % kGroups * kRows;
  const int first = Shape::first(rank), end = Shape::end(rank);
  const auto is_there = [&](int number) { return Shape::kRows % kRows == 0 || first_row + number < Shape::kRows; };
  wait_for_previous();
  row.once();
  for (int number = threadIdx.x / 32; number < kRows && is_there(number); number += Shape::kWarps)
    join_partials<kStates>(row, boxes, number, first_row + number, partials...);
  typename Row::Vector held[Shape::kVectors];
  fill<Shape, kCommon, true>(row, held, FromMemory<Shape>(), first, end);
  __syncthreads();
  if constexpr (kTiling.overlap) launch_dependents();
  for (int number = 0; number < kRows && is_there(number); ++number) {
    row.at(first_row + number);
    fill<Shape, kOwn, true>(row, held, FromMemory<Shape>(), first, end);
    row.start();
    learn_joined(row, boxes, number);
    store_both(row, rank == 0 && threadIdx.x == 0, [&] {
      if constexpr (Row::kStoresElements) store_row_elements<Shape, (kCommon | kOwn)>(row, held, first, end);
    });
  }
}

}  // namespace ws
