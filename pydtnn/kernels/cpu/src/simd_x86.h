/* The x86 intrinsics of the vector layer; included only by simd.h, for AVX2 and AVX-512.
 *
 * Masked loads and stores do not touch memory where the mask is off, so a tail at the end of a page
 * is safe. The masks are made from a count. max and min are one instruction here; like the
 * comparison they return b when an operand is NaN.
 */
#ifndef PYDTNN_SIMD_X86_H
#define PYDTNN_SIMD_X86_H

#include <immintrin.h>

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
#error "simd_x86.h serves vectors of 32 and 64 bytes"
#endif

#endif
