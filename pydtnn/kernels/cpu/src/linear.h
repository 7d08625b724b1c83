/* Kernels of fully connected layers; see linear.c. All return 0, or -1 if memory is short. */
#ifndef PYDTNN_LINEAR_H
#define PYDTNN_LINEAR_H

#include <stdint.h>

#include "dispatch.h"

/* x (batch, inputs), w (outputs, inputs), y (batch, outputs) */
struct linear_shape {
    ptrdiff_t batch, inputs, outputs;
};

struct linear_kernels {
    int (*forward)(const struct linear_shape *shape, const void *x, const void *w, const void *b,
                   void *y, int threads);
    int (*backward_data)(const struct linear_shape *shape, const void *dy, const void *w, void *dx,
                         int threads);
    int (*backward_filter)(const struct linear_shape *shape, const void *x, const void *dy,
                           void *dw, int accumulate, int threads);
    int (*backward_bias)(const void *dy, ptrdiff_t rows, ptrdiff_t columns, void *out,
                         int accumulate, int threads);
    int (*add_rows)(const void *dy, const int64_t *chosen, ptrdiff_t rows, void *out,
                    ptrdiff_t count, ptrdiff_t columns, int accumulate, int threads);
};

DECLARE_MULTIPLYING_FAMILY(linear)

#endif
