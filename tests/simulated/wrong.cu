/* Kernels with one mistake each, for the tests of the detector of races; `right` has none.
 *
 * Called with x[n] of n = 128 elements, and n, by two blocks of 64 threads, if not said otherwise.
 */
#include "element.cuh"

DEVICE int own() { return blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE int neighbour() { return (threadIdx.x + 1) % blockDim.x; }

/* The last block adds up what all have written. */
KERNEL(right_float32)(float *x, float *out, unsigned *arrived) {
    __shared__ float row[64];
    __shared__ bool last;
    row[threadIdx.x] = x[own()];
    __syncthreads();
    x[own()] = row[neighbour()];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    __threadfence();
    if (last) out[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x + blockDim.x];
}

/* As CUDA's programming guide has it: one thread fences for those that it met at a barrier. */
KERNEL(right_too_float32)(float *x, float *out, unsigned *arrived) {
    __shared__ bool last;
    x[own()] = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last) out[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x + blockDim.x];
}

/* The fence comes before what it is to make known. */
KERNEL(race_of_a_late_fence_float32)(float *x, float *out, unsigned *arrived) {
    __shared__ bool last;
    __threadfence();
    x[own()] = 1;
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    __threadfence();
    if (last) out[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x + blockDim.x];
}

/* Another thread's element of shared memory is read without a barrier. */
KERNEL(race_float32)(float *x, index_t n) {
    __shared__ float row[64];
    row[threadIdx.x] = 0;
    __syncthreads();
    row[threadIdx.x] = x[own()];
    x[own()] = row[neighbour()];
}

/* Lanes of a warp are ordered by no shuffle. */
KERNEL(race_of_lanes_float32)(float *x, index_t n) {
    const float before = __shfl_xor_sync(0xffffffff, x[own()], 1);
    x[own() ^ 1] = before;
}

/* All write, the same. */
KERNEL(race_of_writes_float32)(float *x, index_t n) { x[0] = 1; }

/* What one block writes, another one has read. */
KERNEL(race_of_blocks_float32)(float *x, index_t n) {
    if (blockIdx.x == 0) x[threadIdx.x] = 1;
    if (blockIdx.x == 1) x[own()] = x[threadIdx.x];
}

KERNEL(outside_float32)(float *x, index_t n) {
    if (own() == n - 1) x[own()] = x[own() + 1];
}
KERNEL(outside_shared_float32)(float *x, index_t n) {
    __shared__ float row[32];
    row[threadIdx.x] = x[own()];
}
KERNEL(outside_all_float32)(float *x, index_t n) {
    __shared__ float row[64];
    float *const far = row + (n << 20);
    far[threadIdx.x] = x[own()];
}
KERNEL(unwritten_shared_float32)(float *x, index_t n) {
    __shared__ float row[64];
    if (threadIdx.x > 0) row[threadIdx.x] = x[own()];
    __syncthreads();
    x[own()] = row[threadIdx.x];
}
KERNEL(unwritten_float32)(const float *x, float *out) { /* of `out` */
    out[own()] += x[own()];
}
KERNEL(misaligned_float32)(float *x, index_t n) {
    if (own() == 0) put_pack(fetch<4>(x), x + 5);
}
KERNEL(overflow_float32)(float *x, index_t n) {
    const int size = (int)n << 24;
    x[own()] = size * (int)threadIdx.x;
}

/* The halves of a block meet at two places. */
KERNEL(diverged_float32)(float *x, index_t n) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        x[own()] = 1;
        __syncthreads();
    }
}
/* By blocks of 48: half of the second warp is not there. */
KERNEL(diverged_lanes_float32)(float *x, index_t n) {
    x[own()] = __shfl_xor_sync(0xffffffff, x[own()], 1);
}
/* A warp ends before the others meet it. */
KERNEL(stuck_float32)(float *x, index_t n) {
    if (threadIdx.x < 32) return;
    __syncthreads();
}
/* The next launch finds a count that is not 0. */
KERNEL(counters_float32)(unsigned *arrived) {
    if (threadIdx.x == 0) atomicInc(arrived, gridDim.x);
}
