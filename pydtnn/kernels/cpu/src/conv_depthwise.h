/* Rows of depthwise convolutions: a gather and both gradients; see conv_depthwise_gather.c and
 * conv_depthwise_backward.c. */
#ifndef PYDTNN_CONV_DEPTHWISE_H
#define PYDTNN_CONV_DEPTHWISE_H

#include "conv_block.h"

/* A row of outputs u = 0, 1, ... of one phase and what they read: tap t of row r of the kernel
 * reads in[r] + u pixel + t tap, which is column `column` + u step + t gap of an image of `width`
 * columns. For outputs in [inside, outside) all of them exist, the others read zeros where there
 * are none. */
struct depthwise {
    ptrdiff_t rows, taps; /* rows of the kernel that lie inside the image; taps of the phase */
    const real **in;
    const real **w; /* filters of row r and tap t, one per channel, at w[r] + t w_tap */
    ptrdiff_t pixel, tap, w_tap, column, step, gap, width;
    ptrdiff_t outputs, inside, outside, out_pixel; /* out_pixel: from one to the next, in out */
    ptrdiff_t channels;
    const real *start, *zero; /* bias or NULL; zeros, one per channel */
    const real **edge;        /* room for pointers: see DEPTHWISE_INPUTS */
};

/* What a tap reads for a tile of 8 outputs, or a row of 3 for outputs 2 apart, at most: `edge` has
 * room for rows taps times the larger of this and `outputs`. */
enum { DEPTHWISE_INPUTS = 17 };

/* out[u, c] = start[c] + sum over rows r and taps t of in[r, u, t, c] w[r, t, c]. Filters and start
 * are read in whole vectors. */
void NAME(depthwise_gather)(const struct depthwise *task, real *out);

/* Both gradients, where `in` is dy and x lies as dx does: dx, or NULL, as depthwise_gather computes
 * it, and dw[r][t, c] += sum over u of in[r, u, t, c] x[u, c], for channels in whole vectors that
 * lie as in w. */
void NAME(depthwise_backward)(const struct depthwise *task, const real *x, real *dx,
                              real *const *dw);

/* List `count` inputs, the first of which would be at `in` in column `column`: those after it are
 * `gap` columns and `tap` elements apart. Returns the end of the list. */
INLINE const real **list_inputs(const struct depthwise *t, const real *in, ptrdiff_t column,
                                ptrdiff_t gap, ptrdiff_t tap, ptrdiff_t count, const real **edge) {
    for (ptrdiff_t i = 0; i < count; i++, column += gap, in += tap)
        edge[i] = column >= 0 && column < t->width ? in : t->zero;
    return edge + count;
}

/* Keep a vector in a register: gcc would load it again for every multiply-add. */
#if defined(__x86_64__)
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v)
#endif

#endif
