/* Sums of vectors in double precision, whatever the real type; the lanes are added in a fixed order at the end. */
#ifndef PYDTNN_DOUBLES_H
#define PYDTNN_DOUBLES_H

#include "simd.h"

typedef double dvec __attribute__((vector_size(VECTOR_BYTES)));

#if REAL_FLOAT
typedef float half_vec __attribute__((vector_size(VECTOR_BYTES / 2)));

struct doubles {
    dvec low, high;
};

INLINE struct doubles widen(vec v) {
    union {
        vec whole;
        half_vec half[2];
    } u = {v};
    return (struct doubles){__builtin_convertvector(u.half[0], dvec), __builtin_convertvector(u.half[1], dvec)};
}
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
