/* Teams of threads that share a row: a warp or, where rows are long, the whole block.
 *
 * SIZE is WARP or THREADS. Every thread of a team gets the team's sum or maximum, made in an order
 * that the size of the team alone decides.
 */
#pragma once

#include "element.cuh"

template <int SIZE> struct Team {
    int lane;             /* of this thread, below SIZE */
    index_t index, count; /* of this team in the grid, and how many there are */

    __device__ __forceinline__ Team() {
        lane = thread_number() % SIZE;
        index = (index_t)blockIdx.x * (THREADS / SIZE) + thread_number() / SIZE;
        count = (index_t)gridDim.x * (THREADS / SIZE);
    }

    /* combine(a, b) over the team; all threads of the block call it */
    template <class V, class Combine>
    __device__ __forceinline__ V reduce(V v, Combine combine) const {
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) {
            v = combine(v, __shfl_xor_sync(0xffffffff, v, offset));
        }
        if constexpr (SIZE > WARP) {
            __shared__ V of_warp[SIZE / WARP];
            __syncthreads(); /* somebody may still read what the last reduction left */
            if (lane % WARP == 0) of_warp[lane / WARP] = v;
            __syncthreads();
            v = of_warp[0];
#pragma unroll
            for (int warp = 1; warp < SIZE / WARP; warp++) v = combine(v, of_warp[warp]);
        }
        return v;
    }

    template <class V> __device__ __forceinline__ V sum(V v) const {
        return reduce(v, [](V a, V b) { return a + b; });
    }

    /* NaN where any is NaN */
    template <class V> __device__ __forceinline__ V maximum(V v) const {
        return reduce(v, [](V a, V b) { return a >= b || a != a ? a : b; });
    }
};
