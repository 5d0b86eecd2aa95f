// Sliding windows: the rows of data that a row of outputs needs are joined column by column to one, which stays in the
// first-level cache with the padding around it, and every output joins a few neighbours there. Or, where indices do not allow
// that, every output walks its own window.
// The generated struct has, beside what `ws_threads.hpp` lists:
//
//   kTiling      sizes, see below
//   Windows      Reductions that every window makes
//   Outer        Space of the outputs' axes but the last
//
// for windows that are joined by columns
//
//   kRow, Deep     Slide along the row, and Slides along the other dimensions
//   row(at)        gets the positions along those; may be missing
//   join(j, e)     joins element j of a row of data to column e of `held->columns`
//   store(i, e)    stores output i of a row, the window that begins at column kRow.stride * e
//
// for others
//
//   Window                     Space of a window's elements
//   place(i)                   gets the output's place along the last axis
//   is_outside(Number<r>, Number<k>, at)   whether, at coordinate k of an element, reduction r leaves it out; may be missing
//   join(Number<r>, found, at) joins an element to what reduction r has found; learn(Number<r>, found) has its result
//   store_output()             what is stored
#pragma once
#include "ws_results.hpp"

namespace ws {

struct WindowTiling {
  long outputs;  // of a row
  long block;    // of them at a time
  int threads;   // see Team
};

// One dimension of the data, and how windows move over it: element k of output o lies at o * stride + k * dilation - padding,
// inside where that is 0 … data - 1.
struct Slide {
  long data, outputs, size, stride, dilation, padding;
  int axis = -1;  // where `at` holds the output; -1: there is one output only

  constexpr long reach() const { return (size - 1) * dilation; }
  // Positions from the first element of the first of neighbouring windows to the last element of the last.
  constexpr long span(long windows) const { return (windows - 1) * stride + reach() + 1; }
  constexpr bool begins_before() const { return padding > 0; }
  constexpr bool ends_behind() const { return span(outputs) - padding > data; }
};
// Dimensions beside the row's, outermost first.
template <Slide... kSlides> struct Slides {
  static constexpr int kCount = sizeof...(kSlides);
  static constexpr Slide kSlide[kCount + 1] = {kSlides..., {}};
};

namespace detail {
template <class Operation, class T>
inline constexpr bool kNanPasses = std::is_floating_point_v<T> && (std::is_same_v<Operation, Maximum> ||
                                                                   std::is_same_v<Operation, Minimum>);
// The processor's own instruction: the second argument when either is NaN.
template <class Operation, class T> WS_INLINE T join_numbers(T a, T b) {
  if constexpr (!kNanPasses<Operation, T>) return Operation::of(a, b);
  else if constexpr (std::is_same_v<Operation, Maximum>) return a > b ? a : b;
  else return a < b ? a : b;
}
template <class Operation, long kCount, long kStep, class T> WS_INLINE T join_numbers(const T* from) {
  if constexpr (kCount == 1) return from[0];
  else return join_numbers<Operation>(join_numbers<Operation, kCount - 1, kStep>(from), from[(kCount - 1) * kStep]);
}
template <long kCount, long kStep, class T> WS_INLINE unsigned nan_count(const T* from) {
  unsigned count = 0;
#pragma GCC unroll 64
  for (long i = 0; i < kCount; ++i) count += from[i * kStep] != from[i * kStep];
  return count;
}
}  // namespace detail

// One more element joined. A NaN is made afresh instead of kept: keeping it would be a conditional store, which gcc makes of
// a vectorised loop one element at a time.
template <class Operation, class T> WS_INLINE T joined(T a, T b) {
  const T larger = detail::join_numbers<Operation>(a, b);
  if constexpr (detail::kNanPasses<Operation, T>) return a != a ? quiet_nan<T>() : larger;
  return larger;
}

// Joins from[0], from[kStep], … from[(kCount - 1) · kStep] in this order; unrolled, so that loops that call it vectorise.
// NaNs are looked for apart: a test at every join would become a chain of branches.
template <class Operation, long kCount, long kStep, class T> WS_INLINE T join_steps(const T* from) {
  const T result = detail::join_numbers<Operation, kCount, kStep>(from);
  if constexpr (detail::kNanPasses<Operation, T>)
    return detail::nan_count<kCount, kStep>(from) != 0 ? quiet_nan<T>() : result;
  return result;
}

// What windows have found, or columns of the data.
template <class Windows, long kCount> struct WindowResults : Windows::template Running<kCount> {
  template <int i> using Operation = typename Windows::template At<i>::Operation;
  template <int i> WS_INLINE void join(long e, typename Windows::template At<i>::Value value) {
    auto& place = this->template at<i>().value[e];
    place = joined<Operation<i>>(place, value);
  }
  // The window that begins at column kRow.stride * e.
  template <int i, Slide kRow> WS_INLINE auto along(long e) const {
    return join_steps<Operation<i>, kRow.size, kRow.dilation>(this->template at<i>().value + kRow.stride * e);
  }
};
// The joined row of a block of outputs: a multiple of 16 columns, whole vectors.
template <class Windows, Slide kRow, long kBlock>
using WindowColumns = WindowResults<Windows, (kRow.span(kBlock) + 15) / 16 * 16>;

template <class W> struct WindowBlocks {
  static constexpr WindowTiling kTiling = W::kTiling;
  static constexpr long kBlocks = (kTiling.outputs + kTiling.block - 1) / kTiling.block;
  static constexpr int kAxis = W::Outer::kAxes;  // number of the block's coordinate
  using Tiles = typename W::Outer::template With<kBlocks>;

  // Calls `visit(own, at, begin, end)` for blocks of rows of outputs.
  template <class Visit> static WS_INLINE void each(const W& nest, const Visit& visit) {
    using Threads = Team<kTiling.threads>;
    Threads::run(nest, [&](W& own) WS_BODY {
      const auto visit_tile = [&](const long* at, long) WS_BODY {
        const long begin = kBlocks == 1 ? 0 : at[kAxis] * kTiling.block;
        locate(own, at);
        visit(own, at, begin, end_of_block<kTiling.outputs, kTiling.block>(begin));
      };
      long at[kAxis + 1];
      if constexpr (kTiling.threads == 1) nested<0>(at, visit_tile);
      else Threads::template share<Tiles>(visit_tile);
    });
  }
  // One thread's tiles: in loops, whose rows are short enough for a step from point to point to show (4 % of an lp_pool2d
  // of 128 x 128 elements).
  template <int k, class Visit> static WS_INLINE void nested(long* at, const Visit& visit) {
    if constexpr (k == Tiles::kAxes) visit(at, 0);
    else
      for (at[k] = 0; at[k] < Tiles::kExtent[k]; ++at[k]) nested<k + 1>(at, visit);
  }
};

// Joins the rows of data, as far as they are inside, to one; `first`: the data's column that lies in column 0.
template <int k = 0, class W> WS_INLINE void join_rows(W& nest, const long* at, long* position, long first) {
  using Deep = typename W::Deep;
  if constexpr (k < Deep::kCount) {
    constexpr Slide kSlide = Deep::kSlide[k];
    for (long element = 0; element < kSlide.size; ++element) {
      position[k] = (kSlide.axis < 0 ? 0 : kSlide.stride * at[kSlide.axis]) + kSlide.dilation * element - kSlide.padding;
      if (kSlide.begins_before() && position[k] < 0) continue;
      if (kSlide.ends_behind() && position[k] >= kSlide.data) continue;
      join_rows<k + 1>(nest, at, position, first);
    }
  } else {
    constexpr Slide kRow = W::kRow;
    constexpr long kSpan = kRow.span(W::kTiling.block);
    const long low = first > 0 ? first : 0, high = first + kSpan < kRow.data ? first + kSpan : kRow.data;
    if constexpr (requires { nest.row(position); }) nest.row(position);
#pragma omp simd
    for (long j = low; j < high; ++j) nest.join(j, j - first);
  }
}

template <class W> WS_INLINE void reduce_windows(const W& nest) {
  WindowBlocks<W>::each(nest, [](W& own, const long* at, long begin, long end) WS_BODY {
    long position[W::Deep::kCount + 1];
    own.held->columns.clear();
    join_rows(own, at, position, W::kRow.stride * begin - W::kRow.padding);
    store_block(own, begin, end);
  });
}

// Joins the elements of a window, the loops over which are left early where a position is outside.
template <int r, int k, class W, class Found, int n> WS_INLINE void walk_window(const W& nest, Found& found, long (&at)[n]) {
  if constexpr (k < W::Window::kAxes) {
    for (at[k] = 0; at[k] < W::Window::kExtent[k]; ++at[k]) {
      if constexpr (requires { nest.is_outside(Number<r>(), Number<k>(), at); })
        if (nest.is_outside(Number<r>(), Number<k>(), at)) continue;
      walk_window<r, k + 1>(nest, found, at);
    }
  } else {
    nest.join(Number<r>(), found, at);
  }
}

template <class W> WS_INLINE void reduce_each_window(const W& nest) {
  WindowBlocks<W>::each(nest, [](W& own, const long*, long begin, long end) WS_BODY {
    for (long i = begin; i < end; ++i) {
      own.place(i);
      each_number<W::Windows::kCount>([&](auto number) WS_BODY {
        long at[W::Window::kAxes > 0 ? W::Window::kAxes : 1];
        WindowResults<typename W::Windows, 1> found;
        found.clear();
        walk_window<number.value, 0>(own, found, at);
        own.learn(number, found);
      });
      own.store_output();
    }
  });
}

}  // namespace ws
