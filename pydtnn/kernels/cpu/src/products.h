/* The step of a sum of products, for files that are compiled twice: for factors that are reals, and
 * with PAIRS for pairs of bfloat16, each in the place of a real (see HAS_DOTS in stored.h): then a
 * step is two products. Sums are reals.
 *
 *   PRODUCTS(name)         the name of a function of either
 *   broadcast(p)           a factor, in all lanes
 *   add_product(s, x, w)   s + x w
 */
#ifndef PYDTNN_PRODUCTS_H
#define PYDTNN_PRODUCTS_H

#include "simd.h"

#ifdef PAIRS
#define PRODUCTS(name) NAME(name##_pairs)
INLINE vec broadcast(const real *pair) {
    int32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return (vec)_mm512_set1_epi32(bits);
}
INLINE vec add_product(vec sum, vec x, vec w) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
}
#else
#define PRODUCTS(name) NAME(name)
INLINE vec broadcast(const real *element) { return vset(*element); }
INLINE vec add_product(vec sum, vec x, vec w) { return sum + x * w; }
#endif

#endif
