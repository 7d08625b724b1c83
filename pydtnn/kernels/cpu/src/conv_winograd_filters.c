/* Filters of Winograd's convolution into the space of the products, and their gradients back.
 *
 * Forward and backward of data pack the filters on every call (they change between calls): a panel
 * of outputs is transposed tap by tap, as for the direct convolution, and transformed with outputs
 * in the lanes. Gradients come with the input channels in the lanes, as dw has them.
 */
#include "conv_winograd.h"
#include "conv_winograd_points.h"

enum { PACK_INPUTS = LANES }; /* at a time: gemm_pack turns squares, and they stay in L1 */

/* u of `n` filters that lie side by side, taps `tap` apart. */
INLINE void transform_filters(const int rows, const int columns, const enum form form, ptrdiff_t n, const real *w,
                              ptrdiff_t tap, ptrdiff_t stride, real *u) {
    const int down = rows + 2, across = columns + 2;
    for (ptrdiff_t at = 0; at < n; at += LANES) {
        vec x[TAPS], half[3 * MOST_POINTS], line[MOST_POINTS];
        real *q = u + at;
        UNROLL
        for (int k = 0; k < TAPS; k++) x[k] = vload(w + k * tap + at);
        UNROLL
        for (int k = 0; k < 3; k++) filter_points(columns, x + 3 * k, 1, half + k * across);
        UNROLL
        for (int j = 0; j < across; j++) {
            real *p = q;
            filter_points(rows, half + j, across, line);
            UNROLL
            for (int i = 0; i < down; i++) {
                vput(form, p, line[i]);
                p += across * stride;
                KEEP(p);
            }
            q += stride;
            KEEP(q);
        }
    }
}

#if HAS_DOTS
/* The same for `count` inputs of `width` outputs in pairs. */
INLINE void transform_pairs(const int rows, const int columns, ptrdiff_t count, ptrdiff_t width, const real *w, ptrdiff_t stride,
                            real *u) {
    for (ptrdiff_t i = 0; i < count; i += 2, u += width) {
        const real *first = w + i * width;
        transform_filters(rows, columns, FIRST, width, first, count * width, stride, u);
        transform_filters(rows, columns, SECOND, width, first + width, count * width, stride, u);
    }
}
#endif

void NAME(winograd_filters)(struct tile tile, enum factors factors, const struct filter_view *view,
                            struct range inputs, struct range outputs, const real *w,
                            ptrdiff_t stride, real *u) {
    const int paired = factors == PAIRED_INPUTS;
    const ptrdiff_t end = inputs.first + inputs.count;
    real packed[TAPS * PACK_INPUTS * ROWS_COLUMNS];
    for (ptrdiff_t j = 0; j < outputs.count; j += ROWS_COLUMNS) {
        const ptrdiff_t columns = smaller(outputs.count - j, ROWS_COLUMNS);
        const ptrdiff_t width = vectors_of(columns) * LANES;
        const real *from = w + (outputs.first + j) * view->outer;
        for (ptrdiff_t i = inputs.first; i < end; i += PACK_INPUTS) {
            const ptrdiff_t count = smaller(end - i, PACK_INPUTS), n = count * width;
            for (int t = 0; t < TAPS; t++) {
                NAME(gemm_pack)
                (count, columns, from + view->tap[t] + i * view->inner, view->inner, view->outer,
                 packed + t * n);
            }
            if (tile.rows == 4) {
                transform_filters(4, 4, REALS, n, packed, n, stride, u + i * width);
#if HAS_DOTS
            } else if (paired && tile.columns == 4) {
                transform_pairs(2, 4, count, width, packed, stride, u + i / 2 * width);
            } else if (paired) {
                transform_pairs(2, 2, count, width, packed, stride, u + i / 2 * width);
            } else if (tile.columns == 4) {
                transform_filters(2, 4, REALS, n, packed, n, stride, u + i * width);
#endif
            } else {
                transform_filters(2, 2, REALS, n, packed, n, stride, u + i * width);
            }
        }
        u += (paired ? view->in / 2 : view->in) * width;
    }
}

INLINE void sum_filter(const int rows, const int columns, const struct filter_sum *s,
                       ptrdiff_t channels, const real *du, real *dw) {
    const int down = rows + 2, across = columns + 2;
    for (ptrdiff_t c = 0; c < channels; c += LANES) {
        const ptrdiff_t lanes = smaller(channels - c, LANES);
        vec x[MOST_POINTS], half[3 * MOST_POINTS], line[3];
        UNROLL
        for (int i = 0; i < down; i++) {
            UNROLL
            for (int j = 0; j < across; j++) {
                const real *p = du + (i * across + j) * s->stride + c;
                x[j] = vload(p);
                for (ptrdiff_t k = 1; k < s->parts; k++) x[j] += vload(p + k * s->part);
            }
            filter_sums(columns, x, 1, half + 3 * i);
        }
        UNROLL
        for (int j = 0; j < 3; j++) {
            filter_sums(rows, half + j, 3, line);
            UNROLL
            for (int i = 0; i < 3; i++) {
                real *p = dw + (3 * i + j) * s->tap + c;
                if (s->accumulate) line[i] += vload_part(p, lanes);
                vstore_part(p, line[i], lanes);
            }
        }
    }
}

void NAME(winograd_filter_sum)(struct tile tile, const struct filter_sum *sum, ptrdiff_t channels,
                               const real *du, real *dw) {
    if (tile.rows == 4) {
        sum_filter(4, 4, sum, channels, du, dw);
#if HAS_DOTS
    } else if (tile.columns == 4) {
        sum_filter(2, 4, sum, channels, du, dw);
#endif
    } else {
        sum_filter(2, 2, sum, channels, du, dw);
    }
}
