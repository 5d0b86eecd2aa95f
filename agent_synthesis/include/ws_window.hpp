// Windows along a row whose columns have been reduced: a fixed number of elements, a fixed distance apart.
#pragma once
#include "ws_loops.hpp"

namespace ws {

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

}  // namespace ws
