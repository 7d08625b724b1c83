/* 6 Packing: operands are copied into the order in which the tile reads them.
   Blocks of 256 l keep a panel of b (256 x 2 V floats) in the first cache while it meets all rows.
   Packed panels are read from start to end: no strides, no misses of the page table. Zeros fill the
   panels at the edges, so that there is one tile only. It is the scheme of Goto and van de Geijn,
   "Anatomy of high-performance matrix multiplication", 2008, and what OpenBLAS does. */
#include "vectors.h"

enum { DEPTH = 256, HEIGHT = ROWS * 8 };

static void tile(const float *a, const float *b, float *c, int rows, int columns, int n, int k) {
    vec sums[ROWS][2] = {0};
    for (int i = 0; i < rows; i++) { /* c comes from memory while the sums are computed */
        __builtin_prefetch(c + (long)i * n, 1);
        __builtin_prefetch(c + (long)i * n + V, 1);
    }
    for (int l = 0; l < k; l++, a += ROWS, b += 2 * V) {
        vec left = load(b), right = load(b + V);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            sums[i][0] += a[i] * left;
            sums[i][1] += a[i] * right;
        }
    }
    if (rows == ROWS && columns == 2 * V) {
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            store(c + i * n, load(c + i * n) + sums[i][0]);
            store(c + i * n + V, load(c + i * n + V) + sums[i][1]);
        }
        return;
    }
    float out[ROWS][2 * V];
    memcpy(out, sums, sizeof out);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) c[i * n + j] += out[i][j];
}

/* Copy `lines` rows of a, or columns of b, as panels of `width` with zeros at the edge. */
static void pack(const float *x, float *to, int lines, int depth, int line, int step, int width) {
    for (int i0 = 0; i0 < lines; i0 += width, x += (long)width * line) {
        int there = least(width, lines - i0);
        for (int l = 0; l < depth; l++, to += width)
            for (int i = 0; i < width; i++)
                to[i] = i < there ? x[i * (long)line + l * (long)step] : 0;
    }
}

void product(const float *a, const float *b, float *c, int m, int n, int k) {
    int wide = (n + 2 * V - 1) / (2 * V) * 2 * V;
    float *panels = lines((long)DEPTH * (wide + HEIGHT)), *rows = panels + (long)DEPTH * wide;
    memset(c, 0, sizeof(float) * m * n);
    for (int l = 0; l < k; l += DEPTH) {
        int depth = least(DEPTH, k - l);
        pack(b + (long)l * n, panels, n, depth, 1, n, 2 * V);
        for (int i = 0; i < m; i += HEIGHT) {
            int height = least(HEIGHT, m - i);
            pack(a + (long)i * k + l, rows, height, depth, k, 1, ROWS);
            for (int j = 0; j < n; j += 2 * V)
                for (int r = 0; r < height; r += ROWS)
                    tile(rows + r * depth, panels + j * depth, c + (long)(i + r) * n + j,
                         least(ROWS, height - r), least(2 * V, n - j), n, depth);
        }
    }
    free(panels);
}
