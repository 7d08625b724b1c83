/* The map of a deferred array: its terms in memory, and a thread's coefficients in registers. */
#pragma once

#include "columns.cuh"

/* Arrays (rows, channels) with a pivot and a factor (channels,) each, or null for 0 and 1. */
template <class T> struct Terms {
    const T *x[2];
    const real<T> *pivot[2], *factor[2];
};

template <class T, int N, int TERMS> struct Map {
    typedef real<T> R;
    R pivot[TERMS][N], factor[TERMS][N], shift[N];

    __device__ __forceinline__ Map(const Terms<T> &terms, const R *shifts, const Place &p) {
#pragma unroll
        for (int k = 0; k < TERMS; k++) {
            coefficients(terms.pivot[k], p.channel, p.inside, (R)0, pivot[k]);
            coefficients(terms.factor[k], p.channel, p.inside, (R)1, factor[k]);
        }
        coefficients(shifts, p.channel, p.inside, (R)0, shift);
    }

    __device__ __forceinline__ void load_terms(const Terms<T> &terms, index_t at,
                                               R (&x)[TERMS][N]) const {
#pragma unroll
        for (int k = 0; k < TERMS; k++) load<N>(terms.x[k] + at, x[k]);
    }

    __device__ __forceinline__ void centre(R (&x)[TERMS][N]) const {
#pragma unroll
        for (int i = 0; i < TERMS * N; i++) x[i / N][i % N] -= pivot[i / N][i % N];
    }

    /* v from centred terms, without the ReLU */
    __device__ __forceinline__ void value(const R (&centred)[TERMS][N], R (&v)[N]) const {
#pragma unroll
        for (int n = 0; n < N; n++) {
            v[n] = shift[n];
#pragma unroll
            for (int k = 0; k < TERMS; k++) v[n] += factor[k][n] * centred[k][n];
        }
    }
};
