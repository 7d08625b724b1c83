/* Kernels of two-dimensional convolutions over NHWC images; see conv.c. All return 0, or -1 if
 * memory is short, except those of volumes. */
#ifndef PYDTNN_CONV_H
#define PYDTNN_CONV_H

#include "fused.h"

/* x (batch, size, channels), w (filters, kernel, channels / groups), y (batch, output, filters);
 * pairs are (vertical, horizontal). padding is what lies before the image; what lies after it
 * follows from the size of the output. */
struct conv_shape {
    ptrdiff_t batch, size[2], channels, output[2], filters, kernel[2], stride[2], padding[2],
        dilation[2], groups;
};

/* The depth of a volume, and what planes read of it: `taps` depths, `dilation` apart. Each of the
 * `rows` of a plane has `units` of `channels` elements: columns, or their groups of channels. */
struct depth_shape {
    ptrdiff_t size, output, taps, stride, padding, dilation, rows, units, channels;
};

/* The numbers in the names are the sides of an output tile, rows and columns if they differ, which
 * requires products of pairs of bfloat16; of filters of one row or column, a tile is one, too.
 * POLYPHASE is for a stride of 2. */
enum algorithm { DIRECT, WINOGRAD4, WINOGRAD2, WINOGRAD24, POLYPHASE, WINOGRAD5 };

/* Inputs may be deferred; an input that is read several times must not be stored over its source.
 * The result of a gather is that of its sink, with an `add` that may be its `y`; `sums` are the
 * sink's (rows of channels, overwritten), or NULL. */
struct conv_kernels {
    int (*forward)(const struct conv_shape *shape, int algorithm, const struct source *x,
                   const void *w, const void *b, const struct sink *y, double *sums, int threads);
    int (*backward_data)(const struct conv_shape *shape, int algorithm, const struct source *dy,
                         const void *w, const struct sink *dx, double *sums, int threads);
    int (*backward_filter)(const struct conv_shape *shape, int algorithm, const struct source *x,
                           const struct source *dy, void *dw, int accumulate, int threads);
    /* both, reading memory once where they can; dx must not overlap x and dy */
    int (*backward)(const struct conv_shape *shape, int data_algorithm, int filter_algorithm,
                    const struct source *x, const struct source *dy, const void *w,
                    const struct sink *dx, double *sums, void *dw, int accumulate, int threads);
    /* the planes of volumes, and the sum of them; see conv_depth.c */
    void (*unfold)(const struct depth_shape *shape, const void *x, ptrdiff_t first,
                   ptrdiff_t planes, void *out, int threads);
    void (*fold)(const struct depth_shape *shape, const void *x, ptrdiff_t first, ptrdiff_t planes,
                 void *out, int threads);
};

DECLARE_MULTIPLYING_FAMILY(conv)

#endif
