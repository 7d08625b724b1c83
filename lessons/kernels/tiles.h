/* What rungs 6 to 8 do with a tile, and with a group of ROWS tiles. Before this, a rung defines
   SIDE and POINTS, rows and columns of a tile of outputs and of inputs. Lanes are channels:
   transforms move no data between lanes. */
#include "frame.h"

/* Floats of a group and a vector of channels: POINTS x POINTS matrices of ROWS vectors. All strides
   are constants, so that one pointer reaches all. */
enum { MATRIX = ROWS * V, AREA = POINTS * POINTS, NEXT = AREA * MATRIX };

/* The first pixel of tile t in images of so many rows and columns. A tile that would cross the edge
   begins earlier: some outputs are computed twice. */
static long corner(int t, int h, int w, int rows, int columns) {
    int across = (w + SIDE - 1) / SIDE, down = (h + SIDE - 1) / SIDE;
    int p = least(t / across % down * SIDE, h - SIDE), q = least(t % across * SIDE, w - SIDE);
    return ((long)(t / across / down) * rows + p) * columns + q;
}

typedef int mask __attribute__((vector_size(4 * V), aligned(4)));

/* Batch norm and ReLU, if there are any: rung 8. A comparison of vectors is -1, all bits, or 0. */
static inline vec finish(vec y, const float *scale, const float *shift) {
    if (!scale) return y;
    y = y * load(scale) + load(shift);
    return (vec)((y > 0) & (mask)y);
}

typedef void transform(const vec *from, int step, vec *to); /* of a line of vectors */

/* Transform rows, then columns: in x in vectors become out x out. Loops are unrolled. */
static inline __attribute__((always_inline)) void square(
    transform *line, int in, int out, const float *from, long row, long pixel, float *to,
    long to_row, long to_pixel, const float *scale, const float *shift) {
    vec half[AREA], x[POINTS];
#pragma GCC unroll 6
    for (int i = 0; i < in; i++, from += row) {
#pragma GCC unroll 6
        for (int j = 0; j < in; j++) x[j] = load(from + j * pixel);
        line(x, 1, half + i * out);
    }
#pragma GCC unroll 6
    for (int j = 0; j < out; j++) {
        line(half + j, out, x);
#pragma GCC unroll 6
        for (int i = 0; i < out; i++)
            store(to + i * to_row + j * to_pixel, finish(x[i], scale, shift));
    }
}

/* One of AREA products: ROWS tiles (depth, ROWS, V) and two vectors of filters (depth V, 2 V). The
   tile of registers is that of rung 5 of the other ladder. */
static void multiply(const float *v, const float *u, float *m, int depth) {
    vec sums[ROWS][2] = {0};
    for (int l = 0; l < depth; l++, v += NEXT)
        for (int e = 0; e < V; e++, u += 2 * V) {
            vec left = load(u), right = load(u + V);
#pragma GCC unroll 16
            for (int t = 0; t < ROWS; t++) {
                sums[t][0] += v[t * V + e] * left;
                sums[t][1] += v[t * V + e] * right;
            }
        }
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; t++) {
        store(m + t * V, sums[t][0]);
        store(m + NEXT + t * V, sums[t][1]);
    }
}
