/* Batch norm: sums over all rows per channel, the coefficients made of them, and affine maps.
 *
 * Sums of x and x^2 are taken about a pivot, the first row that a thread reads, and are turned into
 * those about 0 in double: with a pivot k deviations from the mean, float32 arithmetic costs the
 * variance eps k^2, however large the mean is. Coefficients that come in double are used in double,
 * so that x scale + shift does not cancel either; not so for elements of 16 bits, which cancel more
 * digits by themselves.
 */
#include "group_norm.cuh"
#include "maps.cuh"

template <class T, int N>
DEVICE void statistics(const T *x, double *out, index_t accumulate, const ForwardMap<real<T>> &map,
                       index_t rows, index_t channels, index_t part_rows, double *partial,
                       unsigned *arrived) {
    __shared__ double table[Table<T, 2, N>::DOUBLES];
    const Place p = place<N>(rows, channels, part_rows);
    real<T> pivot[N] = {};
    typename Slot<T>::type total[2][N];
    if (p.count) load<N>(x + p.at, pivot);
    sum_rows<T, 4>(p, table, total, [&](index_t at, auto flight, auto &run) {
        Pack<T, N> from[flight.value];
#pragma unroll
        for (int f = 0; f < flight.value; f++) from[f] = fetch<N>(x + at + f * p.pitch);
#pragma unroll
        for (int i = 0; i < flight.value * N; i++) {
            const real<T> centred = widen(from[i / N].at[i % N]) - pivot[i % N];
            run[0][i % N] += centred;
            run[1][i % N] += centred * centred;
        }
    });
    if (blockIdx.x + blockIdx.y + threadIdx.x + threadIdx.y == 0) {
        put(out, (double)rows, accumulate);
    }
    const auto about_zero = [&](int n, double (&sums)[2]) {
        const double shift = pivot[n], sum = total[0][n], moved = p.count * shift;
        sums[0] = sum + moved;
        sums[1] = total[1][n] + shift * (2 * sum + moved);
    };
    const auto finish = [&](index_t channel, const double *totals) {
        put(out + 1 + channel, totals[0], accumulate);
        put(out + 1 + channels + channel, totals[1], accumulate);
        if (map.out) map.put(channel, channels, (double)rows, totals[0], totals[1]);
    };
    finish_columns<2, N>(about_zero, table, channels, partial, arrived, finish);
}

/* sum dy and sum dy (x - mean) inv_std; x is taken relative to the mean rounded to its type. */
template <class T, int N>
DEVICE void backward_statistics(const T *x, const T *dy, const double *mean, const double *inv_std,
                                double *out, index_t accumulate, index_t rows, index_t channels,
                                index_t part_rows, double *partial, unsigned *arrived) {
    __shared__ double table[Table<T, 2, N>::DOUBLES];
    const Place p = place<N>(rows, channels, part_rows);
    real<T> pivot[N];
    typename Slot<T>::type total[2][N];
    coefficients(mean, p.channel, p.inside, (real<T>)0, pivot);
    sum_rows<T, 2>(p, table, total, [&](index_t at, auto flight, auto &run) {
        Pack<T, N> u[flight.value], g[flight.value];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            u[f] = fetch<N>(x + at + f * p.pitch);
            g[f] = fetch<N>(dy + at + f * p.pitch);
        }
#pragma unroll
        for (int i = 0; i < flight.value * N; i++) {
            const real<T> slope = widen(g[i / N].at[i % N]);
            run[0][i % N] += slope;
            run[1][i % N] += slope * (widen(u[i / N].at[i % N]) - pivot[i % N]);
        }
    });
    const auto finish = [&](index_t channel, const double *totals) {
        const double off = (double)(real<T>)mean[channel] - mean[channel];
        put(out + channel, totals[0], accumulate);
        put(out + channels + channel, (totals[1] + off * totals[0]) * inv_std[channel], accumulate);
    };
    finish_columns(total, table, channels, partial, arrived, finish);
}

/* What coefficients of maps are multiplied in. */
template <class T> struct Fine {
    typedef double type;
};
template <> struct Fine<float16> {
    typedef float type;
};
template <> struct Fine<bfloat16> {
    typedef float type;
};

/* out = a dy + b x + c, or without dy b x + c. */
template <class T, int N, bool BACKWARD>
DEVICE void affine(const T *x, const T *dy, const double *a, const double *b, const double *c,
                   T *out, index_t rows, index_t channels, index_t part_rows) {
    typedef typename Fine<T>::type F;
    const Place p = place<N>(rows, channels, part_rows);
    F of_dy[N], of_x[N], constant[N];
    if (BACKWARD) coefficients(a, p.channel, p.inside, (F)0, of_dy);
    coefficients(b, p.channel, p.inside, (F)0, of_x);
    coefficients(c, p.channel, p.inside, (F)0, constant);
    for_rows<BACKWARD ? 2 : 4>(p, [&](index_t at, auto flight) {
        Pack<T, N> u[flight.value], g[flight.value];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            u[f] = fetch<N>(x + at + f * p.pitch);
            if (BACKWARD) g[f] = fetch<N>(dy + at + f * p.pitch);
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                F y = of_x[n] * widen(u[f].at[n]) + constant[n];
                if (BACKWARD) y += of_dy[n] * widen(g[f].at[n]);
                u[f].at[n] = Narrow<T>::of((real<T>)y);
            }
            put_pack(u[f], out + at + f * p.pitch);
        }
    });
}

/* The coefficients of maps, of sums that are there. */
template <class R>
DEVICE void map_forward(const double *sums, const ForwardMap<R> &map, index_t channels) {
    const index_t j = (index_t)blockIdx.x * THREADS + threadIdx.x;
    if (j < channels) map.put(j, channels, sums[0], sums[1 + j], sums[1 + channels + j]);
}
template <class R>
DEVICE void map_backward(const double *sums, const R *pivot, const BackwardMap<R> &map,
                         index_t channels) {
    const index_t j = (index_t)blockIdx.x * THREADS + threadIdx.x;
    if (j < channels) map.put(j, channels, pivot, sums[j], sums[channels + j]);
}

#define WIDTHS(T, WIDTH, N)                                                                        \
    KERNEL_OF(3, statistics_##WIDTH##_##T)                                                         \
    (const T *x, double *out, index_t accumulate, const real<T> *gamma, const real<T> *beta,       \
     double epsilon, double *moments, real<T> *map, double *collect, index_t rows,                 \
     index_t channels, index_t part_rows, double *partial, unsigned *arrived) {                    \
        const ForwardMap<real<T>> made = {gamma, beta, epsilon, moments, map, collect};            \
        statistics<T, N>(x, out, accumulate, made, rows, channels, part_rows, partial, arrived);   \
    }                                                                                              \
    KERNEL_OF(3, backward_statistics_##WIDTH##_##T)                                                \
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
    WIDTHS(T, wide, Width<T>::FLAT)                                                                \
    WIDTHS(T, single, 1)                                                                           \
    KERNEL(coefficients_##T)                                                                       \
    (const double *sums, const real<T> *gamma, const real<T> *beta, double epsilon,                \
     double *moments, real<T> *out, double *collect, index_t channels) {                           \
        const ForwardMap<real<T>> made = {gamma, beta, epsilon, moments, out, collect};            \
        map_forward(sums, made, channels);                                                         \
    }                                                                                              \
    KERNEL(backward_coefficients_##T)                                                              \
    (const double *sums, double rows, const double *rows_at, const double *moments,                \
     const real<T> *pivot, const real<T> *gamma, real<T> *dgamma, real<T> *dbeta, real<T> *out,    \
     index_t accumulate, index_t channels) {                                                       \
        const Number count = {rows, rows_at};                                                      \
        const BackwardMap<real<T>> made = {count, moments, gamma, dgamma, dbeta, out, accumulate}; \
        map_backward(sums, pivot, made, channels);                                                 \
    }                                                                                              \
    GROUP_KERNELS(T)

ELEMENTS(DEFINE)
