/* The directions of a convolution, one per file; conv.c puts them into the table. */
#ifndef PYDTNN_CONV_PARTS_H
#define PYDTNN_CONV_PARTS_H

#include "conv_block.h"
#include "conv_walk.h"

/* Make a walk of a direction; what it is given must stay where it is until the walk was run. Return
 * -1 if memory is short. */
int NAME(gather_walk)(struct walk *walk, const struct conv_shape *shape, enum gather gather,
                      const struct source *x, const real *w, const real *b, const struct sink *y,
                      double *sums);
int NAME(filter_walk)(struct walk *walk, const struct conv_shape *shape, const struct source *x,
                      const struct source *dy, real *dw, int accumulate);

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

/* y[out_i, c] = start[c] + sum over taps t of x[in_i + tap[t], c] w[w_tap[t], c]. Pixels come in
 * runs of `run` neighbours, `pixel` apart in x and `y_pixel` in y; taps in rows of `row_taps`
 * neighbours, which may be more than 1 where neighbours in the run are neighbours in x as well. */
struct depthwise {
    const real *x, *w; /* w: one row of `ldw` channels per tap */
    const ptrdiff_t *in, *out;
    ptrdiff_t run, pixel, y_pixel;
    const ptrdiff_t *tap, *w_tap;
    ptrdiff_t taps, row_taps, ldw;
    const real *start; /* bias or NULL */
    real *y;
    ptrdiff_t channels;
};
void NAME(depthwise_gather)(ptrdiff_t pixels, const struct depthwise *task);

/* dw[t, c] += sum over pixels of dy[out, c] x[in + tap t, c], for channels of whole vectors */
void NAME(depthwise_filter)(ptrdiff_t pixels, const struct depthwise *task, const real *dy,
                            real *dw);

#endif
