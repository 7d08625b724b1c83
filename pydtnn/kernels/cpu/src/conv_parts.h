/* The directions of a convolution, one per file; conv.c puts them into the table. */
#ifndef PYDTNN_CONV_PARTS_H
#define PYDTNN_CONV_PARTS_H

#include "conv_block.h"

int NAME(conv_gather)(const struct conv_shape *shape, enum gather gather, const real *x,
                      const real *w, const real *b, real *y, int threads);
int NAME(conv_filter)(const struct conv_shape *shape, const real *x, const real *dy, real *dw,
                      int accumulate, int threads);

/* One filter per channel. */
INLINE int is_depthwise(const struct conv_shape *s) {
    return s->groups > 1 && s->groups == s->channels && s->groups == s->filters;
}

/* y[i, o] = start[o] + sum over rows r of the kernel, channels c and taps k of x[row[r] + (i + k)
 * pixel + c] w[r, k, c, o] for `outputs` neighbours i and one vector of columns o. */
struct slide {
    const ptrdiff_t *row; /* offset of each row of the kernel */
    ptrdiff_t rows, channels, pixel;
    const real *w, *start;
    ptrdiff_t y_pixel, outputs, columns;
};
void NAME(slide_gather)(const struct slide *task, ptrdiff_t taps, const real *x, real *y);

struct depthwise {
    const real *x, *w; /* w: one row of `ldw` channels per tap */
    const ptrdiff_t *in, *out, *tap;
    ptrdiff_t taps, ldw;
    const real *start; /* bias or NULL */
    real *y;
    ptrdiff_t channels;
};
void NAME(depthwise_gather)(ptrdiff_t pixels, const struct depthwise *task);

/* dw[t, c] += sum over pixels of dy[out, c] x[in + tap t, c], for channels of whole vectors */
void NAME(depthwise_filter)(ptrdiff_t pixels, const struct depthwise *task, const real *dy,
                            real *dw);

#endif
