/* Products for a few samples, with little reuse of w.
 *
 * With fewer samples than FEW the register blocks of gemm.c would be mostly empty, and the time is
 * bound by the memory bandwidth of w or dw. Each is therefore read or written once, along its rows,
 * by loops that keep ROWS of them in flight:
 *
 *   forward           y[n, o] = w[o] . x[n]            sums of lanes, ROWS outputs at a time
 *   backward_data     dx[n] += dy[n, o] w[o]           ROWS outputs at a time; dx stays in L1
 *   backward_filter   dw[o] = sum of dy[n, o] x[n]     one store per vector
 *
 * Threads share outputs, or columns in backward_data, so each sum has one order. Expected: the
 * bandwidth of a core for the memory of w.
 */
#include "gemm.h"
#include "lanes.h"
#include "linear_parts.h"

enum { ROWS = 4, BLOCK = 64, COLUMNS = 2048 };

/* y[o] = start[o] + w[o] . x for `rows` outputs from number o on. */
INLINE void dot_rows(const int rows, ptrdiff_t inputs, const real *x, const real *w, const real *b,
                     real *y) {
    vec sum[ROWS];
    ptrdiff_t j = 0;
    UNROLL
    for (int r = 0; r < rows; r++) sum[r] = vzero();
    for (; j + LANES <= inputs; j += LANES) {
        UNROLL
        for (int r = 0; r < rows; r++) sum[r] += vload(w + r * inputs + j) * vload(x + j);
    }
    if (j < inputs) {
        UNROLL
        for (int r = 0; r < rows; r++)
            sum[r] += vload_part(w + r * inputs + j, inputs - j) * vload_part(x + j, inputs - j);
    }
    for (int r = 0; r < rows; r++) y[r] = vsum(sum[r]) + (b ? b[r] : 0);
}

void NAME(few_forward)(const struct linear_shape *s, const real *x, const real *w, const real *b,
                       real *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (ptrdiff_t first = 0; first < s->outputs; first += BLOCK) {
        ptrdiff_t end = smaller(first + BLOCK, s->outputs), o = first;
        for (; o < end; o += o + ROWS <= end ? ROWS : 1) {
            const real *bias = b ? b + o : NULL;
            for (ptrdiff_t n = 0; n < s->batch; n++) {
                const real *row = x + n * s->inputs;
                real *out = y + n * s->outputs + o;
                if (o + ROWS <= end) {
                    dot_rows(ROWS, s->inputs, row, w + o * s->inputs, bias, out);
                } else {
                    dot_rows(1, s->inputs, row, w + o * s->inputs, bias, out);
                }
            }
        }
    }
}

/* dx[j] += sum over `rows` outputs of dy[r] w[r, j], for `columns` of rows that are `width` long.
 */
INLINE void add_rows(const int rows, ptrdiff_t columns, ptrdiff_t width, const real *dy,
                     const real *w, real *dx) {
    vec factor[ROWS];
    UNROLL
    for (int r = 0; r < rows; r++) factor[r] = vset(dy[r]);
    for (ptrdiff_t j = 0; j < columns; j += LANES) {
        ptrdiff_t lanes = smaller(columns - j, LANES);
        vec sum = load(dx + j, lanes);
        UNROLL
        for (int r = 0; r < rows; r++) sum += factor[r] * load(w + r * width + j, lanes);
        store(dx + j, sum, lanes);
    }
}

void NAME(few_backward_data)(const struct linear_shape *s, const real *dy, const real *w, real *dx,
                             int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (ptrdiff_t first = 0; first < s->inputs; first += COLUMNS) {
        ptrdiff_t columns = smaller(s->inputs - first, COLUMNS);
        for (ptrdiff_t n = 0; n < s->batch; n++)
            memset(dx + n * s->inputs + first, 0, (size_t)columns * sizeof(real));
        for (ptrdiff_t o = 0; o < s->outputs; o += o + ROWS <= s->outputs ? ROWS : 1) {
            const real *rows = w + o * s->inputs + first;
            for (ptrdiff_t n = 0; n < s->batch; n++) {
                const real *g = dy + n * s->outputs + o;
                real *out = dx + n * s->inputs + first;
                if (o + ROWS <= s->outputs) {
                    add_rows(ROWS, columns, s->inputs, g, rows, out);
                } else {
                    add_rows(1, columns, s->inputs, g, rows, out);
                }
            }
        }
    }
}

/* dw = [dw +] sum over `samples` of g[n] x[n], for one row of dw. */
INLINE void outer_row(const int samples, const struct linear_shape *s, const real *x, const real *g,
                      int accumulate, real *dw) {
    vec factor[FEW];
    UNROLL
    for (int n = 0; n < samples; n++) factor[n] = vset(g[n * s->outputs]);
    for (ptrdiff_t j = 0; j < s->inputs; j += LANES) {
        ptrdiff_t lanes = smaller(s->inputs - j, LANES);
        vec sum = accumulate ? load(dw + j, lanes) : vzero();
        UNROLL
        for (int n = 0; n < samples; n++) sum += factor[n] * load(x + n * s->inputs + j, lanes);
        store(dw + j, sum, lanes);
    }
}

void NAME(few_backward_filter)(const struct linear_shape *s, const real *x, const real *dy,
                               real *dw, int accumulate, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (ptrdiff_t o = 0; o < s->outputs; o++) {
        real *row = dw + o * s->inputs;
        switch (s->batch) {
        case 3:
            outer_row(3, s, x, dy + o, accumulate, row);
            break;
        case 2:
            outer_row(2, s, x, dy + o, accumulate, row);
            break;
        case 1:
            outer_row(1, s, x, dy + o, accumulate, row);
            break;
        default:
            outer_row(0, s, x, dy + o, accumulate, row);
        }
    }
}
