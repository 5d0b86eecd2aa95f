// A multi-stage ring: CTAs that stay on their SM while row after row passes through their shared memory, part by part.
//
// A part's number counts the parts of all rows of a team. The results of a row are wanted `lag` parts after its last part has
// come, so the CTAs of a row agree while memory still brings the next row and takes the one before: each byte moves once, without
// a pause. What rows share lies in registers as far as it fits there, `held` vectors of it; the second-level cache keeps the rest,
// and gives it a part ahead.
#pragma once
#include "ws_rows.cuh"

namespace ws {

// Of what rows share, `kLoads`: vectors in registers, and those that come a part ahead.
template <class Shape, class Row, int kHeld> struct SharedLoads {
  using Vector = typename Row::Vector;
  static constexpr LoadSet kLoads = Row::kSharedByRows;
  static constexpr int kVectors = Shape::kVectors, kParts = Shape::kParts;
  // Parts of a load that registers hold: the first loads' as many as there are.
  static WS_INLINE constexpr int held_parts(LoadSet bit) {
    int spare = kHeld / kVectors;
    for (LoadSet before = 1; before < bit; before <<= 1)
      if (kLoads & before) spare -= spare < kParts ? spare : kParts;
    return spare < kParts ? spare : kParts;
  }
  static WS_INLINE constexpr int most_held() {
    int most = 0;
    for (int number = 0; number < 64; ++number)
      if (kLoads >> number & 1 && held_parts(LoadSet(1) << number) > most) most = held_parts(LoadSet(1) << number);
    return most;
  }
  Vector held[most_held() > 0 ? most_held() * kVectors : 1];
  Vector next[kVectors];

  // Reads a vector that registers hold, where the part is one of those.
  struct ReadHeld {
    SharedLoads& to;
    int part, v;

    template <class Load, class T> WS_INLINE void operator()(Load, const T* from) const {
      if (part < held_parts(Load::kBit))
        to.held[part * kVectors + v].*Load::kMember = load<Shape::kWidth, kLast>(from);
    }
  };
  // Reads a vector of a part ahead, where registers do not hold it; `last`: no row needs it again.
  struct ReadNext {
    SharedLoads& to;
    int part, v;
    bool last;

    template <class Load, class T> WS_INLINE void operator()(Load, const T* from) const {
      if (held_parts(Load::kBit) < kParts && part >= held_parts(Load::kBit))
        to.next[v].*Load::kMember = load_again<Shape::kWidth>(from, last);
    }
  };
  // A vector of the part at hand.
  struct Take {
    const SharedLoads& from;
    Vector& to;
    int part, v;

    template <class Load, class T> WS_INLINE void operator()(Load, const T*) const {
      constexpr int kHeldParts = held_parts(Load::kBit);
      if (part < kHeldParts) to.*Load::kMember = from.held[(part < kHeldParts ? part : 0) * kVectors + v].*Load::kMember;
      else to.*Load::kMember = from.next[v].*Load::kMember;
    }
  };

  // The vectors of a part, wherever it ends.
  WS_INLINE void take(const Row& row, Vector (&to)[kVectors], int part) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) row.template each_load<kLoads>(0, Take{*this, to[v], part, v});
  }
};

WS_INLINE constexpr int ring_places(RowTiling tiling) { return 2 * tiling.threads / 32; }

// `Row::kInRing`: loads that pass through the ring. `Row::kTogether`: those of which a warp's vectors lie together.
template <RowTiling kTiling, class Row, class Boxes>
WS_INLINE void ring_rows(Row row, Boxes& boxes, uint64* slots, uint64* arrivals) {
  using Shape = RowShape<kTiling>;
  using State = StateOf<Row, 0>;
  using Index = typename Row::Index;
  constexpr int kCtas = Shape::kCtas, kTeams = kTiling.teams, kThreads = Shape::kThreads, kVectors = Shape::kVectors;
  constexpr int kParts = Shape::kParts, kPart = Shape::kPart;
  constexpr int kDepth = kTiling.depth;  // parts in shared memory or on the way there
  constexpr int kLead = kTiling.lag;     // parts that are added up before they are stored
  constexpr LoadSet kInRing = Row::kInRing;
  constexpr LoadSet kStored = Row::kStoreLoads & ~Row::kScalars;
  using Shared = SharedRows<Shape, Row, kInRing, kDepth * kVectors * kThreads>;
  using Source = FromShared<Shape, kInRing, Shared>;
  using Common = SharedLoads<Shape, Row, kTiling.held>;

  extern __shared__ uint4 ring[];
  auto& box = reinterpret_cast<State(&)[2][Shape::kWarps]>(boxes.template of<0>());
  const Shared shared{reinterpret_cast<char*>(ring)};
  const int rank = blockIdx.x % kCtas, team = blockIdx.x / kCtas;
  const int first = Shape::first(rank), end = Shape::end(rank);
  const auto place_of = [&](int number) { return number % kDepth * kVectors * kThreads; };
  const auto begin_of = [&](int number) { return first + number % kParts * kPart; };
  const auto row_of = [&](int number) { return team + Index(number / kParts) * kTeams; };
  const auto slots_of = [&](int turn) {  // two sets of slots take turns
    return reinterpret_cast<Slot<State>*>(slots) + (team * 2 + turn % 2) * kCtas;
  };

  // Starts the copies of a part, as one group.
  const auto fetch = [&](int number) {
    if (row_of(number) < kTiling.rows) {
      Row other = row;
      other.at(row_of(number));
      each_vector<Shape, kVectors, false>(begin_of(number), end, [&](int v, int begin, bool whole) {
        const CopyVector<Shared, Shape, kLast> copy{shared, place_of(number) + v * kThreads, begin, whole};
        other.template each_load<kInRing>(begin, copy);
      });
    }
    commit_copies();
  };
  // Asks memory for a part, a warp's vectors at once.
  const auto ask = [&](int number) {
    if (Row::kTogether != 0 && row_of(number) < kTiling.rows && threadIdx.x % 32 == 0) {
      Row other = row;
      other.at(row_of(number));
      each_vector<Shape, kVectors, false>(begin_of(number), end, [&](int, int begin, bool) {
        constexpr int kWide = 32 * Shape::kWidth;
        if (Shape::kColumns % kWide == 0 || begin + kWide <= Shape::kColumns)
          other.template each_load<Row::kTogether>(begin, Prefetch<kWide>());
      });
    }
  };
  // Adds a part up; with a row's last one, signals the other CTAs.
  State own = State::empty();
  const auto add_up = [&](int number) {
    if (row_of(number) < kTiling.rows) {
      Row other = row;
      other.at(row_of(number));
      other.start();
      wait_copies<kDepth - kLead>();
      const Source source{shared, place_of(number)};
      own = State::join(own, accumulate_part<Shape, 0>(other, source, begin_of(number), end));
      if (number % kParts == kParts - 1) {
        const int turn = number / kParts;
        tell_team<Shape::kWarps>(own, box[0], slots_of(turn), rank, turn + 1);
        own = State::empty();
      }
    }
  };

  if constexpr (kTiling.overlap) wait_for_previous();
  Common common;
  if constexpr (Common::most_held() > 0) {
#pragma unroll
    for (int part = 0; part < Common::most_held(); ++part)
      each_vector<Shape, kVectors, false>(first + part * kPart, end, [&](int v, int begin, bool) {
        row.template each_load<Common::kLoads>(begin, typename Common::ReadHeld{common, part, v});
      });
  }
  each_vector<Shape, kVectors, false>(first, end, [&](int v, int begin, bool) {
    row.template each_load<Common::kLoads>(begin, typename Common::ReadNext{common, 0, v, false});
  });
  for (int number = 0; number < kDepth - kLead; ++number) fetch(number);
  row.once();
  for (int number = 0; number < kLead; ++number) {
    fetch(number + kDepth - kLead);
    add_up(number);
  }
  int turn = 0;
  for (Index number = team; number < kTiling.rows; number += kTeams, ++turn) {
    row.at(number);
    row.start();
    const State state = hear_team<Shape::kWarps, kCtas>(box[1], slots_of(turn), turn + 1);
    row.learn(RowNumber<0>(), state, state);
    const auto elements = [&](int part) {
      const int place = turn * kParts + part, begin = first + part * kPart;
      const Source source{shared, place_of(place)};
      typename Row::Vector read[kVectors];
      common.take(row, read, part);
      fill<Shape, (kStored & ~Common::kLoads), false>(row, read, source, begin, end);
      store_elements<Shape, kStored, false>(row, read, source, begin, end);
      fetch(place + kDepth);
      ask(place + kDepth + 1);
      const int following = (part + 1) % kParts;
      const bool last = number + (following > 0 ? 1 : 2) * kTeams >= kTiling.rows;
      each_vector<Shape, kVectors, false>(first + following * kPart, end, [&](int v, int next_begin, bool) {
        row.template each_load<Common::kLoads>(next_begin, typename Common::ReadNext{common, following, v, last});
      });
      add_up(place + kLead);
    };
    store_both(row, rank == 0 && threadIdx.x == 0, [&] {
#pragma unroll
      for (int part = 0; part < kParts; ++part) elements(part);
    });
  }
  if constexpr (kTiling.overlap) launch_dependents();
  clear_slots<kCtas>(slots_of(0), arrivals + team);
}

}  // namespace ws
