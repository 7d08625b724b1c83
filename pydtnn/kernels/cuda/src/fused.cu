/* Deferred arrays: v = shift + sum of factor (x - pivot) over one or two terms, max(v, 0) if asked.
 *
 * `evaluate` reads the terms and writes v. `gate` reads dy, perhaps another gradient and the terms,
 * and writes what passes the ReLU; the sums that batch norm's backward needs are taken in passing.
 * Both move each array once, at the speed of memory: what they compute is a few operations for an
 * element. Two kernels of batch norm that only sum are the same loop without the writing (norm.cu).
 */
#include "deferred.cuh"

template <class T, int N, int TERMS>
DEVICE void evaluate(Terms<T> terms, const real<T> *shift, index_t relu, T *out, index_t rows,
                     index_t channels, index_t part_rows) {
    const Place p = place<N>(rows, channels, part_rows);
    const Map<T, N, TERMS> map(terms, shift, p);
    for_rows<4>(p, [&](index_t row, auto flight) {
        real<T> x[flight.value][TERMS][N];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            map.load_terms(terms, (row + f * p.stride) * channels + p.channel, x[f]);
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            real<T> v[N];
            map.centre(x[f]);
            map.value(x[f], v);
#pragma unroll
            for (int n = 0; n < N; n++) v[n] = relu && v[n] < 0 ? 0 : v[n];
            store<N>(v, out + (row + f * p.stride) * channels + p.channel);
        }
    });
}

template <class T, int N, int TERMS, bool SUMS>
DEVICE void gate(const T *dy, const T *add, Terms<T> terms, const real<T> *shift, index_t relu,
                 T *out, double *sums, index_t rows, index_t channels, index_t part_rows,
                 double *partial, unsigned *arrived) {
    const Place p = place<N>(rows, channels, part_rows);
    const Map<T, N, TERMS> map(terms, shift, p);
    double total[1 + TERMS][N] = {};
    /* two terms fill the registers twice as fast */
    sum_rows<4 / TERMS, real<T>>(p, total, [&](index_t row, auto flight, auto &run) {
        real<T> g[flight.value][N], more[flight.value][N], x[flight.value][TERMS][N];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            const index_t at = (row + f * p.stride) * channels + p.channel;
            load<N>(dy + at, g[f]);
            if (add) load<N>(add + at, more[f]);
            map.load_terms(terms, at, x[f]);
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            real<T> v[N];
            map.centre(x[f]);
            map.value(x[f], v);
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (add) g[f][n] += more[f][n];
                /* v as it is stored: who reads it forward must see the same sign */
                g[f][n] = relu && !(rounded<T>(v[n]) > 0) ? 0 : rounded<T>(g[f][n]);
                if (!SUMS) continue;
                run[0][n] += g[f][n];
#pragma unroll
                for (int k = 0; k < TERMS; k++) run[1 + k][n] += g[f][n] * x[f][k][n];
            }
            store<N>(g[f], out + (row + f * p.stride) * channels + p.channel);
        }
    });
    if (!SUMS) return;
    finish_columns(total, channels, partial, arrived, [&](index_t channel, const double *totals) {
#pragma unroll
        for (int s = 0; s <= TERMS; s++) sums[s * channels + channel] = totals[s];
    });
}

#define EVALUATE(T, TERMS, WIDTH, N)                                                               \
    KERNEL(evaluate_##TERMS##_##WIDTH##_##T)                                                       \
    (const T *x0, const real<T> *pivot0, const real<T> *factor0, const T *x1,                      \
     const real<T> *pivot1, const real<T> *factor1, const real<T> *shift, index_t relu, T *out,    \
     index_t rows, index_t channels, index_t part_rows) {                                          \
        const Terms<T> terms = {{x0, x1}, {pivot0, pivot1}, {factor0, factor1}};                   \
        evaluate<T, N, TERMS>(terms, shift, relu, out, rows, channels, part_rows);                 \
    }

#define GATE(T, TERMS, WIDTH, N)                                                                   \
    KERNEL(gate_##TERMS##_##WIDTH##_##T)                                                           \
    (const T *x0, const real<T> *pivot0, const real<T> *factor0, const T *x1,                      \
     const real<T> *pivot1, const real<T> *factor1, const real<T> *shift, index_t relu,            \
     const T *dy, const T *add, T *out, index_t rows, index_t channels, index_t part_rows) {       \
        const Terms<T> terms = {{x0, x1}, {pivot0, pivot1}, {factor0, factor1}};                   \
        gate<T, N, TERMS, false>(dy, add, terms, shift, relu, out, nullptr, rows, channels,        \
                                 part_rows, nullptr, nullptr);                                     \
    }                                                                                              \
    KERNEL(gate_sums_##TERMS##_##WIDTH##_##T)                                                      \
    (const T *x0, const real<T> *pivot0, const real<T> *factor0, const T *x1,                      \
     const real<T> *pivot1, const real<T> *factor1, const real<T> *shift, index_t relu,            \
     const T *dy, const T *add, T *out, double *sums, index_t rows, index_t channels,              \
     index_t part_rows, double *partial, unsigned *arrived) {                                      \
        const Terms<T> terms = {{x0, x1}, {pivot0, pivot1}, {factor0, factor1}};                   \
        gate<T, N, TERMS, true>(dy, add, terms, shift, relu, out, sums, rows, channels, part_rows, \
                                partial, arrived);                                                 \
    }

#define VARIANTS(T, TERMS, WIDTH, N)                                                               \
    EVALUATE(T, TERMS, WIDTH, N)                                                                   \
    GATE(T, TERMS, WIDTH, N)

#define DEFINE(T)                                                                                  \
    VARIANTS(T, 1, wide, Width<T>::CHANNELS)                                                       \
    VARIANTS(T, 1, single, 1)                                                                      \
    VARIANTS(T, 2, wide, Width<T>::CHANNELS)                                                       \
    VARIANTS(T, 2, single, 1)

ELEMENTS(DEFINE)
