// Element types, packs of them, and memory accesses of a pack at once, for sm_80 and later.
#pragma once
#include "ws_ptx.cuh"

namespace ws {

using int8 = signed char;
using uint8 = unsigned char;
using int64 = long long;
using uint64 = unsigned long long;

// IEEE 754 binary16 and bfloat16 as they lie in memory; arithmetic widens them to float.
struct half { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

template <class T> WS_INLINE T infinity();
template <> WS_INLINE float infinity<float>() { return __int_as_float(0x7f800000); }
template <> WS_INLINE double infinity<double>() { return __longlong_as_double(0x7ff0000000000000LL); }
template <class T> WS_INLINE T quiet_nan();
template <> WS_INLINE float quiet_nan<float>() { return __int_as_float(0x7fc00000); }
template <> WS_INLINE double quiet_nan<double>() { return __longlong_as_double(0x7ff8000000000000LL); }

WS_INLINE float widen(half value) { return ptx::float_of_half(value.bits); }
WS_INLINE float widen(bfloat16 value) { return __int_as_float(static_cast<int>(value.bits) << 16); }

// Floats of 8 bits: of four bits of exponent, which have no infinity and one NaN, and of five. What is too large for four bits
// becomes the largest number, or with earlier versions of PyTorch NaN.
template <bool kSaturates> struct float8_e4m3 { uint8 bits; };
struct float8_e5m2 { uint8 bits; };

template <bool kSaturates> WS_INLINE float widen(float8_e4m3<kSaturates> value) {
  const unsigned magnitude = value.bits & 0x7fu;
  const unsigned finite = __float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f);
  return __uint_as_float((value.bits & 0x80u) << 24 | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}
WS_INLINE float widen(float8_e5m2 value) {
  const unsigned magnitude = (value.bits & 0x7fu) << 21;
  const unsigned finite = __float_as_uint(__uint_as_float(magnitude) * 0x1p112f);
  return __uint_as_float((value.bits & 0x80u) << 24 | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

// `narrow<T>(x)` rounds to nearest, ties to even, as PyTorch's conversions do.
template <class T> WS_INLINE T narrow(float value);
template <> WS_INLINE half narrow<half>(float value) { return {ptx::half_of_float(value)}; }
template <> WS_INLINE bfloat16 narrow<bfloat16>(float value) { return {ptx::bfloat16_of_float(value)}; }

// Adding a power of two lets the adder round at the spacing of subnormal numbers, 2^-9 and 2^-16.
template <bool kSaturates> WS_INLINE float8_e4m3<kSaturates> narrow_to_e4m3(float value) {
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const unsigned normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  const unsigned subnormal = __float_as_uint(__uint_as_float(magnitude) + 0x1p14f) - __float_as_uint(0x1p14f);
  unsigned result = magnitude < (121u << 23) ? subnormal : normal;
  result = magnitude > 0x43e80000u ? (kSaturates ? 0x7eu : 0x7fu) : result;
  result = magnitude > 0x7f800000u ? 0x7fu : result;
  return {static_cast<uint8>(result | (bits >> 24 & 0x80u))};
}
template <> WS_INLINE float8_e4m3<true> narrow<float8_e4m3<true>>(float value) { return narrow_to_e4m3<true>(value); }
template <> WS_INLINE float8_e4m3<false> narrow<float8_e4m3<false>>(float value) { return narrow_to_e4m3<false>(value); }
template <> WS_INLINE float8_e5m2 narrow<float8_e5m2>(float value) {
  const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const unsigned normal = (magnitude - (112u << 23) + 0xfffffu + (magnitude >> 21 & 1u)) >> 21;
  const unsigned subnormal = __float_as_uint(__uint_as_float(magnitude) + 0x1p7f) - __float_as_uint(0x1p7f);
  unsigned result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= 0x47700000u ? 0x7cu : result;
  result = magnitude > 0x7f800000u ? 0x7fu : result;
  return {static_cast<uint8>(result | (bits >> 24 & 0x80u))};
}

// The value of a float after a round trip through a narrower type.
template <class T> WS_INLINE float rounded_to(float value) { return widen(narrow<T>(value)); }

// Floating point to integer, truncated.
template <class To, class From> WS_INLINE To to_integer(From value) {
  if constexpr (sizeof(To) == 4) {
    return static_cast<int>(value);
  } else {
    return static_cast<To>(static_cast<int64>(value));
  }
}

// N elements that lie one after the other, moved in accesses of up to 16 bytes.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T lane[N];
  WS_INLINE T& operator[](int e) { return lane[e]; }
  WS_INLINE const T& operator[](int e) const { return lane[e]; }
};

// How a load treats the caches: kShared may be read by others soon, kOnce will not and stays out of the first level, kLast
// leaves the second level first, kWritten is memory that this kernel also writes.
enum Reuse { kShared, kOnce, kLast, kWritten };

template <Reuse kReuse> WS_INLINE uint4 load_16(const uint4* from) {
  if constexpr (kReuse == kOnce) return ptx::load_constant_once(from);
  else if constexpr (kReuse == kLast) return ptx::load_constant_last(from);
  else if constexpr (kReuse == kShared) return ptx::load_constant(from);
  else return *from;
}

template <int N, Reuse kReuse, class T> WS_INLINE Pack<T, N> load(const T* from) {
  Pack<T, N> pack;
  constexpr int kBytes = sizeof(T) * N;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      reinterpret_cast<uint4*>(&pack)[i] = load_16<kReuse>(reinterpret_cast<const uint4*>(from) + i);
  } else if constexpr (kReuse != kWritten && kBytes == 8) {
    *reinterpret_cast<uint2*>(&pack) = __ldg(reinterpret_cast<const uint2*>(from));
  } else if constexpr (kReuse != kWritten && kBytes == 4) {
    *reinterpret_cast<unsigned*>(&pack) = __ldg(reinterpret_cast<const unsigned*>(from));
  } else {
    pack = *reinterpret_cast<const Pack<T, N>*>(from);
  }
  return pack;
}

template <class T, int N> WS_INLINE void store(T* to, const Pack<T, N>& pack) {
  constexpr int kBytes = sizeof(T) * N;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(&pack)[i];
  } else {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
  }
}

// For results that are not read soon: first to leave the caches.
template <class T, int N> WS_INLINE void store_streaming(T* to, const Pack<T, N>& pack) {
  constexpr int kBytes = sizeof(T) * N;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      __stcs(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(&pack)[i]);
  } else {
    store(to, pack);
  }
}

// Packs that begin before a row of kColumns elements, or end behind it: only what lies inside is read and written. `begin` is
// the number in the row of the pack's first element; `whole`: the caller knows that the pack does neither.
template <int kColumns> WS_INLINE bool is_inside(int j) { return static_cast<unsigned>(j) < kColumns; }
template <int N, Reuse kReuse, int kColumns, class T>
WS_INLINE Pack<T, N> load_inside(const T* from, int begin, bool whole = false) {
  if (whole || (begin >= 0 && begin + N <= kColumns)) return load<N, kReuse>(from);
  Pack<T, N> pack = {};
#pragma unroll
  for (int e = 0; e < N; ++e)
    if (is_inside<kColumns>(begin + e)) pack[e] = from[e];
  return pack;
}
template <int kColumns, class T, int N> WS_INLINE void store_elements_inside(T* to, const Pack<T, N>& pack, int begin) {
#pragma unroll
  for (int e = 0; e < N; ++e)
    if (is_inside<kColumns>(begin + e)) to[e] = pack[e];
}
template <int kColumns, class T, int N>
WS_INLINE void store_inside(T* to, const Pack<T, N>& pack, int begin, bool whole = false) {
  if (whole || (begin >= 0 && begin + N <= kColumns)) store(to, pack);
  else store_elements_inside<kColumns>(to, pack, begin);
}
template <int kColumns, class T, int N>
WS_INLINE void store_streaming_inside(T* to, const Pack<T, N>& pack, int begin, bool whole = false) {
  if (whole || (begin >= 0 && begin + N <= kColumns)) store_streaming(to, pack);
  else store_elements_inside<kColumns>(to, pack, begin);
}

// Brings bytes into the second-level cache; address and count are multiples of 16. It may run before the previous kernel has
// written there, since that cache is where all writes meet.
WS_INLINE void prefetch(const void* from, unsigned bytes) { ptx::prefetch(from, bytes); }

// Programmatic dependent launch: the next kernel may start now; wait for the previous one's memory.
WS_INLINE void launch_dependents() { ptx::launch_dependents(); }
WS_INLINE void wait_for_previous() { ptx::wait_for_previous(); }

}  // namespace ws
