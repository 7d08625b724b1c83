/* Kernels of scaled dot-product attention; see attention.c. Both return 0, or -1 if memory is
 * short. */
#ifndef PYDTNN_ATTENTION_H
#define PYDTNN_ATTENTION_H

#include <stdint.h>

#include "dispatch.h"

/* q (batch, length, heads, width), keys k (batch, keys, heads, width), and values in the rows of k
 * behind them, with rows `ldq` and `ldk` apart; y (batch, length, heads, width), log_sums (batch,
 * heads, length). The first query is at position `query` of a sequence of `whole`, the first key at
 * `key`, which is not behind it if causal. Of a sample of equally many queries and keys, only the
 * first `lengths` positions exist: outputs and gradients of the others are 0. Dropped weights are
 * those whose word is below the threshold; without samples, none. Words are those of an array with
 * `first_head` heads before these. */
struct attention_shape {
    ptrdiff_t batch, length, keys, heads, width, ldq, ldk, query, key, whole;
    int causal;
    const int64_t *lengths; /* (batch,), or NULL */
    const int64_t *samples; /* (batch,), or NULL */
    uint32_t seed, stream, epoch, threshold;
    ptrdiff_t first_head;
    double factor; /* of the weights that are kept */
};

struct attention_kernels {
    int (*forward)(const struct attention_shape *shape, const void *q, const void *k, void *y,
                   void *log_sums, int threads);
    /* dq and dk have the rows of q and k, dv is behind dk */
    int (*backward)(const struct attention_shape *shape, const void *dy, const void *q,
                    const void *k, const void *y, const void *log_sums, void *dq, void *dk,
                    int threads);
};

DECLARE_FAMILY(attention)

#endif
