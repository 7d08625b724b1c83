/* Layer and group norm: one mean and variance per row of x (N, P, C) and group of channels.
 *
 * A team of threads takes one group of one row: P runs of C / groups neighbours (runs.cuh). Sums are
 * taken about a pivot as in norm.cu: in the arithmetic of the elements over a vector, in double
 * from there on. What backward multiplies is centred about the mean rounded to that arithmetic, and
 * what rounding took away is put back. The gradients of gamma and beta are sums over rows and
 * positions, in a kernel of their own.
 */
#pragma once

#include "columns.cuh"
#include "runs.cuh"
#include "team.cuh"

/* Where a group is in x: its first element, and its first channel. */
struct Group {
    index_t base, channel;
    int width;

    __device__ __forceinline__ Group(index_t index, index_t positions, index_t channels,
                                     index_t groups) {
        const index_t row = index / groups;
        width = (int)(channels / groups);
        channel = (index - row * groups) * width;
        base = row * positions * channels + channel;
    }
};

template <class T, int N, int SIZE>
DEVICE void group_forward(const T *x, const real<T> *gamma, const real<T> *beta, double epsilon,
                          T *out, double *mean, double *inv_std, index_t rows, index_t positions,
                          index_t channels, index_t groups) {
    typedef real<T> R;
    const Team<SIZE> team;
    const bool real_team = team.index < rows * groups;
    const Group group(real_team ? team.index : 0, positions, channels, groups);
    Runs<T, N, SIZE, 1> runs(team.lane, group.width, real_team ? (int)positions : 0, (int)channels);
    runs.from[0] = x + group.base;
    runs.hold();
    const R pivot = widen(x[group.base]);
    double sum = 0, square = 0;
    runs.each([&](int, int, const R(&v)[1][N]) {
        R of_vector = 0, squares = 0;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const R u = v[0][n] - pivot;
            of_vector += u;
            squares += u * u;
        }
        sum += of_vector;
        square += squares;
    });
    const double size = (double)group.width * positions;
    const double offset = team.sum(sum) / size;
    const double spread = team.sum(square) / size - offset * offset;
    const double rstd = 1 / sqrt((spread < 0 ? 0 : spread) + epsilon);
    if (!real_team) return;
    if (team.lane == 0) {
        mean[team.index] = pivot + offset;
        inv_std[team.index] = rstd;
    }
    const R rest = (R)offset, factor = (R)rstd;
    T *const to = out + group.base;
    runs.each([&](int at, int column, const R(&v)[1][N]) {
        R scale[N], shift[N], y[N];
        load<N>(gamma + group.channel + column, scale);
        load<N>(beta + group.channel + column, shift);
#pragma unroll
        for (int n = 0; n < N; n++) {
            y[n] = (v[0][n] - pivot - rest) * factor * scale[n] + shift[n];
        }
        store<N>(y, to + at);
    });
}

template <class T, int N, int SIZE>
DEVICE void group_backward(const T *x, const T *dy, const real<T> *gamma, const double *mean,
                           const double *inv_std, T *out, index_t rows, index_t positions,
                           index_t channels, index_t groups) {
    typedef real<T> R;
    const Team<SIZE> team;
    const bool real_team = team.index < rows * groups;
    const index_t index = real_team ? team.index : 0;
    const Group group(index, positions, channels, groups);
    Runs<T, N, SIZE, 2> runs(team.lane, group.width, real_team ? (int)positions : 0, (int)channels);
    runs.from[0] = x + group.base;
    runs.from[1] = dy + group.base;
    runs.hold();
    const double rstd = inv_std[index];
    const R centre = (R)mean[index];
    const double off = centre - mean[index];
    double sum = 0, product = 0;
    runs.each([&](int, int column, const R(&v)[2][N]) {
        R scale[N], of_vector = 0, products = 0;
        load<N>(gamma + group.channel + column, scale);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const R g = v[1][n] * scale[n];
            of_vector += g;
            products += g * (v[0][n] - centre);
        }
        sum += of_vector;
        product += products;
    });
    const double size = (double)group.width * positions;
    sum = team.sum(sum);
    product = (team.sum(product) + off * sum) / size * rstd * rstd;
    if (!real_team) return;
    const R slope = (R)product, constant = (R)(sum / size + off * product), factor = (R)rstd;
    T *const to = out + group.base;
    runs.each([&](int at, int column, const R(&v)[2][N]) {
        R scale[N], dx[N];
        load<N>(gamma + group.channel + column, scale);
#pragma unroll
        for (int n = 0; n < N; n++) {
            dx[n] = (v[1][n] * scale[n] - constant - (v[0][n] - centre) * slope) * factor;
        }
        store<N>(dx, to + at);
    });
}

/* dgamma = sum dy xhat, dbeta = sum dy over the rows and positions: rows of (N P, C). The channels
   of a thread are of one group. */
template <class T, int N>
DEVICE void group_parameters(const T *x, const T *dy, const double *mean, const double *inv_std,
                             real<T> *dgamma, real<T> *dbeta, index_t accumulate, index_t positions,
                             index_t groups, index_t rows, index_t channels, index_t part_rows,
                             double *partial, unsigned *arrived) {
    typedef real<T> R;
    __shared__ double table[Table<T, 2, N>::DOUBLES];
    const Place p = place<N>(rows, channels, part_rows);
    typename Slot<T>::type total[2][N];
    /* the statistics of a thread's next row: so many samples on, so many positions */
    const index_t samples = blockDim.y / positions * groups;
    const int beyond = (int)(blockDim.y % positions);
    const index_t sample = p.row / positions;
    index_t position = p.row - sample * positions;
    index_t statistic = sample * groups + (p.inside ? p.channel / (channels / groups) : 0);
    sum_rows<T, 2>(p, table, total, [&](index_t at, auto flight, auto &run) {
        Pack<T, N> u[flight.value], g[flight.value];
        double centre[flight.value], rstd[flight.value];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            u[f] = fetch<N>(x + at + f * p.pitch);
            g[f] = fetch<N>(dy + at + f * p.pitch);
            centre[f] = mean[statistic];
            rstd[f] = inv_std[statistic];
            statistic += samples;
            position += beyond;
            if (position >= positions) {
                position -= positions;
                statistic += groups;
            }
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            const R about = (R)centre[f], off = (R)(about - centre[f]), factor = (R)rstd[f];
#pragma unroll
            for (int n = 0; n < N; n++) {
                const R slope = widen(g[f].at[n]);
                run[0][n] += slope * ((widen(u[f].at[n]) - about + off) * factor);
                run[1][n] += slope;
            }
        }
    });
    const auto finish = [&](index_t channel, const double *totals) {
        put(dgamma + channel, totals[0], accumulate);
        put(dbeta + channel, totals[1], accumulate);
    };
    finish_columns(total, table, channels, partial, arrived, finish);
}

#define GROUP_TEAMS(T, NAME, SIZE, WIDTH, N)                                                       \
    KERNEL_OF(2, group_forward_##NAME##_##WIDTH##_##T)                                             \
    (const T *x, const real<T> *gamma, const real<T> *beta, double epsilon, T *out, double *mean,  \
     double *inv_std, index_t rows, index_t positions, index_t channels, index_t groups) {         \
        group_forward<T, N, SIZE>(x, gamma, beta, epsilon, out, mean, inv_std, rows, positions,    \
                                  channels, groups);                                               \
    }                                                                                              \
    KERNEL_OF(2, group_backward_##NAME##_##WIDTH##_##T)                                            \
    (const T *x, const T *dy, const real<T> *gamma, const double *mean, const double *inv_std,     \
     T *out, index_t rows, index_t positions, index_t channels, index_t groups) {                  \
        group_backward<T, N, SIZE>(x, dy, gamma, mean, inv_std, out, rows, positions, channels,    \
                                   groups);                                                        \
    }

#define GROUP_WIDTHS(T, WIDTH, N)                                                                  \
    GROUP_TEAMS(T, warp, WARP, WIDTH, N)                                                           \
    GROUP_TEAMS(T, block, THREADS, WIDTH, N)                                                       \
    KERNEL_OF(3, group_parameters_##WIDTH##_##T)                                                   \
    (const T *x, const T *dy, const double *mean, const double *inv_std, real<T> *dgamma,          \
     real<T> *dbeta, index_t accumulate, index_t positions, index_t groups, index_t rows,          \
     index_t channels, index_t part_rows, double *partial, unsigned *arrived) {                    \
        group_parameters<T, N>(x, dy, mean, inv_std, dgamma, dbeta, accumulate, positions, groups, \
                               rows, channels, part_rows, partial, arrived);                       \
    }

#define GROUP_KERNELS(T)                                                                           \
    GROUP_WIDTHS(T, wide, Width<T>::FLAT)                                                          \
    GROUP_WIDTHS(T, single, 1)
