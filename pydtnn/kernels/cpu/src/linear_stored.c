/* Products of matrices whose elements are stored in 16 bits.
 *
 * Instructions for pairs of bfloat16 (HAS_DOTS) add up two products at a time, whose factors must
 * lie side by side: along a row they do, where they are; along a column, pairs of rows are
 * interleaved in a copy. Otherwise, and where the summed index is odd, operands are copied as
 * reals, which is little beside large products.
 */
#include <stdlib.h>

#include "gemm.h"
#include "lanes.h"
#include "linear_parts.h"
#include "parts.h"
#include "stored.h"

#if STORED_BF16
static void widen_all(const stored *x, ptrdiff_t n, real *out, int threads) {
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              read_row(x + p * PART, part_length(n, PART, p), out + p * PART));
}
static void narrow_all(const real *x, ptrdiff_t n, stored *out, int threads) {
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              write_row(x + p * PART, part_length(n, PART, p), out + p * PART));
}

#if HAS_DOTS
INLINE void pair_vector(const stored *first, const stored *second, real *out, ptrdiff_t i,
                        ptrdiff_t lanes) {
    const uvec high = second ? (uvec)load_stored(second + i, lanes) : (uvec){0};
    store(out + i, (vec)((uvec)load_stored(first + i, lanes) >> 16 | high), lanes);
}

static void pair_row(const stored *first, const stored *second, ptrdiff_t n, real *out) {
    FOR_CHANNELS(n, pair_vector, first, second, out);
}

/* Interleave rows 2 r and 2 r + 1 of x (rows, columns), the last with zeros if it is alone. */
static void pair_rows(const stored *x, ptrdiff_t rows, ptrdiff_t columns, real *out, int threads) {
    FOR_PARTS(r, (rows + 1) / 2, rows * columns, threads,
              const stored *first = x + 2 * r * columns;
              pair_row(first, 2 * r + 1 < rows ? first + columns : NULL, columns,
                       out + r * columns));
}

static int forward_pairs(const struct linear_shape *s, const void *x, const void *w, const void *b,
                         void *y, int threads) {
    const ptrdiff_t outputs = s->batch * s->outputs;
    const struct linear_shape half = {s->batch, s->inputs / 2, s->outputs};
    real *y_real = NAME(scratch_new)(outputs);
    if (!y_real) return -1;
    const int status = NAME(linear_forward_pairs)(&half, x, w, b, y_real, threads);
    narrow_all(y_real, outputs, y, threads);
    free(y_real);
    return status;
}

static int backward_data_pairs(const struct linear_shape *s, const void *dy, const void *w,
                               void *dx, int threads) {
    const ptrdiff_t inputs = s->batch * s->inputs;
    const struct linear_shape half = {s->batch, s->inputs, s->outputs / 2};
    real *dx_real = NAME(scratch_new)(inputs + half.outputs * s->inputs);
    if (!dx_real) return -1;
    real *pairs = dx_real + inputs;
    pair_rows(w, s->outputs, s->inputs, pairs, threads);
    const int status = NAME(linear_backward_data_pairs)(&half, dy, pairs, dx_real, threads);
    narrow_all(dx_real, inputs, dx, threads);
    free(dx_real);
    return status;
}

static int backward_filter_pairs(const struct linear_shape *s, const void *x, const void *dy,
                                 void *dw, int accumulate, int threads) {
    const struct linear_shape half = {(s->batch + 1) / 2, s->inputs, s->outputs};
    real *x_pairs = NAME(scratch_new)(half.batch * (s->inputs + s->outputs));
    if (!x_pairs) return -1;
    real *dy_pairs = x_pairs + half.batch * s->inputs;
    pair_rows(x, s->batch, s->inputs, x_pairs, threads);
    pair_rows(dy, s->batch, s->outputs, dy_pairs, threads);
    const int status =
        NAME(linear_backward_filter_pairs)(&half, x_pairs, dy_pairs, dw, accumulate, threads);
    free(x_pairs);
    return status;
}
#endif

int NAME(stored_forward)(const struct linear_shape *s, const void *x, const void *w, const void *b,
                         void *y, int threads) {
#if HAS_DOTS
    if (s->batch >= FEW && s->inputs % 2 == 0) return forward_pairs(s, x, w, b, y, threads);
#endif
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
#if HAS_DOTS
    if (s->batch >= FEW && s->outputs % 2 == 0)
        return backward_data_pairs(s, dy, w, dx, threads);
#endif
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
#if HAS_DOTS
    if (s->batch >= 2 * FEW) return backward_filter_pairs(s, x, dy, dw, accumulate, threads);
#endif
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
