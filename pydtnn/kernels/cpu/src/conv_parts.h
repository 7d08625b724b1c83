/* The directions of a convolution, one per file; conv.c puts them into the table. */
#ifndef PYDTNN_CONV_PARTS_H
#define PYDTNN_CONV_PARTS_H

#include "conv_block.h"
#include "conv_walk.h"
#include "gemm.h"

/* Create a walk of a direction; its arguments must remain valid until the walk has run. Return -1
 * if memory allocation fails. */
int NAME(gather_walk)(struct walk *walk, const struct conv_shape *shape, enum gather gather,
                      const struct source *x, const real *w, const real *b, const struct sink *y,
                      double *sums, int threads);
int NAME(filter_walk)(struct walk *walk, const struct conv_shape *shape, const struct source *x,
                      const struct source *dy, real *dw, int accumulate, int threads);

/* Blocks of gradients of filters, and of data where the former can read a deferred dy from the
 * copy of the latter: 1x1 filters of few channels, so that copies of both stay in L2. */
enum { FILTER_PIXELS = 256, FILTER_BYTES = 512 * 1024 };
INLINE int is_lending(const struct conv_shape *s) {
    return s->kernel[0] * s->kernel[1] * s->stride[0] * s->stride[1] * s->groups == 1 &&
           s->output[0] == s->size[0] && s->output[1] == s->size[1] && /* no padding on any side */
           larger(s->channels, 2 * s->filters) * FILTER_PIXELS * (ptrdiff_t)sizeof(real) <=
               FILTER_BYTES;
}

/* Let a walk of filters that runs together with one of data read its copy of dy, if it can. */
void NAME(filter_borrow)(struct walk *filter, const struct walk *data);
/* The plan of a walk of data, NULL if it lends nothing; where a thread keeps the copy. */
const struct plan *NAME(gather_copy)(const struct walk *data);
const real *NAME(gather_pixels)(const void *thread);

/* One filter per channel. */
INLINE int is_depthwise(const struct conv_shape *s) {
    return s->groups > 1 && s->groups == s->channels && s->groups == s->filters;
}

/* y[i, o] = start[o] + sum over rows r of the kernel, channels c and taps k of x[row[r] + (i + k)
 * pixel + c] w[w_row[r] + k channels + c, o] for `outputs` neighbours i and one vector of
 * columns o. */
struct slide {
    const ptrdiff_t *row, *w_row; /* of each row of the kernel: offset in x, number in w */
    ptrdiff_t rows, channels, pixel;
    const real *w, *start;
    int before, after; /* whether the first and the last input lie outside and count as zero */
    const real *zero;  /* zeros, as many as channels */
    ptrdiff_t y_pixel, outputs, columns;
};
void NAME(slide_gather)(const struct slide *task, ptrdiff_t taps, const real *x, real *y);
/* The same for pairs of bfloat16, which `channels` counts. */
void NAME(slide_gather_pairs)(const struct slide *task, ptrdiff_t taps, const real *x, real *y);

/* A depthwise convolution, forward: out = what the sink makes of in * w + b. Backward: `in` is dy
 * and `out` dx; `dw` = [dw +] the gradient of the filters, from x. One of the two may be NULL, and
 * then so may `w` or `x`. */
struct depthwise_task {
    enum gather gather;
    const struct source *in;
    const void *w, *b; /* b: NULL without a bias */
    const struct sink *out;
    double *sums;
    const struct source *x;
    void *dw;
    int accumulate;
};
int NAME(depthwise_run)(const struct conv_shape *shape, const struct depthwise_task *task,
                        int threads);

#endif
