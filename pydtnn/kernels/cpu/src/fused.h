/* Deferred arrays: elementwise maps with coefficients per channel, applied when they are read, and
 * operations on an array while it is written; see fused.c.
 *
 * Arrays are (rows, channels) of stored elements, coefficients are `channels` reals. */
#ifndef PYDTNN_FUSED_H
#define PYDTNN_FUSED_H

#include "dispatch.h"

/* factor (x - pivot); no pivot: 0, no factor: 1. */
struct term {
    const void *x, *pivot, *factor;
};

/* v = shift + sum of the terms, min(max(v, 0), limit) if relu. A plain array is one term without anything. */
struct source {
    struct term term[2];
    int terms;
    const void *shift; /* NULL: 0 */
    int relu;
    double limit; /* infinite: none */
    void *store; /* NULL, or where the values are written too; may be the array of a term */
};

enum sink_sums {
    SUMS_NONE,
    SUMS_MOMENTS, /* of y: sum y, sum y^2 */
    SUMS_GATE     /* of y and the terms of the gate: sum y, sum y (x - pivot) for each */
};

/* What happens to y after it was computed, while it is in the cache, in this order: y += add;
 * y = 0 where the gate's value is not between 0 and its limit, if the gate has a relu; max(y, 0) if
 * relu; sums. */
struct sink {
    void *y;
    const void *add;           /* NULL: nothing; may be y only for kernels that allow it */
    const struct source *gate; /* NULL: none; if gate->store is given it holds the gate's values */
    int relu;
    enum sink_sums sums;
};

struct fused_kernels {
    int (*evaluate)(const struct source *source, ptrdiff_t rows, ptrdiff_t channels, void *out,
                    int threads);
    /* out = the result of sink for dy; sums (2 or 3, channels) or NULL */
    int (*gate)(const void *dy, const struct sink *sink, ptrdiff_t rows, ptrdiff_t channels,
                double *sums, int threads);
};

DECLARE_STORED_FAMILY(fused)

#endif
