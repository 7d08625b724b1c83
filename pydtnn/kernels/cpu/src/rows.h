/* Operations of softmax and the losses on one row of classes, with a length that is rarely a
 * multiple of LANES. */
#ifndef PYDTNN_ROWS_H
#define PYDTNN_ROWS_H

#include "functions.h"
#include "lanes.h"

/* Largest element; -infinity without any. A NaN may be passed over. */
static inline real row_max(const real *x, ptrdiff_t n) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    vec top = vload_or(x + whole, tail, vset((real)-__builtin_inf()));
    for (ptrdiff_t j = 0; j < whole; j += LANES) top = vmax(top, vload(x + j));
    return vtop(top);
}

/* out = exp(x - shift) but for the tail, the part of a vector at the end, which comes back in
   *last, with zeros behind it. Returns the sum. */
static inline real row_exp(const real *x, ptrdiff_t n, real shift, real *out, vec *last) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    vec sum = *last = vexp(vload_or(x + whole, tail, vset((real)-__builtin_inf())) - shift);
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        const vec e = vexp(vload(x + j) - shift);
        vstore(out + j, e);
        sum += e;
    }
    return vsum(sum);
}

#endif
