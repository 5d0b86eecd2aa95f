// Elementary functions that gcc vectorises: branch-free; float within 1.5 units in the last place, or
// 2.3 where a quotient follows (tanh, sigmoid, sinh, cosh).
//
// Each takes an argument range apart (exponent and mantissa, multiples of ln 2 or pi/2), evaluates a polynomial
// whose coefficients were fitted to the least maximum error (Lawson's iteration on Chebyshev points), and puts the
// pieces together. NaN, infinities, signed zeros and subnormal numbers come out as in IEEE 754. The double
// overloads call the C library. Compile with -fno-math-errno -fno-trapping-math (neither changes a value).
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ws_types.hpp"

namespace ws {

namespace detail {

// 1.5 x 2^23 + 254: adding it rounds a float to an integer, which then stands in the low bits, plus 254: the
// exponent bias twice, so that two powers of two can be made from it by shifts alone.
inline constexpr float kRoundingShift = 12583166.0f;
inline constexpr float kLog2E = 1.44269504f;
// ln 2 in two parts; the first has 9 trailing zero bits, so that a small integer times it is exact.
inline constexpr float kLn2High = 0.693145752f;
inline constexpr float kLn2Low = 1.42860677e-6f;

struct Scaled { float fraction; std::int32_t exponent; };
struct Reduced { float fraction; std::uint32_t biased; };

// x = exponent * ln 2 + fraction with |fraction| <= ln 2 / 2; the low bits of `biased` are exponent + 254.
WS_INLINE Reduced split_exponent(float x) {
  const float shifted = x * kLog2E + kRoundingShift;
  const float whole = shifted - kRoundingShift;
  return {(x - whole * kLn2High) - whole * kLn2Low, bits_of(shifted)};
}

// (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2.
WS_INLINE float exp_tail(float r) {
  float p = 0.00139504105f;
  p = p * r + 0.00836888185f;
  p = p * r + 0.0416662074f;
  p = p * r + 0.166665189f;
  return p * r + 0.500000009f;
}

// e^x for |x| <= 87: no overflow, no subnormal result.
WS_INLINE float exp_moderate(float x) {
  const Reduced s = split_exponent(x);
  const float r = s.fraction;
  return (1.0f + (r + r * r * exp_tail(r))) * float_of((s.biased - 127u) << 23);
}

// log(1 + f) - f + f^2 / 2 over f^3, for 1 + f between sqrt(1/2) and sqrt(2).
WS_INLINE float log_tail(float f) {
  float p = 0.0691533042f;
  p = p * f - 0.117898011f;
  p = p * f + 0.118729929f;
  p = p * f - 0.123843529f;
  p = p * f + 0.142186565f;
  p = p * f - 0.166692503f;
  p = p * f + 0.200022266f;
  p = p * f - 0.249999866f;
  return p * f + 0.333333104f;
}

// x = 2^exponent (1 + fraction) for positive finite x, subnormal numbers included.
WS_INLINE Scaled split_logarithm(float x) {
  const bool subnormal = x < 0x1p-126f;
  const std::uint32_t bits = bits_of(subnormal ? x * 0x1p23f : x) - 0x3f3504f3u;
  const std::int32_t exponent = (static_cast<std::int32_t>(bits) >> 23) - (subnormal ? 23 : 0);
  return {float_of((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f, exponent};
}

WS_INLINE float log_positive(float x) {
  const Scaled s = split_logarithm(x);
  const float f = s.fraction;
  const float e = static_cast<float>(s.exponent);
  const float tail = f * f * f * log_tail(f) + e * kLn2Low;
  return e * kLn2High + (f + (tail - 0.5f * f * f));
}

// Logarithm's special cases: below zero NaN, at zero -inf, at +inf and NaN itself.
WS_INLINE float log_special(float x, float regular) {
  float y = x < __builtin_inff() ? regular : x;
  y = x == 0.0f ? -__builtin_inff() : y;
  return x < 0.0f ? __builtin_nanf("") : y;
}

// log2(x) in double for positive finite x; relative error about 1e-13.
WS_INLINE double log2_double(float x) {
  const Scaled s = split_logarithm(x);
  const double f = s.fraction;
  const double t = f / (f + 2.0);
  const double u = t * t;
  double p = 0.213684934014621711;
  p = p * u + 0.220910460692289925;
  p = p * u + 0.262334456550249007;
  p = p * u + 0.320598532868819786;
  p = p * u + 0.412198585861525704;
  p = p * u + 0.577078016345421235;
  p = p * u + 0.961796693925989907;
  p = p * u + 2.88539008177792681;
  return p * t + static_cast<double>(s.exponent);
}

// 2^x rounded to float once; x in double. Saturates to 0 and infinity.
WS_INLINE float exp2_double(double x) {
  x = x > 200.0 ? 200.0 : x;
  x = x < -200.0 ? -200.0 : x;
  constexpr double kShift = 6755399441055744.0;  // 1.5 x 2^52
  const double shifted = x + kShift;
  const double r = x - (shifted - kShift);
  double p = 1.02114683004953821e-7;
  p = p * r + 1.32596461524169906e-6;
  p = p * r + 0.0000152526416355291824;
  p = p * r + 0.000154034337465942131;
  p = p * r + 0.00133335582594562801;
  p = p * r + 0.00961812919394184602;
  p = p * r + 0.0555041086642443699;
  p = p * r + 0.240226506956403002;
  p = p * r + 0.693147180559953793;
  p = p * r + 1.0;
  const std::uint64_t whole = bits_of(shifted) - bits_of(kShift);
  return static_cast<float>(p * double_of((whole + 1023u) << 52));
}

// 2^e * 2 / pi modulo 4, for e = -24 ... 104, as a sum of two doubles. The first has 28 significant bits, so that its
// product with the 24-bit mantissa of any float is exact: one table serves every argument, however large.
inline constexpr double kQuadrants[129][2] = {
    {0x1.45f306e000000p-25, -0x1.b1bbead603d8bp-56},
    {0x1.45f306e000000p-24, -0x1.b1bbead603d8bp-55},
    {0x1.45f306e000000p-23, -0x1.b1bbead603d8bp-54},
    {0x1.45f306e000000p-22, -0x1.b1bbead603d8bp-53},
    {0x1.45f306e000000p-21, -0x1.b1bbead603d8bp-52},
    {0x1.45f306e000000p-20, -0x1.b1bbead603d8bp-51},
    {0x1.45f306e000000p-19, -0x1.b1bbead603d8bp-50},
    {0x1.45f306e000000p-18, -0x1.b1bbead603d8bp-49},
    {0x1.45f306e000000p-17, -0x1.b1bbead603d8bp-48},
    {0x1.45f306e000000p-16, -0x1.b1bbead603d8bp-47},
    {0x1.45f306e000000p-15, -0x1.b1bbead603d8bp-46},
    {0x1.45f306e000000p-14, -0x1.b1bbead603d8bp-45},
    {0x1.45f306e000000p-13, -0x1.b1bbead603d8bp-44},
    {0x1.45f306e000000p-12, -0x1.b1bbead603d8bp-43},
    {0x1.45f306e000000p-11, -0x1.b1bbead603d8bp-42},
    {0x1.45f306e000000p-10, -0x1.b1bbead603d8bp-41},
    {0x1.45f306e000000p-9, -0x1.b1bbead603d8bp-40},
    {0x1.45f306e000000p-8, -0x1.b1bbead603d8bp-39},
    {0x1.45f306e000000p-7, -0x1.b1bbead603d8bp-38},
    {0x1.45f306e000000p-6, -0x1.b1bbead603d8bp-37},
    {0x1.45f306e000000p-5, -0x1.b1bbead603d8bp-36},
    {0x1.45f306e000000p-4, -0x1.b1bbead603d8bp-35},
    {0x1.45f306e000000p-3, -0x1.b1bbead603d8bp-34},
    {0x1.45f306e000000p-2, -0x1.b1bbead603d8bp-33},
    {0x1.45f306e000000p-1, -0x1.b1bbead603d8bp-32},
    {0x1.45f306e000000p+0, -0x1.b1bbead603d8bp-31},
    {-0x1.7419f24000000p+0, -0x1.b1bbead603d8bp-30},
    {0x1.17cc1b8000000p+0, -0x1.b1bbead603d8bp-29},
    {-0x1.d067c92000000p+0, 0x1.391054a7f09d6p-30},
    {0x1.7cc1b72000000p-2, 0x1.c882a53f84eb0p-32},
    {0x1.7cc1b72000000p-1, 0x1.c882a53f84eb0p-31},
    {0x1.7cc1b72000000p+0, 0x1.c882a53f84eb0p-30},
    {-0x1.067c91c000000p+0, 0x1.c882a53f84eb0p-29},
    {0x1.f306dca000000p+0, -0x1.bbead603d8a83p-31},
    {-0x1.9f246c6000000p-4, -0x1.df56b01ec5417p-33},
    {-0x1.9f246c6000000p-3, -0x1.df56b01ec5417p-32},
    {-0x1.9f246c6000000p-2, -0x1.df56b01ec5417p-31},
    {-0x1.9f246c6000000p-1, -0x1.df56b01ec5417p-30},
    {-0x1.9f246c6000000p+0, -0x1.df56b01ec5417p-29},
    {0x1.836e4e4000000p-1, 0x1.054a7f09d5f48p-31},
    {0x1.836e4e4000000p+0, 0x1.054a7f09d5f48p-30},
    {-0x1.f246c6e000000p-1, -0x1.f56b01ec54170p-30},
    {-0x1.f246c6e000000p+0, -0x1.f56b01ec54170p-29},
    {0x1.b727220000000p-4, 0x1.529fc2757d1f5p-33},
    {0x1.b727220000000p-3, 0x1.529fc2757d1f5p-32},
    {0x1.b727220000000p-2, 0x1.529fc2757d1f5p-31},
    {0x1.b727220000000p-1, 0x1.529fc2757d1f5p-30},
    {0x1.b727220000000p+0, 0x1.529fc2757d1f5p-29},
    {-0x1.236377e000000p-1, 0x1.4a7f09d5f47d5p-30},
    {-0x1.236377e000000p+0, 0x1.4a7f09d5f47d5p-29},
    {0x1.b939106000000p+0, -0x1.6b01ec5417056p-29},
    {-0x1.1b1bbea000000p-1, -0x1.ac07b1505c159p-30},
    {-0x1.1b1bbea000000p+0, -0x1.ac07b1505c159p-29},
    {0x1.c9c882a000000p+0, 0x1.4fe13abe8fa9ap-30},
    {-0x1.b1bbeae000000p-2, 0x1.3f84eafa3ea6ap-31},
    {-0x1.b1bbeae000000p-1, 0x1.3f84eafa3ea6ap-30},
    {-0x1.b1bbeae000000p+0, 0x1.3f84eafa3ea6ap-29},
    {0x1.391054a000000p-1, 0x1.fc2757d1f534ep-31},
    {0x1.391054a000000p+0, 0x1.fc2757d1f534ep-30},
    {-0x1.8ddf56c000000p+0, 0x1.fc2757d1f534ep-29},
    {0x1.c882a54000000p-1, -0x1.ec54170565912p-35},
    {0x1.c882a54000000p+0, -0x1.ec54170565912p-34},
    {-0x1.bbead60000000p-2, -0x1.ec54170565912p-33},
    {-0x1.bbead60000000p-1, -0x1.ec54170565912p-32},
    {-0x1.bbead60000000p+0, -0x1.ec54170565912p-31},
    {0x1.1054a80000000p-1, -0x1.ec54170565912p-30},
    {0x1.1054a80000000p+0, -0x1.ec54170565912p-29},
    {-0x1.df56b02000000p+0, 0x1.3abe8fa9a6ee0p-32},
    {0x1.054a7f0000000p-2, 0x1.3abe8fa9a6ee0p-31},
    {0x1.054a7f0000000p-1, 0x1.3abe8fa9a6ee0p-30},
    {0x1.054a7f0000000p+0, 0x1.3abe8fa9a6ee0p-29},
    {-0x1.f56b01e000000p+0, -0x1.8a82e0acb223fp-29},
    {0x1.529fc28000000p-4, -0x1.505c1596447e5p-33},
    {0x1.529fc28000000p-3, -0x1.505c1596447e5p-32},
    {0x1.529fc28000000p-2, -0x1.505c1596447e5p-31},
    {0x1.529fc28000000p-1, -0x1.505c1596447e5p-30},
    {0x1.529fc28000000p+0, -0x1.505c1596447e5p-29},
    {-0x1.5ac07b2000000p+0, 0x1.5f47d4d377037p-29},
    {0x1.4a7f09e000000p+0, -0x1.4170565911f92p-29},
    {-0x1.6b01ec6000000p+0, 0x1.7d1f534ddc0dbp-29},
    {0x1.29fc276000000p+0, -0x1.05c1596447e49p-29},
    {-0x1.ac07b16000000p+0, 0x1.f47d4d377036ep-29},
    {0x1.4fe13ac000000p-1, -0x1.70565911f924fp-33},
    {0x1.4fe13ac000000p+0, -0x1.70565911f924fp-32},
    {-0x1.603d8a8000000p+0, -0x1.70565911f924fp-31},
    {0x1.3f84eb0000000p+0, -0x1.70565911f924fp-30},
    {-0x1.80f62a0000000p+0, -0x1.70565911f924fp-29},
    {0x1.fc2757e000000p-1, -0x1.c1596447e493bp-30},
    {0x1.fc2757e000000p+0, -0x1.c1596447e493bp-29},
    {-0x1.ec54170000000p-6, -0x1.596447e493ad5p-36},
    {-0x1.ec54170000000p-5, -0x1.596447e493ad5p-35},
    {-0x1.ec54170000000p-4, -0x1.596447e493ad5p-34},
    {-0x1.ec54170000000p-3, -0x1.596447e493ad5p-33},
    {-0x1.ec54170000000p-2, -0x1.596447e493ad5p-32},
    {-0x1.ec54170000000p-1, -0x1.596447e493ad5p-31},
    {-0x1.ec54170000000p+0, -0x1.596447e493ad5p-30},
    {0x1.3abe8fa000000p-3, 0x1.34ddc0db6295ap-32},
    {0x1.3abe8fa000000p-2, 0x1.34ddc0db6295ap-31},
    {0x1.3abe8fa000000p-1, 0x1.34ddc0db6295ap-30},
    {0x1.3abe8fa000000p+0, 0x1.34ddc0db6295ap-29},
    {-0x1.8a82e0a000000p+0, -0x1.96447e493ad4dp-29},
    {0x1.d5f47d4000000p-1, 0x1.a6ee06db14acdp-30},
    {0x1.d5f47d4000000p+0, 0x1.a6ee06db14acdp-29},
    {-0x1.505c15a000000p-2, 0x1.377036d8a5665p-31},
    {-0x1.505c15a000000p-1, 0x1.377036d8a5665p-30},
    {-0x1.505c15a000000p+0, 0x1.377036d8a5665p-29},
    {0x1.5f47d4e000000p+0, -0x1.911f924eb5336p-29},
    {-0x1.4170566000000p+0, 0x1.bb81b6c52b328p-30},
    {0x1.7d1f534000000p+0, 0x1.bb81b6c52b328p-29},
    {-0x1.05c1596000000p+0, -0x1.11f924eb53362p-30},
    {0x1.f47d4d4000000p+0, -0x1.11f924eb53362p-29},
    {-0x1.7056592000000p-4, 0x1.c0db6295993c4p-33},
    {-0x1.7056592000000p-3, 0x1.c0db6295993c4p-32},
    {-0x1.7056592000000p-2, 0x1.c0db6295993c4p-31},
    {-0x1.7056592000000p-1, 0x1.c0db6295993c4p-30},
    {-0x1.7056592000000p+0, 0x1.c0db6295993c4p-29},
    {0x1.1f534de000000p+0, -0x1.f924eb53361dep-31},
    {-0x1.c159644000000p+0, -0x1.f924eb53361dep-30},
    {0x1.f534ddc000000p-2, 0x1.b6c52b3278872p-35},
    {0x1.f534ddc000000p-1, 0x1.b6c52b3278872p-34},
    {0x1.f534ddc000000p+0, 0x1.b6c52b3278872p-33},
    {-0x1.596447e000000p-4, -0x1.24eb53361de38p-34},
    {-0x1.596447e000000p-3, -0x1.24eb53361de38p-33},
    {-0x1.596447e000000p-2, -0x1.24eb53361de38p-32},
    {-0x1.596447e000000p-1, -0x1.24eb53361de38p-31},
    {-0x1.596447e000000p+0, -0x1.24eb53361de38p-30},
    {0x1.4d37704000000p+0, -0x1.24eb53361de38p-29},
    {-0x1.65911fa000000p+0, 0x1.b6295993c4390p-29},
    {0x1.34ddc0e000000p+0, -0x1.275a99b0ef1bfp-30},};

struct Quadrant { float angle; std::int32_t number; };

// x = number * pi / 2 + angle with |angle| <= pi / 4 (number modulo 4); NaN for an infinity or NaN.
WS_INLINE Quadrant split_quadrant(float x) {
  const std::uint32_t bits = bits_of(x);
  std::int32_t row = static_cast<std::int32_t>((bits >> 23) & 0xffu) - 150 + 24;
  const bool tiny = row < 0;
  row = tiny ? 0 : (row > 128 ? 128 : row);
  const double mantissa = static_cast<double>(static_cast<std::int32_t>((bits & 0x7fffffu) | 0x800000u));
  constexpr double kShift = 6755399441055744.0;
  const double high = mantissa * kQuadrants[row][0];
  const double shifted = high + kShift;
  const double turns = (high - (shifted - kShift)) + mantissa * kQuadrants[row][1];
  const float angle = static_cast<float>(turns * 1.5707963267948966);
  const std::int32_t number = static_cast<std::int32_t>(bits_of(shifted) & 3u);
  const bool negative = x < 0.0f;
  const float signed_angle = negative ? -angle : angle;
  const float regular = tiny ? x : signed_angle;
  return {__builtin_fabsf(x) < __builtin_inff() ? regular : __builtin_nanf(""),
          tiny ? 0 : (negative ? -number : number)};
}

WS_INLINE float sin_polynomial(float r) {
  const float s = r * r;
  float p = 2.71831071e-6f;
  p = p * s - 0.000198393347f;
  p = p * s + 0.00833332939f;
  p = p * s - 0.166666666f;
  return r + r * (s * p);
}

WS_INLINE float cos_polynomial(float r) {
  const float s = r * r;
  float p = 2.44387262e-5f;
  p = p * s - 0.00138873696f;
  p = p * s + 0.0416666469f;
  return (1.0f - 0.5f * s) + s * s * p;
}

WS_INLINE float sine_of_quadrant(float angle, std::int32_t number) {
  const float sine = sin_polynomial(angle);
  const float cosine = cos_polynomial(angle);
  const float value = (number & 1) != 0 ? cosine : sine;
  return float_of(bits_of(value) ^ (static_cast<std::uint32_t>(number & 2) << 30));
}

template <class T> inline constexpr bool is_real = std::is_floating_point_v<T>;

}  // namespace detail

// ---- float: our own ----------------------------------------------------------------------------------

WS_INLINE float copysign(float magnitude, float sign) {
  return float_of((bits_of(magnitude) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

WS_INLINE float exp(float x) {
  float clamped = x > 89.0f ? 89.0f : x;
  clamped = clamped < -104.0f ? -104.0f : clamped;
  const detail::Reduced s = detail::split_exponent(clamped);
  const float r = s.fraction;
  // Two factors, since 2^128 and subnormal powers are not floats; the biased exponents of the two add up to `biased`.
  const std::uint32_t half_biased = s.biased >> 1;
  const float first = float_of(half_biased << 23);
  const float second = float_of((s.biased - half_biased) << 23);
  return (1.0f + (r + r * r * detail::exp_tail(r))) * first * second;
}

WS_INLINE float exp2(float x) { return detail::exp2_double(static_cast<double>(x)); }

WS_INLINE float expm1(float x) {
  float clamped = x > 89.0f ? 89.0f : x;
  clamped = clamped < -18.0f ? -18.0f : clamped;
  const detail::Reduced s = detail::split_exponent(clamped);
  const float r = s.fraction;
  const float p = r + r * r * detail::exp_tail(r);
  const float half_scale = float_of((s.biased - 128u) << 23);  // 2^(exponent - 1)
  const float y = 2.0f * (half_scale * p + (half_scale - 0.5f));
  return __builtin_fabsf(x) < 1e-9f ? x : y;
}

WS_INLINE float log(float x) { return detail::log_special(x, detail::log_positive(x)); }

WS_INLINE float log2(float x) {
  return detail::log_special(x, static_cast<float>(detail::log2_double(x)));
}

WS_INLINE float log1p(float x) {
  const float u = 1.0f + x;
  // What the addition lost, to first order.
  const float lost = u - 1.0f;
  const float correction = (x - lost) / u;
  const float regular = detail::log_positive(u) + correction;
  float y = x < __builtin_inff() ? regular : x;
  y = x == -1.0f ? -__builtin_inff() : y;
  y = x < -1.0f ? __builtin_nanf("") : y;
  return __builtin_fabsf(x) < 1e-9f ? x : y;
}

WS_INLINE float sigmoid(float x) { return 1.0f / (1.0f + ws::exp(-x)); }

WS_INLINE float tanh(float x) {
  const float magnitude = __builtin_fabsf(x);
  const float t = ws::expm1(2.0f * (magnitude > 10.0f ? 10.0f : magnitude));
  return ws::copysign(t / (t + 2.0f), x);
}

WS_INLINE float erf(float x) {
  const float t = __builtin_fabsf(x);
  const float s = x * x;
  float near = 7.88910239e-5f;
  near = near * s - 0.000802083611f;
  near = near * s + 0.00518953475f;
  near = near * s - 0.0268544443f;
  near = near * s + 0.112836002f;
  near = near * s - 0.376126271f;
  near = near * s + 0.128379166f;
  const float c = t > 4.0f ? 4.0f : t;
  // log(erfc(c)) on 1 <= c <= 4.
  float far = 2.51750886e-7f;
  far = far * c - 2.53209016e-5f;
  far = far * c + 0.000463825575f;
  far = far * c - 0.00428251242f;
  far = far * c + 0.025373831f;
  far = far * c - 0.108639364f;
  far = far * c - 0.633039313f;
  far = far * c - 1.12966129f;
  far = far * c + 0.000204387148f;
  const float outside = ws::copysign(1.0f - detail::exp_moderate(far), x);
  const float inside = x + x * near;
  const float y = t > 1.0f ? outside : inside;
  return t <= __builtin_inff() ? y : x;
}

WS_INLINE float sin(float x) {
  const detail::Quadrant q = detail::split_quadrant(x);
  return detail::sine_of_quadrant(q.angle, q.number);
}

WS_INLINE float cos(float x) {
  const detail::Quadrant q = detail::split_quadrant(x);
  return detail::sine_of_quadrant(q.angle, q.number + 1);
}

WS_INLINE float sinh(float x) {
  // sinh = (t + t / (t + 1)) / 2 with t = e^|x| - 1; halved twice late, where e^|x| overflows before sinh does.
  const float magnitude = __builtin_fabsf(x);
  const float t = ws::expm1(magnitude);
  const float root = ws::exp(0.5f * magnitude);
  const float regular = 0.5f * (t + t / (t + 1.0f));
  return ws::copysign(magnitude > 88.0f ? 0.5f * root * root : regular, x);
}

WS_INLINE float cosh(float x) {
  const float root = ws::exp(0.5f * __builtin_fabsf(x));
  const float half_power = 0.5f * root * root;
  const float e = ws::exp(__builtin_fabsf(x));
  return __builtin_fabsf(x) > 88.0f ? half_power : 0.5f * e + 0.5f / e;
}

WS_INLINE float pow(float base, float exponent) {
  const float magnitude = __builtin_fabsf(base);
  const float whole = __builtin_truncf(exponent);
  const bool integral = whole == exponent;
  const float half_whole = 0.5f * whole;
  const bool odd = integral && __builtin_truncf(half_whole) != half_whole;
  // log2 of 0 and of infinity, far beyond what any other float reaches.
  double logarithm = detail::log2_double(magnitude);
  logarithm = magnitude == 0.0f ? -1e200 : logarithm;
  logarithm = magnitude == __builtin_inff() ? 1e200 : logarithm;
  float y = detail::exp2_double(static_cast<double>(exponent) * logarithm);
  y = magnitude == 1.0f ? 1.0f : y;
  y = (base < 0.0f && !integral && magnitude < __builtin_inff()) ? __builtin_nanf("") : y;
  const bool negate = odd && (bits_of(base) >> 31) != 0u;
  y = negate ? -y : y;
  y = (base != base || exponent != exponent) ? __builtin_nanf("") : y;
  y = (magnitude == 1.0f && __builtin_fabsf(exponent) == __builtin_inff()) ? 1.0f : y;
  return (exponent == 0.0f || base == 1.0f) ? 1.0f : y;
}

// ---- float: the C library's, and everything in double ------------------------------------------------

#define WS_LIBRARY(name) WS_INLINE double name(double x) { return __builtin_##name(x); }
#define WS_LIBRARY_FLOAT(name) \
  WS_LIBRARY(name) WS_INLINE float name(float x) { return __builtin_##name##f(x); }
WS_LIBRARY(exp) WS_LIBRARY(exp2) WS_LIBRARY(expm1) WS_LIBRARY(log) WS_LIBRARY(log2) WS_LIBRARY(log1p)
WS_LIBRARY(sin) WS_LIBRARY(cos) WS_LIBRARY(sinh) WS_LIBRARY(cosh) WS_LIBRARY(tanh) WS_LIBRARY(erf)
WS_LIBRARY_FLOAT(tan) WS_LIBRARY_FLOAT(asin) WS_LIBRARY_FLOAT(acos) WS_LIBRARY_FLOAT(atan)
WS_LIBRARY_FLOAT(erfc) WS_LIBRARY_FLOAT(sqrt) WS_LIBRARY_FLOAT(floor) WS_LIBRARY_FLOAT(ceil)
WS_LIBRARY_FLOAT(trunc) WS_LIBRARY_FLOAT(fabs)
#undef WS_LIBRARY
#undef WS_LIBRARY_FLOAT

WS_INLINE double copysign(double magnitude, double sign) { return __builtin_copysign(magnitude, sign); }
WS_INLINE double sigmoid(double x) { return 1.0 / (1.0 + ws::exp(-x)); }
WS_INLINE double pow(double base, double exponent) { return __builtin_pow(base, exponent); }
WS_INLINE float atan2(float y, float x) { return __builtin_atan2f(y, x); }
WS_INLINE double atan2(double y, double x) { return __builtin_atan2(y, x); }
WS_INLINE float round(float x) { return __builtin_rintf(x); }   // ties to even
WS_INLINE double round(double x) { return __builtin_rint(x); }
WS_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
WS_INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
WS_INLINE float fmod(float a, float b) { return __builtin_fmodf(a, b); }
WS_INLINE double fmod(double a, double b) { return __builtin_fmod(a, b); }

// ---- any type ----------------------------------------------------------------------------------------

// An offset that the compiler may not look into: g++ 12 vectorises a load at an offset made from truth values wrongly,
// `x[y[i] > 0]` over a loop with -mavx2 already.
WS_INLINE std::int64_t opaque(std::int64_t offset) {
  asm("" : "+r"(offset));
  return offset;
}

// NaN when either argument is.
template <class T> WS_INLINE T max(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> WS_INLINE T min(T a, T b) { return (a < b || a != a) ? a : b; }
template <class T> WS_INLINE bool isnan(T x) { return x != x; }
template <class T> WS_INLINE bool isinf(T x) {
  if constexpr (detail::is_real<T>) return ws::fabs(x) == infinity<T>();
  return false;
}
template <class T> WS_INLINE T sign(T x) { return static_cast<T>((T(0) < x) - (x < T(0))); }

// Integers wrap around, as PyTorch's do; signed overflow would be undefined in C++.
template <class T> using wider = std::make_unsigned_t<std::conditional_t<(sizeof(T) < 4), std::int32_t, T>>;
template <class T> WS_INLINE T wrap_add(T a, T b) { return static_cast<T>(wider<T>(a) + wider<T>(b)); }
template <class T> WS_INLINE T wrap_sub(T a, T b) { return static_cast<T>(wider<T>(a) - wider<T>(b)); }
template <class T> WS_INLINE T wrap_mul(T a, T b) { return static_cast<T>(wider<T>(a) * wider<T>(b)); }
template <class T> WS_INLINE T wrap_neg(T a) { return static_cast<T>(wider<T>(0) - wider<T>(a)); }
template <class T> WS_INLINE T wrap_abs(T a) { return a < T(0) ? wrap_neg(a) : a; }

// By fewer bits than there are, as PyTorch has it: by more, or by less than none, nothing or the sign is left.
template <class T> WS_INLINE T shift_left(T a, T b) {
  constexpr int kBits = 8 * sizeof(T);
  return b < T(0) || b >= T(kBits) ? T(0) : static_cast<T>(wider<T>(a) << static_cast<int>(b));
}
template <class T> WS_INLINE T shift_right(T a, T b) {
  constexpr int kMost = 8 * sizeof(T) - 1;
  const int places = b < T(0) || b > T(kMost) ? kMost : static_cast<int>(b);
  return std::is_unsigned_v<T> && (b < T(0) || b > T(kMost)) ? T(0) : static_cast<T>(a >> places);
}

template <class T> WS_INLINE T integer_pow(T base, T exponent) {
  if (exponent < T(0)) {
    const T unit = exponent % T(2) != T(0) ? base : T(1);
    return base == T(1) ? T(1) : (base == static_cast<T>(-1) ? unit : T(0));
  }
  T result = T(1);
  for (; exponent > T(0); exponent = static_cast<T>(exponent / T(2))) {
    if (exponent % T(2) != T(0)) result = wrap_mul(result, base);
    base = wrap_mul(base, base);
  }
  return result;
}

// Division that never traps: by zero it gives 0 (PyTorch raises before a kernel could run), the least by -1 wraps.
template <class T> WS_INLINE T trunc_div(T a, T b) {
  if constexpr (detail::is_real<T>) return ws::trunc(a / b);
  else if (b == T(0)) return T(0);
  else if (b == static_cast<T>(-1) && std::is_signed_v<T>) return wrap_neg(a);
  else return static_cast<T>(a / b);
}

// Remainder with the sign of the dividend.
template <class T> WS_INLINE T fmod_any(T a, T b) {
  if constexpr (detail::is_real<T>) return ws::fmod(a, b);
  else if (b == T(0) || (b == static_cast<T>(-1) && std::is_signed_v<T>)) return T(0);
  else return static_cast<T>(a % b);
}

// Remainder with the sign of the divisor.
template <class T> WS_INLINE T remainder(T a, T b) {
  const T rest = fmod_any(a, b);
  return (rest != T(0) && ((b < T(0)) != (rest < T(0)))) ? static_cast<T>(rest + b) : rest;
}

template <class T> WS_INLINE T floor_div(T a, T b) {
  if constexpr (!detail::is_real<T>) {
    const T quotient = trunc_div(a, b);
    const T rest = fmod_any(a, b);
    return (rest != T(0) && ((b < T(0)) != (rest < T(0)))) ? static_cast<T>(quotient - T(1)) : quotient;
  } else {
    // Python's: exact remainder first, so that the quotient does not round up to the next integer.
    if (b == T(0)) return a / b;
    const T rest = ws::fmod(a, b);
    T quotient = (a - rest) / b;
    if (rest != T(0) && ((b < T(0)) != (rest < T(0)))) quotient -= T(1);
    if (quotient == T(0)) return ws::copysign(T(0), a / b);
    const T whole = ws::floor(quotient);
    return quotient - whole > T(0.5) ? whole + T(1) : whole;
  }
}

}  // namespace ws
