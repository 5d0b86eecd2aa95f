// Prefetched rows: CTAs or clusters that stay on their SM, each at work on a row while the next ones are on their way.
//
// A row arrives in shared memory by each thread's own copies, so no barrier guards it. It moves on to registers and leaves room
// for another at once, or, where these do not hold it, stays until it is stored and passes through them in parts.
#pragma once
#include "ws_rows.cuh"

namespace ws {

// Over the CTA or cluster of a row; rows take turns with the places.
template <class Shape, class Boxes> struct ExchangeInTurns {
  Boxes& boxes;
  int rank, turn;

  template <int kStage, class State> WS_INLINE State over(const State& own) const {
    State* const box = boxes.template of<kStage>() + turn % 2 * (Shape::kWarps * Shape::kCtas);
    if constexpr (Shape::kCtas > 1) return over_cluster<Shape::kWarps, Shape::kCtas>(own, box, rank);
    else return over_block<Shape::kWarps>(own, box);
  }
};

WS_INLINE constexpr int prefetched_places(RowTiling tiling) { return 2 * tiling.threads / 32 * tiling.ctas; }

// Adds elements to the sums over rows; of their loads `kHave` is there.
template <class Shape, LoadSet kHave, class Row, class Source, int kCount>
WS_INLINE void add_up(const Row& row, typename Row::Vector (&vectors)[kCount], typename Row::Sums (&sums)[kCount],
                      const Source& source, int base, int end) {
  each_vector<Shape, kCount, Shape::kHoldsRow>(base, end, [&](int v, int begin, bool whole) {
    source.template fill<(Row::kSumLoads & ~kHave)>(row, vectors[v], v, begin, whole);
    each_element<Shape>(begin, whole, [&](int j, int e) { row.add(sums[v], vectors[v], j, e); });
  });
}

// Leaves the sums over a team's rows beside those of the other teams.
template <int kColumns> struct WriteSums {
  int team;

  template <class T, int N> WS_INLINE void operator()(const Pack<T, N>& vector, T* first) const {
    store(first + int64(team) * kColumns, vector);
  }
};

// body(part, its first element) for each part of a row.
template <class Shape, int kParts, class Body> WS_INLINE void each_part(int first, const Body& body) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) body(part, first + part * Shape::kPart);
}

// All stages of a row that passes through registers in parts: `source(part)` gives each.
template <class Shape, int kParts, int kStage = 0, class Row, class SourceOf, class Exchange>
WS_INLINE void reduce_parts(Row& row, const SourceOf& source, int first, int end, const Exchange& exchange) {
  if constexpr (kStage < Row::Stages::kCount) {
    using State = StateOf<Row, kStage>;
    State own = State::empty();
    each_part<Shape, kParts>(first, [&](int part, int base) {
      own = State::join(own, accumulate_part<Shape, kStage>(row, source(part), base, end));
    });
    row.learn(RowNumber<kStage>(), exchange.template over<kStage>(own), own);
    reduce_parts<Shape, kParts, kStage + 1>(row, source, first, end, exchange);
  }
}

// `Row::kAhead`: loads that come through shared memory. With sums over rows, registers hold what rows share, if they hold rows.
template <RowTiling kTiling, class Row, class Boxes> WS_INLINE void prefetched_rows(Row row, Boxes& boxes) {
  using Shape = RowShape<kTiling>;
  using Index = typename Row::Index;
  constexpr int kCtas = Shape::kCtas, kTeams = kTiling.teams, kThreads = Shape::kThreads, kVectors = Shape::kVectors;
  constexpr bool kHolds = Shape::kHoldsRow;
  constexpr int kParts = kHolds ? 1 : Shape::kParts;                                  // of a row, in registers at once
  constexpr int kDepth = kTiling.depth, kPlaces = kParts * kVectors * kThreads;       // rows in shared memory; vectors of one
  constexpr LoadSet kAhead = Row::kAhead;
  constexpr LoadSet kStays = Row::kHasSums && kHolds ? Row::kCommon : 0;
  constexpr LoadSet kStored = Row::kStoreLoads | Row::kSumLoads;
  constexpr LoadSet kHeld = (Row::Stages::kLoads | (kTiling.preload ? kStored : 0)) & ~Row::kScalars;
  using Shared = SharedRows<Shape, Row, kAhead, kDepth * kPlaces>;
  using Source = FromShared<Shape, kAhead, Shared>;
  using Vector = typename Row::Vector;

  extern __shared__ uint4 ahead[];
  const Shared shared{reinterpret_cast<char*>(ahead)};
  const FromMemory<Shape> memory;
  const int rank = kCtas > 1 ? blockIdx.x % kCtas : 0, team = kCtas > 1 ? blockIdx.x / kCtas : blockIdx.x;
  // Starts the copies of a thread's part of a row to a slot, as one group.
  const auto fetch = [&](Index number, int slot) {
    if (number < kTiling.rows) {
      Row other = row;
      other.at(number);
      const int shift = other.shift(), end = Shape::end(rank, shift);
      each_part<Shape, kParts>(Shape::first(rank, shift), [&](int part, int base) {
        each_vector<Shape, kVectors, kHolds>(base, end, [&](int v, int begin, bool whole) {
          const int place = slot * kPlaces + (part * kVectors + v) * kThreads;
          other.template each_load<kAhead>(begin, CopyVector<Shared, Shape, kOnce>{shared, place, begin, whole});
        });
      });
      other.each_value(CopyValue<kThreads, kDepth>{shared.values(), slot});
    }
    commit_copies();
  };

  if constexpr (kTiling.overlap) wait_for_previous();
  if constexpr (kCtas > 1) cluster_arrive();  // every CTA runs before another writes to it
  for (int slot = 0; slot < kDepth; ++slot) fetch(team + slot * kTeams, slot);
  if constexpr (kCtas > 1) cluster_wait();
  row.once();
  Vector held[kVectors];
  typename Row::Sums sums[kParts][kVectors] = {};
  fill<Shape, kStays, true>(row, held, memory, Shape::first(rank), Shape::end(rank));
  int turn = 0, slot = 0;
  for (Index number = team; number < kTiling.rows; number += kTeams, ++turn) {
    row.at(number);
    const int shift = row.shift(), first = Shape::first(rank, shift), end = Shape::end(rank, shift);
    const bool leads = rank == 0 && threadIdx.x == 0;
    const ExchangeInTurns<Shape, Boxes> exchange{boxes, rank, turn};
    const auto source = [&](int part) { return Source{shared, slot * kPlaces + part * kVectors * kThreads}; };
    wait_copies<kDepth - 1>();
    row.each_value(TakeValue<kThreads, kDepth>{shared.values(), slot});
    if constexpr (kHolds) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) source(0).template fill<kAhead>(row, held[v], v, 0, true);
      fetch(number + kDepth * kTeams, slot);
      constexpr LoadSet kHave = kHeld | kAhead | kStays;
      fill<Shape, (kHeld & ~kAhead & ~kStays), true>(row, held, memory, first, end);
      row.start();
      reduce_row<Shape, kHave>(row, held, first, end, exchange);
      store_both(row, leads, [&] {
        if constexpr (Row::kStoresElements) store_elements<Shape, kHave, true>(row, held, memory, first, end);
      });
      if constexpr (Row::kHasSums) add_up<Shape, kHave>(row, held, sums[0], memory, first, end);
    } else {
      row.start();
      reduce_parts<Shape, kParts>(row, source, first, end, exchange);
      store_both(row, leads, [&] {
        each_part<Shape, kParts>(first, [&](int part, int base) {
          constexpr LoadSet kRead = kStored & ~Row::kScalars;
          Vector read[kVectors];
          fill<Shape, kRead, false>(row, read, source(part), base, end);
          if constexpr (Row::kStoresElements) store_elements<Shape, kRead, false>(row, read, source(part), base, end);
          if constexpr (Row::kHasSums) add_up<Shape, kRead>(row, read, sums[part], source(part), base, end);
        });
      });
      fetch(number + kDepth * kTeams, slot);
    }
    slot = slot + 1 == kDepth ? 0 : slot + 1;
  }
  if constexpr (Row::kHasSums)
    each_part<Shape, kParts>(Shape::first(rank), [&](int part, int base) {
      each_vector<Shape, kVectors, kHolds>(base, Shape::end(rank), [&](int v, int begin, bool) {
        row.each_sum(sums[part][v], begin, WriteSums<Shape::kColumns>{team});
      });
    });
  if constexpr (kTiling.overlap) launch_dependents();
}

}  // namespace ws
