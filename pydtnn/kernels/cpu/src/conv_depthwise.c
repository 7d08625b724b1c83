/* Depthwise convolution: channels side by side in vectors, nothing to reuse between them.
 *
 * Forward and backward of data keep a tile of 8 neighbouring pixels x 1 vector of channels in
 * registers. Where a row of the kernel has 3 taps side by side, its filters sit in registers and an
 * input is loaded once for all of them: 13 loads for 24 multiply-adds, else 9 for 8. Channels are
 * the inner loop, so that a row of pixels is read and written once from end to end: what bounds it
 * is memory, 9 multiply-adds for 8 bytes. Backward of filters keeps the sums of up to nine taps in
 * registers and goes over the pixels. Filters are packed as [tap][channel]. Views leave out the
 * taps in the padding, and arrays are read where they lie.
 */
#include "conv_parts.h"
#include "gemm.h"
#include "lanes.h"

enum { TILE_PIXELS = 8, TILE_TAPS = 9, ROW_TAPS = 3 };

/* `pixels` neighbours and the first `lanes` channels from `column` on. */
INLINE void gather_tile(const int pixels, const int row_taps, const struct depthwise *t,
                        const real *x, real *y, ptrdiff_t column, const ptrdiff_t lanes) {
    vec sum[TILE_PIXELS], start = t->start ? vload(t->start + column) : vzero();
    const ptrdiff_t pixel = t->pixel;
    UNROLL
    for (int i = 0; i < pixels; i++) sum[i] = start;
    for (ptrdiff_t k = 0; k < t->taps; k += row_taps) {
        const real *row = x + t->tap[k] + column, *w = t->w + t->w_tap[k] * t->ldw + column;
        vec filter[ROW_TAPS];
        UNROLL
        for (int r = 0; r < row_taps; r++) filter[r] = vload(w + r * t->ldw);
        UNROLL
        for (int i = 0; i < pixels + row_taps - 1; i++) {
            vec one = load(row + i * pixel, lanes);
            UNROLL
            for (int r = 0; r < row_taps; r++) {
                if (i - r >= 0 && i - r < pixels) sum[i - r] += one * filter[r];
            }
        }
    }
    UNROLL
    for (int i = 0; i < pixels; i++) store(y + i * t->y_pixel + column, sum[i], lanes);
}

INLINE void gather_pixels(const int pixels, const int row_taps, const struct depthwise *t,
                          const real *x, real *y) {
    ptrdiff_t column = 0;
    for (; column + LANES <= t->channels; column += LANES)
        gather_tile(pixels, row_taps, t, x, y, column, LANES);
    if (column < t->channels) gather_tile(pixels, row_taps, t, x, y, column, t->channels - column);
}

INLINE void gather_run(const int row_taps, const struct depthwise *t, const real *x, real *y) {
    ptrdiff_t i = 0, in = t->pixel, out = t->y_pixel;
    for (; i + TILE_PIXELS <= t->run; i += TILE_PIXELS)
        gather_pixels(TILE_PIXELS, row_taps, t, x + i * in, y + i * out);
    for (; i + 3 <= t->run; i += 3) gather_pixels(3, row_taps, t, x + i * in, y + i * out);
    for (; i < t->run; i++) gather_pixels(1, row_taps, t, x + i * in, y + i * out);
}

void NAME(depthwise_gather)(ptrdiff_t pixels, const struct depthwise *task) {
    for (ptrdiff_t i = 0; i < pixels; i += task->run) {
        const real *x = task->x + task->in[i];
        real *y = task->y + task->out[i];
        if (task->row_taps == 3) {
            gather_run(3, task, x, y);
        } else {
            gather_run(1, task, x, y);
        }
    }
}

INLINE void filter_tile(const int taps, ptrdiff_t pixels, const struct depthwise *t,
                        ptrdiff_t first, ptrdiff_t column, const ptrdiff_t lanes, const real *dy,
                        real *dw) {
    vec sum[TILE_TAPS];
    const real *x[TILE_TAPS];
    UNROLL
    for (int k = 0; k < taps; k++) {
        sum[k] = vzero();
        x[k] = t->x + t->tap[first + k] + column;
    }
    for (ptrdiff_t i = 0; i < pixels; i++) {
        vec g = load(dy + t->out[i] + column, lanes);
        UNROLL
        for (int k = 0; k < taps; k++) sum[k] += load(x[k] + t->in[i], lanes) * g;
    }
    UNROLL
    for (int k = 0; k < taps; k++) {
        real *p = dw + t->w_tap[first + k] * t->ldw + column;
        vstore(p, vload(p) + sum[k]);
    }
}

INLINE void filter_column(ptrdiff_t pixels, const struct depthwise *t, ptrdiff_t column,
                          const ptrdiff_t lanes, const real *dy, real *dw) {
    ptrdiff_t k = 0;
    for (; k + TILE_TAPS <= t->taps; k += TILE_TAPS)
        filter_tile(TILE_TAPS, pixels, t, k, column, lanes, dy, dw);
    for (; k + 4 <= t->taps; k += 4) filter_tile(4, pixels, t, k, column, lanes, dy, dw);
    for (; k < t->taps; k++) filter_tile(1, pixels, t, k, column, lanes, dy, dw);
}

void NAME(depthwise_filter)(ptrdiff_t pixels, const struct depthwise *task, const real *dy,
                            real *dw) {
    ptrdiff_t column = 0;
    for (; column + LANES <= task->channels; column += LANES)
        filter_column(pixels, task, column, LANES, dy, dw);
    if (column < task->channels)
        filter_column(pixels, task, column, task->channels - column, dy, dw);
}
