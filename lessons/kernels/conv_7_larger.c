/* 7 Larger tiles: 16 outputs from 36 multiplications instead of 144, four times fewer.
   Tiles of 2 x 2 outputs need 64 for as many. The transforms of a tile have more additions, but
   four times the outputs. What limits it: two thirds of the time are the products, at nine tenths
   of the peak; the rest are transforms and copies, through the second cache. Still larger tiles
   lose more bits than they save multiplications. Inputs are evaluated as polynomials at 0,
   +-sqrt(1/2), +-sqrt(2) and infinity: errors are twice those of rung 4, and would be four times
   with the points 0, +-1, +-2 (Barabasz, Anderson, Soodhalter and Gregg, "Error analysis and
   improving the accuracy of Winograd convolution for deep neural networks", 2020). h and w must be
   at least 4. */
#define SIDE 4
enum { POINTS = SIDE + 2 };
#include "tiles.h"

static const float P = 0.70710678f, Q = 1.41421356f;

static inline void inputs(const vec *d, int step, vec *v) {
    vec d0 = d[0], d1 = d[step], d2 = d[2 * step], d3 = d[3 * step], d4 = d[4 * step];
    vec even = d4 - 2 * d2, odd = P * (d3 - 2 * d1);
    v[0] = d0 + d4 - 2.5f * d2;
    v[1] = even + odd;
    v[2] = even - odd;
    even = d4 - 0.5f * d2;
    odd = Q * (d3 - 0.5f * d1);
    v[3] = even + odd;
    v[4] = even - odd;
    v[5] = d1 + d[5 * step] - 2.5f * d3;
}

static inline void filters(const vec *g, int step, vec *u) {
    vec g0 = g[0], g1 = g[step], g2 = g[2 * step];
    u[0] = g0;
    u[1] = (g0 + 0.5f * g2 + P * g1) * (-2 / 3.f);
    u[2] = (g0 + 0.5f * g2 - P * g1) * (-2 / 3.f);
    u[3] = (g0 + 2 * g2 + Q * g1) * (1 / 6.f);
    u[4] = (g0 + 2 * g2 - Q * g1) * (1 / 6.f);
    u[5] = g2;
}

static inline void outputs(const vec *m, int step, vec *y) {
    vec even1 = m[step] + m[2 * step], odd1 = P * (m[step] - m[2 * step]);
    vec even2 = m[3 * step] + m[4 * step], odd2 = Q * (m[3 * step] - m[4 * step]);
    y[0] = m[0] + even1 + even2;
    y[1] = odd1 + odd2;
    y[2] = 0.5f * even1 + 2 * even2;
    y[3] = 0.5f * odd1 + 2 * odd2 + m[5 * step];
}

#include "conv_6_groups.c"
