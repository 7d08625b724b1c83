/* The vector layer of all templates: one source, compiled once per instruction set and real type.
 *
 * setup.py defines VECTOR_BYTES (64, 32 or 16: the width the instruction set has; a wider one makes
 * gcc split and spill), REAL_FLOAT (1 float, 0 double), STORED_BF16 (1: arrays of activations have
 * 16 bits, see stored.h) and SUFFIX (as in avx512_f32). GCC's vector
 * extensions do the rest, so gcc and clang, x86 and ARM compile the same lines; only loads and
 * stores of part of a vector, max and min use intrinsics.
 *
 *   real, vec, ivec       a scalar, a vector of LANES of them, one of as many integers (masks)
 *   NAME(x)               x with the suffix of this variant, for every symbol that leaves its file
 *   vload(p), vstore      unaligned
 *   vload_part(p, n)      the first n lanes, 0 <= n <= LANES, the others 0; no other memory is read
 *   vstore_part(p, v, n)  the first n lanes; no other memory is written
 *   vset(x), vzero()      broadcast, zero
 *   vselect(m, a, b)      a where the mask is set, else b; a mask is a comparison such as a > b
 *   vmax, vmin            lane by lane
 *   vsum(v)               sum over the lanes, always in the same (pairwise) order
 */
#ifndef PYDTNN_SIMD_H
#define PYDTNN_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if VECTOR_BYTES >= 32
#include <immintrin.h>
#endif

#define PASTE_(x, suffix) x##_##suffix
#define PASTE(x, suffix) PASTE_(x, suffix)
#define NAME(x) PASTE(x, SUFFIX)

#if REAL_FLOAT
typedef float real;
typedef int32_t ireal;
#else
typedef double real;
typedef int64_t ireal;
#endif

enum { LANES = VECTOR_BYTES / sizeof(real) };

typedef real vec __attribute__((vector_size(VECTOR_BYTES)));
typedef ireal ivec __attribute__((vector_size(VECTOR_BYTES)));
typedef real vec_unaligned
    __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

#define INLINE static inline __attribute__((always_inline, unused))

INLINE vec vload(const real *p) { return *(const vec_unaligned *)p; }
INLINE void vstore(real *p, vec v) { *(vec_unaligned *)p = v; }
INLINE vec vzero(void) { return (vec){0}; }
INLINE vec vset(real x) {
    return x - (vec){0};
} /* x - 0 is x for every x, -0 and NaN included; x + 0 is not */

INLINE vec vselect(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* Masked loads and stores do not touch memory where the mask is off, so a tail at the end of a page
 * is safe. The masks are made from a count. max and min are one instruction here; like the
 * comparison they return b when an operand is NaN. */
#if VECTOR_BYTES == 64 && REAL_FLOAT
#define PART(n) ((__mmask16)((1u << (n)) - 1))
INLINE vec vload_part(const real *p, ptrdiff_t n) { return (vec)_mm512_maskz_loadu_ps(PART(n), p); }
INLINE void vstore_part(real *p, vec v, ptrdiff_t n) {
    _mm512_mask_storeu_ps(p, PART(n), (__m512)v);
}
INLINE vec vmax(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec vmin(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif VECTOR_BYTES == 64
#define PART(n) ((__mmask8)((1u << (n)) - 1))
INLINE vec vload_part(const real *p, ptrdiff_t n) { return (vec)_mm512_maskz_loadu_pd(PART(n), p); }
INLINE void vstore_part(real *p, vec v, ptrdiff_t n) {
    _mm512_mask_storeu_pd(p, PART(n), (__m512d)v);
}
INLINE vec vmax(vec a, vec b) { return (vec)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE vec vmin(vec a, vec b) { return (vec)_mm512_min_pd((__m512d)a, (__m512d)b); }
#elif VECTOR_BYTES == 32 && REAL_FLOAT
#define PART(n) \
    _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
INLINE vec vload_part(const real *p, ptrdiff_t n) { return (vec)_mm256_maskload_ps(p, PART(n)); }
INLINE void vstore_part(real *p, vec v, ptrdiff_t n) { _mm256_maskstore_ps(p, PART(n), (__m256)v); }
INLINE vec vmax(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec vmin(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#elif VECTOR_BYTES == 32
#define PART(n) _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3))
INLINE vec vload_part(const real *p, ptrdiff_t n) { return (vec)_mm256_maskload_pd(p, PART(n)); }
INLINE void vstore_part(real *p, vec v, ptrdiff_t n) {
    _mm256_maskstore_pd(p, PART(n), (__m256d)v);
}
INLINE vec vmax(vec a, vec b) { return (vec)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE vec vmin(vec a, vec b) { return (vec)_mm256_min_pd((__m256d)a, (__m256d)b); }
#else
INLINE vec vload_part(const real *p, ptrdiff_t n) {
    vec v = {0};
    memcpy(&v, p, (size_t)n * sizeof(real));
    return v;
}
INLINE void vstore_part(real *p, vec v, ptrdiff_t n) { memcpy(p, &v, (size_t)n * sizeof(real)); }
INLINE vec vmax(vec a, vec b) { return vselect(a > b, a, b); }
INLINE vec vmin(vec a, vec b) { return vselect(a < b, a, b); }
#endif

INLINE real vsum(vec v) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    }
    return v[0];
}

#endif
