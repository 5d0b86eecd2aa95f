// Smem-resident rows: CTAs that stay on their SM and keep as much of a long row in shared memory as fits there.
//
// A row is shared by as many CTAs as keep all of it, up to all of the GPU, and comes in parts. `depth` parts arrive by a
// thread's own copies while the row before is stored, so no barrier guards them; registers hold `held` vectors more, likewise.
// The parts beyond are visited last before the CTAs agree and first, backwards, after it, when the second-level cache still has
// them. While they agree, `lag` parts of the next row come into that cache.
#pragma once
#include "ws_rows.cuh"

namespace ws {

WS_INLINE constexpr int resident_places(RowTiling tiling) { return 2 * tiling.threads / 32; }

// `Row::kResident`: loads that stay. `Row::kTogether`: those of which a warp's vectors lie together.
template <RowTiling kTiling, class Row, class Boxes>
WS_INLINE void smem_resident_rows(Row row, Boxes& boxes, uint64* slots = nullptr, uint64* arrivals = nullptr) {
  using Shape = RowShape<kTiling>;
  using State = StateOf<Row, 0>;
  using Stage = StageOf<Row, 0>;
  using Index = typename Row::Index;
  using Vector = typename Row::Vector;
  constexpr int kCtas = Shape::kCtas, kTeams = kTiling.teams, kThreads = Shape::kThreads, kVectors = Shape::kVectors;
  constexpr int kParts = Shape::kParts, kPart = Shape::kPart;
  constexpr int kKept = kTiling.depth;                         // parts in shared memory
  constexpr int kHeld = kTiling.held;                          // vectors of a thread in registers, behind those
  constexpr int kFirstRest = kKept + kHeld / kVectors;         // the first part that is read twice
  constexpr LoadSet kResident = Row::kResident;
  constexpr LoadSet kReduced = (Stage::kFirst | Stage::kSecond) & ~Row::kScalars;
  constexpr LoadSet kStored = Row::kStoreLoads & ~Row::kScalars;
  using Shared = SharedRows<Shape, Row, kResident, kKept * kVectors * kThreads>;

  extern __shared__ uint4 resident[];
  auto& box = reinterpret_cast<State(&)[2][Shape::kWarps]>(boxes.template of<0>());
  const Shared shared{reinterpret_cast<char*>(resident)};
  const int rank = kCtas > 1 ? blockIdx.x % kCtas : 0, team = kCtas > 1 ? blockIdx.x / kCtas : blockIdx.x;
  const int first = Shape::first(rank), end = Shape::end(rank), held_first = first + kKept * kPart;
  const auto place_of = [&](int part) { return part * kVectors * kThreads; };

  // Starts the copies of a part of a row, as one group; the first brings the row's values, too.
  const auto fetch = [&](Index number, int part) {
    if (number < kTiling.rows) {
      Row other = row;
      other.at(number);
      each_vector<Shape, kVectors, false>(first + part * kPart, end, [&](int v, int begin, bool whole) {
        const CopyVector<Shared, Shape, kLast> copy{shared, place_of(part) + v * kThreads, begin, whole};
        other.template each_load<kResident>(begin, copy);
      });
      if (Row::kHasValues && part == 0) other.each_value(CopyValue<kThreads, 1>{shared.values(), 0});
    }
    commit_copies();
  };
  Vector held[kHeld > 0 ? kHeld : 1];
  // Asks for the vectors of a row that registers hold.
  const auto refill = [&](Index number) {
    if (kHeld > 0 && number < kTiling.rows) {
      Row other = row;
      other.at(number);
      fill<Shape, kResident, false>(other, held, FromMemoryBy<Shape, kLast>(), held_first, end);
    }
  };

  if constexpr (kTiling.overlap) wait_for_previous();
  for (int part = 0; part < kKept; ++part) fetch(team, part);
  refill(team);
  row.once();
  int turn = 0;
  for (Index number = team; number < kTiling.rows; number += kTeams, ++turn) {
    row.at(number);
    if constexpr (Row::kHasValues) {
      wait_copies<kKept - 1>();
      row.each_value(TakeValue<kThreads, 1>{shared.values(), 0});
    }
    row.start();

    State own = State::empty();
    for (int part = 0; part < kKept; ++part) {
      wait_copies<kKept - 1>();
      const FromShared<Shape, kResident, Shared> source{shared, place_of(part)};
      own = State::join(own, accumulate_part<Shape, 0>(row, source, first + part * kPart, end));
      commit_copies();  // an empty group: the next wait is for the next part
    }
    if constexpr (kHeld > 0) {
      const FromMemory<Shape> memory;
      fill<Shape, (kReduced & ~kResident), false>(row, held, memory, held_first, end);
      own = State::join(own, accumulate<Shape, 0, (kReduced | kResident), false>(row, held, memory, held_first, end));
    }
    for (int part = kFirstRest; part < kParts; ++part)
      own = State::join(own, accumulate_part<Shape, 0>(row, FromMemory<Shape>(), first + part * kPart, end));

    if constexpr (kTiling.lag > 0 && Row::kTogether != 0) {
      const Index next = number + kTeams;
      if (threadIdx.x % 32 == 0 && next < kTiling.rows) {
        Row other = row;
        other.at(next);
        for (int part = 0; part < kTiling.lag; ++part)
          each_vector<Shape, kVectors, false>(first + part * kPart, end, [&](int, int begin, bool) {
            other.template each_load<Row::kTogether>(begin, Prefetch<32 * Shape::kWidth>());
          });
      }
    }
    State state;
    if constexpr (kCtas > 1) {
      auto* const slots_of_turn = reinterpret_cast<Slot<State>*>(slots) + (team * 2 + turn % 2) * kCtas;
      state = over_team<Shape::kWarps, kCtas>(own, box, slots_of_turn, rank, turn + 1);
    } else {
      state = over_block<Shape::kWarps>(own, box[turn % 2]);
    }
    row.learn(RowNumber<0>(), state, own);

    store_both(row, rank == 0 && threadIdx.x == 0, [&] {
      for (int part = kParts; part-- > kFirstRest;) store_part<Shape>(row, FromMemory<Shape>(), first + part * kPart, end);
      if constexpr (kHeld > 0) {
        const FromMemory<Shape> memory;
        fill<Shape, (kStored & ~kResident), false>(row, held, memory, held_first, end);
        store_elements<Shape, (kStored | kResident), false>(row, held, memory, held_first, end);
        refill(number + kTeams);
      }
      for (int part = 0; part < kKept; ++part) {
        const FromShared<Shape, kResident, Shared> source{shared, place_of(part)};
        store_part<Shape>(row, source, first + part * kPart, end);
        fetch(number + kTeams, part);
      }
    });
  }
  if constexpr (kTiling.overlap) launch_dependents();
  if constexpr (kCtas > 1) clear_slots<kCtas>(reinterpret_cast<Slot<State>*>(slots) + team * (2 * kCtas), arrivals + team);
}

}  // namespace ws
