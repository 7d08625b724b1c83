/* 4 Direct, with a tile of registers: six neighbouring outputs, some vectors of their channels.
   Inputs are read from the framed image itself, of which a row fits the first cache: no columns.
   The inputs of neighbours are c floats apart; the vectors of filters serve them all. */
#include "frame.h"

static void tile(const float *x, const float *f, float *y, int rows, int wide, int c, int o,
                 int columns) {
    vec sums[OUTPUTS][WIDE] = {0};
    const float *from[OUTPUTS];
    for (int i = 0; i < 3; i++) {
        for (int t = 0; t < OUTPUTS; t++) /* those beyond the image are the last one again */
            from[t] = x + (long)i * wide * c + (long)least(t, rows - 1) * c;
        for (int l = 0; l < 3 * c; l++, f += o) { /* three neighbours of a row are contiguous */
            vec filters[WIDE];
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) filters[v] = load(f + least(v, columns - 1) * V);
#pragma GCC unroll 6
            for (int t = 0; t < OUTPUTS; t++)
#pragma GCC unroll 4
                for (int v = 0; v < WIDE; v++) sums[t][v] += from[t][l] * filters[v];
        }
    }
    for (int t = 0; t < rows; t++)
        for (int v = 0; v < columns; v++)
            store(y + t * o + v * V, sums[t][v]);
}

/* o must be a multiple of V. */
void conv(const float *images, const float *f, float *y, int n, int h, int w, int c, int o) {
    float *x = framed(images, n, h, w, c);
    for (int s = 0; s < n; s++)
        for (int p = 0; p < h; p++)
            for (int r = 0; r < o; r += WIDE * V)
                for (int q = 0; q < w; q += OUTPUTS)
                    tile(x + (((long)s * (h + 2) + p) * (w + 2) + q) * c, f + r,
                         y + (((long)s * h + p) * w + q) * o + r, least(OUTPUTS, w - q), w + 2, c,
                         o, least(WIDE, (o - r) / V));
    free(x);
}
