/* Sums of vectors in double precision for any real type; the lanes are added in a fixed
   order at the end. */
#ifndef PYDTNN_DOUBLES_H
#define PYDTNN_DOUBLES_H

#include "simd.h"

typedef double dvec __attribute__((vector_size(VECTOR_BYTES)));

#if REAL_FLOAT
struct doubles {
    dvec low, high;
};

#if VECTOR_BYTES == 64
INLINE struct doubles widen(vec v) {
    return (struct doubles){
        (dvec)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)),
        (dvec)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1)),
    };
}
#elif VECTOR_BYTES == 32
INLINE struct doubles widen(vec v) {
    return (struct doubles){
        (dvec)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)),
        (dvec)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)),
    };
}
#else
INLINE struct doubles widen(vec v) {
    return (struct doubles){{(double)v[0], (double)v[1]}, {(double)v[2], (double)v[3]}};
}
#endif

INLINE void add_doubles(struct doubles *sum, vec v) {
    struct doubles d = widen(v);
    sum->low += d.low;
    sum->high += d.high;
}
INLINE void add_squares(struct doubles *sum, vec v) {
    struct doubles d = widen(v);
    sum->low += d.low * d.low;
    sum->high += d.high * d.high;
}
INLINE double sum_doubles(struct doubles sum) {
    dvec both = sum.low + sum.high;
    double total = 0;
    for (size_t i = 0; i < sizeof both / sizeof total; i++) total += both[i];
    return total;
}
#else
struct doubles {
    vec sum;
};
INLINE void add_doubles(struct doubles *sum, vec v) { sum->sum += v; }
INLINE void add_squares(struct doubles *sum, vec v) { sum->sum += v * v; }
INLINE double sum_doubles(struct doubles sum) { return vsum(sum.sum); }
#endif

#endif
