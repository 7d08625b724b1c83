/* Gather for one vector of outputs and a stride of 1: an input is broadcast once for all the taps
 * of a row of the kernel.
 *
 * gemm_rows with one vector of columns needs a load for every multiply-add and is bound by them.
 * Here a tile is 16 neighbouring pixels; for each row of the kernel and channel the 2 or 3 filters
 * of the row sit in registers, and every input pixel under the tile is broadcast once and
 * multiplied into the outputs that use it: 21 loads for 48 multiply-adds, 16 + 3 + 1 registers.
 * Pixels that are left over in a row use tiles of 8, 4 and 1; with 16 registers a tile has 12.
 * Where the row ends, the input outside is read from a row of zeros, so that a tile has no
 * conditions. Filters are packed as for gemm_rows. Expected: 0.87 of the peak for 16 channels;
 * memory and the start of tiles take most of the rest.
 *
 * conv_slide_pairs.c compiles this file again for pairs of bfloat16.
 */
#include "conv_parts.h"
#include "gemm.h"
#include "products.h"

#if VECTOR_BYTES == 64
enum { TILE = 16 };
#else
enum { TILE = 12 };
#endif
enum { MOST_TAPS = 3, MOST_TRIPLES = (TILE + 2) / 3 };

/* Forget where a pointer came from. gcc would address 18 pixels by as many offsets, keep those in
 * vector registers and move them over the port of the multiply-adds. */
#define KEEP(pointer) __asm__("" : "+r"(pointer))

/* `pixels` outputs from number i of the row on. The first and the last input that they use have
 * separate pointers, which point to zeros at the end of the row. */
INLINE void slide_tile(const int pixels, const int taps, const struct slide *t, ptrdiff_t i0,
                       const real *x, real *y) {
    vec sum[TILE], start = t->start ? vload(t->start) : vzero();
    const ptrdiff_t channels = t->channels, pixel = t->pixel;
    const int inputs = pixels + taps - 1, triples = inputs / 3; /* of those in between */
    const int begins = i0 == 0 && t->before, ends = i0 + pixels == t->outputs && t->after;
    x += i0 * pixel;
    y += i0 * t->y_pixel;
    UNROLL
    for (int i = 0; i < pixels; i++) sum[i] = start;
    for (ptrdiff_t r = 0; r < t->rows; r++) {
        const real *row = x + t->row[r], *w = t->w + t->w_row[r] * LANES, *p[MOST_TRIPLES];
        const real *first = begins ? t->zero : row,
                   *last = ends ? t->zero : row + (inputs - 1) * pixel;
        UNROLL
        for (int i = 0; i < triples; i++) p[i] = row + (3 * i + 1) * pixel;
        for (ptrdiff_t c = 0; c < channels; c++, w += LANES) {
            vec filter[MOST_TAPS];
            UNROLL
            for (int k = 0; k < taps; k++) filter[k] = vload(w + k * channels * LANES);
            UNROLL
            for (int i = 0; i < inputs; i++) {
                const vec one = broadcast(i == 0            ? first
                                          : i == inputs - 1 ? last
                                                            : p[(i - 1) / 3] + (i - 1) % 3 * pixel);
                UNROLL
                for (int k = 0; k < taps; k++) {
                    if (i - k >= 0 && i - k < pixels)
                        sum[i - k] = add_product(sum[i - k], one, filter[k]);
                }
            }
            UNROLL
            for (int i = 0; i < triples; i++) {
                p[i]++;
                KEEP(p[i]);
            }
            first++;
            last++;
        }
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
    ptrdiff_t i = 0;
    for (; i + TILE <= t->outputs; i += TILE) slide_tile(TILE, taps, t, i, x, y);
    for (; i + 8 <= t->outputs; i += 8) slide_tile(8, taps, t, i, x, y);
    for (; i + 4 <= t->outputs; i += 4) slide_tile(4, taps, t, i, x, y);
    for (; i < t->outputs; i++) slide_tile(1, taps, t, i, x, y);
}

void PRODUCTS(slide_gather)(const struct slide *task, ptrdiff_t taps, const real *x, real *y) {
    if (taps == 2) {
        slide_row(2, task, x, y);
    } else {
        slide_row(3, task, x, y);
    }
}
