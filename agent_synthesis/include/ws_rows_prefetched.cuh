// Prefetched rows: CTAs or clusters that stay on their SM, each with a row in registers and the next one on its way.
//
// A row arrives in shared memory by each thread's own copies, moves on to its registers, and leaves room for the next, which
// arrives while this one is agreed upon and stored. So memory always has something to do, and no barrier guards what a thread
// copies for itself.
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

// Adds a row's elements to the sums over rows.
template <class Shape, LoadSet kHave, class Row, int kCount>
WS_INLINE void add_up(const Row& row, typename Row::Vector (&vectors)[kCount], typename Row::Sums (&sums)[kCount], int base, int end) {
  const FromMemory<Shape> memory;
  each_vector<Shape, kCount, true>(base, end, [&](int v, int begin, bool whole) {
    memory.template fill<(Row::kSumLoads & ~kHave)>(row, vectors[v], v, begin, whole);
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

// `Row::kAhead`: loads that come through shared memory. With sums over rows, registers hold what rows share.
template <RowTiling kTiling, class Row, class Boxes> WS_INLINE void prefetched_rows(Row row, Boxes& boxes) {
  using Shape = RowShape<kTiling>;
  using Index = typename Row::Index;
  constexpr int kCtas = Shape::kCtas, kTeams = kTiling.teams, kThreads = Shape::kThreads, kVectors = Shape::kVectors;
  constexpr LoadSet kAhead = Row::kAhead;
  constexpr LoadSet kStays = Row::kHasSums ? Row::kCommon : 0;
  constexpr LoadSet kStored = Row::kStoreLoads | Row::kSumLoads;
  constexpr LoadSet kHeld = (Row::Stages::kLoads | (kTiling.preload ? kStored : 0)) & ~Row::kScalars;
  using Shared = SharedRows<Shape, Row, kAhead, kVectors * kThreads>;

  extern __shared__ uint4 ahead[];
  const Shared shared{reinterpret_cast<char*>(ahead)};
  const int rank = kCtas > 1 ? blockIdx.x % kCtas : 0, team = kCtas > 1 ? blockIdx.x / kCtas : blockIdx.x;
  // Starts the copies of a thread's part of a row, as one group.
  const auto fetch = [&](Index number) {
    if (number < kTiling.rows) {
      Row other = row;
      other.at(number);
      const int shift = other.shift();
      each_vector<Shape, kVectors, true>(Shape::first(rank, shift), Shape::end(rank, shift), [&](int v, int begin, bool whole) {
        other.template each_load<kAhead>(begin, CopyVector<Shared, Shape, kOnce>{shared, v * kThreads, begin, whole});
      });
      other.each_value(CopyValue<kThreads, 1>{shared.values(), 0});
    }
    commit_copies();
  };

  if constexpr (kTiling.overlap) wait_for_previous();
  if constexpr (kCtas > 1) cluster_arrive();  // every CTA runs before another writes to it
  fetch(team);
  if constexpr (kCtas > 1) cluster_wait();
  row.once();
  typename Row::Vector held[kVectors];
  typename Row::Sums sums[kVectors] = {};
  fill<Shape, kStays, true>(row, held, FromMemory<Shape>(), Shape::first(rank), Shape::end(rank));
  int turn = 0;
  for (Index number = team; number < kTiling.rows; number += kTeams, ++turn) {
    row.at(number);
    const int shift = row.shift(), first = Shape::first(rank, shift), end = Shape::end(rank, shift);
    wait_copies<0>();
    const FromShared<Shape, kAhead, Shared> source{shared, 0};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) source.template fill<kAhead>(row, held[v], v, 0, true);
    row.each_value(TakeValue<kThreads, 1>{shared.values(), 0});
    fetch(number + kTeams);
    fill<Shape, (kHeld & ~kAhead & ~kStays), true>(row, held, FromMemory<Shape>(), first, end);
    row.start();
    reduce_row<Shape, (kHeld | kAhead | kStays)>(row, held, first, end, ExchangeInTurns<Shape, Boxes>{boxes, rank, turn});
    store_both(row, rank == 0 && threadIdx.x == 0, [&] {
      if constexpr (Row::kStoresElements)
        store_elements<Shape, (kHeld | kAhead | kStays), true>(row, held, FromMemory<Shape>(), first, end);
    });
    if constexpr (Row::kHasSums) add_up<Shape, (kHeld | kAhead | kStays)>(row, held, sums, first, end);
  }
  if constexpr (Row::kHasSums)
    each_vector<Shape, kVectors, true>(Shape::first(rank), Shape::end(rank), [&](int v, int begin, bool) {
      row.each_sum(sums[v], begin, WriteSums<Shape::kColumns>{team});
    });
  if constexpr (kTiling.overlap) launch_dependents();
}

}  // namespace ws
