// Convolutions: a thread makes a few neighbouring outputs of a few rows. It reads every row of data that their windows need
// once, in vectors, and adds each element to all sums that it belongs to, in registers.
//
// The one idea: all extents of a strip are constants, so the loops over its rows and windows unroll, and what windows share is
// read once. What neighbouring strips share comes from the first-level cache, or from a tile in shared memory that the block
// brings. Strips away from the edges are made without a test. The generated struct W's are:
//
//   Offset, Value                                  int, or int64 where a buffer needs it; type of sums
//   kTiling, kRow, kDown, Deep, Channels, Outer    sizes, see below
//   load(at, channel, place, down, row)            vector_width neighbours of the data from position `row` on, widened
//   weight(at, channel, element, m, k, i)          the weight of element m along kDown and k along the row, for output i
//   store(at, down, row, sums)                     store_width outputs from `row` on
//
// `at` holds the coordinates of the outputs along the axes Outer, `channel` those of a channel; `place` and `element` hold
// positions, and elements of the window, along Deep's dimensions.
#pragma once
#include "ws_window.cuh"

namespace ws {

struct ConvolutionTiling {
  int threads;
  int rows, outputs;    // rows of outputs of a thread; outputs of such a row
  int vector_width;     // elements of the data that are read at once
  int store_width;      // outputs that are stored at once
  int across;           // threads of a block along the row, where it shares a tile; 0: none is shared
  bool weights_differ;  // whether neighbours along the row have weights of their own
  bool overlap;         // programmatic dependent launch
};

// What does not depend on a thread.
template <class W> struct ConvolutionShape {
  using Offset = typename W::Offset;
  using Value = typename W::Value;
  static constexpr ConvolutionTiling kTiling = W::kTiling;
  static constexpr Slide kRow = W::kRow, kDown = W::kDown;
  static constexpr int kRows = kTiling.rows, kOutputs = kTiling.outputs, kWidth = kTiling.vector_width;
  // Columns from the data's first to that which a strip's vectors begin with: the padding, in whole vectors.
  static constexpr int kLeft = (kRow.padding + kWidth - 1) / kWidth * kWidth;
  static constexpr int kFirst = kLeft - kRow.padding;  // the first column of them that a window reads
  static constexpr int kVectors = (kFirst + static_cast<int>(kRow.span(kOutputs)) + kWidth - 1) / kWidth;
  static constexpr int kSpan = static_cast<int>(kDown.span(kRows));
  static constexpr Offset kRowStrips = (kRow.outputs + kOutputs - 1) / kOutputs;
  static constexpr Offset kDownStrips = (kDown.outputs + kRows - 1) / kRows;
  // Of a block that shares a tile.
  static constexpr int kAcross = kTiling.across > 0 ? kTiling.across : 1;
  static constexpr int kAlong = kTiling.across > 0 ? kTiling.threads / kAcross : 1;
  static constexpr Offset kRowTiles = (kRowStrips + kAcross - 1) / kAcross;
  static constexpr Offset kDownTiles = (kDownStrips + kAlong - 1) / kAlong;
  static constexpr int kTileRows = static_cast<int>(kDown.span(kAlong * kRows));
  static constexpr int kTileVectors = (kRow.stride * kOutputs * (kAcross - 1)) / kWidth + kVectors;
  using Tile = Pack<Value, kWidth>[kTileRows][kTileVectors];
};

template <class Slides> inline constexpr int kSlideCount = 0;
template <Slide... kSlides> inline constexpr int kSlideCount<Slides<kSlides...>> = sizeof...(kSlides);

template <class W> struct ConvolutionStrip : ConvolutionShape<W> {
  using Shape = ConvolutionShape<W>;
  using typename Shape::Offset;
  using typename Shape::Value;
  using Shape::kDown, Shape::kFirst, Shape::kLeft, Shape::kOutputs, Shape::kRow, Shape::kRows, Shape::kSpan, Shape::kTiling,
      Shape::kVectors, Shape::kWidth;
  using Columns = Value[kVectors * kWidth];
  static constexpr int kWeightColumns = kTiling.weights_differ ? kOutputs : 1;
  // Windows whose weights fit in registers: all loops over them unroll.
  static constexpr bool kIsShort = kDown.size * kRow.size * kWeightColumns <= 32;

  const W& window;
  Offset row_begin, down_begin;
  Offset at[W::Outer::kCount], channel[W::Channels::kCount] = {};
  static constexpr int kDeep = kSlideCount<typename W::Deep>;
  Offset place[kDeep > 0 ? kDeep : 1] = {}, element[kDeep > 0 ? kDeep : 1] = {};
  Value total[kRows][kOutputs];

  WS_INLINE ConvolutionStrip(const W& given, Offset row, Offset down) : window(given), row_begin(row), down_begin(down) {
#pragma unroll
    for (int o = 0; o < kRows; ++o)
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) total[o][e] = 0;
  }

  // Goes to the channel and the place of another.
  WS_INLINE void follow(const ConvolutionStrip& other) {
#pragma unroll
    for (int k = 0; k < W::Channels::kCount; ++k) channel[k] = other.channel[k];
    if constexpr (kDeep > 0) {
#pragma unroll
      for (int k = 0; k < kDeep; ++k) element[k] = other.element[k];
    }
  }

  // Positions of the first of the vectors, and of the first row of data.
  WS_INLINE Offset column() const { return kRow.stride * row_begin - kLeft; }
  WS_INLINE Offset line() const { return kDown.stride * down_begin - kDown.padding; }
  WS_INLINE bool is_inside() const {
    return line() >= 0 && line() + kSpan <= kDown.data && column() >= 0 && column() + kVectors * kWidth <= kRow.data;
  }

  // A vector of the data; zeros outside, which an infinite weight makes NaN, as in a library's padding.
  template <bool kTested> WS_INLINE Pack<Value, kWidth> vector(Offset line, Offset column) const {
    if (!kTested || (line >= 0 && line < kDown.data && column >= 0 && column < kRow.data))
      return window.load(at, channel, place, line, column);
    Pack<Value, kWidth> zeros;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) zeros[e] = 0;
    return zeros;
  }

  // The weights of an element along kDown, and what a row of data adds to the sums by them.
  WS_INLINE void weigh(Value (&weights)[kRow.size][kWeightColumns], int m) const {
#pragma unroll
    for (int k = 0; k < kRow.size; ++k)
#pragma unroll
      for (int e = 0; e < kWeightColumns; ++e) {
        constexpr bool kAllAreThere = kTiling.across == 0 && kRow.outputs % kOutputs == 0;
        const Offset i = kAllAreThere ? row_begin + e : ws::min<Offset>(row_begin + e, kRow.outputs - 1);
        weights[k][e] = window.weight(at, channel, element, m, k, i);
      }
  }
  WS_INLINE void add(Value (&sums)[kOutputs], const Columns& seen, const Value (&weights)[kRow.size][kWeightColumns]) const {
#pragma unroll
    for (int k = 0; k < kRow.size; ++k)
#pragma unroll
      for (int e = 0; e < kOutputs; ++e)
        sums[e] += seen[kFirst + kRow.stride * e + k * kRow.dilation] * weights[k][kTiling.weights_differ ? e : 0];
  }

  template <class Read> static WS_INLINE void gather(Columns& columns, const Read& read, int row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Pack<Value, kWidth> values = read(row, v);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) columns[v * kWidth + e] = values[e];
    }
  }

  // Adds what windows come to at one place along the other dimensions. `read(row, v)` has a vector of a row of data.
  template <class Read> WS_INLINE void add_windows(const Read& read) {
    if constexpr (kIsShort) {
      Value weights[kDown.size][kRow.size][kWeightColumns];
#pragma unroll
      for (int m = 0; m < kDown.size; ++m) weigh(weights[m], m);
#pragma unroll
      for (int row = 0; row < kSpan; ++row) {
        Columns seen;
        gather(seen, read, row);
#pragma unroll
        for (int o = 0; o < kRows; ++o) {
          const int reach = row - kDown.stride * o;
          if (reach >= 0 && reach <= kDown.reach() && reach % kDown.dilation == 0)
            add(total[o], seen, weights[reach / kDown.dilation]);
        }
      }
    } else {
#pragma unroll 1
      for (int m = 0; m < kDown.size; ++m) {
        Value weights[kRow.size][kWeightColumns];
        weigh(weights, m);
#pragma unroll
        for (int o = 0; o < kRows; ++o) {
          Columns seen;
          gather(seen, read, kDown.stride * o + kDown.dilation * m);
          add(total[o], seen, weights);
        }
      }
    }
  }

  // Calls `visit()` in every channel, at every place that windows have along the dimensions Deep inside the data.
  template <class Visit> WS_INLINE void each_place(const Visit& visit) {
#pragma unroll 1
    for (int number = 0; number < static_cast<int>(W::Channels::points()); ++number) {
      W::Channels::locate(number, channel);
      slide<0>(typename W::Deep{}, visit);
    }
  }
  template <int k, class Visit> WS_INLINE void slide(Slides<>, const Visit& visit) { visit(); }
  template <int k, Slide kSlide, Slide... kMore, class Visit> WS_INLINE void slide(Slides<kSlide, kMore...>, const Visit& visit) {
    const Offset begin = (kSlide.axis < 0 ? 0 : kSlide.stride * at[kSlide.axis < 0 ? 0 : kSlide.axis]) - kSlide.padding;
#pragma unroll 1
    for (int step = 0; step < kSlide.size; ++step) {
      element[k] = step, place[k] = begin + step * kSlide.dilation;
      if (kSlide.begins_before() && place[k] < 0) continue;
      if (kSlide.ends_behind(kSlide.outputs) && place[k] >= kSlide.data) continue;
      slide<k + 1>(Slides<kMore...>{}, visit);
    }
  }

  template <bool kTested> WS_INLINE void walk() {
    each_place([&] { add_windows([&](int row, int v) { return vector<kTested>(line() + row, column() + v * kWidth); }); });
  }

  WS_INLINE void store() const {
    constexpr int kStored = kTiling.store_width;
    if (row_begin >= kRow.outputs || down_begin >= kDown.outputs) return;
#pragma unroll
    for (int o = 0; o < kRows; ++o) {
      const Offset down = down_begin + o;
      if (kDown.outputs % kRows != 0 && down >= kDown.outputs) break;
#pragma unroll
      for (int e = 0; e < kOutputs; e += kStored) {
        if (kRow.outputs % kOutputs != 0 && row_begin + e >= kRow.outputs) break;
        Value sums[kStored];
#pragma unroll
        for (int s = 0; s < kStored; ++s) sums[s] = total[o][e + s];
        window.store(at, down, row_begin + e, sums);
      }
    }
  }
};

// Every thread reads what its strip needs.
template <class W> WS_INLINE void convolve(const W& window) {
  using Strip = ConvolutionStrip<W>;
  using Offset = typename Strip::Offset;
  constexpr Offset kStrips = Strip::kRowStrips * Strip::kDownStrips, kPoints = kStrips * W::Outer::points();
  if constexpr (Strip::kTiling.overlap) wait_for_previous(), launch_dependents();
  const Offset number = static_cast<Offset>(blockIdx.x) * Strip::kTiling.threads + threadIdx.x;
  if (kPoints % Strip::kTiling.threads != 0 && number >= kPoints) return;
  Strip strip(window, number % Strip::kRowStrips * Strip::kOutputs,
              number / Strip::kRowStrips % Strip::kDownStrips * Strip::kRows);
  W::Outer::template locate<kStrips>(number, strip.at);
  if (strip.is_inside()) strip.template walk<false>();
  else strip.template walk<true>();
  strip.store();
}

// A block brings what its strips need.
template <class W> WS_INLINE void convolve_tile(const W& window, typename ConvolutionShape<W>::Tile& tile) {
  using Strip = ConvolutionStrip<W>;
  using Offset = typename Strip::Offset;
  if constexpr (Strip::kTiling.overlap) wait_for_previous(), launch_dependents();
  const Offset number = blockIdx.x;
  const int across = threadIdx.x % Strip::kAcross, along = threadIdx.x / Strip::kAcross;
  const Offset row = number % Strip::kRowTiles * Strip::kAcross, down = number / Strip::kRowTiles % Strip::kDownTiles * Strip::kAlong;
  Strip first(window, row * Strip::kOutputs, down * Strip::kRows);
  Strip strip(window, (row + across) * Strip::kOutputs, (down + along) * Strip::kRows);
  W::Outer::template locate<Strip::kRowTiles * Strip::kDownTiles>(number, strip.at);
  W::Outer::template locate<Strip::kRowTiles * Strip::kDownTiles>(number, first.at);
  first.each_place([&] {
    __syncthreads();
    for (int v = threadIdx.x; v < Strip::kTileRows * Strip::kTileVectors; v += Strip::kTiling.threads) {
      const int y = v / Strip::kTileVectors, x = v % Strip::kTileVectors;
      tile[y][x] = first.template vector<true>(first.line() + y, first.column() + x * Strip::kWidth);
    }
    __syncthreads();
    strip.follow(first);
    constexpr int kStep = static_cast<int>(Strip::kRow.stride) * Strip::kOutputs / Strip::kWidth;
    const int y = along * Strip::kRows * Strip::kDown.stride, x = across * kStep;
    strip.add_windows([&](int line, int v) { return tile[y + line][x + v]; });
  });
  strip.store();
}

}  // namespace ws
