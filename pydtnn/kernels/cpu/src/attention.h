/* Kernels of scaled dot-product attention; see attention.c. Both return 0, or -1 if memory is
 * short. */
#ifndef PYDTNN_ATTENTION_H
#define PYDTNN_ATTENTION_H

#include <stdint.h>

#include "dispatch.h"

/* qkv (batch, length, 3, heads, width), y (batch, length, heads, width), log_sums (batch, heads,
 * length). Of a sample, only the first `lengths` positions exist: outputs and gradients of the
 * others are 0. Dropped weights are those whose word is below the threshold; without samples,
 * none. Words are those of an array with `first_head` heads before these. */
struct attention_shape {
    ptrdiff_t batch, length, heads, width;
    int causal;
    const int64_t *lengths; /* (batch,), or NULL */
    const int64_t *samples; /* (batch,), or NULL */
    uint32_t seed, stream, epoch, threshold;
    ptrdiff_t first_head;
    double factor; /* of the weights that are kept */
};

struct attention_kernels {
    int (*forward)(const struct attention_shape *shape, const void *qkv, void *y, void *log_sums,
                   int threads);
    int (*backward)(const struct attention_shape *shape, const void *dy, const void *qkv,
                    const void *y, const void *log_sums, void *dqkv, int threads);
};

DECLARE_FAMILY(attention)

#endif
