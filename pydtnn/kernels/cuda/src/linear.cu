/* Biases of fully connected layers and convolutions: added to each row, and their gradient. */
#include "columns.cuh"

template <class T, int N>
DEVICE void add_bias(const T *bias, T *out, index_t rows, index_t channels, index_t part_rows) {
    const Place p = place<N>(rows, channels, part_rows);
    real<T> b[N] = {};
    if (p.inside) {
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = widen(bias[p.channel + n]);
    }
    for_rows<4>(p, [&](index_t row, auto flight) {
        real<T> y[flight.value][N];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            load<N>(out + (row + f * p.stride) * channels + p.channel, y[f]);
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
#pragma unroll
            for (int n = 0; n < N; n++) y[f][n] += b[n];
            store<N>(y[f], out + (row + f * p.stride) * channels + p.channel);
        }
    });
}

template <class T, int N>
DEVICE void backward_bias(const T *dy, T *out, index_t accumulate, index_t rows, index_t channels,
                          index_t part_rows, double *partial, unsigned *arrived) {
    const Place p = place<N>(rows, channels, part_rows);
    double total[1][N] = {};
    sum_rows<4, real<T>>(p, total, [&](index_t row, auto flight, auto &run) {
        real<T> g[flight.value][N];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            load<N>(dy + (row + f * p.stride) * channels + p.channel, g[f]);
        }
#pragma unroll
        for (int i = 0; i < flight.value * N; i++) run[0][i % N] += g[i / N][i % N];
    });
    finish_columns(total, channels, partial, arrived, [&](index_t channel, const double *totals) {
        put(out + channel, totals[0], accumulate);
    });
}

#define WIDTHS(T, WIDTH, N)                                                                        \
    KERNEL(add_bias_##WIDTH##_##T)                                                                 \
    (const T *bias, T *out, index_t rows, index_t channels, index_t part_rows) {                   \
        add_bias<T, N>(bias, out, rows, channels, part_rows);                                      \
    }                                                                                              \
    KERNEL(backward_bias_##WIDTH##_##T)                                                            \
    (const T *dy, T *out, index_t accumulate, index_t rows, index_t channels, index_t part_rows,   \
     double *partial, unsigned *arrived) {                                                         \
        backward_bias<T, N>(dy, out, accumulate, rows, channels, part_rows, partial, arrived);     \
    }

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, Width<T>::CHANNELS)                                                            \
    WIDTHS(T, single, 1)

ELEMENTS(DEFINE)
