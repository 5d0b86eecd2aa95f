// Rows that are read once where registers hold them, and as often as there are stages and stores where not.
//
// A row belongs to some lanes of a warp, to a CTA, to a cluster, or to CTAs of a cooperative grid. These write to each other's
// mailboxes in a workspace; who reads a slot clears it, so the workspace is zero between calls.
#pragma once
#include "ws_rows.cuh"

namespace ws {

// How those who share a row exchange their states.
enum RowExchange { kOverLanes, kOverCta, kOverCluster, kOverGrid };

WS_INLINE constexpr int plain_places(RowTiling tiling, RowExchange exchange) {
  return tiling.threads / 32 * (exchange == kOverCluster ? tiling.ctas : 1) + (exchange == kOverGrid);
}

template <RowTiling kTiling, RowExchange kExchange, class Row, class Boxes> struct ExchangeOnce {
  using Shape = RowShape<kTiling>;
  static constexpr int kCtas = Shape::kCtas, kWarps = Shape::kWarps;
  Boxes& boxes;
  int rank;
  typename Row::Index number;  // of the row
  uint64* mailboxes;

  // Words of the mailboxes of the stages before one.
  template <int kStage> static WS_INLINE constexpr int64 words_before() {
    if constexpr (kStage == 0) return 0;
    else return words_before<kStage - 1>() + int64(Slot<StateOf<Row, kStage - 1>>::kWords) * Shape::kRows * kCtas * kCtas;
  }
  template <int kStage, class State> WS_INLINE State over(const State& own) const {
    if constexpr (kTiling.overlap && kStage == Row::Stages::kCount - 1) launch_dependents();
    if constexpr (kExchange == kOverCluster && kStage == 0) cluster_wait();
    if constexpr (kExchange == kOverLanes) {
      return State::template over_lanes<Shape::kLanes>(own);
    } else if constexpr (kExchange == kOverCluster) {
      return over_cluster<kWarps, kCtas>(own, boxes.template of<kStage>(), rank);
    } else if constexpr (kExchange == kOverCta) {
      return over_block<kWarps>(own, boxes.template of<kStage>());
    } else {
      State *const box = boxes.template of<kStage>(), &shared = box[kWarps];
      const State cta = over_block<kWarps>(own, box);
      auto* const of_row = reinterpret_cast<Slot<State>*>(mailboxes + words_before<kStage>()) + number * (kCtas * kCtas);
      if (threadIdx.x < 32) {
        const State whole = over_blocks<kCtas>(cta, of_row, rank);
        if (threadIdx.x == 0) shared = whole;
      }
      __syncthreads();
      return shared;
    }
  }
};

// `Row::kAsked`: loads of which a CTA's whole slice is asked for before the previous kernel ends.
template <RowTiling kTiling, RowExchange kExchange, class Row, class Boxes>
WS_INLINE void plain_rows(Row row, Boxes& boxes, uint64* mailboxes = nullptr) {
  using Shape = RowShape<kTiling>;
  using Index = typename Row::Index;
  constexpr int kCtas = Shape::kCtas, kRowsOfCta = kCtas > 1 ? 1 : Shape::kThreads / Shape::kLanes;
  constexpr bool kRagged = Shape::kRows % kRowsOfCta != 0;
  constexpr LoadSet kFirst = Shape::kHoldsRow ? Row::Stages::kLoads & ~Row::kScalars : 0;
  constexpr LoadSet kSecond = Shape::kHoldsRow && kTiling.preload ? Row::kStoreLoads & ~Row::kScalars & ~kFirst : 0;

  const int rank = kCtas > 1 ? blockIdx.x % kCtas : 0;
  Index number = blockIdx.x / kCtas;
  if constexpr (kRowsOfCta > 1) number = Index(blockIdx.x) * kRowsOfCta + threadIdx.x / Shape::kLanes;
  const bool inside = !kRagged || number < Shape::kRows;
  if (kRagged && !inside) number = Shape::kRows - 1;
  row.at(number);
  const int shift = row.shift(), first = Shape::first(rank, shift), end = Shape::end(rank, shift);
  if (Row::kAsked != 0 && threadIdx.x == 0) row.template each_load<Row::kAsked>(rank * Shape::kSlice, Prefetch<Shape::kSlice>());
  if constexpr (kTiling.overlap) wait_for_previous();
  if constexpr (kExchange == kOverCluster) cluster_arrive();  // every CTA runs before another writes to it
  typename Row::Vector held[Shape::kVectors];
  fill<Shape, kFirst, true>(row, held, FromMemory<Shape>(), first, end);
  fill<Shape, kSecond, true>(row, held, FromMemory<Shape>(), first, end);
  row.once();
  row.start();
  const ExchangeOnce<kTiling, kExchange, Row, Boxes> exchange{boxes, rank, number, mailboxes};
  reduce_row<Shape, (kFirst | kSecond)>(row, held, first, end, exchange);
  const bool leads = kRowsOfCta > 1 ? threadIdx.x % Shape::kLanes == 0 && inside : rank == 0 && threadIdx.x == 0;
  store_both(row, leads, [&] {
    if constexpr (Row::kStoresElements)
      if (inside) store_row_elements<Shape, (kFirst | kSecond)>(row, held, first, end);
  });
}

// By lanes alone, which need no shared memory.
template <RowTiling kTiling, class Row> WS_INLINE void lane_rows(Row row) {
  StageBoxes<Row, 0> none;
  plain_rows<kTiling, kOverLanes>(row, none);
}

}  // namespace ws
