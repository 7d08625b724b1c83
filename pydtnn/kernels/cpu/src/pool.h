/* Pooling of images and volumes; see pool.c. Kernels return 0, or -1 when there is no memory for
   the tables of windows. */
#ifndef PYDTNN_POOL_H
#define PYDTNN_POOL_H

#include <stdint.h>

#include "dispatch.h"

/* One spatial axis; a kernel of 0 means adaptive: the output cuts the input in bins of nearly
   equal size. */
struct pool_axis {
    ptrdiff_t size, output, kernel, stride, before;
};

struct pool_shape {
    ptrdiff_t batch, channels;
    struct pool_axis depths, rows, columns; /* the depth of an image is 1 */
    int count_padding;
};

struct pool_kernels {
    /* index: uint8 or int32, according to its bytes */
    int (*max_forward)(const void *x, const struct pool_shape *shape, void *out, void *index,
                       int index_bytes, int threads);
    int (*max_backward)(const void *dy, const void *index, int index_bytes,
                        const struct pool_shape *shape, void *out, int threads);
    int (*average_forward)(const void *x, const struct pool_shape *shape, void *out, int threads);
    int (*average_backward)(const void *dy, const struct pool_shape *shape, void *out, int threads);
};

DECLARE_STORED_FAMILY(pool)

#endif
