/* The one-dimensional transforms of Winograd's F(4, 3) and F(2, 3), of F(4, 2) and F(3, 4), and of
 * F(5, 4).
 *
 * m outputs of a filter of r taps are m + r - 1 products: the input is evaluated at as many points
 * (B^T d), so is the filter (G w), and the products are interpolated (A^T m). The gradients use the
 * transposes: A g of the outputs, G^T u of the filter. All of it follows from the points by
 * Toom-Cook: rows of B^T are the coefficients of prod over j != i of (x - p_j), rows of G the
 * powers of p_i over prod over j != i of (p_i - p_j), columns of A^T the powers of p_i.
 *
 * Six points are 0, +-sqrt(1/2), +-sqrt(2) and infinity: their powers stay near 1, and the error is
 * half that of the usual 0, +-1, +-2 (Barabasz et al., "Error analysis and improving the accuracy
 * of Winograd convolution for deep neural networks", ACM TOMS 46(4), 2020, on the choice of
 * points). Five points are these without 0, four are 0, +-1 and infinity, eight are 0, +-1/2, +-1,
 * +-2 and infinity. Source of the method:
 * Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016.
 *
 * Error of float32 against float64, in norm, 16 to 64 channels of normal numbers: F(4x4, 3x3) 5e-7
 * to 9e-7, all directions, 2.1 to 2.5 times that of the direct algorithm; F(2x2, 3x3) 1.6e-7 to
 * 3e-7, 0.7 to 0.8 times (tests/kernels/test_winograd.py).
 *
 * Each function reads elements `step` apart and writes neighbours. The numbers of points, outputs
 * and taps are constants, and outputs + taps = points + 1.
 */
#ifndef PYDTNN_CONV_WINOGRAD_POINTS_H
#define PYDTNN_CONV_WINOGRAD_POINTS_H

#include "simd.h"

/* Squares of the points 1/2 and 2, their sum 5/2 and their product 1 are exact. */
#define POINT_A ((real)0.70710678118654752)
#define POINT_B ((real)1.41421356237309505)
/* 1 / prod over j != i of (p_i - p_j) */
#define SCALE_A ((real)(-2. / 3))
#define SCALE_B ((real)(1. / 6))

/* A polynomial at +-sqrt(1/2) and +-sqrt(2), from its even part and its odd part over the point. */
INLINE void both_signs(vec even_a, vec odd_a, vec even_b, vec odd_b, vec *v) {
    v[0] = even_a + POINT_A * odd_a;
    v[1] = even_a - POINT_A * odd_a;
    v[2] = even_b + POINT_B * odd_b;
    v[3] = even_b - POINT_B * odd_b;
}

/* Of eight points, +-1/2, +-1 and +-2 have these 1 / prod over j != i of (p_i - p_j). */
#define SCALE_HALF ((real)(32. / 45))
#define SCALE_ONE ((real)(-2. / 9))
#define SCALE_TWO ((real)(1. / 90))

INLINE void signs_of(vec even, vec odd, real p, vec *v) {
    v[0] = even + p * odd;
    v[1] = even - p * odd;
}

/* B^T d: all points from as many inputs */
INLINE void input_points(const int points, const vec *d, const int step, vec *v) {
    const vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step];
    if (points == 4) {
        v[0] = d0 - d2;
        v[1] = d2 + d1;
        v[2] = d2 - d1;
        v[3] = d1 - d3;
        return;
    }
    const vec d4 = d[4 * step];
    if (points == 5) {
        const vec even_a = d3 - 2 * d1, odd_a = d2 - 2 * d0;
        const vec even_b = d3 - (real)0.5 * d1, odd_b = d2 - (real)0.5 * d0;
        both_signs(even_a, odd_a, even_b, odd_b, v);
        v[4] = (d0 + d4) - (real)2.5 * d2;
        return;
    }
    const vec d5 = d[5 * step];
    if (points == 8) {
        const vec d6 = d[6 * step], d7 = d[7 * step];
        v[0] = (d0 - d6) + (real)5.25 * (d4 - d2);
        signs_of((d6 + 4 * d2) - 5 * d4, (d5 + 4 * d1) - 5 * d3, (real)0.5, v + 1);
        signs_of((d6 + d2) - (real)4.25 * d4, (d5 + d1) - (real)4.25 * d3, 1, v + 3);
        signs_of((d6 + (real)0.25 * d2) - (real)1.25 * d4,
                 (d5 + (real)0.25 * d1) - (real)1.25 * d3, 2, v + 5);
        v[7] = (d7 - d1) + (real)5.25 * (d3 - d5);
        return;
    }
    const vec even_a = d4 - 2 * d2, odd_a = d3 - 2 * d1;
    const vec even_b = d4 - (real)0.5 * d2, odd_b = d3 - (real)0.5 * d1;
    v[0] = (d0 + d4) - (real)2.5 * d2;
    both_signs(even_a, odd_a, even_b, odd_b, v + 1);
    v[5] = (d1 + d5) - (real)2.5 * d3;
}

/* A^T m: outputs from all points */
INLINE void output_points(const int points, const int outputs, const vec *m, const int step,
                          vec *y) {
    if (points == 4) {
        y[0] = m[0] + (m[step] + m[2 * step]);
        y[1] = (m[step] - m[2 * step]) - m[3 * step];
        return;
    }
    const vec *a = points == 5 ? m : m + step, *b = a + 2 * step;
    const vec sum_a = a[0] + a[step], difference_a = a[0] - a[step];
    const vec sum_b = b[0] + b[step], difference_b = b[0] - b[step];
    const vec last = m[(points - 1) * step];
    if (points == 8) {
        const vec sum_c = b[2 * step] + b[3 * step], difference_c = b[2 * step] - b[3 * step];
        y[0] = m[0] + ((sum_a + sum_b) + sum_c);
        y[1] = ((real)0.5 * difference_a + difference_b) + 2 * difference_c;
        y[2] = ((real)0.25 * sum_a + sum_b) + 4 * sum_c;
        y[3] = ((real)0.125 * difference_a + difference_b) + 8 * difference_c;
        y[4] = ((real)0.0625 * sum_a + sum_b) + (16 * sum_c + last);
        return;
    }
    y[0] = sum_a + sum_b;
    if (points == 6) y[0] += m[0];
    y[1] = POINT_A * difference_a + POINT_B * difference_b;
    if (outputs == 3) {
        y[2] = (real)0.5 * sum_a + (2 * sum_b + last);
        return;
    }
    y[2] = (real)0.5 * sum_a + 2 * sum_b;
    y[3] = POINT_A / 2 * difference_a + (POINT_B * 2 * difference_b + last);
}

/* A g: all points from the gradients of outputs */
INLINE void gradient_points(const int points, const int outputs, const vec *g, const int step,
                            vec *z) {
    const vec g0 = g[0], g1 = g[step];
    if (points == 4) {
        z[0] = g0;
        z[1] = g0 + g1;
        z[2] = g0 - g1;
        z[3] = -g1;
        return;
    }
    const vec g2 = g[2 * step];
    if (points == 8) {
        const vec g3 = g[3 * step], g4 = g[4 * step];
        z[0] = g0;
        signs_of((g0 + (real)0.25 * g2) + (real)0.0625 * g4, g1 + (real)0.25 * g3, (real)0.5,
                 z + 1);
        signs_of((g0 + g2) + g4, g1 + g3, 1, z + 3);
        signs_of((g0 + 4 * g2) + 16 * g4, g1 + 4 * g3, 2, z + 5);
        z[7] = g4;
        return;
    }
    vec even_a = g0 + (real)0.5 * g2, odd_a = g1, even_b = g0 + 2 * g2, odd_b = g1;
    if (outputs > 3) {
        odd_a += (real)0.5 * g[3 * step];
        odd_b += 2 * g[3 * step];
    }
    vec *a = z;
    if (points == 6) *a++ = g0;
    both_signs(even_a, odd_a, even_b, odd_b, a);
    a[4] = g[(outputs - 1) * step];
}

/* G w: all points from the taps of a filter */
INLINE void filter_points(const int points, const int taps, const vec *w, const int step, vec *u) {
    const vec w0 = w[0], w1 = w[step];
    if (points == 5) {
        const vec even_a = (real)(-1. / 3) * w1, odd_a = POINT_B / 3 * w0;
        const vec even_b = (real)(1. / 3) * w1, odd_b = POINT_A / 3 * w0;
        u[0] = even_a - odd_a;
        u[1] = even_a + odd_a;
        u[2] = even_b + odd_b;
        u[3] = even_b - odd_b;
        u[4] = w1;
        return;
    }
    u[0] = w0;
    if (points == 4) {
        const vec w2 = w[2 * step], even = (real)0.5 * (w0 + w2);
        u[1] = even + (real)0.5 * w1;
        u[2] = even - (real)0.5 * w1;
        u[3] = w2;
        return;
    }
    if (points == 8) {
        const vec w2 = w[2 * step], w3 = w[3 * step];
        signs_of(SCALE_HALF * (w0 + (real)0.25 * w2), SCALE_HALF * (w1 + (real)0.25 * w3),
                 (real)0.5, u + 1);
        signs_of(SCALE_ONE * (w0 + w2), SCALE_ONE * (w1 + w3), 1, u + 3);
        signs_of(SCALE_TWO * (w0 + 4 * w2), SCALE_TWO * (w1 + 4 * w3), 2, u + 5);
        u[7] = w3;
        return;
    }
    vec even_a = w0 + (real)0.5 * w[2 * step], odd_a = w1;
    vec even_b = w0 + 2 * w[2 * step], odd_b = w1;
    if (taps > 3) {
        odd_a += (real)0.5 * w[3 * step];
        odd_b += 2 * w[3 * step];
    }
    even_a *= SCALE_A;
    odd_a *= SCALE_A;
    even_b *= SCALE_B;
    odd_b *= SCALE_B;
    both_signs(even_a, odd_a, even_b, odd_b, u + 1);
    u[5] = w[(taps - 1) * step];
}

/* G^T u: taps from all points */
INLINE void filter_sums(const int points, const int taps, const vec *u, const int step, vec *w) {
    if (points == 5) {
        const vec even_a = u[0] + u[step], odd_a = u[step] - u[0];
        const vec even_b = u[2 * step] + u[3 * step], odd_b = u[2 * step] - u[3 * step];
        w[0] = POINT_B / 3 * odd_a + POINT_A / 3 * odd_b;
        w[1] = (real)(1. / 3) * (even_b - even_a) + u[4 * step];
        return;
    }
    const vec sum_a = u[step] + u[2 * step], difference_a = u[step] - u[2 * step];
    if (points == 4) {
        w[0] = u[0] + (real)0.5 * sum_a;
        w[1] = (real)0.5 * difference_a;
        w[2] = (real)0.5 * sum_a + u[3 * step];
        return;
    }
    const vec sum_b = u[3 * step] + u[4 * step], difference_b = u[3 * step] - u[4 * step];
    if (points == 8) {
        const vec sum_c = u[5 * step] + u[6 * step], difference_c = u[5 * step] - u[6 * step];
        w[0] = u[0] + ((SCALE_HALF * sum_a + SCALE_ONE * sum_b) + SCALE_TWO * sum_c);
        w[1] = (SCALE_HALF / 2 * difference_a + SCALE_ONE * difference_b) +
               SCALE_TWO * 2 * difference_c;
        w[2] = (SCALE_HALF / 4 * sum_a + SCALE_ONE * sum_b) + SCALE_TWO * 4 * sum_c;
        w[3] = (SCALE_HALF / 8 * difference_a + SCALE_ONE * difference_b) +
               (SCALE_TWO * 8 * difference_c + u[7 * step]);
        return;
    }
    const vec last = u[5 * step];
    w[0] = u[0] + (SCALE_A * sum_a + SCALE_B * sum_b);
    w[1] = SCALE_A * POINT_A * difference_a + SCALE_B * POINT_B * difference_b;
    if (taps == 3) {
        w[2] = SCALE_A / 2 * sum_a + (SCALE_B * 2 * sum_b + last);
    } else {
        w[2] = SCALE_A / 2 * sum_a + SCALE_B * 2 * sum_b;
        w[3] = SCALE_A * POINT_A / 2 * difference_a +
               (SCALE_B * POINT_B * 2 * difference_b + last);
    }
}

#endif
