/* Kernels of two-dimensional convolutions over NHWC images; see conv.c. All return 0, or -1 if
 * memory is short. */
#ifndef PYDTNN_CONV_H
#define PYDTNN_CONV_H

#include "dispatch.h"

/* x (batch, size, channels), w (filters, kernel, channels / groups), y (batch, output, filters);
 * pairs are (vertical, horizontal). padding is what lies before the image; what lies after it
 * follows from the size of the output. */
struct conv_shape {
    ptrdiff_t batch, size[2], channels, output[2], filters, kernel[2], stride[2], padding[2],
        dilation[2], groups;
};

struct conv_kernels {
    int (*forward)(const struct conv_shape *shape, const void *x, const void *w, const void *b,
                   void *y, int threads);
    int (*backward_data)(const struct conv_shape *shape, const void *dy, const void *w, void *dx,
                         int threads);
    int (*backward_filter)(const struct conv_shape *shape, const void *x, const void *dy, void *dw,
                           int accumulate, int threads);
};

DECLARE_FAMILY(conv)

#endif
