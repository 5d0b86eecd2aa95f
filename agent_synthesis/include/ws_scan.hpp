// Scans of a block of values that lies in the first-level cache.
// The one idea: four values at a time are scanned among themselves, so that only one operation in four waits for the one before.
// The order of operations is the same on every machine. Nothing here knows rows or threads.
#pragma once
#include "ws_loops.hpp"

namespace ws {

namespace detail {
// Integers wrap around, which is only defined without a sign.
template <class T> struct FourOf { typedef T type __attribute__((vector_size(32), aligned(8), may_alias)); };
template <> struct FourOf<std::int64_t> {
  typedef std::uint64_t type __attribute__((vector_size(32), aligned(8), may_alias));
};
typedef std::int64_t FourPlaces __attribute__((vector_size(32)));
}  // namespace detail

// values[i] becomes the running result up to element i (of those after i, with kReverse; without i, with kExclusive), from
// `before` on, which becomes the running result of all. T is double or a 64-bit integer.
template <class Operation, bool kReverse, bool kExclusive, class T>
inline void scan(T* values, long count, T neutral, T& before) {
  using Four = typename detail::FourOf<T>::type;
  constexpr detail::FourPlaces kByOne = kReverse ? detail::FourPlaces{1, 2, 3, 4} : detail::FourPlaces{4, 0, 1, 2};
  constexpr detail::FourPlaces kByTwo = kReverse ? detail::FourPlaces{2, 3, 4, 5} : detail::FourPlaces{4, 5, 0, 1};
  constexpr detail::FourPlaces kLast = kReverse ? detail::FourPlaces{0, 0, 0, 0} : detail::FourPlaces{3, 3, 3, 3};
  const Four none = Four{} + neutral;
  Four upto = Four{} + before;
  const long fours = count / 4;
  for (long number = 0; number < fours; ++number) {
    T* place = kReverse ? values + count - 4 - 4 * number : values + 4 * number;
    Four four = *reinterpret_cast<Four*>(place);
    four = Operation::of(__builtin_shuffle(four, none, kByOne), four);
    four = Operation::of(__builtin_shuffle(four, none, kByTwo), four);
    *reinterpret_cast<Four*>(place) =
        Operation::of(upto, static_cast<Four>(kExclusive ? __builtin_shuffle(four, none, kByOne) : four));
    upto = Operation::of(upto, static_cast<Four>(__builtin_shuffle(four, kLast)));
  }
  before = static_cast<T>(upto[0]);
  for (long number = 0; number < count % 4; ++number) {
    T& value = values[kReverse ? count % 4 - 1 - number : 4 * fours + number];
    const T next = Operation::of(before, value);
    value = kExclusive ? before : next;
    before = next;
  }
}

}  // namespace ws
