/* Filters of Winograd's convolution into the space of the products, and their gradients back.
 *
 * Forward and backward of data pack the filters on every call (they change between calls): a panel
 * of outputs is transposed tap by tap, as for the direct convolution, and transformed with outputs
 * in the lanes. Gradients come with the input channels in the lanes, as dw has them.
 */
#include "conv_winograd_parts.h"
#include "conv_winograd_points.h"
#include "stored.h"

/* Taps at a time, of a vector of inputs: gemm_pack turns squares, and they stay in L1. */
enum { PACK_TAPS = 9 };

/* u of `n` filters that lie side by side, taps `tap` apart. */
INLINE void transform_filters(const int rows, const int columns, const int taps,
                              const enum form form, ptrdiff_t n, const real *w, ptrdiff_t tap,
                              ptrdiff_t stride, real *u) {
    const int high = rows == 1 ? 1 : taps; /* a line has no second pass */
    const int down = points_of(rows, high), across = points_of(columns, taps);
    for (ptrdiff_t at = 0; at < n; at += LANES) {
        vec x[MOST_TAPS], half[MOST_TAPS * MOST_POINTS], line[MOST_POINTS];
        real *q = u + at;
        UNROLL
        for (int k = 0; k < high; k++) {
            UNROLL
            for (int l = 0; l < taps; l++) x[l] = vload(w + (k * taps + l) * tap + at);
            filter_points(across, taps, x, 1, half + k * across);
        }
        UNROLL
        for (int j = 0; j < across; j++) {
            real *p = q;
            if (high > 1) filter_points(down, taps, half + j, across, line);
            UNROLL
            for (int i = 0; i < down; i++) {
                vput(form, p, high > 1 ? line[i] : half[j]);
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
INLINE void transform_pairs(const int rows, const int columns, ptrdiff_t count, ptrdiff_t width,
                            const real *w, ptrdiff_t stride, real *u) {
    for (ptrdiff_t i = 0; i < count; i += 2, u += width) {
        const real *first = w + i * width;
        transform_filters(rows, columns, 3, FIRST, width, first, count * width, stride, u);
        transform_filters(rows, columns, 3, SECOND, width, first + width, count * width, stride, u);
    }
}
#endif

void NAME(winograd_filters)(struct tile tile, enum factors factors, const struct filter_view *view,
                            struct range inputs, struct range outputs, const real *w,
                            ptrdiff_t stride, struct range rows, real *u) {
    const int paired = factors == PAIRED_INPUTS, pair = paired ? 2 : 1;
    const int taps = taps_along(tile, 0) * taps_along(tile, 1);
    const ptrdiff_t most = taps > PACK_TAPS ? LANES / 2 : LANES;
    real packed[PACK_TAPS * LANES * ROWS_COLUMNS];
    for (ptrdiff_t j = 0; j < outputs.count; j += ROWS_COLUMNS) {
        const ptrdiff_t columns = smaller(outputs.count - j, ROWS_COLUMNS);
        const ptrdiff_t width = vectors_of(columns) * LANES;
        const real *from = w + (outputs.first + j) * view->outer + inputs.first * view->inner;
        for (ptrdiff_t i = 0; i < inputs.count; i += most) {
            const ptrdiff_t count = smaller(inputs.count - i, most), n = count * width;
            for (int t = 0; t < taps; t++) {
                if (view->tap[t] < 0) {
                    memset(packed + t * n, 0, (size_t)n * sizeof *packed);
                    continue;
                }
                NAME(gemm_pack)
                (count, columns, from + view->tap[t] + i * view->inner, view->inner, view->outer,
                 packed + t * n);
            }
            real *to = u + (rows.first + i) / pair * width;
            if (is_line(tile) && tile.taps == 3) {
                transform_filters(1, 4, 3, REALS, n, packed, n, stride, to);
            } else if (is_line(tile)) {
                transform_filters(1, 5, 4, REALS, n, packed, n, stride, to);
            } else if (tile.taps == 2) {
                transform_filters(4, 4, 2, REALS, n, packed, n, stride, to);
            } else if (tile.taps == 4) {
                transform_filters(3, 3, 4, REALS, n, packed, n, stride, to);
            } else if (tile.rows == 4) {
                transform_filters(4, 4, 3, REALS, n, packed, n, stride, to);
#if HAS_DOTS
            } else if (paired && tile.columns == 4) {
                transform_pairs(2, 4, count, width, packed, stride, to);
            } else if (paired) {
                transform_pairs(2, 2, count, width, packed, stride, to);
            } else if (tile.columns == 4) {
                transform_filters(2, 4, 3, REALS, n, packed, n, stride, to);
#endif
            } else {
                transform_filters(2, 2, 3, REALS, n, packed, n, stride, to);
            }
        }
        u += rows.count / pair * width;
    }
}

INLINE void sum_filter(const int rows, const int columns, const int taps,
                       const struct filter_sum *s, ptrdiff_t channels, const real *du, real *dw) {
    const int high = rows == 1 ? 1 : taps;
    const int down = points_of(rows, high), across = points_of(columns, taps);
    for (ptrdiff_t c = 0; c < channels; c += LANES) {
        const ptrdiff_t lanes = smaller(channels - c, LANES);
        vec x[MOST_POINTS], half[MOST_TAPS * MOST_POINTS], line[MOST_TAPS];
        UNROLL
        for (int i = 0; i < down; i++) {
            UNROLL
            for (int j = 0; j < across; j++) {
                const real *p = du + (i * across + j) * s->stride + c;
                x[j] = vload(p);
                for (ptrdiff_t k = 1; k < s->parts; k++) x[j] += vload(p + k * s->part);
            }
            filter_sums(across, taps, x, 1, half + taps * i);
        }
        UNROLL
        for (int j = 0; j < taps; j++) {
            if (j >= s->wide) break;
            line[0] = half[j];
            if (high > 1) filter_sums(down, taps, half + j, taps, line);
            UNROLL
            for (int i = 0; i < high; i++) {
                real *p = dw + i * s->row + j * s->column + c;
                if (i >= s->high) break;
                if (s->accumulate) line[i] += vload_part(p, lanes);
                vstore_part(p, line[i], lanes);
            }
        }
    }
}

void NAME(winograd_filter_sum)(struct tile tile, const struct filter_sum *sum, ptrdiff_t channels,
                               const real *du, real *dw) {
    if (is_line(tile) && tile.taps == 3) {
        sum_filter(1, 4, 3, sum, channels, du, dw);
    } else if (is_line(tile)) {
        sum_filter(1, 5, 4, sum, channels, du, dw);
    } else if (tile.taps == 2) {
        sum_filter(4, 4, 2, sum, channels, du, dw);
    } else if (tile.taps == 4) {
        sum_filter(3, 3, 4, sum, channels, du, dw);
    } else if (tile.rows == 4) {
        sum_filter(4, 4, 3, sum, channels, du, dw);
#if HAS_DOTS
    } else if (tile.columns == 4) {
        sum_filter(2, 4, 3, sum, channels, du, dw);
#endif
    } else {
        sum_filter(2, 2, 3, sum, channels, du, dw);
    }
}
