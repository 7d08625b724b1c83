/* Layer norm of one row of n elements, which stays in L1: statistics and map, or their derivatives.
 * RMS norm is the case without beta, which is not `centred`: the mean counts as 0.
 *
 * Deviations are summed in vectors relative to a pivot, the mean of the row's first vector, to
 * avoid cancellation; the normalised row is computed in the same way: xhat = (x - pivot) inv_std +
 * (pivot - mean) inv_std.
 */
#ifndef PYDTNN_NORM_ROW_H
#define PYDTNN_NORM_ROW_H

#include <math.h>

#include "channels.h"
#include "stored.h"

enum { CHAINS = 4 }; /* independent sums, which hide the latency of an addition */

/* 1 / deviation; a variance that rounding made negative is 0, and NaN stays, unlike with fmax */
INLINE double inverse_deviation(double variance, double epsilon) {
    return 1 / sqrt((variance < 0 ? 0 : variance) + epsilon);
}

INLINE void row_statistics(const stored *x, ptrdiff_t n, int centred, double epsilon,
                           double *mean, double *inv_std) {
    const ptrdiff_t first = min_of(n, LANES), tail = n % LANES, whole = n - tail,
                    step = CHAINS * LANES;
    const real pivot = centred ? vsum(sload_part(x, first)) / (real)first : 0;
    const vec p = vset(pivot), end = sload_part(x + whole, tail);
    const vec rest = vselect(vlanes(0) < (ireal)tail, end, p) - p;
    vec sum[CHAINS] = {rest}, square[CHAINS] = {rest * rest};
    ptrdiff_t j = 0;
    for (; j + step <= whole; j += step) {
        for (int k = 0; k < CHAINS; k++) {
            const vec d = sload(x + j + k * LANES) - p;
            sum[k] += d;
            square[k] += d * d;
        }
    }
    for (; j < whole; j += LANES) {
        const vec d = sload(x + j) - p;
        sum[0] += d;
        square[0] += d * d;
    }
    const double offset =
        centred ? (double)vsum((sum[0] + sum[1]) + (sum[2] + sum[3])) / (double)n : 0;
    const double about_pivot =
        (double)vsum((square[0] + square[1]) + (square[2] + square[3])) / (double)n;
    *mean = (double)pivot + offset;
    *inv_std = inverse_deviation(about_pivot - offset * offset, epsilon);
}

/* What turns x into xhat: (x - pivot) scale + offset. */
struct standard {
    vec pivot, scale, offset;
};

INLINE struct standard standard_of(double mean, double inv_std) {
    const real pivot = (real)mean;
    return (struct standard){vset(pivot), vset((real)inv_std),
                             vset((real)(((double)pivot - mean) * inv_std))};
}

INLINE vec standardize(vec x, struct standard s) { return (x - s.pivot) * s.scale + s.offset; }

INLINE void row_forward(const stored *x, ptrdiff_t n, const real *gamma, const real *beta,
                        int centred, double epsilon, stored *out, double *mean, double *inv_std) {
    row_statistics(x, n, centred, epsilon, mean, inv_std);
    const struct standard s = standard_of(*mean, *inv_std);
    ptrdiff_t j = 0;
    for (; j + LANES <= n; j += LANES) {
        const vec b = centred ? vload(beta + j) : vzero();
        sstore(out + j, standardize(sload(x + j), s) * vload(gamma + j) + b);
    }
    const ptrdiff_t tail = n - j;
    const vec xhat = standardize(sload_part(x + j, tail), s);
    const vec b = centred ? vload_part(beta + j, tail) : vzero();
    sstore_part(out + j, xhat * vload_part(gamma + j, tail) + b, tail);
}

struct row_sums {
    vec g, gx;
};

/* One vector: adds to the gradients of gamma and beta, and to the sums of g = dy gamma and g
   xhat. */
INLINE void row_products(const stored *x, const stored *dy, const real *gamma, struct standard s,
                         ptrdiff_t j, ptrdiff_t lanes, struct row_sums *sums, real *dgamma,
                         real *dbeta) {
    const vec d = load_stored(dy + j, lanes), xhat = standardize(load_stored(x + j, lanes), s);
    const vec g = d * load(gamma + j, lanes);
    sums->g += g;
    sums->gx += g * xhat;
    store(dgamma + j, load(dgamma + j, lanes) + d * xhat, lanes);
    store(dbeta + j, load(dbeta + j, lanes) + d, lanes);
}

/* dx = (g - mean g - xhat mean(g xhat)) inv_std */
INLINE void row_gradient(const stored *x, const stored *dy, const real *gamma, struct standard s,
                         struct row_sums means, ptrdiff_t j, ptrdiff_t lanes, stored *out) {
    const vec xhat = standardize(load_stored(x + j, lanes), s),
              g = load_stored(dy + j, lanes) * load(gamma + j, lanes);
    store_stored(out + j, (g - means.g - xhat * means.gx) * s.scale, lanes);
}

INLINE void row_backward(const stored *x, const stored *dy, ptrdiff_t n, const real *gamma,
                         int centred, double mean, double inv_std, stored *out, real *dgamma,
                         real *dbeta) {
    const struct standard s = standard_of(mean, inv_std);
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    struct row_sums sums = {vzero(), vzero()};
    for (ptrdiff_t j = 0; j < whole; j += LANES)
        row_products(x, dy, gamma, s, j, LANES, &sums, dgamma, dbeta);
    if (tail) row_products(x, dy, gamma, s, whole, tail, &sums, dgamma, dbeta);
    const real mean_g = centred ? vsum(sums.g) / (real)n : 0;
    const struct row_sums means = {vset(mean_g), vset(vsum(sums.gx) / (real)n)};
    for (ptrdiff_t j = 0; j < whole; j += LANES)
        row_gradient(x, dy, gamma, s, means, j, LANES, out);
    if (tail) row_gradient(x, dy, gamma, s, means, whole, tail, out);
}

#endif
