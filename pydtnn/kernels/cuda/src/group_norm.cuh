/* Layer and group norm: one mean and variance per row of x (N, P, C) and group of channels.
 *
 * A team of threads takes one group of one row: P runs of C / groups neighbours. It reads them once
 * for the sums, about a pivot as in norm.cu, and a second time, from the caches, for the output.
 * The gradients of gamma and beta are sums over rows and positions, in a kernel of their own.
 */
#pragma once

#include "columns.cuh"
#include "team.cuh"

/* Elements of a group: number i of `size`, as its place in x and its channel. */
struct Group {
    index_t row, base, width, channels, first, size;

    __device__ __forceinline__ Group(index_t index, index_t positions, index_t channels_,
                                     index_t groups) {
        width = channels_ / groups;
        channels = channels_;
        row = index / groups;
        first = index % groups * width;
        base = row * positions * channels;
        size = positions * width;
    }
    __device__ __forceinline__ index_t channel(unsigned i) const {
        return first + i % (unsigned)width;
    }
    __device__ __forceinline__ index_t at(unsigned i) const {
        return base + i / (unsigned)width * channels + channel(i);
    }
};

template <class T, int SIZE>
DEVICE void group_forward(const T *x, const real<T> *gamma, const real<T> *beta, double epsilon,
                          T *out, double *mean, double *inv_std, index_t rows, index_t positions,
                          index_t channels, index_t groups) {
    const Team<SIZE> team;
    const bool real_team = team.index < rows * groups;
    const Group group(real_team ? team.index : 0, positions, channels, groups);
    const real<T> pivot = widen(x[group.base + group.first]);
    double sum = 0, square = 0;
    for (index_t i = team.lane; i < group.size; i += SIZE) {
        const real<T> u = widen(x[group.at(i)]) - pivot;
        sum += u;
        square += (double)u * u;
    }
    const double offset = team.sum(sum) / group.size;
    const double spread = team.sum(square) / group.size - offset * offset;
    const double rstd = 1 / sqrt((spread < 0 ? 0 : spread) + epsilon);
    if (!real_team) return;
    if (team.lane == 0) {
        mean[team.index] = pivot + offset;
        inv_std[team.index] = rstd;
    }
    const real<T> rest = (real<T>)offset, factor = (real<T>)rstd;
    for (index_t i = team.lane; i < group.size; i += SIZE) {
        const index_t at = group.at(i), c = group.channel(i);
        const real<T> xhat = (widen(x[at]) - pivot - rest) * factor;
        out[at] = Narrow<T>::of(xhat * gamma[c] + beta[c]);
    }
}

template <class T, int SIZE>
DEVICE void group_backward(const T *x, const T *dy, const real<T> *gamma, const double *mean,
                           const double *inv_std, T *out, index_t rows, index_t positions,
                           index_t channels, index_t groups) {
    const Team<SIZE> team;
    const bool real_team = team.index < rows * groups;
    const Group group(real_team ? team.index : 0, positions, channels, groups);
    const index_t index = real_team ? team.index : 0;
    const double centre = mean[index], rstd = inv_std[index];
    double sum = 0, product = 0;
    for (index_t i = team.lane; i < group.size; i += SIZE) {
        const index_t at = group.at(i);
        const double g = (double)widen(dy[at]) * gamma[group.channel(i)];
        sum += g;
        product += g * (widen(x[at]) - centre);
    }
    sum = team.sum(sum) / group.size;
    product = team.sum(product) / group.size * rstd * rstd;
    if (!real_team) return;
    for (index_t i = team.lane; i < group.size; i += SIZE) {
        const index_t at = group.at(i);
        const double g = (double)widen(dy[at]) * gamma[group.channel(i)];
        const double dx = (g - sum - (widen(x[at]) - centre) * product) * rstd;
        out[at] = Narrow<T>::of((real<T>)dx);
    }
}

/* dgamma = sum dy xhat, dbeta = sum dy over the rows and positions: rows of (N P, C). */
template <class T, int N>
DEVICE void group_parameters(const T *x, const T *dy, const double *mean, const double *inv_std,
                             real<T> *dgamma, real<T> *dbeta, index_t accumulate, index_t positions,
                             index_t groups, index_t rows, index_t channels, index_t part_rows,
                             double *partial, unsigned *arrived) {
    const Place p = place<N>(rows, channels, part_rows);
    const index_t width = channels / groups;
    double total[2][N] = {};
    for_rows<1>(p, [&](index_t row, auto) {
        const index_t at = row * channels + p.channel, first = row / positions * groups;
        real<T> u[N], g[N];
        load<N>(x + at, u);
        load<N>(dy + at, g);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const index_t group = first + (p.channel + n) / width;
            total[0][n] += g[n] * (u[n] - mean[group]) * inv_std[group];
            total[1][n] += g[n];
        }
    });
    finish_columns(total, channels, partial, arrived, [&](index_t channel, const double *totals) {
        put(dgamma + channel, totals[0], accumulate);
        put(dbeta + channel, totals[1], accumulate);
    });
}

#define GROUP_TEAMS(T, NAME, SIZE)                                                                 \
    KERNEL(group_forward_##NAME##_##T)                                                             \
    (const T *x, const real<T> *gamma, const real<T> *beta, double epsilon, T *out, double *mean,  \
     double *inv_std, index_t rows, index_t positions, index_t channels, index_t groups) {         \
        group_forward<T, SIZE>(x, gamma, beta, epsilon, out, mean, inv_std, rows, positions,       \
                               channels, groups);                                                  \
    }                                                                                              \
    KERNEL(group_backward_##NAME##_##T)                                                            \
    (const T *x, const T *dy, const real<T> *gamma, const double *mean, const double *inv_std,     \
     T *out, index_t rows, index_t positions, index_t channels, index_t groups) {                  \
        group_backward<T, SIZE>(x, dy, gamma, mean, inv_std, out, rows, positions, channels,       \
                                groups);                                                           \
    }

#define GROUP_WIDTHS(T, WIDTH, N)                                                                  \
    KERNEL(group_parameters_##WIDTH##_##T)                                                         \
    (const T *x, const T *dy, const double *mean, const double *inv_std, real<T> *dgamma,          \
     real<T> *dbeta, index_t accumulate, index_t positions, index_t groups, index_t rows,          \
     index_t channels, index_t part_rows, double *partial, unsigned *arrived) {                    \
        group_parameters<T, N>(x, dy, mean, inv_std, dgamma, dbeta, accumulate, positions, groups, \
                               rows, channels, part_rows, partial, arrived);                       \
    }

#define GROUP_KERNELS(T)                                                                           \
    GROUP_TEAMS(T, warp, WARP)                                                                     \
    GROUP_TEAMS(T, block, THREADS)                                                                 \
    GROUP_WIDTHS(T, wide, Width<T>::CHANNELS)                                                      \
    GROUP_WIDTHS(T, single, 1)
