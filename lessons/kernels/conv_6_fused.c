/* 6 Fused: batch norm's scale and shift, and ReLU, are applied before the sums leave the registers.
   Alone, each of these passes reads and writes all outputs, and computes next to nothing: at 64
   channels they take as long as a good part of the convolution. Here they cost two instructions for
   each vector of outputs. The tile is that of rung 4. */
#include "vectors.h"

typedef int mask __attribute__((vector_size(4 * V), aligned(4)));

static inline vec relu(vec x) { /* a comparison of vectors is -1, all bits, or 0 */
    vec zero = {0};
    return (vec)((x > zero) & (mask)x);
}

static void tile(const float *x, const float *f, float *y, int rows, int wide, int c, int o,
                 int columns, const float *scale, const float *shift) {
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
            store(y + t * o + v * V,
                  relu(sums[t][v] * load(scale + v * V) + load(shift + v * V)));
}

/* o must be a multiple of V. */
void conv_norm_relu(const float *x, const float *f, float *y, int n, int h, int w, int c, int o,
                    const float *scale, const float *shift) {
    for (int s = 0; s < n; s++)
        for (int p = 0; p < h; p++)
            for (int r = 0; r < o; r += WIDE * V)
                for (int q = 0; q < w; q += OUTPUTS)
                    tile(x + (((long)s * (h + 2) + p) * (w + 2) + q) * c, f + r,
                         y + (((long)s * h + p) * w + q) * o + r, least(OUTPUTS, w - q), w + 2, c,
                         o, least(WIDE, (o - r) / V), scale + r, shift + r);
}
