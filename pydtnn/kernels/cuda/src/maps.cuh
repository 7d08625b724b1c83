/* What batch norm makes of a channel's sums: the coefficients of its maps.
 *
 * They cost a few operations per channel. So whoever ends a sum computes them at once, if nobody
 * else adds to it; kernels of their own (norm.cu) are for sums that are added up elsewhere.
 */
#pragma once

#include "columns.cuh"

/* factor (x - pivot) + shift: pointers as `Norm.coefficients` has them, `out` null for nothing. */
template <class R> struct ForwardMap {
    const R *gamma, *beta;
    double epsilon, *moments;
    R *out;
    double *collect;

    /* The pivot is the mean rounded; what rounding took away goes into the shift. */
    __device__ __forceinline__ void put(index_t j, index_t channels, double rows, double total,
                                        double squares) const {
        if (collect) {
            if (j == 0) collect[0] += rows;
            collect[1 + j] += total;
            collect[1 + channels + j] += squares;
        }
        const double count = rows > 1 ? rows : 1;
        const double mean = total / count;
        const double spread = squares / count - mean * mean;
        /* written so that NaN stays NaN */
        const double inv_std = 1 / sqrt((spread < 0 ? 0 : spread) + epsilon);
        const R pivot = (R)mean, factor = (R)(gamma[j] * inv_std);
        moments[j] = mean;
        moments[channels + j] = inv_std;
        out[j] = pivot;
        out[channels + j] = factor;
        out[2 * channels + j] = (R)(beta[j] - (mean - pivot) * factor);
    }
};

/* dx = a dz + b (x - pivot) + c, and the gradients of gamma and beta: pointers as
   `Norm.backward_coefficients` has them, `out` null for nothing. */
template <class R> struct BackwardMap {
    Number count;
    const double *moments;
    const R *gamma;
    R *dgamma, *dbeta, *out;
    index_t accumulate;

    __device__ __forceinline__ void put(index_t j, index_t channels, const R *pivot, double total,
                                        double product) const {
        const double rows = count.get();
        const double offset = moments[j] - pivot[j], inv_std = moments[channels + j];
        const double gradient = inv_std * (product - offset * total);
        const double a = gamma[j] * inv_std, b = -a * inv_std * gradient / rows;
        ::put(dgamma + j, gradient, accumulate);
        ::put(dbeta + j, total, accumulate);
        out[j] = (R)a;
        out[channels + j] = (R)b;
        out[2 * channels + j] = (R)(-a * total / rows - b * offset);
    }
};
