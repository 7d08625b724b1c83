/* Batch norm: sums over all rows per channel, then one affine map per channel, forward and
 * backward.
 *
 * Four passes over memory in a training step: statistics reads x, normalize reads x and writes y,
 * backward_statistics reads x and dy, backward_normalize reads both and writes dx. Loops and
 * precision: channels.h. Coefficients come in double; a float x is taken relative to the centre
 * p = -c/b of the map b x + c, rounded to float: b (x - p) + (c + b p) does not cancel.
 */
#include <math.h>
#include <stdlib.h>

#include "channels.h"
#include "norm.h"
#include "norm_group.h"
#include "norm_response.h"
#include "stored.h"

enum { MAX_PARTS = 32 };

/* Lines cut into at most MAX_PARTS parts of whole blocks. */
struct cut {
    ptrdiff_t size, parts;
};

static struct cut cut_lines(const struct lines *o) {
    const ptrdiff_t blocks = parts_of(o->count, BLOCK_LINES);
    const ptrdiff_t size = BLOCK_LINES * parts_of(blocks, MAX_PARTS);
    return (struct cut){size, size ? parts_of(o->count, size) : 0};
}

/* -- sums: each part has two rows of `columns` doubles; they are added in order to the first
   part's */

static double *sums_create(const struct lines *o, ptrdiff_t parts) {
    const size_t row = 2 * (size_t)o->columns;
    double *sums = malloc((row * (size_t)(parts + 1) + 1) * sizeof *sums);
    if (sums) memset(sums, 0, row * sizeof *sums); /* in case there is no part */
    return sums;
}

static void sums_reduce(const struct lines *o, ptrdiff_t parts, double *sums) {
    const ptrdiff_t row = 2 * o->columns;
    for (ptrdiff_t p = 1; p < parts; p++) {
        for (ptrdiff_t j = 0; j < row; j++) sums[j] += sums[p * row + j];
    }
}

static void store_double(double *out, double value, int accumulate) {
    *out = accumulate ? *out + value : value;
}

static int statistics(const void *x_, ptrdiff_t rows, ptrdiff_t channels, double *out,
                      int accumulate, int threads) {
    const stored *x = x_;
    const struct lines o = lines_of(rows, channels);
    const struct cut cut = cut_lines(&o);
    double *sums = sums_create(&o, cut.parts);
    if (!sums) return -1;
    FOR_PARTS(p, cut.parts, rows * channels, threads,
              moments(x + p * cut.size * o.columns, part_length(o.count, cut.size, p), o.columns,
                      sums + 2 * p * o.columns));
    sums_reduce(&o, cut.parts, sums);
    finish_moments(&o, x, sums);
    store_double(out, (double)rows, accumulate);
    for (ptrdiff_t j = 0; j < channels; j++) {
        store_double(out + 1 + j, sums[j], accumulate);
        store_double(out + 1 + channels + j, sums[o.columns + j], accumulate);
    }
    free(sums);
    return 0;
}

static int backward_statistics(const void *x_, const void *dy_, ptrdiff_t rows, ptrdiff_t channels,
                               const double *mean, const double *inv_std, double *out,
                               int accumulate, int threads) {
    const stored *x = x_, *dy = dy_;
    const struct lines o = lines_of(rows, channels);
    const struct cut cut = cut_lines(&o);
    double *sums = sums_create(&o, cut.parts);
    real *pivot = malloc(((size_t)o.columns + 1) * sizeof *pivot);
    if (!sums || !pivot) {
        free(sums);
        free(pivot);
        return -1;
    }
    for (ptrdiff_t j = 0; j < channels; j++) pivot[j] = (real)mean[j];
    fold_table(&o, pivot);
    FOR_PARTS(p, cut.parts, rows * channels, threads,
              const ptrdiff_t first = p * cut.size * o.columns;
              products(x + first, dy + first, pivot, part_length(o.count, cut.size, p), o.columns,
                       sums + 2 * p * o.columns));
    sums_reduce(&o, cut.parts, sums);
    finish_products(&o, x, dy, pivot, sums);
    for (ptrdiff_t j = 0; j < channels; j++) {
        const double centred = sums[o.columns + j] + ((double)pivot[j] - mean[j]) * sums[j];
        store_double(out + j, sums[j], accumulate);
        store_double(out + channels + j, centred * inv_std[j], accumulate);
    }
    free(sums);
    free(pivot);
    return 0;
}

/* -- maps */

/* Tables of a dy + b x + c = a dy + b (x - p) + (c + b p) or, without a, of b x + c; returns
   their memory. */
static real *map_create(const struct lines *o, const double *a, const double *b, const double *c,
                        struct map *map) {
    real *table = malloc((4 * (size_t)o->columns + 1) * sizeof *table);
    if (!table) return table;
    real *dy_factor = table + o->columns, *x_factor = dy_factor + o->columns;
    real *constant = x_factor + o->columns;
    for (ptrdiff_t j = 0; j < o->channels; j++) {
        const double centre = REAL_FLOAT && b[j] != 0 ? -c[j] / b[j] : 0;
        table[j] = (real)(fabs(centre) < 1e30 ? centre : 0); /* b may be nearly 0 */
        dy_factor[j] = (real)(a ? a[j] : 0);
        x_factor[j] = (real)b[j];
        constant[j] = (real)(c[j] + b[j] * (double)table[j]);
    }
    for (int k = 0; k < 4; k++) fold_table(o, table + k * o->columns);
    *map = a ? (struct map){table, dy_factor, x_factor, constant}
             : (struct map){table, x_factor, x_factor, constant};
    return table;
}

/* Elements of a part: whole lines, about PART. */
static ptrdiff_t part_elements(const struct lines *o) {
    return o->columns ? parts_of(PART, o->columns) * o->columns : 1;
}

static int normalize(const void *x_, ptrdiff_t rows, ptrdiff_t channels, const double *scale,
                     const double *shift, void *out_, int threads) {
    const stored *x = x_;
    stored *out = out_;
    const struct lines o = lines_of(rows, channels);
    const ptrdiff_t n = rows * channels, size = part_elements(&o);
    struct map map;
    real *memory = map_create(&o, 0, scale, shift, &map);
    if (!memory) return -1;
    FOR_PARTS(p, parts_of(n, size), n, threads,
              map_forward(x + p * size, map, part_length(n, size, p), o.columns, out + p * size));
    free(memory);
    return 0;
}

static int backward_normalize(const void *x_, const void *dy_, ptrdiff_t rows, ptrdiff_t channels,
                              const double *a, const double *b, const double *c, void *out_,
                              int threads) {
    const stored *x = x_, *dy = dy_;
    stored *out = out_;
    const struct lines o = lines_of(rows, channels);
    const ptrdiff_t n = rows * channels, size = part_elements(&o);
    struct map map;
    real *memory = map_create(&o, a, b, c, &map);
    if (!memory) return -1;
    FOR_PARTS(p, parts_of(n, size), n, threads,
              map_backward(x + p * size, dy + p * size, map, part_length(n, size, p), o.columns,
                           out + p * size));
    free(memory);
    return 0;
}

const struct norm_kernels NAME(norm_kernels) = {
    .statistics = statistics,
    .backward_statistics = backward_statistics,
    .normalize = normalize,
    .backward_normalize = backward_normalize,
    .group_forward = NAME(group_forward),
    .group_backward = NAME(group_backward),
    .response_forward = NAME(response_forward),
    .response_backward = NAME(response_backward),
};
