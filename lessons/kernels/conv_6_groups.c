/* 6 In the cache: a group of tiles goes all the way before the next one begins.
   Rung 5 writes the transformed tiles of an image to memory, reads and packs them for products, and
   does the same with the results. Here ROWS tiles are transformed, multiplied, transformed back,
   and stay in the second cache: 0.11 MiB, with 64 channels, beside 0.25 MiB of filters. These
   are transformed once in a call, straight into the order in which the products read them. Nothing
   is packed or cleared, and the transforms use vectors of channels:
       u (AREA, o / 2 V, c, 2 V)    the filters, in panels
       v (c / V, AREA, ROWS, V)     the inputs of a group; m (o / V, AREA, ROWS, V), products v u
   Images get their frames when their first tile comes, in a ring of as many as a group can meet. */
#ifndef SIDE /* outputs of a tile along an axis; rung 7 has others */
enum { SIDE = 2, POINTS = 4 };
#include "tiles.h"

static inline void inputs(const vec *d, int step, vec *v) { /* B' d */
    v[0] = d[0] - d[2 * step];
    v[1] = d[step] + d[2 * step];
    v[2] = d[2 * step] - d[step];
    v[3] = d[step] - d[3 * step];
}

static inline void filters(const vec *g, int step, vec *u) { /* G g */
    u[0] = g[0];
    u[1] = (g[0] + g[step] + g[2 * step]) * 0.5f;
    u[2] = (g[0] - g[step] + g[2 * step]) * 0.5f;
    u[3] = g[2 * step];
}

static inline void outputs(const vec *m, int step, vec *y) { /* A' m */
    y[0] = m[0] + m[step] + m[2 * step];
    y[1] = m[step] - m[2 * step] - m[3 * step];
}
#endif

static void winograd(const float *x, const float *f, float *y, int n, int h, int w, int c, int o,
                     const float *scale, const float *shift) {
    int each = ((h + SIDE - 1) / SIDE) * ((w + SIDE - 1) / SIDE), tiles = n * each, next = 0;
    int depth = (c + V - 1) / V, wide = depth * V, panels = (o / V + 1) / 2;
    int ring = ROWS / each + 2;
    long image = (h + 2L) * (w + 2) * wide, panel = 2L * V * wide;
    long matrix = panels * panel + V; /* not all in one set of the cache */
    float *u = lines(AREA * matrix + (depth + 2L * panels) * NEXT + ring * image);
    float *v = u + AREA * matrix, *m = v + (long)depth * NEXT, *d = m + 2L * panels * NEXT;
    memset(d, 0, sizeof(float) * ring * image); /* the frames; what is inside is copied later */
    if (wide > c || panels * 2 * V > o) memset(u, 0, sizeof(float) * AREA * matrix);
    for (int r = 0; r < o / V; r++)
        for (int l = 0; l < c; l++)
            square(filters, 3, POINTS, f + (long)l * o + r * V, 3L * c * o, (long)c * o,
                   u + r / 2 * panel + (2 * l + r % 2) * V, POINTS * matrix, matrix, 0, 0);
    for (int first = 0; first < tiles; first += ROWS) {
        int rows = least(ROWS, tiles - first);
        for (; next <= (first + rows - 1) / each; next++)
            frame(x + (long)next * h * w * c, d + next % ring * image, h, w, c, wide);
        for (int t = 0; t < rows; t++) {
            float *from = d + corner((first + t) % (ring * each), h, w, h + 2, w + 2) * wide;
            for (int l = 0; l < depth; l++)
                square(inputs, POINTS, POINTS, from + l * V, (w + 2L) * wide, wide,
                       v + l * NEXT + t * V, POINTS * MATRIX, MATRIX, 0, 0);
        }
        for (int i = 0; i < AREA; i++)
            for (int j = 0; j < panels; j++)
                multiply(v + i * MATRIX, u + i * matrix + j * panel, m + 2L * j * NEXT + i * MATRIX,
                         depth);
        for (int t = 0; t < rows; t++) {
            float *to = y + corner(first + t, h, w, h, w) * o;
            for (int r = 0; r < o / V; r++)
                square(outputs, POINTS, SIDE, m + r * NEXT + t * V, POINTS * MATRIX, MATRIX,
                       to + r * V, (long)w * o, o, scale ? scale + r * V : 0,
                       scale ? shift + r * V : 0);
        }
    }
    free(u);
}

void conv(const float *x, const float *f, float *y, int n, int h, int w, int c, int o) {
    winograd(x, f, y, n, h, w, c, o, 0, 0);
}
