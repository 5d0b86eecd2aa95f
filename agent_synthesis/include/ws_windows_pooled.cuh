// Ends of a convolution's tiles that pool its outputs: windows over them are reduced on chip, and what they come to is stored.
//
// Tiles begin where a window does and have whole ones, so that those of windows that overlap do too. Such an end has
//   Pooled                       the functor of the reduction (`ws_reduce.cuh`)
//   value(batch, m, n, sum)      what is pooled of an output
//   pooled(batch, m, n, value)   the stores of window m, images outermost
// A few columns of all rows of a tile are put beside each other in shared memory, where every thread takes windows. Outputs of
// a transposed convolution's phases at one position are reduced before that: its phases come one after the other.
#pragma once
#include "ws_product_windows.cuh"
#include "ws_reduce.cuh"

namespace ws {

template <class P, class Finish>
  requires requires { typename Finish::Pooled; }
struct WindowTileEnd<P, Finish> {
  using State = Fold<typename Finish::Pooled, float>;
  static_assert(P::kSlices == 1, "sums are whole");
  static constexpr int kWindows = P::windows(0) * P::windows(1) * P::windows(2) * P::windows(3), kPairThreads = 256, kPairBarrier = 5;
  float kept[P::kTurn > 1 ? P::kSums : 1];

  // The row of a tile with these outputs.
  static WS_INLINE int row_at(const int (&at)[4]) {
    const int eight = P::kShape.eights == 2 ? at[2] / 8 % 8 : at[P::kShape.eights] % 8;
    const int half = at[P::kShape.halves] / P::kHalvesStep % 2;
    return at[2] % 8 + 8 * eight + 64 * half;
  }

  // A window of a tile: what it comes to, of a column of those that are turned.
  static WS_INLINE float over_window(const Turned* turned, const int (&first)[4], int column) {
    State all = State::empty();
#pragma unroll
    for (int a = 0; a < P::pooled(0).size; ++a) {
#pragma unroll
      for (int b = 0; b < P::pooled(1).size; ++b) {
#pragma unroll
        for (int c = 0; c < P::pooled(2).size; ++c) {
          const int at[4] = {first[0] + a * P::pooled(0).dilation, first[1] + b * P::pooled(1).dilation,
                             first[2] + c * P::pooled(2).dilation, first[3]};
          const int row = row_at(at);
          all = State::join(all, {turned[row / 64].sums[row % 64][column]});
        }
      }
    }
    return all.value;
  }

  WS_INLINE void take(const typename P::Tile& tile, int rank, int warpgroup, float (&sums)[P::kSums],
                      typename P::Shared& shared, const Finish& finish) {
    const int lane = threadIdx.x % 32, own_row = 16 * (threadIdx.x % 128 / 32) + lane / 4, quarter = threadIdx.x % 4;
    const int first_row = tile.first_row(rank), first_column = tile.first_column() + warpgroup / 2 * P::kOwnColumns;
    const int phase = P::phase_of(first_row / kTileRows);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int m = P::position(first_row + warpgroup % 2 * 64 + own_row + 8 * lower);
#pragma unroll
      for (int i = 0; i < P::kOwnColumns / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = first_column + 8 * i + 2 * quarter + e, number = 4 * i + 2 * lower + e;
          float value = State::empty().value;
          if (m >= 0 && n < P::kN) value = finish.value(tile.layer, m, n, sums[number]);
          if constexpr (P::kTurn > 1) {
            if (phase > 0) value = State::join({kept[number]}, {value}).value;
            kept[number] = value;
          } else {
            sums[number] = value;
          }
        }
      }
    }
    if (phase < P::kTurn - 1) return;
    if constexpr (P::kTurn > 1) pool(tile, first_row, first_column, warpgroup, kept, shared, finish);
    else pool(tile, first_row, first_column, warpgroup, sums, shared, finish);
  }

  static WS_INLINE void pool(const typename P::Tile& tile, int first_row, int first_column, int warpgroup,
                             const float (&values)[P::kSums], typename P::Shared& shared, const Finish& finish) {
    const int pair = warpgroup / 2, thread = threadIdx.x % 128 + warpgroup % 2 * 128;
    Turned* turned = shared.turned + 2 * pair;
    const typename P::Place place(first_row / kTileRows);
#pragma unroll
    for (int begin = 0; begin < P::kOwnColumns; begin += kTurnedColumns) {
      meet_at<kPairThreads>(kPairBarrier + pair);
      turned[warpgroup % 2].take(values, begin);
      meet_at<kPairThreads>(kPairBarrier + pair);
      for (int item = thread; item < kWindows * kTurnedColumns; item += kPairThreads) {
        const int column = item / kWindows, n = first_column + begin + column;
        int rest = item % kWindows, window[4], first[4], number = 0;
        bool is_one = n < P::kN;
#pragma unroll
        for (int d = 2; d >= 0; --d) {
          window[d] = rest % P::windows(d);
          rest /= P::windows(d);
        }
        window[3] = rest;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int d = i == 0 ? 3 : i - 1, stride = P::pooled(d).stride;
          first[d] = window[d] * stride;
          window[d] += (place.at[d] - P::begin(d)) / stride;
          is_one = is_one && window[d] < P::all_windows(d);
          number = number * P::all_windows(d) + window[d];
        }
        if (is_one) finish.pooled(tile.layer, number, n, over_window(turned, first, column));
      }
    }
  }
};

}  // namespace ws
