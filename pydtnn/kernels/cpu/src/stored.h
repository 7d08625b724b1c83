/* Elements of arrays of activations, as they are stored.
 *
 * They are real, except in the variant for bfloat16, which computes with floats and stores their
 * upper halves: they are widened when they are loaded and rounded to nearest even when they are
 * stored. NaN stays NaN, and subnormal numbers become zeros of their sign, as vcvtneps2bf16 does
 * it, for the same bytes with integer arithmetic, which all instruction sets have.
 *
 *   stored                       the type of an element
 *   sload(p), sstore(p, v)       a vector, unaligned
 *   sload_part, sstore_part      the first n lanes, as vload_part and vstore_part
 *   sround(v)                    the values that sstore stores
 *   widened(e)                   the value of one element
 *
 * HAS_DOTS: whether there is an instruction for products of bfloat16 (avx512_bf16). It multiplies
 * pairs of neighbours and adds both products to a float; two of them lie in one real here.
 *
 *   vput(form, p, v)             v rounded to bfloat16, as its form says; or as it is
 *   vpair(v, w)                  v and w rounded to bfloat16, in pairs; or v
 */
#ifndef PYDTNN_STORED_H
#define PYDTNN_STORED_H

#include "simd.h"

#if STORED_BF16 && defined(__AVX512BF16__)
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

#if STORED_BF16
typedef uint16_t stored;
typedef uint32_t uvec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t hvec __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t hvec_unaligned
    __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

INLINE vec widen_halves(hvec h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }

/* The rounded upper halves. */
INLINE hvec halves_of(vec v) {
#if HAS_DOTS
    return (hvec)_mm512_cvtneps_pbh((__m512)v);
#else
    const uvec bits = (uvec)v, exponent = bits & 0x7f800000;
    const uvec rounded = bits + 0x7fff + (bits >> 16 & 1), zero = bits & 0x80000000;
    const vec number = vselect(exponent == 0, (vec)zero, (vec)rounded);
    const vec quiet = (vec)(bits | 0x400000);
    return __builtin_convertvector((uvec)vselect(v == v, number, quiet) >> 16, hvec);
#endif
}
INLINE vec sround(vec v) { return widen_halves(halves_of(v)); }
INLINE vec sload(const stored *p) { return widen_halves(*(const hvec_unaligned *)p); }
INLINE void sstore(stored *p, vec v) { *(hvec_unaligned *)p = halves_of(v); }
#if VECTOR_BYTES == 64
INLINE vec sload_part(const stored *p, ptrdiff_t n) {
    return widen_halves((hvec)_mm256_maskz_loadu_epi16(PART(n), p));
}
INLINE void sstore_part(stored *p, vec v, ptrdiff_t n) {
    _mm256_mask_storeu_epi16(p, PART(n), (__m256i)halves_of(v));
}
#else
INLINE vec sload_part(const stored *p, ptrdiff_t n) {
    hvec h = {0};
    memcpy(&h, p, (size_t)n * sizeof *p);
    return widen_halves(h);
}
INLINE void sstore_part(stored *p, vec v, ptrdiff_t n) {
    const hvec h = halves_of(v);
    memcpy(p, &h, (size_t)n * sizeof *p);
}
#endif
INLINE real widened(stored element) {
    const uint32_t bits = (uint32_t)element << 16;
    real value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#else
typedef real stored;
INLINE vec sround(vec v) { return v; }
INLINE vec sload(const stored *p) { return vload(p); }
INLINE void sstore(stored *p, vec v) { vstore(p, v); }
INLINE vec sload_part(const stored *p, ptrdiff_t n) { return vload_part(p, n); }
INLINE void sstore_part(stored *p, vec v, ptrdiff_t n) { vstore_part(p, v, n); }
INLINE real widened(stored element) { return element; }
#endif

/* How vectors are written that are factors of products. */
enum form {
    REALS,  /* unchanged */
    HALVES, /* half a vector: neighbouring lanes are pairs */
    FIRST,  /* first elements of pairs, of which the second are 0 */
    SECOND  /* second elements of pairs that are already there */
};

INLINE vec vpair(vec first, vec second) {
#if HAS_DOTS
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)halves_of(first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)halves_of(second));
    return (vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#else
    (void)second;
    return first;
#endif
}

INLINE void vput(const enum form form, real *p, vec v) {
#if HAS_DOTS
    const __m256i half = (__m256i)halves_of(v);
    const __m512i first = _mm512_cvtepu16_epi32(half);
    if (form == HALVES) {
        _mm256_storeu_si256((__m256i *)p, half);
    } else if (form == FIRST) {
        _mm512_storeu_si512(p, first);
    } else if (form == SECOND) {
        const __m512i second = _mm512_slli_epi32(first, 16);
        _mm512_storeu_si512(p, _mm512_or_si512(_mm512_loadu_si512(p), second));
    } else {
        vstore(p, v);
    }
#else
    (void)form;
    vstore(p, v);
#endif
}

#endif
