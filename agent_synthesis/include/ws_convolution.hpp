// Convolutions: the rows of data that a few rows of outputs need are brought into the first-level cache, widened, with the
// padding around them; there every output walks its window without a test. The padding is zeros, which an infinite weight makes
// NaN, as in a library's.
// The one idea: a row of data lies in as many rows as windows are apart (its columns 0, s, 2s, …, then 1, s + 1, …), so that
// neighbouring outputs read neighbours whatever the stride, in vectors. A vector of outputs of several rows is made at once:
// each weight is read once for all of them.
// The generated struct has, beside what `ws_threads.hpp` lists:
//
//   kTiling              sizes, see below
//   Value                type of sums
//   kRow, kDown, Deep    Slide along the row and next to it, and Slides along the other dimensions
//   Outer                Space of the outputs' axes but those of kRow and kDown, and the one along which outputs see the same
//   Channels             Space of what is summed beside windows
//   channel(c)           gets the coordinates of a channel
//   deep(k, position)    gets elements and positions along Deep's dimensions
//   see(position)        gets the position along kDown
//   seen(j)              what lies at position j of the row
//   weight(m, k, i)      the weight of element m along kDown and k along the row, for output i
//   make(m)              gets the output along the axis on which outputs see the same by weights of their own; may be missing
//   down(o)              gets the output along kDown
//   store(i, e)          stores output i of a row, whose sum is `held->rows.sums(e)`
#pragma once
#include "ws_window.hpp"

namespace ws {

struct ConvolutionTiling {
  long made, all_made;  // outputs at a time that see the same, and all of them
  long rows;            // of outputs at a time
  long block;           // of outputs of a row at a time
  bool weights_differ;  // whether neighbours along the row have weights of their own
  int threads;          // see Team
};

namespace detail {
#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
// A vector of the processor, wherever it lies.
template <class T> struct Vector {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  static constexpr long kLanes = kVectorBytes / sizeof(T);
};
template <class T> WS_INLINE auto& vector_at(T* place) { return *reinterpret_cast<typename Vector<T>::type*>(place); }
template <class T> WS_INLINE auto vector_at(const T* place) { return *reinterpret_cast<const typename Vector<T>::type*>(place); }
constexpr long whole(long count, long unit) { return (count + unit - 1) / unit * unit; }
}  // namespace detail

// What a thread keeps of one channel.
template <class T, Slide kRow, Slide kDown, ConvolutionTiling kTiling> struct ConvolutionRows {
  static constexpr long kLanes = detail::Vector<T>::kLanes;
  static constexpr long kWidth = detail::whole(kTiling.block, kLanes);  // sums of a row
  static constexpr long kPhases = kRow.stride < kRow.reach() + 1 ? kRow.stride : kRow.reach() + 1;
  static constexpr long kColumns = detail::whole(kWidth + kRow.reach() / kRow.stride, kLanes);
  static constexpr long kWeights = kTiling.weights_differ ? kWidth : 1;
  alignas(64) T data[kDown.span(kTiling.rows)][kPhases][kColumns];
  alignas(64) T sum[kTiling.made][kTiling.rows][kWidth];
  alignas(64) T weight[kDown.size][kRow.size][kWeights];
  long made, output;  // whose sums are stored

  WS_INLINE T sums(long e) const { return sum[made][output][e]; }
};

template <class W> struct ConvolutionBlocks {
  static constexpr long kLongestUnrolled = 11;  // elements of a window
  static constexpr ConvolutionTiling kTiling = W::kTiling;
  static constexpr Slide kRow = W::kRow, kDown = W::kDown;
  static constexpr long kDownBlocks = (kDown.outputs + kTiling.rows - 1) / kTiling.rows;
  static constexpr long kRowBlocks = (kRow.outputs + kTiling.block - 1) / kTiling.block;
  static constexpr long kMadeBlocks = (kTiling.all_made + kTiling.made - 1) / kTiling.made;
  static constexpr int kAxis = W::Outer::kAxes;  // number of the first coordinate of a block, of three
  using Tiles = typename W::Outer::template With<kMadeBlocks>::template With<kDownBlocks>::template With<kRowBlocks>;
  using T = typename W::Value;
  // Rows of outputs whose sums are in registers at once.
  static constexpr int kTogether = kTiling.rows % 4 == 0 ? 4 : kTiling.rows % 2 == 0 ? 2 : 1;

  // Brings a row of data, whose column `first` is met first, or zeros for one that is outside.
  static WS_INLINE void bring(W& nest, long row, long position, long first) {
    auto& data = nest.held->rows.data[row];
    using Rows = std::remove_reference_t<decltype(nest.held->rows)>;
    const bool inside = position >= 0 && position < kDown.data;
    if constexpr (requires { nest.see(0L); })
      if (inside) nest.see(position);
    for (long phase = 0; phase < Rows::kPhases; ++phase) {
      const long begin = first + phase;
      long low = begin < 0 ? (-begin + kRow.stride - 1) / kRow.stride : 0;
      long high = begin < kRow.data ? (kRow.data - begin + kRow.stride - 1) / kRow.stride : 0;
      high = inside ? (high < Rows::kColumns ? high : Rows::kColumns) : 0;
      low = low < high ? low : high;
      for (long c = 0; c < low; ++c) data[phase][c] = 0;
#pragma omp simd
      for (long c = low; c < high; ++c) data[phase][c] = nest.seen(begin + c * kRow.stride);
      for (long c = high; c < Rows::kColumns; ++c) data[phase][c] = 0;
    }
  }

  // Brings the weight of an element, or that of each output; outputs behind the row's last have its own.
  template <long kWeights>
  static WS_INLINE void bring_weights(const W& nest, T (&weights)[kWeights], long m, long k, long first_output) {
    if constexpr (kWeights == 1) {
      weights[0] = nest.weight(m, k, first_output);
    } else {
      for (long e = 0; e < kWeights; ++e) {
        const long i = first_output + e;
        weights[e] = nest.weight(m, k, i < kRow.outputs ? i : kRow.outputs - 1);
      }
    }
  }

  // Adds what a channel's windows come to, at one place along the other dimensions.
  static WS_INLINE void add(W& nest, long made, long first_output) {
    auto& rows = nest.held->rows;
    using Rows = std::remove_reference_t<decltype(rows)>;
    using V = typename detail::Vector<T>::type;
    for (long m = 0; m < kDown.size; ++m)
      for (long k = 0; k < kRow.size; ++k) bring_weights(nest, rows.weight[m][k], m, k, first_output);
    for (long o = 0; o < kTiling.rows; o += kTogether)
      for (long e = 0; e < Rows::kWidth; e += Rows::kLanes) {
        V total[kTogether];
#pragma GCC unroll 4
        for (int g = 0; g < kTogether; ++g) total[g] = detail::vector_at(&rows.sum[made][o + g][e]);
        if constexpr (kDown.size <= kLongestUnrolled && kDown.span(kTogether) <= 64)
          walk_down(rows, total, o, e);
        else
          walk_each(rows, total, o, e);
#pragma GCC unroll 4
        for (int g = 0; g < kTogether; ++g) detail::vector_at(&rows.sum[made][o + g][e]) = total[g];
      }
  }

  template <class Rows> static WS_INLINE auto factor(const Rows& rows, long m, long k, long e) {
    if constexpr (kTiling.weights_differ) return detail::vector_at(&rows.weight[m][k][e]);
    else return typename detail::Vector<T>::type{} + rows.weight[m][k][0];
  }
  template <class Rows> static WS_INLINE auto data(const Rows& rows, long row, long k, long e) {
    const long seen = k * kRow.dilation;
    return detail::vector_at(&rows.data[row][seen % kRow.stride][e + seen / kRow.stride]);
  }
  // Adds the windows of a vector of outputs of kTogether rows: each vector of data and each weight are read once for all.
  template <class Rows, class V> static WS_INLINE void walk_down(const Rows& rows, V (&total)[kTogether], long o, long e) {
    constexpr int kSpan = kDown.span(kTogether);
#pragma GCC unroll 16
    for (int k = 0; k < kRow.size; ++k) {
      V factors[kDown.size];
#pragma GCC unroll 16
      for (int m = 0; m < kDown.size; ++m) factors[m] = factor(rows, m, k, e);
#pragma GCC unroll 64
      for (int row = 0; row < kSpan; ++row) {
        const V seen = data(rows, o * kDown.stride + row, k, e);
#pragma GCC unroll 4
        for (int g = 0; g < kTogether; ++g) {
          const int reach = row - g * kDown.stride, m = reach / kDown.dilation;
          if (reach >= 0 && reach % kDown.dilation == 0 && m < kDown.size) total[g] += seen * factors[m];
        }
      }
    }
  }
  // The same for windows too long to be unrolled.
  template <class Rows, class V> static WS_INLINE void walk_each(const Rows& rows, V (&total)[kTogether], long o, long e) {
    for (int m = 0; m < kDown.size; ++m)
#pragma GCC unroll 16
      for (int k = 0; k < kRow.size; ++k) {
        const V weight = factor(rows, m, k, e);
#pragma GCC unroll 4
        for (int g = 0; g < kTogether; ++g)
          total[g] += data(rows, (o + g) * kDown.stride + m * kDown.dilation, k, e) * weight;
      }
  }

  // The same at every place that windows have along the other dimensions, inside the data.
  template <int k = 0>
  static WS_INLINE void add_all(W& nest, const long* at, long* element, long* position, long made, long down, long begin) {
    using Deep = typename W::Deep;
    if constexpr (k < Deep::kCount) {
      constexpr Slide kSlide = Deep::kSlide[k];
      for (element[k] = 0; element[k] < kSlide.size; ++element[k]) {
        position[k] = (kSlide.axis < 0 ? 0 : kSlide.stride * at[kSlide.axis]) + kSlide.dilation * element[k] - kSlide.padding;
        if (kSlide.begins_before() && position[k] < 0) continue;
        if (kSlide.ends_behind() && position[k] >= kSlide.data) continue;
        add_all<k + 1>(nest, at, element, position, made, down, begin);
      }
    } else {
      if constexpr (requires { nest.deep(element, position); }) nest.deep(element, position);
      for (long row = 0; row < kDown.span(kTiling.rows); ++row)
        bring(nest, row, kDown.stride * down + row - kDown.padding, kRow.stride * begin - kRow.padding);
      each_made(nest, made, [&](long m) WS_BODY { add(nest, m, begin); });
    }
  }

  // Calls `visit(m)` for the outputs from number `first` on that see the same.
  template <class Visit> static WS_INLINE void each_made(W& nest, long first, const Visit& visit) {
    for (long m = 0; m < kTiling.made && first + m < kTiling.all_made; ++m) {
      if constexpr (requires { nest.make(0L); }) nest.make(first + m);
      visit(m);
    }
  }

  static WS_INLINE void make(W& nest, const long* at, long made, long down, long begin) {
    auto& rows = nest.held->rows;
    for (long m = 0; m < kTiling.made; ++m) fill_rows(rows.sum[m]);
    W::Channels::each([&](const long* channel, long) WS_BODY {
      if constexpr (requires { nest.channel(channel); }) nest.channel(channel);
      long element[W::Deep::kCount + 1], position[W::Deep::kCount + 1];
      add_all(nest, at, element, position, made, down, begin);
    });
    each_made(nest, made, [&](long m) WS_BODY {
      rows.made = m;
      for (rows.output = 0; rows.output < kTiling.rows && down + rows.output < kDown.outputs; ++rows.output) {
        if constexpr (requires { nest.down(0L); }) nest.down(down + rows.output);
        store_block(nest, begin, end_of_block<kRow.outputs, kTiling.block>(begin));
      }
    });
  }
  template <long kRows, long kWidth> static WS_INLINE void fill_rows(T (&sum)[kRows][kWidth]) {
    for (long o = 0; o < kRows; ++o)
#pragma omp simd
      for (long e = 0; e < kWidth; ++e) sum[o][e] = 0;
  }
};

template <class W> WS_INLINE void convolve(const W& nest) {
  using Blocks = ConvolutionBlocks<W>;
  using Threads = Team<Blocks::kTiling.threads>;
  Threads::run(nest, [&](W& own) WS_BODY {
    Threads::template share<typename Blocks::Tiles>([&](const long* at, long) WS_BODY {
      locate(own, at);
      const long* block = at + Blocks::kAxis;
      constexpr ConvolutionTiling kTiling = Blocks::kTiling;
      Blocks::make(own, at, block[0] * kTiling.made, block[1] * kTiling.rows, block[2] * kTiling.block);
    });
  });
}

}  // namespace ws
