/* exp, expm1, log, arctan, the normal distribution and what is made of them, for vectors of float
 * and double.
 *
 * Arguments are reduced to a small interval (Muller, "Elementary Functions", chapters 5 and 11)
 * where a Taylor or Gregory series of a dozen terms reaches the last bit; the same lines serve both
 * types, with fewer terms for float. Errors against the exact value, float and double: exp, expm1,
 * log 2 ulp, arctan, tanh, sigmoid 3 ulp, the normal distribution 3 ulp above -3
 * (tests/kernels/test_elementwise.py). NaN comes out as NaN,
 * infinities as the limits.
 */
#ifndef PYDTNN_FUNCTIONS_H
#define PYDTNN_FUNCTIONS_H

#include "simd.h"

#if REAL_FLOAT
enum { MANTISSA = 23, BIAS = 127 };
enum { EXP_TERMS = 7, LOG_TERMS = 4, LOG1P_TERMS = 7, ARCTAN_TERMS = 9 };
#define LN2_HIGH 0x1.63p-1f /* nine bits: n * LN2_HIGH is exact */
#define LN2_LOW -0x1.bd0106p-13f
#define ROUNDING 0x1.8p23f /* adding it leaves the nearest integer in the low bits */
#define LOWEST_EXP -120.f /* x exp(x) of less is 0, exp of more than HIGHEST_EXP infinity */
#define HIGHEST_EXP 89.f
#define SMALLEST_NORMAL 0x1p-126f
#define NORMAL_FAR 15.f
#define NORMAL_NEAR 12.f /* exp(-x^2 / 2) times a factor of the result is normal up to here */
#define GELU_NEAR 9.5f   /* exp(-2 u) likewise */
#define NORMAL_SERIES                                                                      \
    {0.755285138946f,     -0.607896617017f,  0.387136645045f,   -0.186522771698f,          \
     0.0604069890139f,    -7.52836648089e-3f, -3.52625250438e-3f, 1.57028208703e-3f,       \
     1.9919378612e-4f,    -1.20822119948e-4f}
#else
enum { MANTISSA = 52, BIAS = 1023 };
enum { EXP_TERMS = 13, LOG_TERMS = 10, LOG1P_TERMS = 16, ARCTAN_TERMS = 20 };
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#define ROUNDING 0x1.8p52
#define LOWEST_EXP -760.
#define HIGHEST_EXP 710.
#define SMALLEST_NORMAL 0x1p-1022
#define NORMAL_FAR 39.
#define NORMAL_NEAR 36.
#define GELU_NEAR 20.
#define NORMAL_SERIES                                                                          \
    {0.75528513041575148,    -0.60789664197189177,   0.38713740074221872,                      \
     -0.18652185795969299,   0.060396574890706599,   -0.0075401889656226678,                   \
     -0.0034796923623715906, 0.0016308184422239424,  1.3334425522449718e-4,                    \
     -2.3109482030472139e-4, -1.9078730959333091e-6, 3.5144187813104212e-5,                    \
     7.1502765135451109e-7,  -5.9189050803965809e-6, -6.2517856405123011e-7,                   \
     1.0198152807723923e-6,  2.6374251424953201e-7,  -1.5426167593457165e-7,                   \
     -7.6424829783780222e-8, 1.4569488564608778e-8,  1.3938808852558356e-8,                    \
     7.7318958086256081e-11, -9.6615755481552986e-10}
#endif

/* Whether all lanes are in [-limit, limit]. */
INLINE int vall_within(vec v, real limit) {
#if VECTOR_BYTES == 64 && REAL_FLOAT
    const __m512 size = _mm512_abs_ps((__m512)v);
    return _mm512_cmp_ps_mask(size, _mm512_set1_ps(limit), _CMP_LE_OQ) == 0xffff;
#elif VECTOR_BYTES == 64
    const __m512d size = _mm512_abs_pd((__m512d)v);
    return _mm512_cmp_pd_mask(size, _mm512_set1_pd(limit), _CMP_LE_OQ) == 0xff;
#else
    const ivec within = (v <= limit) & (v >= -limit);
#if VECTOR_BYTES == 32
    return _mm256_movemask_epi8((__m256i)within) == -1;
#else
    ireal all = within[0];
    for (size_t i = 1; i < LANES; i++) all &= within[i];
    return all != 0;
#endif
#endif
}

/* The largest lane; a NaN may be passed over. */
INLINE real vtop(vec v) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) v[i] = v[i + half] > v[i] ? v[i + half] : v[i];
    }
    return v[0];
}

INLINE ivec vsign(vec x) { return (ivec)x & (ivec)vset((real)-0.0); }
INLINE vec vabs(vec x) { return (vec)((ivec)x & ~(ivec)vset((real)-0.0)); }

/* 2^n for -BIAS < n <= BIAS */
INLINE vec vpower2(ivec n) { return (vec)((n + BIAS) << MANTISSA); }

/* n and exp(r) - 1, where x = n ln 2 + r and |r| <= ln 2 / 2 */
INLINE vec vexp_reduced(vec x, ivec *n) {
    static const real factor[] = {1. / 2,       1. / 6,        1. / 24,        1. / 120,
                                  1. / 720,     1. / 5040,     1. / 40320,     1. / 362880,
                                  1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
    vec rounded = x * vset((real)1.4426950408889634) + vset(ROUNDING);
    *n = (ivec)rounded - (ivec)vset(ROUNDING);
    vec whole = rounded - vset(ROUNDING);
    vec r = x - whole * vset(LN2_HIGH) - whole * vset(LN2_LOW);
    vec series = vset(factor[EXP_TERMS - 2]);
#pragma GCC unroll 16
    for (int k = EXP_TERMS - 3; k >= 0; k--) series = series * r + vset(factor[k]);
    return r + r * r * series;
}

/* exp(x) in two factors, neither of which is infinite or subnormal. A product with a number a is
 * rounded once in the range of subnormal numbers, too, if the last factor is `rest`. */
struct exponential {
    vec most, rest;
};

INLINE struct exponential vexp_factors(vec x) {
    ivec n;
    vec e = 1 + vexp_reduced(vmin(vset(HIGHEST_EXP), vmax(vset(LOWEST_EXP), x)), &n);
    ivec half = n >> 1;
    return (struct exponential){e * vpower2(half), vpower2(n - half)};
}

INLINE vec vexp(vec x) {
    const struct exponential e = vexp_factors(x);
    return e.most * e.rest;
}

/* 2^y for 2 - BIAS <= y < BIAS */
INLINE vec vexp2_near(vec y) {
    static const real factor[] = {
        0.69314718055994531,   0.24022650695910071,   0.055504108664821580,  0.0096181291076284772,
        0.0013333558146428443, 1.5403530393381610e-4, 1.5252733804059840e-5, 1.3215486790144309e-6,
        1.0178086009239700e-7, 7.0549116208011233e-9, 4.4455382718708115e-10,
        2.5678435993488205e-11, 1.3691488853904128e-12}; /* (ln 2)^k / k! */
    const vec shift = vset(ROUNDING + BIAS); /* leaves the exponent's bits of 2^n in the low bits */
    vec rounded = y + shift, r = y - (rounded - shift), series = vset(factor[EXP_TERMS - 1]);
#pragma GCC unroll 16
    for (int k = EXP_TERMS - 2; k >= 0; k--) series = series * r + vset(factor[k]);
    return (1 + r * series) * (vec)((ivec)rounded << MANTISSA);
}

/* 2^y for y <= 0, or not far above; at least 2^(2 - BIAS) */
INLINE vec vexp2(vec y) { return vexp2_near(vmax(vset(2 - BIAS), y)); }

/* exp(x) - 1 for x <= 0 */
INLINE vec vexpm1(vec x) {
    ivec n;
    vec e = vexp_reduced(vmax(vset(-MANTISSA), x), &n); /* below, the result is -1 */
    vec scale = vpower2(n);
    return scale * e + (scale - 1);
}

/* a sigmoid(x) */
INLINE vec vsigmoid_times(vec a, vec x) {
    const struct exponential e = vexp_factors(-vabs(x)); /* of exp(x) and exp(-x) the smaller */
    const vec one = vset(1), sum = 1 + e.most * e.rest;
    return a * vselect(x >= 0, one, e.most) / sum * vselect(x >= 0, one, e.rest);
}

INLINE vec vsigmoid(vec x) { return vsigmoid_times(vset(1), x); }

INLINE vec vtanh(vec x) {
    vec e = vexpm1(-2 * vabs(x));
    return (vec)((ivec)(-e / (2 + e)) | vsign(x));
}

/* log x = n log 2 + log m, m in [sqrt(1/2), sqrt(2)); log m = 2 artanh s, s = (m - 1) / (m + 1) */
INLINE vec vlog(vec x) {
    static const real factor[] = {2. / 3,  2. / 5,  2. / 7,  2. / 9,  2. / 11,
                                  2. / 13, 2. / 15, 2. / 17, 2. / 19, 2. / 21};
    vec size = vabs(x); /* so that no integer overflows; x < 0 is dealt with at the end */
    ivec subnormal = size < SMALLEST_NORMAL;
    vec normal = vselect(subnormal, size * vset((real)((ireal)1 << MANTISSA)), size);
    ivec n = ((ivec)normal - (ivec)vset((real)0.70710678118654752)) >> MANTISSA;
    vec f = (vec)((ivec)normal - (n << MANTISSA)) - 1;
    n -= subnormal & MANTISSA;
    vec s = f / (2 + f), z = s * s;
    vec series = vset(factor[LOG_TERMS - 1]);
#pragma GCC unroll 16
    for (int k = LOG_TERMS - 2; k >= 0; k--) series = series * z + vset(factor[k]);
    vec whole = __builtin_convertvector(n, vec);
    vec result = whole * vset(LN2_HIGH) + (f - (s * (f - z * series) - whole * vset(LN2_LOW)));
    result = vselect(x == 0, vset((real)-__builtin_inf()), result);
    result = vselect(x == vset((real)__builtin_inf()), x, result);
    return vselect(x >= 0, result, x * vset((real)__builtin_nan(""))); /* NaN for NaN and x < 0 */
}

/* log(1 + x) for 0 <= x <= 1: 2 artanh(x / (2 + x)) with an argument of at most 1/3 */
INLINE vec vlog1p(vec x) {
    vec s = x / (2 + x), z = s * s, series = vset((real)2 / (2 * LOG1P_TERMS + 1));
#pragma GCC unroll 16
    for (int k = LOG1P_TERMS - 1; k >= 0; k--) series = series * z + (real)2 / (2 * k + 1);
    return s * series;
}

/* arctan t = k pi/4 + arctan q, |q| <= tan(pi/8); q = t, (t - 1) / (t + 1) or -1 / t; t = |x| */
INLINE vec varctan(vec x) {
    vec t = vabs(x);
    ivec middle = t > (real)0.41421356237309503, high = t > (real)2.4142135623730949;
    vec base = vselect(high, vset((real)1.5707963267948966),
                       vselect(middle, vset((real)0.78539816339744828), vzero()));
    vec q = vselect(high, vset(-1), vselect(middle, t - 1, t)) /
            vselect(high, t, vselect(middle, t + 1, vset(1)));
    vec z = q * q, series = vset((real)1 / (2 * ARCTAN_TERMS + 1));
#pragma GCC unroll 32
    for (int k = ARCTAN_TERMS - 1; k > 0; k--) series = (real)1 / (2 * k + 1) - series * z;
    return (vec)((ivec)(base + (q - q * z * series)) | vsign(x));
}

/* The standard normal distribution at t = |x|, at most NORMAL_FAR, where the exponential vanishes:
   Phi(-t) = exp(-t^2 / 2) quotient, quotient = P(s) / (t + 4), s = (t - 4) / (t + 4), see
   kernels/reference/normal.py */
#define NORMAL_PEAK ((real)0.39894228040143268) /* the density is this times the exponential */
INLINE vec vnormal_quotient(vec t) {
    static const real factor[] = NORMAL_SERIES;
    enum { TERMS = sizeof factor / sizeof factor[0] };
    const vec q = 1 / (t + 4), s = (t - 4) * q;
    vec series = vset(factor[TERMS - 1]);
#pragma GCC unroll 32
    for (int k = TERMS - 2; k >= 0; k--) series = series * s + vset(factor[k]);
    return q * series;
}

struct normal {
    vec t, quotient;
    struct exponential e;
};

INLINE struct normal vnormal(vec x) {
    const vec t = vmin(vset(NORMAL_FAR), vabs(x));
    return (struct normal){t, vnormal_quotient(t), vexp_factors(t * t * vset((real)-0.5))};
}

#endif
