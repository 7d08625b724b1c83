/* Deferred arrays: v = shift + sum of factor (x - pivot) over one or two terms, max(v, 0) if asked.
 *
 * `evaluate` reads the terms and writes v. `gate` reads dy, perhaps another gradient and the terms,
 * and writes what passes the ReLU; the sums that batch norm's backward needs are taken in passing,
 * and so are the coefficients of a term that was normalised, if they are wanted.
 * Both move each array once, at the speed of memory: what they compute is a few operations for an
 * element. Two kernels of batch norm that only sum are the same loop without the writing (norm.cu).
 */
#include "deferred.cuh"
#include "maps.cuh"

template <class T, int N, int TERMS>
DEVICE void evaluate(Terms<T> terms, const real<T> *shift, index_t relu, T *out, index_t rows,
                     index_t channels, index_t part_rows) {
    __shared__ real<T> shared[Map<T, N, TERMS>::SIZE];
    const Place p = place<N>(rows, channels, part_rows);
    const Map<T, N, TERMS> map(terms, shift, channels, shared);
    for_rows<4 / TERMS>(p, [&](index_t at, auto flight) {
        Pack<T, N> x[flight.value][TERMS];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            fetch_terms(terms, at + f * p.pitch, x[f]);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const auto channel = map.channel(n);
#pragma unroll
            for (int f = 0; f < flight.value; f++) {
                real<T> centred[TERMS];
                const real<T> v = channel.value(x[f], n, centred);
                x[f][0].at[n] = Narrow<T>::of(relu && v < 0 ? 0 : v);
            }
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            put_pack(x[f][0], out + at + f * p.pitch);
        }
    });
}

template <class T, int N, int TERMS> struct Gated {
    Pack<T, N> dy, add, x[TERMS];
};

/* What batch norm makes of the sums of each term. */
template <class T> struct Norms {
    BackwardMap<real<T>> of[2];
};

template <class T, int N, int TERMS, bool SUMS>
DEVICE void gate(const T *dy, const T *add, Terms<T> terms, const real<T> *shift, index_t relu,
                 T *out, double *sums, const Norms<T> &norms, index_t rows, index_t channels,
                 index_t part_rows, double *partial, unsigned *arrived) {
    __shared__ real<T> shared[Map<T, N, TERMS>::SIZE];
    const Place p = place<N>(rows, channels, part_rows);
    const Map<T, N, TERMS> map(terms, shift, channels, shared);
    const auto step = [&](index_t at, auto flight, auto &run) {
        Gated<T, N, TERMS> from[flight.value];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            const index_t here = at + f * p.pitch;
            from[f].dy = fetch<N>(dy + here);
            if (add) from[f].add = fetch<N>(add + here);
            fetch_terms(terms, here, from[f].x);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const auto channel = map.channel(n);
#pragma unroll
            for (int f = 0; f < flight.value; f++) {
                real<T> centred[TERMS], g = widen(from[f].dy.at[n]);
                const real<T> v = channel.value(from[f].x, n, centred);
                if (add) g += widen(from[f].add.at[n]);
                /* v as it is stored: who reads it forward must see the same sign */
                const T stored = Narrow<T>::of(relu && !positive<T>(v) ? 0 : g);
                from[f].dy.at[n] = stored;
                if constexpr (SUMS) {
                    g = widen(stored);
                    run[0][n] += g;
#pragma unroll
                    for (int k = 0; k < TERMS; k++) run[1 + k][n] += g * centred[k];
                }
            }
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            put_pack(from[f].dy, out + at + f * p.pitch);
        }
    };
    if constexpr (SUMS) {
        __shared__ double table[Table<T, 1 + TERMS, N>::DOUBLES];
        typename Slot<T>::type total[1 + TERMS][N];
        sum_rows<T, 2 / TERMS>(p, table, total, step);
        finish_columns(total, table, channels, partial, arrived,
                       [&](index_t channel, const double *totals) {
#pragma unroll
                           for (int s = 0; s <= TERMS; s++) sums[s * channels + channel] = totals[s];
#pragma unroll
                           for (int k = 0; k < TERMS; k++) {
                               if (norms.of[k].out) {
                                   norms.of[k].put(channel, channels, terms.pivot[k], totals[0],
                                                   totals[1 + k]);
                               }
                           }
                       });
    } else {
        int none = 0;
        for_rows<2>(p, [&](index_t at, auto flight) { step(at, flight, none); });
    }
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
        gate<T, N, TERMS, false>(dy, add, terms, shift, relu, out, nullptr, Norms<T>{}, rows,      \
                                 channels, part_rows, nullptr, nullptr);                           \
    }                                                                                              \
    KERNEL_OF(3, gate_sums_##TERMS##_##WIDTH##_##T)                                                \
    (const T *x0, const real<T> *pivot0, const real<T> *factor0, const T *x1,                      \
     const real<T> *pivot1, const real<T> *factor1, const real<T> *shift, index_t relu,            \
     const T *dy, const T *add, T *out, double *sums, double rows0, const double *rows0_at,        \
     const double *moments0, const real<T> *gamma0, real<T> *dgamma0, real<T> *dbeta0,             \
     real<T> *map0, index_t accumulate0, double rows1, const double *rows1_at,                     \
     const double *moments1, const real<T> *gamma1, real<T> *dgamma1, real<T> *dbeta1,             \
     real<T> *map1, index_t accumulate1, index_t rows, index_t channels, index_t part_rows,        \
     double *partial, unsigned *arrived) {                                                         \
        const Terms<T> terms = {{x0, x1}, {pivot0, pivot1}, {factor0, factor1}};                   \
        const Norms<T> norms = {                                                                   \
            {{{rows0, rows0_at}, moments0, gamma0, dgamma0, dbeta0, map0, accumulate0},            \
             {{rows1, rows1_at}, moments1, gamma1, dgamma1, dbeta1, map1, accumulate1}}};          \
        gate<T, N, TERMS, true>(dy, add, terms, shift, relu, out, sums, norms, rows, channels,     \
                                part_rows, partial, arrived);                                      \
    }

#define VARIANTS(T, TERMS, WIDTH, N)                                                               \
    EVALUATE(T, TERMS, WIDTH, N)                                                                   \
    GATE(T, TERMS, WIDTH, N)

#define DEFINE(T)                                                                                  \
    VARIANTS(T, 1, wide, Width<T>::FLAT)                                                           \
    VARIANTS(T, 1, single, 1)                                                                      \
    VARIANTS(T, 2, wide, Width<T>::FLAT)                                                           \
    VARIANTS(T, 2, single, 1)

ELEMENTS(DEFINE)
