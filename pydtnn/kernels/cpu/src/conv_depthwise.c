/* Depthwise convolution: channels side by side in vectors, nothing to reuse between them.
 *
 * Forward and backward of data keep a tile of 8 pixels x 1 vector of channels in registers and go
 * over the taps: per tap one load of filters and eight of inputs for eight multiply-adds, so loads
 * from L1 bound it at half the peak. Backward of filters keeps the sums of up to nine taps in
 * registers and goes over the pixels. Filters are packed as [tap][channel].
 */
#include "conv_parts.h"
#include "gemm.h"

enum { TILE_PIXELS = 8, TILE_TAPS = 9 };

INLINE void gather_tile(const int pixels, const struct depthwise *t, ptrdiff_t first,
                        ptrdiff_t column) {
    vec sum[TILE_PIXELS], start = t->start ? vload(t->start + column) : vzero();
    ptrdiff_t count = smaller(t->channels - column, LANES);
    for (int i = 0; i < pixels; i++) sum[i] = start;
    for (ptrdiff_t k = 0; k < t->taps; k++) {
        const real *x = t->x + t->tap[k] + column;
        vec w = vload(t->w + k * t->ldw + column);
        for (int i = 0; i < pixels; i++) sum[i] += vload(x + t->in[first + i]) * w;
    }
    for (int i = 0; i < pixels; i++) {
        real *y = t->y + t->out[first + i] + column;
        if (count == LANES) {
            vstore(y, sum[i]);
        } else {
            vstore_part(y, sum[i], count);
        }
    }
}

void NAME(depthwise_gather)(ptrdiff_t pixels, const struct depthwise *task) {
    for (ptrdiff_t column = 0; column < task->channels; column += LANES) {
        ptrdiff_t i = 0;
        for (; i + TILE_PIXELS <= pixels; i += TILE_PIXELS)
            gather_tile(TILE_PIXELS, task, i, column);
        for (; i < pixels; i++) gather_tile(1, task, i, column);
    }
}

INLINE void filter_tile(const int taps, ptrdiff_t pixels, const struct depthwise *t,
                        ptrdiff_t first, ptrdiff_t column, const real *dy, real *dw) {
    vec sum[TILE_TAPS];
    const real *x[TILE_TAPS];
    for (int k = 0; k < taps; k++) {
        sum[k] = vzero();
        x[k] = t->x + t->tap[first + k] + column;
    }
    ptrdiff_t count = smaller(t->channels - column, LANES);
    for (ptrdiff_t i = 0; i < pixels; i++) {
        const real *p = dy + t->out[i] + column;
        vec g = count == LANES ? vload(p) : vload_part(p, count);
        for (int k = 0; k < taps; k++) sum[k] += vload(x[k] + t->in[i]) * g;
    }
    for (int k = 0; k < taps; k++) {
        real *p = dw + (first + k) * t->ldw + column;
        vstore(p, vload(p) + sum[k]);
    }
}

void NAME(depthwise_filter)(ptrdiff_t pixels, const struct depthwise *task, const real *dy,
                            real *dw) {
    for (ptrdiff_t column = 0; column < task->channels; column += LANES) {
        ptrdiff_t k = 0;
        for (; k + TILE_TAPS <= task->taps; k += TILE_TAPS)
            filter_tile(TILE_TAPS, pixels, task, k, column, dy, dw);
        for (; k + 4 <= task->taps; k += 4) filter_tile(4, pixels, task, k, column, dy, dw);
        for (; k < task->taps; k++) filter_tile(1, pixels, task, k, column, dy, dw);
    }
}
