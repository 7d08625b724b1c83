/* Gather for one vector of outputs and a stride of 1: an input is broadcast once for all the taps
 * of a row of the kernel.
 *
 * gemm_rows with one vector of columns needs a load for every multiply-add and is bound by them.
 * Here a tile is 16 neighbouring pixels; for each row of the kernel and channel the 2 or 3 filters
 * of the row sit in registers, and every input pixel under the tile is broadcast once and
 * multiplied into the outputs that see it: 21 loads for 48 multiply-adds, 16 + 3 + 1 registers.
 * Pixels that are left over in a row use tiles of 8, 4 and 1. Filters are packed as for gemm_rows.
 * Expected: 0.8 of the peak, of which the copy of the block and memory take most of the rest.
 */
#include "conv_parts.h"
#include "gemm.h"

enum { TILE = 16, MOST_TAPS = 3, MOST_TRIPLES = (TILE + MOST_TAPS - 1 + 2) / 3 };

/* Forget where a pointer came from. gcc would address 18 pixels by as many offsets, keep those in
 * vector registers and move them over the port of the multiply-adds. */
#define KEEP(pointer) __asm__("" : "+r"(pointer))

INLINE void slide_tile(const int pixels, const int taps, const struct slide *t, const real *x,
                       real *y) {
    vec sum[TILE], start = t->start ? vload(t->start) : vzero();
    const ptrdiff_t channels = t->channels, pixel = t->pixel;
    const int inputs = pixels + taps - 1, triples = (inputs + 2) / 3;
    const real *w = t->w;
    UNROLL
    for (int i = 0; i < pixels; i++) sum[i] = start;
    for (ptrdiff_t r = 0; r < t->rows; r++) {
        const real *p[MOST_TRIPLES];
        UNROLL
        for (int i = 0; i < triples; i++) p[i] = x + t->row[r] + 3 * i * pixel;
        for (ptrdiff_t c = 0; c < channels; c++, w += LANES) {
            vec filter[MOST_TAPS];
            UNROLL
            for (int k = 0; k < taps; k++) filter[k] = vload(w + k * channels * LANES);
            UNROLL
            for (int i = 0; i < inputs; i++) {
                vec one = vset(p[i / 3][i % 3 * pixel]);
                UNROLL
                for (int k = 0; k < taps; k++) {
                    if (i - k >= 0 && i - k < pixels) sum[i - k] += one * filter[k];
                }
            }
            UNROLL
            for (int i = 0; i < triples; i++) {
                p[i]++;
                KEEP(p[i]);
            }
        }
        w += (taps - 1) * channels * LANES;
    }
    UNROLL
    for (int i = 0; i < pixels; i++) {
        if (t->columns == LANES) {
            vstore(y + i * t->y_pixel, sum[i]);
        } else {
            vstore_part(y + i * t->y_pixel, sum[i], t->columns);
        }
    }
}

INLINE void slide_row(const int taps, const struct slide *t, const real *x, real *y) {
    ptrdiff_t i = 0, in = t->pixel, out = t->y_pixel;
    for (; i + TILE <= t->outputs; i += TILE) slide_tile(TILE, taps, t, x + i * in, y + i * out);
    for (; i + 8 <= t->outputs; i += 8) slide_tile(8, taps, t, x + i * in, y + i * out);
    for (; i + 4 <= t->outputs; i += 4) slide_tile(4, taps, t, x + i * in, y + i * out);
    for (; i < t->outputs; i++) slide_tile(1, taps, t, x + i * in, y + i * out);
}

void NAME(slide_gather)(const struct slide *task, ptrdiff_t taps, const real *x, real *y) {
    if (taps == 2) {
        slide_row(2, task, x, y);
    } else {
        slide_row(3, task, x, y);
    }
}
