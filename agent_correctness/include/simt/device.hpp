// CUDA's words for g++: what a kernel can say without a header of the toolkit, said to the machine of `machine.hpp`.
// Only what NVRTC itself knows is here; instructions that are written as PTX on the device are in `ptx.hpp`.
#pragma once
#include <math.h>
#include <type_traits>

#include "simt/machine.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __constant__ static
// Each resident block has a copy of the whole shared object, so one block's static memory is another's no more than on
// a GPU. All of it lies in one section, which the machine fills before a block begins.
#define __shared__ static __attribute__((section("simt_shared")))

#define threadIdx (simt::here->thread)
#define blockIdx (simt::here->block)
#define blockDim (simt::here->block_extent)
#define gridDim (simt::here->grid_extent)
constexpr int warpSize = 32;

// ---- vectors -------------------------------------------------------------------------------------------

#define SIMT_VECTORS(name, type, pair, quad)                                    \
  struct name##1 { type x; };                                                   \
  struct alignas(pair) name##2 { type x, y; };                                  \
  struct name##3 { type x, y, z; };                                             \
  struct alignas(quad) name##4 { type x, y, z, w; };                            \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }              \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }   \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
SIMT_VECTORS(char, signed char, 2, 4)
SIMT_VECTORS(uchar, unsigned char, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(ushort, unsigned short, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(uint, unsigned, 8, 16)
SIMT_VECTORS(longlong, long long, 16, 16)
SIMT_VECTORS(ulonglong, unsigned long long, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef SIMT_VECTORS
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace simt {

template <class To, class From> inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}
template <class T> inline uint64_t word_of(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  __builtin_memcpy(&word, &value, sizeof(value));
  return word;
}
template <class T> inline T value_of(uint64_t word) {
  T value;
  __builtin_memcpy(&value, &word, sizeof(value));
  return value;
}

inline unsigned thread_number() {
  const Here& at = *here;
  return at.thread.x + at.block_extent.x * (at.thread.y + at.block_extent.y * at.thread.z);
}
inline int lane_number() { return static_cast<int>(thread_number() % 32); }

// `extern __shared__ T name[];` has no meaning in a block of C++; it is respelled with this before g++ reads it.
template <class T> inline T* dynamic_shared() { return static_cast<T*>(dynamic_shared_memory()); }

// Calls a kernel with arguments that lie in memory.
template <class... Arguments, size_t... kAt>
inline void call_at(void (*kernel)(Arguments...), void* const* arguments, std::integer_sequence<size_t, kAt...>) {
  kernel(*static_cast<std::remove_const_t<Arguments>*>(arguments[kAt])...);
}
template <class... Arguments> inline void call(void (*kernel)(Arguments...), void* const* arguments) {
  call_at(kernel, arguments, std::make_integer_sequence<size_t, sizeof...(Arguments)>());
}

}  // namespace simt

// ---- numbers -------------------------------------------------------------------------------------------

inline float __int_as_float(int bits) { return simt::bits_as<float>(bits); }
inline int __float_as_int(float value) { return simt::bits_as<int>(value); }
inline float __uint_as_float(unsigned bits) { return simt::bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return simt::bits_as<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return simt::bits_as<double>(bits); }
inline long long __double_as_longlong(double value) { return simt::bits_as<long long>(value); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t(a) * b >> 32); }
template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return Both(a) < Both(b) ? Both(a) : Both(b);
}
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return Both(a) > Both(b) ? Both(a) : Both(b);
}

// ---- memory --------------------------------------------------------------------------------------------

template <class T> inline T __ldg(const T* from) { return *from; }
template <class T> inline T __ldcs(const T* from) { return *from; }
template <class T> inline T __ldcg(const T* from) { return *from; }
template <class T> inline void __stcs(T* to, T value) { *to = value; }
template <class T> inline void __stcg(T* to, T value) { *to = value; }

// ---- threads together ----------------------------------------------------------------------------------

inline void __syncthreads() { simt::block_barrier(); }
inline int __syncthreads_count(int predicate) { return simt::block_barrier(predicate != 0); }
inline int __syncthreads_or(int predicate) { return simt::block_barrier(predicate != 0) > 0; }
inline int __syncthreads_and(int predicate) { return simt::block_barrier(predicate == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  simt::warp_operation(simt::WarpOperation::kBarrier, mask, 0, 0);
}
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { simt::pause(false); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto lanes = simt::warp_operation(simt::WarpOperation::kBallot, mask, predicate != 0, 0);
  return static_cast<unsigned>(lanes);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// The lane from which each shuffle takes its value; one that lies outside the caller's segment is the caller itself.
template <class T> inline T simt_shuffle(unsigned mask, T value, int source, int width, bool inside) {
  const int lane = simt::lane_number();
  const int from = inside ? (lane & ~(width - 1)) + source : lane;
  return simt::value_of<T>(
      simt::warp_operation(simt::WarpOperation::kShuffle, mask, simt::word_of(value), from));
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return simt_shuffle(mask, value, source & (width - 1), width, true);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  const int source = (simt::lane_number() & (width - 1)) ^ flip;
  return simt_shuffle(mask, value, source, width, source < width);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int source = (simt::lane_number() & (width - 1)) - static_cast<int>(delta);
  return simt_shuffle(mask, value, source, width, source >= 0);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int source = (simt::lane_number() & (width - 1)) + static_cast<int>(delta);
  return simt_shuffle(mask, value, source, width, source < width);
}

// ---- atomics: relaxed, as CUDA's are ---------------------------------------------------------------------

namespace simt {
template <class T, class Change> inline T atomic_change(T* place, const Change& change) {
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  Word* word = reinterpret_cast<Word*>(place);
  Word before = __atomic_load_n(word, __ATOMIC_RELAXED), after;
  do after = bits_as<Word>(change(bits_as<T>(before)));
  while (!__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  pause(after != before);
  return bits_as<T>(before);
}
}  // namespace simt
template <class T, class V> inline T atomicAdd(T* place, V value) {
  return simt::atomic_change(place, [=](T old) {
    if constexpr (!std::is_integral_v<T>) return static_cast<T>(old + value);
    else return static_cast<T>(std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(value));
  });
}
template <class T, class V> inline T atomicSub(T* place, V value) { return atomicAdd(place, -static_cast<T>(value)); }
template <class T, class V> inline T atomicMax(T* place, V value) {
  return simt::atomic_change(place, [=](T old) { return old < T(value) ? T(value) : old; });
}
template <class T, class V> inline T atomicMin(T* place, V value) {
  return simt::atomic_change(place, [=](T old) { return old > T(value) ? T(value) : old; });
}
template <class T, class V> inline T atomicOr(T* place, V value) {
  return simt::atomic_change(place, [=](T old) { return static_cast<T>(old | T(value)); });
}
template <class T, class V> inline T atomicAnd(T* place, V value) {
  return simt::atomic_change(place, [=](T old) { return static_cast<T>(old & T(value)); });
}
template <class T, class V> inline T atomicExch(T* place, V value) {
  return simt::atomic_change(place, [=](T) { return static_cast<T>(value); });
}
template <class T, class C, class V> inline T atomicCAS(T* place, C expected, V value) {
  return simt::atomic_change(place, [=](T old) { return old == T(expected) ? T(value) : old; });
}
