// The operations of the loop-level IR on the device, with PyTorch's semantics: the names are those of the CPU's ws_math.hpp.
// Floats use CUDA's own functions without fast-math; integers wrap; max and min propagate NaN.
#pragma once
#include "ws_types.cuh"

namespace ws {

#define WS_BOTH(name, single, wide)                               \
  WS_INLINE float name(float x) { return single(x); }             \
  WS_INLINE double name(double x) { return wide(x); }
WS_BOTH(exp, ::expf, ::exp) WS_BOTH(exp2, ::exp2f, ::exp2) WS_BOTH(expm1, ::expm1f, ::expm1)
WS_BOTH(log, ::logf, ::log) WS_BOTH(log2, ::log2f, ::log2) WS_BOTH(log1p, ::log1pf, ::log1p)
WS_BOTH(sqrt, ::sqrtf, ::sqrt) WS_BOTH(rsqrt, ::rsqrtf, ::rsqrt)
WS_BOTH(sin, ::sinf, ::sin) WS_BOTH(cos, ::cosf, ::cos) WS_BOTH(tan, ::tanf, ::tan)
WS_BOTH(asin, ::asinf, ::asin) WS_BOTH(acos, ::acosf, ::acos) WS_BOTH(atan, ::atanf, ::atan)
WS_BOTH(sinh, ::sinhf, ::sinh) WS_BOTH(cosh, ::coshf, ::cosh) WS_BOTH(tanh, ::tanhf, ::tanh)
WS_BOTH(erf, ::erff, ::erf) WS_BOTH(erfc, ::erfcf, ::erfc)
WS_BOTH(floor, ::floorf, ::floor) WS_BOTH(ceil, ::ceilf, ::ceil) WS_BOTH(trunc, ::truncf, ::trunc)
WS_BOTH(round, ::rintf, ::rint) WS_BOTH(fabs, ::fabsf, ::fabs)
#undef WS_BOTH
WS_INLINE float pow(float base, float exponent) { return ::powf(base, exponent); }
WS_INLINE double pow(double base, double exponent) { return ::pow(base, exponent); }
WS_INLINE float atan2(float y, float x) { return ::atan2f(y, x); }
WS_INLINE double atan2(double y, double x) { return ::atan2(y, x); }
WS_INLINE float fmod(float a, float b) { return ::fmodf(a, b); }
WS_INLINE double fmod(double a, double b) { return ::fmod(a, b); }
WS_INLINE float copysign(float magnitude, float sign) { return ::copysignf(magnitude, sign); }
WS_INLINE double copysign(double magnitude, double sign) { return ::copysign(magnitude, sign); }
WS_INLINE float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }
WS_INLINE double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }

// ex2.approx of x * log2(e): three instructions instead of nine. The relative error grows as |x| * 2^-24, so it suits
// distances from a maximum, where a large |x| weighs little. Subnormal results are kept.
WS_INLINE float fast_exp(float x) { return ptx::approximate_exp2(x * 1.4426950408889634f); }
WS_INLINE double fast_exp(double x) { return ::exp(x); }

// erfc for what is rounded to 16 bits and multiplied by no more than its argument, as in a GELU: 2 to the power of a polynomial.
// The relative error is 4e-6 up to 3, 3e-4 up to 3.95, where 1 + erf of floats is 0, and behind it the value goes to 0 too.
WS_INLINE float short_erfc(float x) {
  const float size = ::fabsf(x);
  float power = fmaf(size, -1.6179565e-5f, 4.3974016e-4f);
  power = fmaf(size, power, -5.0233863e-3f);
  power = fmaf(size, power, 3.3491917e-2f);
  power = fmaf(size, power, -0.15199721f);
  power = fmaf(size, power, -0.91728169f);
  power = fmaf(size, power, -1.6280335f);
  const float tail = ptx::approximate_exp2(size * power);
  return x < 0.0f ? 2.0f - tail : tail;
}

// The natural logarithm of a positive, finite, normal x within 0.86 units in the last place, as close as CUDA's own, in 16
// instructions instead of 26; of anything else it gives nothing of use and makes `ordinary` false. x is 2^e (1 + f) with f from
// -1/3 to 1/3, and log(1 + f) = f + f^2 p(f) with p fitted for the least relative error there (Lawson's iteration).
WS_INLINE float ordinary_log(float x, bool& ordinary) {
  const int bits = __float_as_int(x);
  ordinary &= static_cast<unsigned>(bits) - 0x00800000u < 0x7f000000u;
  const unsigned e = (static_cast<unsigned>(bits) - 0x3f2aaaabu) & 0xff800000u;  // times 2^23, for 1 + f from 2/3 to 4/3
  const float f = __int_as_float(static_cast<int>(static_cast<unsigned>(bits) - e)) - 1.0f;
  float p = -0.1294896900653839f;
  p = ::fmaf(p, f, 0.14004762470722198f);
  p = ::fmaf(p, f, -0.12167153507471085f);
  p = ::fmaf(p, f, 0.14001159369945526f);
  p = ::fmaf(p, f, -0.16682305932044983f);
  p = ::fmaf(p, f, 0.20010747015476227f);
  p = ::fmaf(p, f, -0.24999716877937317f);
  p = ::fmaf(p, f, 0.3333320915699005f);
  p = ::fmaf(p, f, -0.5f);
  constexpr float kLog2 = 8.26295850e-8f;  // of 2, times 2^-23
  return ::fmaf(static_cast<float>(static_cast<int>(e)), kLog2, ::fmaf(p, f * f, f));
}

// Quotients by one divisor: a reciprocal, a remainder and its correction (Markstein 1990) round as a division does, but for
// results below 2^-100, which may be off by a unit in the last place. Where that is not so, because something is not finite or
// the divisor is not between 2^-96 and 2^96, the result is NaN and `ordinary` becomes false. Four instructions instead of 13.
struct Divisor { float value, reciprocal; };
WS_INLINE Divisor divisor(float value) {
  const bool plain = value >= 1.2621774e-29f && value <= 7.9228163e28f;
  return {value, plain ? 1.0f / value : quiet_nan<float>()};
}
WS_INLINE float quotient(float x, const Divisor& by, bool& ordinary) {
  const float guess = x * by.reciprocal;
  const float excess = ::fmaf(by.value, guess, -x);
  const float result = ::fmaf(-excess, by.reciprocal, guess);
  ordinary &= result == result;
  return result;
}

template <class T> inline constexpr bool is_real = false;
template <> inline constexpr bool is_real<float> = true;
template <> inline constexpr bool is_real<double> = true;
template <class T> inline constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);

template <class T> WS_INLINE T max(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> WS_INLINE T min(T a, T b) { return (a < b || a != a) ? a : b; }
template <> WS_INLINE float max<float>(float a, float b) { return ptx::max_nan(a, b); }
template <> WS_INLINE float min<float>(float a, float b) { return ptx::min_nan(a, b); }
template <class T> WS_INLINE bool isnan(T x) { return x != x; }
template <class T> WS_INLINE bool isinf(T x) {
  if constexpr (is_real<T>) return ws::fabs(x) == infinity<T>();
  return false;
}
template <class T> WS_INLINE T sign(T x) { return static_cast<T>((T(0) < x) - (x < T(0))); }

// Integers wrap around, as PyTorch's do; signed overflow would be undefined.
template <int kBytes> struct Wrapping { using type = unsigned; };
template <> struct Wrapping<8> { using type = unsigned long long; };
template <class T> using wrapping = typename Wrapping<sizeof(T)>::type;
template <class T> WS_INLINE T wrap_add(T a, T b) { return static_cast<T>(wrapping<T>(a) + wrapping<T>(b)); }
template <class T> WS_INLINE T wrap_sub(T a, T b) { return static_cast<T>(wrapping<T>(a) - wrapping<T>(b)); }
template <class T> WS_INLINE T wrap_mul(T a, T b) { return static_cast<T>(wrapping<T>(a) * wrapping<T>(b)); }
template <class T> WS_INLINE T wrap_neg(T a) { return static_cast<T>(wrapping<T>(0) - wrapping<T>(a)); }
template <class T> WS_INLINE T wrap_abs(T a) { return a < T(0) ? wrap_neg(a) : a; }

// By fewer bits than there are, as PyTorch has it: by more, or by less than none, nothing or the sign is left.
template <class T> WS_INLINE T shift_left(T a, T b) {
  constexpr int kBits = 8 * sizeof(T);
  return b < T(0) || b >= T(kBits) ? T(0) : static_cast<T>(wrapping<T>(a) << static_cast<int>(b));
}
template <class T> WS_INLINE T shift_right(T a, T b) {
  constexpr int kMost = 8 * sizeof(T) - 1;
  const int places = b < T(0) || b > T(kMost) ? kMost : static_cast<int>(b);
  return !is_signed<T> && (b < T(0) || b > T(kMost)) ? T(0) : static_cast<T>(a >> places);
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

// By zero it gives 0, and the least by -1 wraps.
template <class T> WS_INLINE T trunc_div(T a, T b) {
  if constexpr (is_real<T>) return ws::trunc(a / b);
  else if (b == T(0)) return T(0);
  else if (b == static_cast<T>(-1) && is_signed<T>) return wrap_neg(a);
  else return static_cast<T>(a / b);
}

// Remainder with the sign of the dividend.
template <class T> WS_INLINE T fmod_any(T a, T b) {
  if constexpr (is_real<T>) return ws::fmod(a, b);
  else if (b == T(0) || (b == static_cast<T>(-1) && is_signed<T>)) return T(0);
  else return static_cast<T>(a % b);
}

// Remainder with the sign of the divisor.
template <class T> WS_INLINE T remainder(T a, T b) {
  const T rest = fmod_any(a, b);
  return (rest != T(0) && ((b < T(0)) != (rest < T(0)))) ? static_cast<T>(rest + b) : rest;
}

template <class T> WS_INLINE T floor_div(T a, T b) {
  if constexpr (!is_real<T>) {
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
