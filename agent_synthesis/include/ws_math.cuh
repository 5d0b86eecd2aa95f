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
