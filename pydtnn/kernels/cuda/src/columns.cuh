/* Arrays (rows, channels) as blocks see them, and sums over the rows.
 *
 *   blockIdx.y   which channels: blockDim.x threads side by side, N channels each
 *   blockIdx.x   which part of the rows; thread row threadIdx.y takes each blockDim.y-th of them
 *
 * A thread keeps the coefficients and sums of its channels in registers. It works on FLIGHT rows at
 * a time, whose loads are all under way before the first is used. Sums are in the arithmetic of the
 * elements for at most RUN rows, then go over to double: conversions are too slow to be made for
 * each element of 16 bits, and the error of float32 stays that of a short sum.
 *
 * The parts of the rows are fixed by the shape (layout.py). Their sums meet in global memory: the
 * block that arrives last, which an integer counter tells, adds them up in the order of the parts.
 * So the result does not depend on which block that is.
 */
#pragma once

#include "element.cuh"

enum { RUN = 16 };

/* Where a thread stands: its first channel, and its rows first, first + stride, ... < end. */
struct Place {
    index_t channel, first, end, stride;
    bool inside;
};

template <int N> DEVICE Place place(index_t rows, index_t channels, index_t part_rows) {
    Place p;
    const index_t begin = blockIdx.x * part_rows;
    p.channel = ((index_t)blockIdx.y * blockDim.x + threadIdx.x) * N;
    p.inside = p.channel < channels;
    p.first = begin + threadIdx.y;
    p.end = !p.inside ? 0 : begin + part_rows < rows ? begin + part_rows : rows;
    p.stride = blockDim.y;
    return p;
}

/* N coefficients from `channel` on, of any type, or the same for all. */
template <int N, class C, class R>
DEVICE void coefficients(const C *table, index_t channel, bool inside, R otherwise, R (&to)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) to[n] = table && inside ? (R)table[channel + n] : otherwise;
}

/* Call step(row, Count<rows at a time>) for all rows of a thread. */
template <int FLIGHT, class Step> DEVICE void for_rows(const Place &p, Step step) {
    index_t row = p.first;
    for (; row + (FLIGHT - 1) * p.stride < p.end; row += FLIGHT * p.stride) {
        step(row, Count<FLIGHT>());
    }
    for (; row < p.end; row += p.stride) step(row, Count<1>());
}

/* The same with sums: step(row, Count, run) adds to run[S][N], which is emptied into `sums`. */
template <int FLIGHT, class R, int S, int N, class Step>
DEVICE void sum_rows(const Place &p, double (&sums)[S][N], Step step) {
    R run[S][N] = {};
    int length = 0;
    for_rows<FLIGHT>(p, [&](index_t row, auto flight) {
        step(row, flight, run);
        length += flight.value;
        if (length < RUN) return;
        length = 0;
#pragma unroll
        for (int i = 0; i < S * N; i++) {
            sums[i / N][i % N] += run[i / N][i % N];
            run[i / N][i % N] = 0;
        }
    });
#pragma unroll
    for (int i = 0; i < S * N; i++) sums[i / N][i % N] += run[i / N][i % N];
}

/* Add up the sums of the threads of a block: entry s W + j of `table` for channel j of its W. */
template <int S, int N> DEVICE void sum_block(double (&sums)[S][N], double *table) {
    const int across = blockDim.x, width = across * N;
    const int thread = thread_number(), lane = thread % WARP;
    double *own = table + thread / WARP * S * width;
#pragma unroll
    for (int i = 0; i < S * N; i++) {
        double sum = sums[i / N][i % N];
        for (int offset = WARP / 2; offset >= across; offset /= 2) {
            sum += __shfl_down_sync(0xffffffff, sum, offset);
        }
        if (lane < across) own[i / N * width + lane * N + i % N] = sum;
    }
    __syncthreads();
    for (int v = thread; v < S * width; v += THREADS) {
        for (int warp = 1; warp < THREADS / WARP; warp++) table[v] += table[warp * S * width + v];
    }
    __syncthreads();
}

/* Whether this block is the last of its column of blocks, whose sums are then all to be seen. */
DEVICE bool last_to_arrive(unsigned *arrived) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (thread_number() == 0) {
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        if (last) *arrived = 0; /* for the next kernel */
    }
    __syncthreads();
    __threadfence();
    return last;
}

/* Add up the sums of all blocks; finish(channel, totals[S]) is called once per channel.
 *
 * `partial` holds S W doubles for each block, `arrived` a counter for each column of blocks, 0
 * before and after.
 */
template <int S, int N, class Finish>
DEVICE void finish_columns(double (&sums)[S][N], index_t channels, double *partial,
                           unsigned *arrived, Finish finish) {
    __shared__ double table[S * N * THREADS];
    const int width = blockDim.x * N, values = S * width;
    const int thread = thread_number(), parts = gridDim.x;
    sum_block<S, N>(sums, table);
    if (parts > 1) {
        partial += (index_t)blockIdx.y * parts * values;
        for (int v = thread; v < values; v += THREADS) {
            partial[(index_t)blockIdx.x * values + v] = table[v];
        }
        if (!last_to_arrive(arrived + blockIdx.y)) return;
        const int teams = values < THREADS ? THREADS / values : 1; /* each takes some parts */
        for (int i = thread; i < teams * values; i += THREADS) {
            double total = 0;
#pragma unroll 8
            for (int part = i / values; part < parts; part += teams) {
                total += __ldcg(partial + (index_t)part * values + i % values);
            }
            table[i] = total;
        }
        __syncthreads();
        for (int v = thread; v < values; v += THREADS) {
            for (int team = 1; team < teams; team++) table[v] += table[team * values + v];
        }
        __syncthreads();
    }
    for (int j = thread; j < width; j += THREADS) {
        const index_t channel = (index_t)blockIdx.y * width + j;
        double totals[S];
#pragma unroll
        for (int s = 0; s < S; s++) totals[s] = table[s * width + j];
        if (channel < channels) finish(channel, totals);
    }
}

/* Add up one double per thread of a grid of columns (1, THREADS) into *out, times `factor`. */
DEVICE void finish_total(double value, double factor, double *out, double *partial,
                         unsigned *arrived) {
    double sums[1][1] = {{value}};
    finish_columns(sums, 1, partial, arrived,
                   [&](index_t, const double *totals) { *out = factor * totals[0]; });
}

template <class T> DEVICE void put(T *out, double value, bool accumulate) {
    *out = Narrow<T>::of((real<T>)(accumulate ? widen(*out) + value : value));
}
