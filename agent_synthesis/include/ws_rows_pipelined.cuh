// Pipelined rows: CTAs that stay on their SM and take row after row through a ring in shared memory.
//
// A thread's asynchronous copies fill its own places, so no barrier guards them, and while the CTAs of a row agree on its result,
// `lag` turns long, the next rows arrive: `depth` are in the ring or on the way. What no row changes is loaded once. Resident
// CTAs of the whole GPU form the teams, since clusters would leave SMs idle: at 4096x393216, 112 to 120 of 132.
#pragma once
#include "ws_rows.cuh"

namespace ws {

WS_INLINE constexpr int pipelined_places(RowTiling tiling) { return 2 * tiling.threads / 32 + (tiling.ctas > 1 ? 2 : 0); }

// `Row::kInRing`: loads that pass through the ring. One barrier a turn: it ends the turn's own states, and the agreed one of the
// row that is finished now. The first warp takes from the other CTAs, the last one sends, so that neither has both to do.
template <RowTiling kTiling, class Row, class Boxes>
WS_INLINE void pipelined_rows(Row row, Boxes& boxes, uint64* mailboxes = nullptr) {
  using Shape = RowShape<kTiling>;
  using State = StateOf<Row, 0>;
  using Index = typename Row::Index;
  constexpr int kCtas = Shape::kCtas, kTeams = kTiling.teams, kThreads = Shape::kThreads, kVectors = Shape::kVectors;
  constexpr int kDepth = kTiling.depth;  // rows that a CTA has in shared memory or on the way there
  constexpr int kLag = kTiling.lag;      // turns from a CTA's own state to the row's
  constexpr LoadSet kInRing = Row::kInRing, kReduced = Row::Stages::kLoads | Row::kStoreLoads;
  constexpr LoadSet kHeld = kTiling.preload ? Row::kCommon & kReduced : 0;
  using Shared = SharedRows<Shape, Row, kInRing, kDepth * kVectors * kThreads>;
  using Source = FromShared<Shape, kInRing, Shared>;

  extern __shared__ uint4 ring[];
  auto& box = reinterpret_cast<State(&)[2][Shape::kWarps]>(boxes.template of<0>());
  State* const agreed = boxes.template of<0>() + 2 * Shape::kWarps;
  const Shared shared{reinterpret_cast<char*>(ring)};
  const int rank = kCtas > 1 ? blockIdx.x % kCtas : 0, team = kCtas > 1 ? blockIdx.x / kCtas : blockIdx.x;
  const int first = Shape::first(rank), end = Shape::end(rank);
  const auto row_of = [&](int turn) { return Index(team) + turn * kTeams; };
  const auto inbox = [&](int turn) {  // of all CTAs of the row
    constexpr int kBoxes = kLag > 0 ? 2 * kLag : 1;
    return reinterpret_cast<Slot<State>*>(mailboxes) + (team * kBoxes + turn % kBoxes) * (kCtas * kCtas);
  };
  // Starts the copies of a turn's row into a slot of the ring, as one group.
  const auto fetch = [&](int turn, int slot) {
    if (row_of(turn) < kTiling.rows) {
      Row other = row;
      other.at(row_of(turn));
      each_vector<Shape, kVectors, false>(first, end, [&](int v, int begin, bool whole) {
        const int place = slot * (kVectors * kThreads) + v * kThreads;
        other.template each_load<kInRing>(begin, CopyVector<Shared, Shape, kOnce>{shared, place, begin, whole});
      });
      other.each_value(CopyValue<kThreads, kDepth>{shared.values(), slot});
    }
    commit_copies();
  };

  if constexpr (kTiling.overlap) wait_for_previous();
  for (int slot = 0; slot < kDepth; ++slot) fetch(slot, slot);
  typename Row::Vector held[kVectors];
  fill<Shape, kHeld, false>(row, held, FromMemory<Shape>(), first, end);
  row.once();
  const int turns = (kTiling.rows - 1 - team) / kTeams + 1;
  int newest = 0, oldest = 0;  // slots of the ring

  for (int turn = 0; turn < turns + kLag; ++turn) {
    Mail<kCtas, State> mail;
    if (kCtas > 1 && threadIdx.x < 32 && turn >= kLag) mail = look<kCtas>(inbox(turn - kLag), rank);
    if (kLag == 0 || turn < turns) {
      row.at(row_of(turn));
      wait_copies<kDepth - 1 - kLag>();
      row.each_value(TakeValue<kThreads, kDepth>{shared.values(), newest});
      row.start();
      const Source source{shared, newest * (kVectors * kThreads)};
      const State own = accumulate<Shape, 0, kHeld, false>(row, held, source, first, end);
      const State mine = State::template over_lanes<32>(own);
      if (threadIdx.x % 32 == 0) box[turn % 2][threadIdx.x / 32] = mine;
      newest = newest + 1 == kDepth ? 0 : newest + 1;
    }
    if (kCtas > 1 && threadIdx.x < 32 && turn >= kLag) {
      const State all = take_from_blocks(mail, inbox(turn - kLag), rank, turn - kLag);
      if (threadIdx.x == 0) agreed[turn % 2] = all;
    }
    __syncthreads();
    if (kCtas > 1 && threadIdx.x >= kThreads - 32 && turn < turns)
      send_to_blocks<kCtas>(over_array<Shape::kWarps>(box[turn % 2]), inbox(turn), rank, turn);
    if (kLag == 0 || turn >= kLag) {
      const int past = turn - kLag;
      row.at(row_of(past));
      row.each_value(TakeValue<kThreads, kDepth>{shared.values(), oldest});
      row.start();
      const State state = kCtas > 1 ? agreed[turn % 2] : over_array<Shape::kWarps>(box[turn % 2]);
      row.learn(RowNumber<0>(), state, state);
      const Source source{shared, oldest * (kVectors * kThreads)};
      store_both(row, rank == 0 && threadIdx.x == 0, [&] {
        if constexpr (Row::kStoresElements) store_elements<Shape, kHeld, false>(row, held, source, first, end);
      });
      fetch(past + kDepth, oldest);
      oldest = oldest + 1 == kDepth ? 0 : oldest + 1;
    }
  }
  if constexpr (kTiling.overlap) launch_dependents();
  if (kCtas > 1 && threadIdx.x < 32)
    for (int turn = 0; turn < 2 * kLag; ++turn) clear_mailboxes<kCtas>(inbox(turn), rank);
}

}  // namespace ws
