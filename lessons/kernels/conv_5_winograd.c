/* 5 Winograd: four outputs from 16 multiplications instead of 36.
   Additions transform a tile of 4 x 4 inputs (B' d B) and the filters (G g G'); the products of
   both for each of 16 positions, summed over channels, are 16 matrix products; A' m A gives 2 x 2
   outputs (Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016). It has 2.25
   times fewer multiplications, but its 16 products are short, each is packed, and all transforms
   go through memory: alone it is slower than rung 4, and it is what rungs 6 and 7 build on. */
#include "frame.h"
#include "product_6_packed.c"

/* B' d for four rows of `columns` floats, which are `line` floats apart. */
static void rows4(const float *d, float *to, int columns, int line) {
    for (int l = 0; l < columns; l++) {
        float d0 = d[l], d1 = d[line + l], d2 = d[2 * line + l], d3 = d[3 * line + l];
        to[l] = d0 - d2;
        to[columns + l] = d1 + d2;
        to[2 * columns + l] = d2 - d1;
        to[3 * columns + l] = d1 - d3;
    }
}

static void transform_filters(const float *f, float *u, int size) { /* (3, 3, c o) -> (16, c o) */
    for (int l = 0; l < size; l++) {
        float half[4][3];
        for (int j = 0; j < 3; j++) {
            float g0 = f[j * size + l], g1 = f[(3 + j) * size + l], g2 = f[(6 + j) * size + l];
            half[0][j] = g0;
            half[1][j] = (g0 + g1 + g2) / 2;
            half[2][j] = (g0 - g1 + g2) / 2;
            half[3][j] = g2;
        }
        for (int i = 0; i < 4; i++) {
            float g0 = half[i][0], g1 = half[i][1], g2 = half[i][2];
            float whole[4] = {g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2};
            for (int j = 0; j < 4; j++) u[(i * 4 + j) * size + l] = whole[j];
        }
    }
}

/* Tiles that would cross the edge begin earlier: some outputs are computed twice. */
void conv(const float *images, const float *f, float *y, int n, int h, int w, int c, int o) {
    int across = (w + 1) / 2, tiles = (h + 1) / 2 * across;
    float *x = framed(images, n, h, w, c);
    float *u = lines(16 * ((long)c * o + (long)tiles * (c + o) + c));
    float *v = u + 16L * c * o, *m = v + 16L * tiles * c, *half = m + 16L * tiles * o;
    transform_filters(f, u, c * o);
    for (int s = 0; s < n; s++) {
        for (int t = 0; t < tiles; t++) {
            int p = least(t / across * 2, h - 2), q = least(t % across * 2, w - 2);
            const float *d = x + ((s * (h + 2L) + p) * (w + 2) + q) * c;
            rows4(d, half, 4 * c, (w + 2) * c); /* (4, 4 c): B' d */
            for (int i = 0; i < 4; i++) {
                float out[4 * c];
                rows4(half + i * 4 * c, out, c, c); /* (4, c): (B' d) B */
                for (int j = 0; j < 4; j++)
                    memcpy(v + ((i * 4L + j) * tiles + t) * c, out + j * c, sizeof(float) * c);
            }
        }
        for (int i = 0; i < 16; i++)
            product(v + (long)i * tiles * c, u + (long)i * c * o, m + (long)i * tiles * o, tiles, o,
                    c);
        for (int t = 0; t < tiles; t++) {
            int p = least(t / across * 2, h - 2), q = least(t % across * 2, w - 2);
            float *to = y + ((s * (long)h + p) * w + q) * o;
#define M(i, j) m[(((i) * 4L + (j)) * tiles + t) * o + l]
            for (int l = 0; l < o; l++) {
                float top[4], low[4]; /* A' m */
                for (int j = 0; j < 4; j++) {
                    top[j] = M(0, j) + M(1, j) + M(2, j);
                    low[j] = M(1, j) - M(2, j) - M(3, j);
                }
                to[l] = top[0] + top[1] + top[2];
                to[o + l] = top[1] - top[2] - top[3];
                to[w * o + l] = low[0] + low[1] + low[2];
                to[(w + 1) * o + l] = low[1] - low[2] - low[3];
            }
        }
    }
    free(u);
    free(x);
}
