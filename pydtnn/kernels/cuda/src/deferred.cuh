/* The map of a deferred array: its terms in memory, and the coefficients of a block's channels.
 *
 * Two terms have five coefficients per channel, for eight channels of a thread more registers than
 * all the rest. So they lie in shared memory, each brought once per block, side by side for lanes
 * side by side: a read costs as much as a read of a byte. They are read anew for each channel and
 * all rows that are under way, and are volatile, lest the compiler move them into registers.
 */
#pragma once

#include "columns.cuh"

/* Arrays (rows, channels) with a pivot and a factor (channels,) each, or null for 0 and 1. */
template <class T> struct Terms {
    const T *x[2];
    const real<T> *pivot[2], *factor[2];
};

/* A row of all terms, as it is in memory. */
template <class T, int N, int TERMS>
DEVICE void fetch_terms(const Terms<T> &terms, index_t at, Pack<T, N> (&x)[TERMS]) {
#pragma unroll
    for (int k = 0; k < TERMS; k++) x[k] = fetch<N>(terms.x[k] + at);
}

template <class T, int N, int TERMS> struct Map {
    typedef real<T> R;
    enum { SIZE = (2 * TERMS + 1) * N * WARP };
    const volatile R *own; /* number i of channel n at (i N + n) WARP */

    /* All threads of the block call it. */
    __device__ __forceinline__ Map(const Terms<T> &terms, const R *shift, index_t channels,
                                   R *shared) {
        const index_t first = (index_t)blockIdx.y * blockDim.x * N;
        for (int j = thread_number(); j < (int)blockDim.x * N && first + j < channels;
             j += THREADS) {
            R *to = shared + j % N * WARP + j / N;
#pragma unroll
            for (int k = 0; k < TERMS; k++) {
                to[2 * k * N * WARP] = terms.pivot[k] ? terms.pivot[k][first + j] : 0;
                to[(2 * k + 1) * N * WARP] = terms.factor[k] ? terms.factor[k][first + j] : 1;
            }
            to[2 * TERMS * N * WARP] = shift ? shift[first + j] : 0;
        }
        __syncthreads();
        own = shared + threadIdx.x;
    }

    /* Coefficients of channel n of the thread. */
    struct Channel {
        R pivot[TERMS], factor[TERMS], shift;

        /* x - pivot of each term, and v without the ReLU */
        template <int M>
        __device__ __forceinline__ R value(const Pack<T, M> (&x)[TERMS], int n,
                                           R (&centred)[TERMS]) const {
            R v = shift;
#pragma unroll
            for (int k = 0; k < TERMS; k++) {
                centred[k] = widen(x[k].at[n]) - pivot[k];
                v += factor[k] * centred[k];
            }
            return v;
        }
    };
    __device__ __forceinline__ Channel channel(int n) const {
        Channel c;
#pragma unroll
        for (int k = 0; k < TERMS; k++) {
            c.pivot[k] = own[(2 * k * N + n) * WARP];
            c.factor[k] = own[((2 * k + 1) * N + n) * WARP];
        }
        c.shift = own[(2 * TERMS * N + n) * WARP];
        return c;
    }
};
