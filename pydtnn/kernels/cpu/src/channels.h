/* Sums over rows, and affine maps of rows, with one coefficient per channel, the basis of all
 * normalisations.
 *
 * Rows shorter than a few vectors are folded: k rows of C channels are one row of k C columns, k C
 * a multiple of LANES, so that any C runs in whole vectors, several rows in each where C < LANES.
 * Longer rows end with a masked vector. Below, a "line" is such a row of `columns`, and tables of
 * coefficients are k copies long.
 *
 * Sums: a vector of columns is loaded for GROUP lines in turn, which amortises the loads and stores
 * of its accumulators (L1). Floats are accumulated relative to a pivot near the mean (statistics:
 * the mean of the block's first lines), to avoid cancellation, and for BLOCK_LINES lines only; then
 * the sums about zero are computed in double. With a pivot k deviations from the mean the variance
 * has an error of eps k^2, and k^2 is at most 2 on average for any data. Three operations a vector
 * (subtract, add, multiply-add) and one load: faster than memory.
 */
#ifndef PYDTNN_CHANNELS_H
#define PYDTNN_CHANNELS_H

#include <string.h>

#include "lanes.h"
#include "parts.h"
#include "stored.h"

enum { FORWARD, BACKWARD };
enum { GROUP = 8, BLOCK_LINES = 128, FOLD_BELOW = 4 * LANES, FOLD_TO = 8 * LANES };
enum { PANEL = 4096 / sizeof(real) }; /* columns with sums and pivots on the stack */

/* Rows as lines: `count` whole ones, and then the first `rest` elements of another. */
struct lines {
    ptrdiff_t channels, columns, count, rest;
};

static inline struct lines lines_of(ptrdiff_t rows, ptrdiff_t channels) {
    ptrdiff_t fold = 1;
    if (0 < channels && channels < FOLD_BELOW) {
        const ptrdiff_t common = channels & -channels; /* largest power of two in channels */
        fold = common < LANES ? LANES / common : 1;
        while (fold * channels < FOLD_TO) fold *= 2;
    }
    return (struct lines){channels, fold * channels, rows / fold, rows % fold * channels};
}

/* Repeat the first `channels` entries of a table to the length of a line. */
static inline void fold_table(const struct lines *o, real *table) {
    for (ptrdiff_t j = o->channels; j < o->columns; j += o->channels) {
        memcpy(table + j, table, (size_t)o->channels * sizeof *table);
    }
}

/* Add the copies of each channel up into the first `channels` entries. */
static inline void unfold_sums(const struct lines *o, double *sums) {
    for (ptrdiff_t j = o->channels; j < o->columns; j += o->channels) {
        for (ptrdiff_t c = 0; c < o->channels; c++) sums[c] += sums[j + c];
    }
}

/* -- sums */

/* Add one vector of columns of n lines to sum and product: u and u v, v = x - pivot, u = dy in
   `BACKWARD`, else v. */
INLINE void sum_group(const stored *x, const stored *dy, const real *pivot, ptrdiff_t n,
                      ptrdiff_t stride, ptrdiff_t j, ptrdiff_t lanes, int pass, real *sum,
                      real *product) {
    vec s = vload(sum + j), q = vload(product + j);
    const vec p = load(pivot + j, lanes);
    for (ptrdiff_t i = 0; i < n; i++) {
        const vec v = load_stored(x + i * stride + j, lanes) - p;
        const vec u = pass == BACKWARD ? load_stored(dy + i * stride + j, lanes) : v;
        s += u;
        q += u * v;
    }
    vstore(sum + j, s);
    vstore(product + j, q);
}

INLINE void sum_lines(const stored *x, const stored *dy, const real *pivot, ptrdiff_t n,
                      ptrdiff_t stride, ptrdiff_t width, int pass, real *sum, real *product) {
    ptrdiff_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        sum_group(x, dy, pivot, n, stride, j, LANES, pass, sum, product);
    }
    if (j < width) sum_group(x, dy, pivot, n, stride, j, width - j, pass, sum, product);
}

/* Sums of at most BLOCK_LINES lines and PANEL columns, from zero. */
INLINE void sum_block(const stored *x, const stored *dy, const real *pivot, ptrdiff_t lines,
                      ptrdiff_t stride, ptrdiff_t width, int pass, real *sum, real *product) {
    memset(sum, 0, (size_t)(width + LANES) * sizeof *sum);
    memset(product, 0, (size_t)(width + LANES) * sizeof *product);
    const ptrdiff_t whole = lines - lines % GROUP;
    for (ptrdiff_t i = 0; i < whole * stride; i += GROUP * stride) {
        sum_lines(x + i, pass == BACKWARD ? dy + i : x, pivot, GROUP, stride, width, pass, sum,
                  product);
    }
    const ptrdiff_t i = whole * stride;
    sum_lines(x + i, pass == BACKWARD ? dy + i : x, pivot, lines - whole, stride, width, pass, sum,
              product);
}

/* The mean of n lines. */
INLINE void mean_line(const stored *x, ptrdiff_t n, ptrdiff_t stride, ptrdiff_t width, real *mean) {
    for (ptrdiff_t j = 0; j < width; j++) {
        real sum = 0;
        for (ptrdiff_t i = 0; i < n; i++) sum += widened(x[i * stride + j]);
        mean[j] = sum / (real)n;
    }
}

/* sum x and sum x^2 of each column of n lines, into two rows of `columns`. */
static inline void moments(const stored *x, ptrdiff_t lines, ptrdiff_t columns, double *sums) {
    real pivot[PANEL], sum[PANEL + LANES], square[PANEL + LANES];
    double *total = sums, *squares = sums + columns;
    memset(sums, 0, 2 * (size_t)columns * sizeof *sums);
    for (ptrdiff_t i = 0; i < lines; i += BLOCK_LINES) {
        const ptrdiff_t n = min_of(BLOCK_LINES, lines - i);
        for (ptrdiff_t first = 0; first < columns; first += PANEL) {
            const ptrdiff_t width = min_of(PANEL, columns - first);
            const stored *block = x + i * columns + first;
            mean_line(block, min_of(n, GROUP), columns, width, pivot);
            sum_block(block, block, pivot, n, columns, width, FORWARD, sum, square);
            for (ptrdiff_t j = 0; j < width; j++) {
                const double p = pivot[j], s = sum[j], about_zero = (double)n * p + s;
                total[first + j] += about_zero;
                squares[first + j] += (double)square[j] + p * (s + about_zero);
            }
        }
    }
}

/* sum u and sum u v of each column of n lines, as in sum_group, into two rows of `columns`. */
INLINE void sums_about(const stored *x, const stored *dy, const real *pivot, ptrdiff_t lines,
                       ptrdiff_t columns, int pass, double *sums) {
    real sum[PANEL + LANES], product[PANEL + LANES];
    memset(sums, 0, 2 * (size_t)columns * sizeof *sums);
    for (ptrdiff_t i = 0; i < lines; i += BLOCK_LINES) {
        const ptrdiff_t n = min_of(BLOCK_LINES, lines - i);
        for (ptrdiff_t first = 0; first < columns; first += PANEL) {
            const ptrdiff_t width = min_of(PANEL, columns - first), at = i * columns + first;
            sum_block(x + at, dy + at, pivot + first, n, columns, width, pass, sum, product);
            for (ptrdiff_t j = 0; j < width; j++) {
                sums[first + j] += (double)sum[j];
                sums[columns + first + j] += (double)product[j];
            }
        }
    }
}

/* sum dy and sum dy (x - pivot) */
static inline void products(const stored *x, const stored *dy, const real *pivot, ptrdiff_t lines,
                            ptrdiff_t columns, double *sums) {
    sums_about(x, dy, pivot, lines, columns, BACKWARD, sums);
}

/* sum (x - pivot) and sum (x - pivot)^2 */
static inline void deviations(const stored *x, const real *pivot, ptrdiff_t lines,
                              ptrdiff_t columns, double *sums) {
    sums_about(x, x, pivot, lines, columns, FORWARD, sums);
}

/* Add the elements behind the last whole line to two rows of sums, and unfold these. */
static inline void finish_moments(const struct lines *o, const stored *x, double *sums) {
    const stored *rest = x + o->count * o->columns;
    for (ptrdiff_t j = 0; j < o->rest; j++) {
        sums[j] += (double)widened(rest[j]);
        sums[o->columns + j] += (double)widened(rest[j]) * (double)widened(rest[j]);
    }
    unfold_sums(o, sums);
    unfold_sums(o, sums + o->columns);
}

static inline void finish_deviations(const struct lines *o, const stored *x, const real *pivot,
                                     double *sums) {
    const stored *rest = x + o->count * o->columns;
    for (ptrdiff_t j = 0; j < o->rest; j++) {
        const double v = (double)widened(rest[j]) - (double)pivot[j];
        sums[j] += v;
        sums[o->columns + j] += v * v;
    }
    unfold_sums(o, sums);
    unfold_sums(o, sums + o->columns);
}

static inline void finish_products(const struct lines *o, const stored *x, const stored *dy,
                                   const real *pivot, double *sums) {
    const ptrdiff_t first = o->count * o->columns;
    for (ptrdiff_t j = 0; j < o->rest; j++) {
        const double d = widened(dy[first + j]);
        sums[j] += d;
        sums[o->columns + j] += d * ((double)widened(x[first + j]) - (double)pivot[j]);
    }
    unfold_sums(o, sums);
    unfold_sums(o, sums + o->columns);
}

/* -- affine maps */

/* Tables of one coefficient per column; `b` is read only in BACKWARD. */
struct map {
    const real *p, *a, *b, *c;
};

/* out = a (x - p) + c, or in BACKWARD a dy + b (x - p) + c, for one vector */
INLINE void map_vector(const stored *x, const stored *dy, struct map map, ptrdiff_t j,
                       ptrdiff_t lanes, int pass, stored *out) {
    const vec a = load(map.a + j, lanes), v = load_stored(x + j, lanes) - load(map.p + j, lanes);
    const vec c = load(map.c + j, lanes);
    if (pass == FORWARD) {
        store_stored(out + j, a * v + c, lanes);
    } else {
        const vec d = load_stored(dy + j, lanes);
        store_stored(out + j, a * d + (load(map.b + j, lanes) * v + c), lanes);
    }
}

/* The map over n elements, the last line of which may be short. In order of memory: lines are not
   grouped as for the sums, because writing several at once is slower than reading the tables. */
INLINE void map_elements(const stored *x, const stored *dy, struct map map, ptrdiff_t n,
                         ptrdiff_t columns, int pass, stored *out) {
    for (; n > 0; n -= columns, x += columns, dy += columns, out += columns) {
        const ptrdiff_t width = min_of(columns, n);
        ptrdiff_t j = 0;
        for (; j + LANES <= width; j += LANES) map_vector(x, dy, map, j, LANES, pass, out);
        if (j < width) map_vector(x, dy, map, j, width - j, pass, out);
    }
}

static inline void map_forward(const stored *x, struct map map, ptrdiff_t n, ptrdiff_t columns,
                               stored *out) {
    map_elements(x, x, map, n, columns, FORWARD, out);
}

static inline void map_backward(const stored *x, const stored *dy, struct map map, ptrdiff_t n,
                                ptrdiff_t columns, stored *out) {
    map_elements(x, dy, map, n, columns, BACKWARD, out);
}

#endif
