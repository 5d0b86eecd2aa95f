// Loops and memory: lanes of a reduction, their fold, and stores that go around the cache.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "ws_math.hpp"

namespace ws {

struct Sum {
  template <class T> static WS_INLINE T neutral() { return T(0); }
  template <class T> static WS_INLINE T of(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) return a || b;
    else if constexpr (std::is_integral_v<T>) return wrap_add(a, b);
    else return a + b;
  }
};
struct Product {
  template <class T> static WS_INLINE T neutral() { return T(1); }
  template <class T> static WS_INLINE T of(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) return a && b;
    else if constexpr (std::is_integral_v<T>) return wrap_mul(a, b);
    else return a * b;
  }
};

// A value and where it stands. Of equal values the least position wins, and the first NaN beats all, as PyTorch has it: so the
// order of joins does not matter.
template <class T, class I> struct At {
  T value;
  I position;
};
template <class Order> struct ArgExtreme {
  template <class A> static WS_INLINE A neutral() {
    return {Order::template last<decltype(A::value)>(), std::numeric_limits<decltype(A::position)>::max()};
  }
  template <class A> static WS_INLINE bool is_better(A b, A a) {
    const bool a_is_nan = ws::isnan(a.value), b_is_nan = ws::isnan(b.value);
    const bool tie = (a.value == b.value) | (a_is_nan & b_is_nan);
    return Order::is(b.value, a.value) | (b_is_nan & !a_is_nan) | (tie & (b.position < a.position));
  }
  template <class A> static WS_INLINE A of(A a, A b) { return is_better(b, a) ? b : a; }
};
struct Greater {
  template <class T> static WS_INLINE bool is(T a, T b) { return a > b; }
  template <class T> static constexpr T last() {
    using Limits = std::numeric_limits<T>;
    return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  }
};
struct Less {
  template <class T> static WS_INLINE bool is(T a, T b) { return a < b; }
  template <class T> static constexpr T last() {
    using Limits = std::numeric_limits<T>;
    return Limits::has_infinity ? Limits::infinity() : Limits::max();
  }
};
struct Maximum {
  template <class T> static WS_INLINE T neutral() { return Greater::last<T>(); }
  template <class T> static WS_INLINE T of(T a, T b) { return ws::max(a, b); }
};
struct Minimum {
  template <class T> static WS_INLINE T neutral() { return Less::last<T>(); }
  template <class T> static WS_INLINE T of(T a, T b) { return ws::min(a, b); }
};
using ArgMaximum = ArgExtreme<Greater>;
using ArgMinimum = ArgExtreme<Less>;

template <class T, long Count> WS_INLINE void fill(T (&values)[Count], T value) {
#pragma omp simd
  for (long lane = 0; lane < Count; ++lane) values[lane] = value;
}

// Calls `visit(j, lane)` for j in [begin, end). Every lane takes each `Lanes`-th element, so a sum is made of `Lanes`
// interleaved partial sums whatever the width of the machine's vectors: the same bits everywhere.
template <long Lanes, class Visit> WS_INLINE void for_lanes(long begin, long end, const Visit& visit) {
  long j = begin;
  for (; j + Lanes <= end; j += Lanes) {
#pragma omp simd
    for (long lane = 0; lane < Lanes; ++lane) visit(j + lane, lane);
  }
  const long rest = end - j;
#pragma omp simd
  for (long lane = 0; lane < rest; ++lane) visit(j + lane, lane);
}

// Folds the lanes by halving: 64 lanes in six steps.
template <class Operation, class T, long Lanes> WS_INLINE T fold(T (&lanes)[Lanes]) {
  static_assert((Lanes & (Lanes - 1)) == 0);
  for (long width = Lanes / 2; width > 0; width /= 2) {
#pragma omp simd
    for (long lane = 0; lane < width; ++lane) lanes[lane] = Operation::of(lanes[lane], lanes[lane + width]);
  }
  return lanes[0];
}

// The maximum of a sequence and the sum of exp(value - maximum), grown block by block in one sweep.
template <class T> struct OnlineSum {
  T maximum = -infinity<T>();
  double sum = 0.0;

  // What to subtract inside a block: never -inf, so that a masked block adds 0 rather than NaN.
  static WS_INLINE T shift(T block_maximum) { return block_maximum == -infinity<T>() ? T(0) : block_maximum; }

  WS_INLINE void merge(T block_maximum, double block_sum) {
    const T larger = ws::max(maximum, block_maximum);
    const T base = shift(larger);
    sum = sum * ws::exp(maximum - base) + block_sum * ws::exp(block_maximum - base);
    maximum = larger;
  }
  // As exp(x - maximum) itself gives: NaN once the maximum is infinite.
  WS_INLINE double result() const { return ws::isinf(maximum) ? quiet_nan<double>() : sum; }
};

namespace detail {
#if defined(__AVX512F__)
inline constexpr long kStreamBytes = 64;
WS_INLINE void stream_vector(char* out, const char* in) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(out), _mm512_loadu_si512(in));
}
#elif defined(__AVX__)
inline constexpr long kStreamBytes = 32;
WS_INLINE void stream_vector(char* out, const char* in) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
#elif defined(__SSE2__)
inline constexpr long kStreamBytes = 16;
WS_INLINE void stream_vector(char* out, const char* in) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(out), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
#endif
}  // namespace detail

// Asks memory for `count` elements that are read soon; there may be nothing where they would be.
template <class T> WS_INLINE void ask_for(const T* from, long count) {
  constexpr long kLine = 64 / sizeof(T);
  for (long i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
}

// Copies a finished block to memory around the cache: a whole line is written without being read first.
// Only the bytes before the first and after the last 64-byte line take the ordinary way.
template <class T> inline void stream(T* out, const T* block, long count) {
#if defined(__SSE2__)
  char* to = reinterpret_cast<char*>(out);
  const char* from = reinterpret_cast<const char*>(block);
  long bytes = count * static_cast<long>(sizeof(T));
  long head = static_cast<long>(-reinterpret_cast<std::uintptr_t>(to) & 63u);
  head = head < bytes ? head : bytes;
  std::memcpy(to, from, static_cast<std::size_t>(head));
  to += head, from += head, bytes -= head;
  for (; bytes >= 64; to += 64, from += 64, bytes -= 64)
    for (long part = 0; part < 64; part += detail::kStreamBytes) detail::stream_vector(to + part, from + part);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
#else
  std::memcpy(out, block, static_cast<std::size_t>(count) * sizeof(T));
#endif
}

// Orders streamed stores before whatever this thread publishes next.
WS_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace ws
