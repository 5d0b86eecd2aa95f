// Storage types narrower than what arithmetic is done in, and conversions between them.
// Everything is branch-free so that gcc vectorises the loops that call it.
#pragma once
#include <cstdint>

#define WS_INLINE inline __attribute__((always_inline))
// After the parameters of a lambda that is the body of a vectorised loop.
#define WS_BODY __attribute__((always_inline))

namespace ws {

// IEEE 754 binary16 and bfloat16 as they lie in memory; arithmetic widens them to float.
struct half { std::uint16_t bits; };
struct bfloat16 { std::uint16_t bits; };

WS_INLINE std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
WS_INLINE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
WS_INLINE std::uint64_t bits_of(double value) { return __builtin_bit_cast(std::uint64_t, value); }
WS_INLINE double double_of(std::uint64_t bits) { return __builtin_bit_cast(double, bits); }

template <class T> WS_INLINE T infinity() { return static_cast<T>(__builtin_inf()); }
template <class T> WS_INLINE T quiet_nan() { return static_cast<T>(__builtin_nan("")); }

WS_INLINE float widen(half value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = (value.bits & 0x7fffu) << 13;
  const std::uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  return float_of(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

WS_INLINE float widen(bfloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

// Floats of 8 bits: of four bits of exponent, which have no infinity and one NaN, and of five. What is too large for four bits
// becomes the largest number, or with earlier versions of PyTorch NaN.
template <bool kSaturates> struct float8_e4m3 { std::uint8_t bits; };
struct float8_e5m2 { std::uint8_t bits; };

template <bool kSaturates> WS_INLINE float widen(float8_e4m3<kSaturates> value) {
  const std::uint32_t magnitude = value.bits & 0x7fu;
  const std::uint32_t finite = bits_of(float_of(magnitude << 20) * 0x1p120f);
  return float_of((value.bits & 0x80u) << 24 | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}
WS_INLINE float widen(float8_e5m2 value) {
  const std::uint32_t magnitude = (value.bits & 0x7fu) << 21;
  const std::uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  return float_of((value.bits & 0x80u) << 24 | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

// `narrow<T>(x)` rounds to nearest, ties to even, as PyTorch's conversions do.
template <class T> WS_INLINE T narrow(float value);

template <> WS_INLINE half narrow<half>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 lets the adder round at the spacing of half's subnormal numbers, 2^-24.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  return {static_cast<std::uint16_t>(result | ((bits >> 16) & 0x8000u))};
}

template <> WS_INLINE bfloat16 narrow<bfloat16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

// Adding a power of two lets the adder round at the spacing of subnormal numbers, 2^-9 and 2^-16.
template <bool kSaturates> WS_INLINE float8_e4m3<kSaturates> narrow_to_e4m3(float value) {
  const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);
  std::uint32_t result = magnitude < (121u << 23) ? subnormal : normal;
  result = magnitude > 0x43e80000u ? (kSaturates ? 0x7eu : 0x7fu) : result;
  result = magnitude > 0x7f800000u ? 0x7fu : result;
  return {static_cast<std::uint8_t>(result | (bits >> 24 & 0x80u))};
}
template <> WS_INLINE float8_e4m3<true> narrow<float8_e4m3<true>>(float value) { return narrow_to_e4m3<true>(value); }
template <> WS_INLINE float8_e4m3<false> narrow<float8_e4m3<false>>(float value) { return narrow_to_e4m3<false>(value); }
template <> WS_INLINE float8_e5m2 narrow<float8_e5m2>(float value) {
  const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffffu + (magnitude >> 21 & 1u)) >> 21;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0x1p7f) - bits_of(0x1p7f);
  std::uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= 0x47700000u ? 0x7cu : result;
  result = magnitude > 0x7f800000u ? 0x7fu : result;
  return {static_cast<std::uint8_t>(result | (bits >> 24 & 0x80u))};
}

// The value of a float after a round trip through a narrower type.
template <class T> WS_INLINE float rounded_to(float value) { return widen(narrow<T>(value)); }

// Floating point to integer as PyTorch converts: truncated, out of range as the wider integer wraps.
template <class To, class From> WS_INLINE To to_integer(From value) {
  if constexpr (sizeof(To) == 4) {
    return static_cast<std::int32_t>(value);
  } else {
    return static_cast<To>(static_cast<std::int64_t>(value));
  }
}

}  // namespace ws
