// Ends of a convolution's tiles that reduce sums where they are made: nothing of the convolution is stored.
//
// Over channels: an end has a type `Row`, what is known of a position (`batch`, `m`, `part`, then results), and
//   kLevels, kClasses            reductions that need those before; neighbouring columns, each of which has a row of its own
//   begin(row, sum)              what is known from the row's first sum, if anything is
//   of(WindowLevel, row, n, sum) the state (`ws_reduce.cuh`) of column n, which may keep something else in the place of its sum
//   learn(WindowLevel, row, state) keeps a result
//   finish(row)                  the stores that are made once a row
//   kStores, value(row, n, sum)  whether elements are stored, by `operator()` as of every end, and their value
// A position's columns are four neighbouring threads', which keep their sums from level to level.
#pragma once
#include "ws_product_windows.cuh"
#include "ws_reduce.cuh"

namespace ws {

template <int kNumber_> struct WindowLevel { static constexpr int kNumber = kNumber_; };

template <class P, class Finish>
  requires requires { typename Finish::Row; }
struct WindowTileEnd<P, Finish> {
  using Row = typename Finish::Row;
  static constexpr int kClasses = Finish::kClasses, kRows = kClasses > 1 ? 2 : 1;  // rows of a thread
  static constexpr int kApart = kClasses > 2 ? kClasses / 2 : 1;                   // neighbouring threads of different classes
  static constexpr bool kIsWhole = P::kN == P::kTileColumns;
  static_assert(P::kColumnTiles == 1 && P::kWarpgroups == 2 && P::kSlices == 1, "a warpgroup has all channels of its positions");
  static_assert(8 % kClasses == 0);

  // The state of all threads that have a row.
  template <class State> static WS_INLINE State over_row(const State& mine) {
    if constexpr (kApart == 1) return State::template over_lanes<4>(mine);
    if constexpr (kApart == 4) return mine;
    State all = mine;
    for (int apart = 0; apart < kApart; ++apart) {
      const bool is_mine = threadIdx.x % kApart == apart;
      const State found = State::template over_lanes<4>(is_mine ? mine : State::empty());
      all = is_mine ? found : all;
    }
    return all;
  }

  template <int kLevel>
  static WS_INLINE void reduce(const Finish& finish, Row (&rows)[kRows], int first_column, int lower, float (&sums)[P::kSums]) {
    if constexpr (kLevel < Finish::kLevels) {
      using State = decltype(finish.of(WindowLevel<kLevel>(), rows[0], 0, sums[0]));
      State states[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) states[r] = State::empty();
#pragma unroll
      for (int i = 0; i < P::kOwnColumns / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = first_column + 8 * i + e, r = e % kRows;
          if (kIsWhole || n < P::kN)
            states[r] = State::join(states[r], finish.of(WindowLevel<kLevel>(), rows[r], n, sums[4 * i + 2 * lower + e]));
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) finish.learn(WindowLevel<kLevel>(), rows[r], over_row(states[r]));
      reduce<kLevel + 1>(finish, rows, first_column, lower, sums);
    }
  }

  WS_INLINE void take(const typename P::Tile& tile, int rank, int warpgroup, float (&sums)[P::kSums],
                      typename P::Shared& shared, const Finish& finish) {
    const int first_row = tile.first_row(rank) + 64 * warpgroup + 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4;
    const int quarter = threadIdx.x % 4, first_column = 2 * quarter;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int m = P::position(first_row + 8 * lower);
      Row rows[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) rows[r] = {tile.layer, m < 0 ? 0 : m, (first_column + r) % kClasses};
      if constexpr (requires(Row& row) { finish.begin(row, 0.0f); }) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          finish.begin(rows[r], __shfl_sync(kAllLanes, sums[2 * lower + r], threadIdx.x % 32 / 4 * 4 + rows[r].part / 2));
      }
      reduce<0>(finish, rows, first_column, lower, sums);
      if (m >= 0 && quarter < kApart) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) finish.finish(rows[r]);
      }
      if constexpr (Finish::kStores) {
#pragma unroll
        for (int i = 0; i < P::kOwnColumns / 8; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int n = first_column + 8 * i + e;
            float& sum = sums[4 * i + 2 * lower + e];
            if (kIsWhole || n < P::kN) sum = finish.value(rows[e % kRows], n, sum);
          }
        }
      }
    }
    if constexpr (Finish::kStores) finish_positions<P>(tile, rank, warpgroup, sums, shared, finish);
  }
};

}  // namespace ws
