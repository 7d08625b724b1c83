/* What softmax and the losses do with one row of classes, whose length is rarely a multiple of
   LANES. */
#ifndef PYDTNN_ROWS_H
#define PYDTNN_ROWS_H

#include "functions.h"
#include "lanes.h"

/* Largest element; -infinity without any. A NaN may be passed over. */
static inline real row_max(const real *x, ptrdiff_t n) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    vec top = vload_or(x + whole, tail, vset((real)-__builtin_inf()));
    for (ptrdiff_t j = 0; j < whole; j += LANES) top = vmax(top, vload(x + j));
    real largest = top[0];
    for (int i = 1; i < LANES; i++) largest = top[i] > largest ? top[i] : largest;
    return largest;
}

/* out = exp(x - shift); returns its sum. */
static inline real row_exp(const real *x, ptrdiff_t n, real shift, real *out) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    vec sum = vzero();
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        vec e = vexp(vload(x + j) - shift);
        vstore(out + j, e);
        sum += e;
    }
    if (tail) {
        vec e = vexp(vload_or(x + whole, tail, vset((real)-__builtin_inf())) - shift);
        vstore_part(out + whole, e, tail);
        sum += e;
    }
    return vsum(sum);
}

#endif
