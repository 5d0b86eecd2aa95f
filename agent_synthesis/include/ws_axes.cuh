// A point's number as its coordinates along axes of fixed extents, the last of which counts fastest.
#pragma once
#include "ws_types.cuh"

namespace ws {

// One axis at least, so that coordinates are an array.
template <int64... kExtents> struct Axes {
  static constexpr int kCount = sizeof...(kExtents);
  // Points of the axes from number `first` on.
  static WS_INLINE constexpr int64 points(int first = 0) {
    const int64 extents[] = {kExtents...};
    int64 product = 1;
    for (int k = first; k < kCount; ++k) product *= extents[k];
    return product;
  }

  // Coordinates of point number / kInside. One quotient and one remainder of the same number for each axis: a chain of
  // quotients would be longer.
  template <int64 kInside = 1, int k = 0, class Number, class Offset>
  static WS_INLINE void locate(Number number, Offset (&at)[kCount]) {
    constexpr int64 kBelow = kInside * points(k + 1);
    const Number quotient = number / static_cast<Number>(kBelow);
    if constexpr (k > 0) at[k] = quotient % static_cast<Number>(points(k) / points(k + 1));
    else at[k] = quotient;
    if constexpr (k + 1 < kCount) locate<kInside, k + 1>(number, at);
  }
};

}  // namespace ws
