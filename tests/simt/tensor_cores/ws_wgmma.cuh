// What `ws_wgmma.cuh` does, on a CPU: each thread works out its own accumulators, at once. A step of 32 bytes of depth is exact,
// and its sum with what was there is rounded towards zero, as tensor cores do: of 8 bits to 14 bits of the largest that is added
// (DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 3.3.2).
#pragma once
#include "ws_barrier.cuh"
#include "ws_product_shape.cuh"
#include "ws_tensor_copy.cuh"

namespace ws {

// An address over 16; from bit 44 on bytes over 16 from one eight of rows to the next, or from one block of 64 rows across;
// from bit 60 on the swizzle's width over 32.
WS_INLINE uint64 operand_of(const void* rows, uint64 step, uint64 width) {
  return reinterpret_cast<uint64>(rows) >> 4 | (step / 16) << 44 | (width / 32) << 60;
}
template <Direction kDirection, int kBlockDepth = 64> WS_INLINE uint64 operand_at(const void* rows) {
  return operand_of(rows, kDirection == kAcross ? kBlockDepth * 128 : 1024, 128);
}
template <int kBytes, int kPitch> WS_INLINE uint64 rows_at(const void* rows) { return operand_of(rows, kPitch * kBytes, kBytes); }
template <Direction kDirection, class T = half> WS_INLINE uint64 further(uint64 operand, int depth) {
  return operand + depth * (kDirection == kAcross ? 128 : static_cast<int>(sizeof(T))) / 16;
}
WS_INLINE void products_begin() {}
WS_INLINE void products_commit() {}
template <int kPending> WS_INLINE void products_wait() { __syncwarp(); }  // which whole warps do together
template <class T, int kCount> WS_INLINE void settle(T (&)[kCount]) {}

template <class T> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<half> = true;
template <class T> constexpr bool kIsTf32 = false;
template <> constexpr bool kIsTf32<tf32> = true;

template <class T> constexpr int kDeep = 32 / sizeof(T);  // of a product
template <class T> constexpr bool kIsOf8Bits = sizeof(T) == 1;

// What tensor cores see of an element: of a float what TF32 has.
template <class T> WS_INLINE double element_at(const char* place) { return widen(*reinterpret_cast<const T*>(place)); }
template <> WS_INLINE double element_at<tf32>(const char* place) {
  return __uint_as_float(*reinterpret_cast<const unsigned*>(place) & 0xffffe000u);
}

// The elements of a row that a product takes.
template <class T, Direction kDirection> WS_INLINE void read_row(double (&to)[kDeep<T>], uint64 operand, int row) {
  static_assert(!kIsOf8Bits<T> || kDirection == kAlong, "only 16 bits may lie across the depth");
  const uint64 begin = (operand & 0xfffffffffffull) << 4, step = (operand >> 44 & 0xffff) << 4, width = operand >> 60 << 5;
  for (int k = 0; k < kDeep<T>; ++k) {
    const uint64 at = kDirection == kAlong ? begin + row / 8 * step + row % 8 * width + k * sizeof(T)
                                           : begin + row / 64 * step + k / 8 * 1024 + k % 8 * 128 + row % 64 * 2;
    to[k] = element_at<T>(swizzled(at, static_cast<int>(width)));
  }
}

WS_INLINE float towards_zero(double sum) {
  const float nearest = static_cast<float>(sum);
  return fabs(static_cast<double>(nearest)) > fabs(sum) ? nextafterf(nearest, 0.0f) : nearest;
}

// What is left of a sum whose largest summand is `largest`.
WS_INLINE float of_14_bits(double sum, double largest) {
  if (!(largest > 0.0) || isinf(largest)) return static_cast<float>(sum);
  const double step = exp2(floor(log2(largest)) - 13.0);
  return static_cast<float>(trunc(sum / step) * step);
}

template <class T, Direction kRight, int kCount>
WS_INLINE void multiply_rows(float (&sums)[kCount], const double (&rows)[2][kDeep<T>], uint64 b, int keep) {
  for (int i = 0; i < kCount; i += 4) {
    for (int e = 0; e < 2; ++e) {
      double column[kDeep<T>];
      read_row<T, kRight>(column, b, 2 * i + threadIdx.x % 4 * 2 + e);
      for (int lower = 0; lower < 2; ++lower) {
        double sum = keep ? sums[i + 2 * lower + e] : 0.0, largest = fabs(sum);
        for (int k = 0; k < kDeep<T>; ++k) {
          const double term = rows[lower][k] * column[k];
          sum += term;
          largest = fmax(largest, fabs(term));
        }
        sums[i + 2 * lower + e] = kIsOf8Bits<T> ? of_14_bits(sum, largest) : towards_zero(sum);
      }
    }
  }
}

template <class T, Direction kLeft, Direction kRight, int kCount>
WS_INLINE void multiply_add(float (&sums)[kCount], uint64 a, uint64 b, int keep) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  double rows[2][kDeep<T>];
  for (int lower = 0; lower < 2; ++lower) read_row<T, kLeft>(rows[lower], a, row + 8 * lower);
  multiply_rows<T, kRight>(sums, rows, b, keep);
}

template <class T, Direction kRight, int kCount>
WS_INLINE void multiply_add_held(float (&sums)[kCount], const unsigned* a, uint64 b, int keep) {
  static_assert(!kIsTf32<T>, "TF32 is held by no product");
  double rows[2][kDeep<T>];
  for (int quarter = 0; quarter < 4; ++quarter) {
    for (int i = 0; i < 4; ++i) {
      const unsigned pair = __shfl_sync(0xffffffffu, a[i], threadIdx.x % 32 / 4 * 4 + quarter);
      for (int e = 0; e < 2; ++e)
        rows[i % 2][i / 2 * 8 + 2 * quarter + e] = widen(T{static_cast<unsigned short>(pair >> 16 * e)});
    }
  }
  multiply_rows<T, kRight>(sums, rows, b, keep);
}

}  // namespace ws
