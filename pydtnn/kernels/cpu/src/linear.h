/* Kernels of fully connected layers; see linear.c. All return 0, or -1 when scratch memory could not be allocated. */
#ifndef PYDTNN_LINEAR_H
#define PYDTNN_LINEAR_H

#include "dispatch.h"

struct linear_kernels {
    int (*backward_bias)(const void *dy, ptrdiff_t rows, ptrdiff_t columns, void *out, int accumulate, int threads);
};

DECLARE_FAMILY(linear)

#endif
