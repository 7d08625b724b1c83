/* into += other, element by element, for the four types in which gradients travel.
 *
 * Bound by memory: two reads and a write an element. The loops are plain C, which every compiler
 * turns into whole vectors; choices between cases are selections and not branches for that reason.
 * Types of 16 bits are widened to float, added there and rounded to nearest even, once: float has
 * more than twice their digits, so the result is the exact sum, rounded. Sums do not depend on the
 * instruction set. x86 converts half to float and back in one instruction each; the loop without
 * these costs about three times as much.
 */
#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "simd.h"
#include "sum.h"

static void add_real(void *into_, const void *other_, ptrdiff_t n) {
    real *restrict into = into_;
    const real *restrict other = other_;
    for (ptrdiff_t i = 0; i < n; i++) into[i] += other[i];
}

#if REAL_FLOAT

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Half: 1 bit of sign, 5 of exponent with bias 15, 10 of mantissa; float: 1, 8 with bias 127, 23.
   A number below the least normal one gets an exponent by adding it to that number, in float, and
   taking the number away again: the adder does the shifting, and the rounding on the way back. */
INLINE float float_of_half(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, bits = (uint32_t)(x & 0x7fff) << 13;
    const uint32_t exponent = bits & 0x0f800000;
    const uint32_t normal = bits + (112u << 23); /* 112 = 127 - 15 */
    const uint32_t tiny = bits_of(float_of(bits + (113u << 23)) - float_of(113u << 23));
    const uint32_t special = bits + (224u << 23); /* infinity, NaN: all exponent bits set */
    return float_of(sign | (exponent == 0x0f800000 ? special : exponent == 0 ? tiny : normal));
}

INLINE uint16_t half_of_float(float x) {
    const uint32_t sign = bits_of(x) & 0x80000000, bits = bits_of(x) ^ sign;
    const uint32_t even = (bits >> 13) & 1;
    const uint32_t normal = (bits - (112u << 23) + 0xfff + even) >> 13; /* carries to infinity */
    const uint32_t tiny = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f); /* 0.5: ulp is 2^-24 */
    const uint32_t nan = 0x7e00 | ((bits >> 13) & 0x3ff);
    const uint32_t special = bits > 0x7f800000 ? nan : 0x7c00;
    const uint32_t half = bits >= (143u << 23) ? special : bits < (113u << 23) ? tiny : normal;
    return (uint16_t)(half | sign >> 16);
}

static void add_half(void *into_, const void *other_, ptrdiff_t n) {
    uint16_t *restrict into = into_;
    const uint16_t *restrict other = other_;
    ptrdiff_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        const __m256 a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(into + i)));
        const __m256 b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(other + i)));
        const __m128i sum = _mm256_cvtps_ph(_mm256_add_ps(a, b), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(into + i), sum);
    }
#endif
    for (; i < n; i++) into[i] = half_of_float(float_of_half(into[i]) + float_of_half(other[i]));
}

/* A bfloat is the upper half of a float. */
INLINE float float_of_bfloat(uint16_t x) { return float_of((uint32_t)x << 16); }

INLINE uint16_t bfloat_of_float(float x) {
    const uint32_t bits = bits_of(x), even = (bits >> 16) & 1;
    const uint32_t nan = (bits >> 16) | 0x40; /* quiet, lest cutting the mantissa makes infinity */
    const uint32_t rounded = (bits + 0x7fff + even) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static void add_bfloat(void *into_, const void *other_, ptrdiff_t n) {
    uint16_t *restrict into = into_;
    const uint16_t *restrict other = other_;
    for (ptrdiff_t i = 0; i < n; i++) {
        into[i] = bfloat_of_float(float_of_bfloat(into[i]) + float_of_bfloat(other[i]));
    }
}

#endif

const struct sum_kernels NAME(sum_kernels) = {
    .add_real = add_real,
#if REAL_FLOAT
    .add_half = add_half,
    .add_bfloat = add_bfloat,
#endif
};
