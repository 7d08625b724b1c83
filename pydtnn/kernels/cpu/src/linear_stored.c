/* Products of matrices whose elements are stored in 16 bits, as products of copies with real
 * elements: two or four bytes an element more to read and write, little beside large products. */
#include <stdlib.h>

#include "gemm.h"
#include "lanes.h"
#include "linear_parts.h"
#include "parts.h"

#if STORED_BF16
static void widen_all(const stored *x, ptrdiff_t n, real *out, int threads) {
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              read_row(x + p * PART, part_length(n, PART, p), out + p * PART));
}
static void narrow_all(const real *x, ptrdiff_t n, stored *out, int threads) {
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              write_row(x + p * PART, part_length(n, PART, p), out + p * PART));
}

int NAME(stored_forward)(const struct linear_shape *s, const void *x, const void *w, const void *b,
                         void *y, int threads) {
    const ptrdiff_t inputs = s->batch * s->inputs, weights = s->outputs * s->inputs;
    const ptrdiff_t outputs = s->batch * s->outputs;
    real *memory = NAME(scratch_new)(inputs + weights + outputs);
    if (!memory) return -1;
    real *x_real = memory, *w_real = x_real + inputs, *y_real = w_real + weights;
    widen_all(x, inputs, x_real, threads);
    widen_all(w, weights, w_real, threads);
    const int status = NAME(linear_forward)(s, x_real, w_real, b, y_real, threads);
    narrow_all(y_real, outputs, y, threads);
    free(memory);
    return status;
}

int NAME(stored_backward_data)(const struct linear_shape *s, const void *dy, const void *w,
                               void *dx, int threads) {
    const ptrdiff_t inputs = s->batch * s->inputs, weights = s->outputs * s->inputs;
    const ptrdiff_t outputs = s->batch * s->outputs;
    real *memory = NAME(scratch_new)(inputs + weights + outputs);
    if (!memory) return -1;
    real *dx_real = memory, *w_real = dx_real + inputs, *dy_real = w_real + weights;
    widen_all(dy, outputs, dy_real, threads);
    widen_all(w, weights, w_real, threads);
    const int status = NAME(linear_backward_data)(s, dy_real, w_real, dx_real, threads);
    narrow_all(dx_real, inputs, dx, threads);
    free(memory);
    return status;
}

int NAME(stored_backward_filter)(const struct linear_shape *s, const void *x, const void *dy,
                                 void *dw, int accumulate, int threads) {
    const ptrdiff_t inputs = s->batch * s->inputs, outputs = s->batch * s->outputs;
    real *memory = NAME(scratch_new)(inputs + outputs);
    if (!memory) return -1;
    real *x_real = memory, *dy_real = x_real + inputs;
    widen_all(x, inputs, x_real, threads);
    widen_all(dy, outputs, dy_real, threads);
    const int status =
        NAME(linear_backward_filter)(s, x_real, dy_real, dw, accumulate, threads);
    free(memory);
    return status;
}
#else
typedef int nothing_is_stored; /* an empty source is no C */
#endif
