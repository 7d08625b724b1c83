/* Biases of fully connected layers and convolutions: added to each row, and their gradient; beside
   arrays of 16 bits they are of float. */
#include "columns.cuh"

template <class T, int N>
DEVICE void add_bias(const real<T> *bias, T *out, index_t rows, index_t channels,
                     index_t part_rows) {
    const Place p = place<N>(rows, channels, part_rows);
    real<T> b[N];
    coefficients(bias, p.channel, p.inside, (real<T>)0, b);
    for_rows<4>(p, [&](index_t at, auto flight) {
        Pack<T, N> y[flight.value];
#pragma unroll
        for (int f = 0; f < flight.value; f++) y[f] = fetch<N>(out + at + f * p.pitch);
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
#pragma unroll
            for (int n = 0; n < N; n++) y[f].at[n] = Narrow<T>::of(widen(y[f].at[n]) + b[n]);
            put_pack(y[f], out + at + f * p.pitch);
        }
    });
}

template <class T, int N>
DEVICE void backward_bias(const T *dy, real<T> *out, index_t accumulate, index_t rows,
                          index_t channels, index_t part_rows, double *partial,
                          unsigned *arrived) {
    __shared__ double table[Table<T, 1, N>::DOUBLES];
    const Place p = place<N>(rows, channels, part_rows);
    typename Slot<T>::type total[1][N];
    sum_rows<T, 4>(p, table, total, [&](index_t at, auto flight, auto &run) {
        Pack<T, N> g[flight.value];
#pragma unroll
        for (int f = 0; f < flight.value; f++) g[f] = fetch<N>(dy + at + f * p.pitch);
#pragma unroll
        for (int i = 0; i < flight.value * N; i++) run[0][i % N] += widen(g[i / N].at[i % N]);
    });
    const auto finish = [&](index_t channel, const double *totals) {
        put(out + channel, totals[0], accumulate);
    };
    finish_columns(total, table, channels, partial, arrived, finish);
}

#define WIDTHS(T, WIDTH, N)                                                                        \
    KERNEL(add_bias_##WIDTH##_##T)                                                                 \
    (const real<T> *bias, T *out, index_t rows, index_t channels, index_t part_rows) {             \
        add_bias<T, N>(bias, out, rows, channels, part_rows);                                      \
    }                                                                                              \
    KERNEL_OF(3, backward_bias_##WIDTH##_##T)                                                      \
    (const T *dy, real<T> *out, index_t accumulate, index_t rows, index_t channels,                \
     index_t part_rows, double *partial, unsigned *arrived) {                                      \
        backward_bias<T, N>(dy, out, accumulate, rows, channels, part_rows, partial, arrived);     \
    }

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, Width<T>::FLAT)                                                                \
    WIDTHS(T, single, 1)

ELEMENTS(DEFINE)
