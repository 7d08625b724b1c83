/* The one-dimensional transforms of Winograd's F(4, 3) and F(2, 3).
 *
 * m outputs of a filter of 3 taps are m + 2 products: the input is evaluated at m + 2 points (B^T
 * d), so is the filter (G w), and the products are interpolated (A^T m). The gradients use the
 * transposes: A g of the outputs, G^T u of the filter. All of it follows from the points by
 * Toom-Cook: rows of B^T are the coefficients of prod over j != i of (x - p_j), rows of G the
 * powers of p_i over prod over j != i of (p_i - p_j), columns of A^T the powers of p_i.
 *
 * F(4, 3) has the points 0, +-sqrt(1/2), +-sqrt(2) and infinity: their powers stay near 1, and the
 * error is half that of the usual 0, +-1, +-2 (Barabasz et al., "Error analysis and improving the
 * accuracy of Winograd convolution for deep neural networks", ACM TOMS 46(4), 2020, on the choice
 * of points). F(2, 3) has 0, +-1 and infinity. Source of the method: Lavin and Gray, "Fast
 * algorithms for convolutional neural networks", CVPR 2016.
 *
 * Error of float32 against float64, in norm, 16 to 64 channels of normal numbers: F(4x4, 3x3) 5e-7
 * to 9e-7, all directions, 2.1 to 2.5 times that of the direct algorithm; F(2x2, 3x3) 1.6e-7 to
 * 3e-7, 0.7 to 0.8 times (tests/kernels/test_winograd.py).
 *
 * Each function reads elements `step` apart and writes neighbours; `tile` is a constant, 4 or 2.
 */
#ifndef PYDTNN_CONV_WINOGRAD_POINTS_H
#define PYDTNN_CONV_WINOGRAD_POINTS_H

#include "simd.h"

/* Squares of the points 1/2 and 2, their sum 5/2 and their product 1 are exact. */
#define POINT_A ((real)0.70710678118654752)
#define POINT_B ((real)1.41421356237309505)

/* B^T d: tile + 2 from tile + 2 */
INLINE void input_points(const int tile, const vec *d, const int step, vec *v) {
    const vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step];
    if (tile == 2) {
        v[0] = d0 - d2;
        v[1] = d2 + d1;
        v[2] = d2 - d1;
        v[3] = d1 - d3;
        return;
    }
    const vec d4 = d[4 * step], d5 = d[5 * step];
    const vec even_a = d4 - 2 * d2, odd_a = d3 - 2 * d1;
    const vec even_b = d4 - (real)0.5 * d2, odd_b = d3 - (real)0.5 * d1;
    v[0] = (d0 + d4) - (real)2.5 * d2;
    v[1] = even_a + POINT_A * odd_a;
    v[2] = even_a - POINT_A * odd_a;
    v[3] = even_b + POINT_B * odd_b;
    v[4] = even_b - POINT_B * odd_b;
    v[5] = (d1 + d5) - (real)2.5 * d3;
}

/* A^T m: tile from tile + 2 */
INLINE void output_points(const int tile, const vec *m, const int step, vec *y) {
    const vec sum_a = m[step] + m[2 * step], difference_a = m[step] - m[2 * step];
    if (tile == 2) {
        y[0] = m[0] + sum_a;
        y[1] = difference_a - m[3 * step];
        return;
    }
    const vec sum_b = m[3 * step] + m[4 * step], difference_b = m[3 * step] - m[4 * step];
    y[0] = m[0] + (sum_a + sum_b);
    y[1] = POINT_A * difference_a + POINT_B * difference_b;
    y[2] = (real)0.5 * sum_a + 2 * sum_b;
    y[3] = POINT_A / 2 * difference_a + (POINT_B * 2 * difference_b + m[5 * step]);
}

/* A g: tile + 2 from tile */
INLINE void gradient_points(const int tile, const vec *g, const int step, vec *z) {
    const vec g0 = g[0], g1 = g[step];
    z[0] = g0;
    if (tile == 2) {
        z[1] = g0 + g1;
        z[2] = g0 - g1;
        z[3] = -g1;
        return;
    }
    const vec g2 = g[2 * step], g3 = g[3 * step];
    const vec even_a = g0 + (real)0.5 * g2, odd_a = g1 + (real)0.5 * g3;
    const vec even_b = g0 + 2 * g2, odd_b = g1 + 2 * g3;
    z[1] = even_a + POINT_A * odd_a;
    z[2] = even_a - POINT_A * odd_a;
    z[3] = even_b + POINT_B * odd_b;
    z[4] = even_b - POINT_B * odd_b;
    z[5] = g3;
}

/* G w: tile + 2 from 3 */
INLINE void filter_points(const int tile, const vec *w, const int step, vec *u) {
    const vec w0 = w[0], w1 = w[step], w2 = w[2 * step];
    u[0] = w0;
    if (tile == 2) {
        const vec even = (real)0.5 * (w0 + w2);
        u[1] = even + (real)0.5 * w1;
        u[2] = even - (real)0.5 * w1;
        u[3] = w2;
        return;
    }
    const vec even_a = (real)(-2. / 3) * (w0 + (real)0.5 * w2), odd_a = (real)(-2. / 3) * w1;
    const vec even_b = (real)(1. / 6) * (w0 + 2 * w2), odd_b = (real)(1. / 6) * w1;
    u[1] = even_a + POINT_A * odd_a;
    u[2] = even_a - POINT_A * odd_a;
    u[3] = even_b + POINT_B * odd_b;
    u[4] = even_b - POINT_B * odd_b;
    u[5] = w2;
}

/* G^T u: 3 from tile + 2 */
INLINE void filter_sums(const int tile, const vec *u, const int step, vec *w) {
    const vec sum_a = u[step] + u[2 * step], difference_a = u[step] - u[2 * step];
    if (tile == 2) {
        w[0] = u[0] + (real)0.5 * sum_a;
        w[1] = (real)0.5 * difference_a;
        w[2] = (real)0.5 * sum_a + u[3 * step];
        return;
    }
    const vec sum_b = u[3 * step] + u[4 * step], difference_b = u[3 * step] - u[4 * step];
    w[0] = u[0] + ((real)(-2. / 3) * sum_a + (real)(1. / 6) * sum_b);
    w[1] = (real)(-2. / 3) * POINT_A * difference_a + (real)(1. / 6) * POINT_B * difference_b;
    w[2] = (real)(-1. / 3) * sum_a + ((real)(1. / 3) * sum_b + u[5 * step]);
}

#endif
