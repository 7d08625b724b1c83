/* Kernels of scaled dot-product attention; see attention.c. Both return 0, or -1 if memory is
 * short. */
#ifndef PYDTNN_ATTENTION_H
#define PYDTNN_ATTENTION_H

#include <stdint.h>

#include "dispatch.h"

/* q (batch, length, heads, width), keys k (batch, keys, heads, width), and values in the rows of k
 * behind them, with rows `ldq` and `ldk` apart; y (batch, length, heads, width), log_sums (batch,
 * heads, length). The first query is at position `query` of a sequence of `whole`, the first key at
 * `key`. A query attends to keys seen[0] to before seen[1]; outputs of queries that attend to
 * none and gradients of keys that no query attends to are 0. Scores are products times `scale`, a
 * positive number, plus a finite bias, minus slopes times distances of positions. Dropped weights
 * are those whose word is below the threshold; without samples, none. Words are those of an array
 * with `first_head` heads before these. */
struct attention_shape {
    ptrdiff_t batch, length, keys, heads, width, ldq, ldk, query, key, whole;
    const int64_t *seen;   /* (1 or batch, length, 2), or NULL: all */
    ptrdiff_t seen_stride; /* between samples of `seen` */
    double scale;
    const void *bias;      /* (heads, length, keys), or NULL */
    const double *slopes;  /* (heads,), or NULL */
    const int64_t *samples; /* (batch,), or NULL */
    uint32_t seed, stream, epoch, threshold;
    ptrdiff_t first_head;
    double factor; /* of the weights that are kept */
};

struct attention_kernels {
    int (*forward)(const struct attention_shape *shape, const void *q, const void *k, void *y,
                   void *log_sums, int threads);
    /* dq and dk have the rows of q and k, dv is behind dk; dbias is as bias, or NULL */
    int (*backward)(const struct attention_shape *shape, const void *dy, const void *q,
                    const void *k, const void *y, const void *log_sums, void *dq, void *dk,
                    void *dbias, int threads);
};

DECLARE_FAMILY(attention)

#endif
