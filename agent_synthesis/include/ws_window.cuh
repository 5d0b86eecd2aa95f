// Windows along a row whose columns have been reduced: a fixed number of elements, a fixed distance apart.
#pragma once
#include "ws_reduce.cuh"

namespace ws {

// One more element joined.
template <class Operation, class T> WS_INLINE T joined(T a, T b) { return Operation::template of<T>(a, b); }

// Joins from[0], from[kStep], … from[(kCount - 1) * kStep] in this order.
template <class Operation, int kCount, int kStep, class T> WS_INLINE T join_steps(const T* from) {
  T result = from[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) result = joined<Operation>(result, from[i * kStep]);
  return result;
}

// Fills a pack.
template <class T, int N> WS_INLINE Pack<T, N> filled(T value) {
  Pack<T, N> pack;
#pragma unroll
  for (int e = 0; e < N; ++e) pack[e] = value;
  return pack;
}

}  // namespace ws
