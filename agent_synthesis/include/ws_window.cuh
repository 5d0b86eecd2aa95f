// Sliding windows: a group of threads makes a tile of outputs. Every thread reads vectors of the rows of data that the tile's
// windows need, each row once, and reduces them column by column in registers; the reduced rows meet in shared memory, where
// each output joins its few neighbours.
//
// The one idea: all extents of a tile are constants, so the loops over its rows unroll and every load is used for all windows
// that it belongs to. What is loaded, joined and stored is the generated struct W's:
//
//   Offset                                   int, or int64 where a buffer needs it
//   kTiling, kRow, kDown, Deep, Outer        sizes, see below
//   State, empty(), join(State&, State)      what windows are reduced to
//   load(at, deep…, down, row, inside)       vector_width neighbours of the data, from position `row` on, as states; empty ones
//                                            if they are not inside: `down` is then a row of the data, but not the right one
//   store(at, down, row, State)              one output
//
// `at` holds the coordinates of the outputs along the axes of which a tile has one point (Outer).
#pragma once
#include "ws_axes.cuh"
#include "ws_reduce.cuh"

namespace ws {

// One dimension of the data, and how windows move over it: element k of output o lies at o * stride + k * dilation - padding,
// inside where that is 0 … data - 1.
struct Slide {
  int64 data, outputs;
  int size, stride, dilation, padding;
  int axis = -1;  // where `at` holds the output; -1: there is one output only

  WS_INLINE constexpr int reach() const { return (size - 1) * dilation; }
  // Positions from the first element of the first of neighbouring windows to the last element of the last.
  WS_INLINE constexpr int64 span(int64 windows) const { return (windows - 1) * stride + reach() + 1; }
  // Whether some of the first `windows` windows begin before the data, or end behind it.
  WS_INLINE constexpr bool begins_before() const { return padding > 0; }
  WS_INLINE constexpr bool ends_behind(int64 windows) const { return (windows - 1) * stride + reach() - padding >= data; }
};
// Dimensions of the window beside a tile's two, outermost first.
template <Slide... kSlides> struct Slides {};

// Neighbours along a row.
template <class State, int N> struct States {
  State lane[N];
  WS_INLINE State& operator[](int e) { return lane[e]; }
  WS_INLINE const State& operator[](int e) const { return lane[e]; }
};

struct WindowTiling {
  int threads, group;         // of a block; of a tile: threads / group tiles share a block
  int vector_width, vectors;  // elements that a thread reads at once; vectors of a row of data that a tile reads
  int rows, outputs;          // rows of outputs of a tile; outputs of such a row
  int columns;                // of a reduced row in shared memory
  bool whole_rows;            // a tile's rows are the data's, and the padding around them is no vector's
  bool overlap;               // programmatic dependent launch
};

template <class W> struct WindowTile {
  using Offset = typename W::Offset;
  using State = typename W::State;
  static constexpr WindowTiling kTiling = W::kTiling;
  static constexpr Slide kRow = W::kRow, kDown = W::kDown;
  static constexpr int kGroups = kTiling.threads / kTiling.group, kRows = kTiling.rows, kWidth = kTiling.vector_width;
  static constexpr int kItems = (kTiling.vectors + kTiling.group - 1) / kTiling.group;
  static constexpr bool kIsShort = kTiling.vectors % kTiling.group != 0;  // some threads have fewer vectors
  static constexpr Offset kRowTiles = (kRow.outputs + kTiling.outputs - 1) / kTiling.outputs;
  static constexpr Offset kDownTiles = (kDown.outputs + kRows - 1) / kRows;
  static constexpr Offset kTiles = kRowTiles * kDownTiles * W::Outer::points();
  // Columns before the data's first, in whole vectors: column q holds the data's column q - kLeft in the first tile of a row.
  static constexpr int kLeft = (kRow.padding + kWidth - 1) / kWidth * kWidth;
  static constexpr int kFirst = kLeft - kRow.padding;  // the first column that a window reads
  static constexpr int kEnd = kFirst + kRow.span(kTiling.outputs);
  using Columns = State[kGroups][kRows][kTiling.columns];

  const W& window;
  int group, rank;
  Offset row_begin = 0, down_begin = 0;
  Offset at[W::Outer::kCount];

  WS_INLINE explicit WindowTile(const W& given, int group, Offset tile)
      : window(given), group(group), rank(threadIdx.x % kTiling.group) {
    if constexpr (kRowTiles > 1) row_begin = tile % kRowTiles * kTiling.outputs;
    if constexpr (kDownTiles > 1) down_begin = tile / kRowTiles % kDownTiles * kRows;
    W::Outer::template locate<kRowTiles * kDownTiles>(tile, at);
  }

  // Columns that no vector covers hold empty states.
  template <int kBegin, int kStop> WS_INLINE void fill(Columns& columns) const {
    if constexpr (kBegin < kStop) {
      for (int q = kBegin + rank; q < kStop; q += kTiling.group) {
        for (int o = 0; o < kRows; ++o) columns[group][o][q] = W::empty();
      }
    }
  }

  // Joins a vector of every row of data to all rows of outputs whose windows it belongs to; `deep` are the positions along the
  // other dimensions.
  template <class... Deep> WS_INLINE void reduce_rows(State (&held)[kRows][kWidth], Offset begin, Deep... deep) const {
    constexpr int kSpan = kDown.span(kRows);
    constexpr bool kBefore = kDown.begins_before(), kBehind = kDown.ends_behind(kDownTiles * kRows);
#pragma unroll
    for (int step = 0; step < kSpan; ++step) {
      const Offset seen = kDown.stride * down_begin + step - kDown.padding;
      Offset down = seen;
      bool inside = true;
      if constexpr (kBefore) down = ws::max<Offset>(down, 0), inside = seen >= 0;
      if constexpr (kBehind) down = ws::min<Offset>(down, kDown.data - 1), inside = inside && seen < kDown.data;
      const States<State, kWidth> values = window.load(at, deep..., down, begin, inside);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
#pragma unroll
        for (int o = 0; o < kRows; ++o) {
          const int k = step - kDown.stride * o;
          if (k >= 0 && k <= kDown.reach() && k % kDown.dilation == 0) W::join(held[o][e], values[e]);
        }
      }
    }
  }

  // The same for every position that the window has along the other dimensions, inside the data.
  template <class... Deep>
  WS_INLINE void reduce(Slides<>, State (&held)[kRows][kWidth], Offset begin, Deep... deep) const {
    reduce_rows(held, begin, deep...);
  }
  template <Slide kSlide, Slide... kMore, class... Deep>
  WS_INLINE void reduce(Slides<kSlide, kMore...>, State (&held)[kRows][kWidth], Offset begin, Deep... deep) const {
    for (int k = 0; k < kSlide.size; ++k) {
      const Offset output = kSlide.axis < 0 ? 0 : at[kSlide.axis < 0 ? 0 : kSlide.axis];
      const Offset position = kSlide.stride * output + k * kSlide.dilation - kSlide.padding;
      if (kSlide.begins_before() && position < 0) continue;
      if (kSlide.ends_behind(kSlide.outputs) && position >= kSlide.data) continue;
      reduce(Slides<kMore...>{}, held, begin, deep..., position);
    }
  }

  // Reduces the rows of data to one for each row of outputs.
  WS_INLINE void reduce_columns(Columns& columns) const {
    if constexpr (kTiling.whole_rows) {
      fill<kFirst, kLeft>(columns);
      fill<kLeft + kTiling.vectors * kWidth, kEnd>(columns);
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int vector = rank + item * kTiling.group;
      Offset begin = kWidth * vector;
      if constexpr (!kTiling.whole_rows) begin = kRow.stride * row_begin + kWidth * vector - kLeft;
      State held[kRows][kWidth];
#pragma unroll
      for (int o = 0; o < kRows; ++o) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) held[o][e] = W::empty();
      }
      bool inside = true;
      if constexpr (kIsShort) inside = vector < kTiling.vectors;
      if constexpr (!kTiling.whole_rows && kLeft > 0) inside = inside && begin >= 0;
      if constexpr (!kTiling.whole_rows) inside = inside && begin < kRow.data;
      if (inside) reduce(typename W::Deep{}, held, begin);
#pragma unroll
      for (int o = 0; o < kRows; ++o) {
        if (!kIsShort || vector < kTiling.vectors)
          put(&columns[group][o][(kTiling.whole_rows ? kLeft : 0) + kWidth * vector], held[o]);
      }
    }
  }

  // To shared memory, in accesses of 16 bytes where the size of a state allows it.
  static WS_INLINE void put(State* to, const State (&states)[kWidth]) {
    if constexpr ((sizeof(State) & (sizeof(State) - 1)) == 0) {
      Pack<State, kWidth> vector;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) vector[e] = states[e];
      ws::store(to, vector);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) to[e] = states[e];
    }
  }

  // Joins each output's neighbours along the reduced rows, and stores it.
  WS_INLINE void reduce_along_rows(const Columns& columns) const {
    for (int q = rank; q < kTiling.outputs; q += kTiling.group) {
      const Offset row = row_begin + q;
      if (kRow.outputs % kTiling.outputs != 0 && row >= kRow.outputs) break;
#pragma unroll
      for (int o = 0; o < kRows; ++o) {
        const Offset down = down_begin + o;
        if (kDown.outputs % kRows != 0 && down >= kDown.outputs) break;
        const State* from = &columns[group][o][kRow.stride * q + kFirst];
        State total = from[0];
#pragma unroll
        for (int k = 1; k < kRow.size; ++k) W::join(total, from[k * kRow.dilation]);
        window.store(at, down, row, total);
      }
    }
  }
};

template <class W> WS_INLINE void reduce_windows(const W& window, typename WindowTile<W>::Columns& columns) {
  using Tile = WindowTile<W>;
  if constexpr (W::kTiling.overlap) wait_for_previous(), launch_dependents();
  const int group = threadIdx.x / W::kTiling.group;
  auto number = static_cast<typename W::Offset>(blockIdx.x);
  if constexpr (Tile::kGroups > 1) number = number * Tile::kGroups + group;
  // Groups without a tile join in the last one too, for the barrier's sake, and leave before they store.
  constexpr bool kSomeAreIdle = Tile::kTiles % Tile::kGroups != 0;
  const Tile tile(window, group, kSomeAreIdle ? ws::min<typename W::Offset>(number, Tile::kTiles - 1) : number);
  tile.reduce_columns(columns);
  __syncthreads();
  if (kSomeAreIdle && number >= Tile::kTiles) return;
  tile.reduce_along_rows(columns);
}

// Where windows share nothing that could be reduced first: a thread for each output. W has kThreads, kOverlap, and makes one
// output from its coordinates along the axes Outer.
template <class W> WS_INLINE void reduce_each_window(const W& window) {
  using Offset = typename W::Offset;
  constexpr int64 kOutputs = W::Outer::points();
  if constexpr (W::kOverlap) wait_for_previous(), launch_dependents();
  const Offset number = static_cast<Offset>(blockIdx.x) * W::kThreads + threadIdx.x;
  if (kOutputs % W::kThreads != 0 && number >= static_cast<Offset>(kOutputs)) return;
  Offset at[W::Outer::kCount];
  W::Outer::locate(number, at);
  window(at);
}

// One more element joined.
template <class Operation, class T> WS_INLINE T joined(T a, T b) { return Operation::template of<T>(a, b); }

}  // namespace ws
