/* Batch norm: sums over all rows per channel, the coefficients made of them, and affine maps.
 *
 * Sums of x and x^2 are taken about a pivot, the first row that a thread reads, and are turned into
 * those about 0 in double: with a pivot k deviations from the mean, float32 arithmetic costs the
 * variance eps k^2, however large the mean is. Coefficients that come in double are used in double,
 * so that x scale + shift does not cancel either.
 */
#include "columns.cuh"
#include "group_norm.cuh"

template <class T, int N>
DEVICE void statistics(const T *x, double *out, index_t accumulate, index_t rows, index_t channels,
                       index_t part_rows, double *partial, unsigned *arrived) {
    const Place p = place<N>(rows, channels, part_rows);
    real<T> pivot[N] = {};
    double total[2][N] = {};
    if (p.first < p.end) load<N>(x + p.first * channels + p.channel, pivot);
    sum_rows<4, real<T>>(p, total, [&](index_t row, auto flight, auto &run) {
        real<T> u[flight.value][N];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            load<N>(x + (row + f * p.stride) * channels + p.channel, u[f]);
        }
#pragma unroll
        for (int i = 0; i < flight.value * N; i++) {
            const real<T> centred = u[i / N][i % N] - pivot[i % N];
            run[0][i % N] += centred;
            run[1][i % N] += centred * centred;
        }
    });
    if (p.first < p.end) {
        const double count = (double)((p.end - 1 - p.first) / p.stride + 1);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const double shift = pivot[n], sum = total[0][n];
            total[0][n] = sum + count * shift;
            total[1][n] += shift * (2 * sum + count * shift);
        }
    }
    if (blockIdx.x + blockIdx.y + threadIdx.x + threadIdx.y == 0) {
        put(out, (double)rows, accumulate);
    }
    finish_columns(total, channels, partial, arrived, [&](index_t channel, const double *totals) {
        put(out + 1 + channel, totals[0], accumulate);
        put(out + 1 + channels + channel, totals[1], accumulate);
    });
}

/* sum dy and sum dy (x - mean) inv_std; x is taken relative to the mean rounded to its type. */
template <class T, int N>
DEVICE void backward_statistics(const T *x, const T *dy, const double *mean, const double *inv_std,
                                double *out, index_t accumulate, index_t rows, index_t channels,
                                index_t part_rows, double *partial, unsigned *arrived) {
    const Place p = place<N>(rows, channels, part_rows);
    real<T> pivot[N];
    double total[2][N] = {};
    coefficients(mean, p.channel, p.inside, (real<T>)0, pivot);
    sum_rows<4, real<T>>(p, total, [&](index_t row, auto flight, auto &run) {
        real<T> u[flight.value][N], g[flight.value][N];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            const index_t at = (row + f * p.stride) * channels + p.channel;
            load<N>(x + at, u[f]);
            load<N>(dy + at, g[f]);
        }
#pragma unroll
        for (int i = 0; i < flight.value * N; i++) {
            run[0][i % N] += g[i / N][i % N];
            run[1][i % N] += g[i / N][i % N] * (u[i / N][i % N] - pivot[i % N]);
        }
    });
    finish_columns(total, channels, partial, arrived, [&](index_t channel, const double *totals) {
        const double off = (double)(real<T>)mean[channel] - mean[channel];
        put(out + channel, totals[0], accumulate);
        put(out + channels + channel, (totals[1] + off * totals[0]) * inv_std[channel], accumulate);
    });
}

/* out = a dy + b x + c, or without dy b x + c. */
template <class T, int N, bool BACKWARD>
DEVICE void affine(const T *x, const T *dy, const double *a, const double *b, const double *c,
                   T *out, index_t rows, index_t channels, index_t part_rows) {
    const Place p = place<N>(rows, channels, part_rows);
    double of_dy[N], of_x[N], constant[N];
    coefficients(a, p.channel, p.inside, 0., of_dy);
    coefficients(b, p.channel, p.inside, 0., of_x);
    coefficients(c, p.channel, p.inside, 0., constant);
    for_rows<4>(p, [&](index_t row, auto flight) {
        real<T> u[flight.value][N], g[flight.value][N];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            const index_t at = (row + f * p.stride) * channels + p.channel;
            load<N>(x + at, u[f]);
            if (BACKWARD) load<N>(dy + at, g[f]);
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                double y = of_x[n] * u[f][n] + constant[n];
                if (BACKWARD) y += of_dy[n] * g[f][n];
                u[f][n] = (real<T>)y;
            }
            store<N>(u[f], out + (row + f * p.stride) * channels + p.channel);
        }
    });
}

/* The pivot is the mean rounded; what rounding took away goes into the shift. */
template <class R>
DEVICE void map_forward(const double *sums, const R *gamma, const R *beta, double epsilon,
                        double *moments, R *out, index_t channels) {
    const index_t j = (index_t)blockIdx.x * THREADS + threadIdx.x;
    if (j >= channels) return;
    const double count = sums[0] > 1 ? sums[0] : 1;
    const double mean = sums[1 + j] / count;
    const double spread = sums[1 + channels + j] / count - mean * mean;
    /* written so that NaN stays NaN */
    const double inv_std = 1 / sqrt((spread < 0 ? 0 : spread) + epsilon);
    const R pivot = (R)mean, factor = (R)(gamma[j] * inv_std);
    moments[j] = mean;
    moments[channels + j] = inv_std;
    out[j] = pivot;
    out[channels + j] = factor;
    out[2 * channels + j] = (R)(beta[j] - (mean - pivot) * factor);
}

/* dx = a dz + b (x - pivot) + c, and the gradients of gamma and beta. */
template <class R>
DEVICE void map_backward(const double *sums, double rows, const double *moments, const R *pivot,
                         const R *gamma, R *dgamma, R *dbeta, R *out, index_t accumulate,
                         index_t channels) {
    const index_t j = (index_t)blockIdx.x * THREADS + threadIdx.x;
    if (j >= channels) return;
    const double offset = moments[j] - pivot[j], inv_std = moments[channels + j];
    const double total = sums[j], gradient = inv_std * (sums[channels + j] - offset * total);
    const double a = gamma[j] * inv_std, b = -a * inv_std * gradient / rows;
    put(dgamma + j, gradient, accumulate);
    put(dbeta + j, total, accumulate);
    out[j] = (R)a;
    out[channels + j] = (R)b;
    out[2 * channels + j] = (R)(-a * total / rows - b * offset);
}

#define WIDTHS(T, WIDTH, N)                                                                        \
    KERNEL(statistics_##WIDTH##_##T)                                                               \
    (const T *x, double *out, index_t accumulate, index_t rows, index_t channels,                  \
     index_t part_rows, double *partial, unsigned *arrived) {                                      \
        statistics<T, N>(x, out, accumulate, rows, channels, part_rows, partial, arrived);         \
    }                                                                                              \
    KERNEL(backward_statistics_##WIDTH##_##T)                                                      \
    (const T *x, const T *dy, const double *mean, const double *inv_std, double *out,              \
     index_t accumulate, index_t rows, index_t channels, index_t part_rows, double *partial,       \
     unsigned *arrived) {                                                                          \
        backward_statistics<T, N>(x, dy, mean, inv_std, out, accumulate, rows, channels,           \
                                  part_rows, partial, arrived);                                    \
    }                                                                                              \
    KERNEL(normalize_##WIDTH##_##T)                                                                \
    (const T *x, const double *scale, const double *shift, T *out, index_t rows,                   \
     index_t channels, index_t part_rows) {                                                        \
        affine<T, N, false>(x, nullptr, nullptr, scale, shift, out, rows, channels, part_rows);    \
    }                                                                                              \
    KERNEL(backward_normalize_##WIDTH##_##T)                                                       \
    (const T *x, const T *dy, const double *a, const double *b, const double *c, T *out,           \
     index_t rows, index_t channels, index_t part_rows) {                                          \
        affine<T, N, true>(x, dy, a, b, c, out, rows, channels, part_rows);                        \
    }

/* Coefficients have the type of the arithmetic: those of 16-bit arrays are float32's. */
#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, Width<T>::CHANNELS)                                                            \
    WIDTHS(T, single, 1)                                                                           \
    KERNEL(coefficients_##T)                                                                       \
    (const double *sums, const real<T> *gamma, const real<T> *beta, double epsilon,                \
     double *moments, real<T> *out, index_t channels) {                                            \
        map_forward<real<T>>(sums, gamma, beta, epsilon, moments, out, channels);                  \
    }                                                                                              \
    KERNEL(backward_coefficients_##T)                                                              \
    (const double *sums, double rows, const double *moments, const real<T> *pivot,                 \
     const real<T> *gamma, real<T> *dgamma, real<T> *dbeta, real<T> *out, index_t accumulate,      \
     index_t channels) {                                                                           \
        map_backward<real<T>>(sums, rows, moments, pivot, gamma, dgamma, dbeta, out, accumulate,   \
                              channels);                                                           \
    }                                                                                              \
    GROUP_KERNELS(T)

ELEMENTS(DEFINE)
