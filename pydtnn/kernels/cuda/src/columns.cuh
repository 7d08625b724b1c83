/* Arrays (rows, channels) as blocks see them, and sums over the rows.
 *
 *   blockIdx.y   which channels: blockDim.x threads side by side, N channels each
 *   blockIdx.x   which part of the rows; thread row threadIdx.y takes each blockDim.y-th of them
 *
 * A thread moves 16 bytes at a time and keeps the coefficients of its channels in registers. It
 * works on FLIGHT rows at once, whose loads are all under way before the first is used. To hide the
 * latency of memory, an SM of an H100 needs about 40 KB under way (4.8 TB/s, 1 us, 132 SMs): FLIGHT
 * is chosen per kernel so that as many threads as its registers allow have at least that.
 *
 * Sums are in the arithmetic of the elements for at most RUN rows, then go to the thread's place in
 * shared memory, where they cost no registers: in double, or in float for elements of 16 bits,
 * whose rounding is a thousand times that of a sum of sums. From there on all is double.
 *
 * The parts of the rows are fixed by the shape (layout.py). Their sums meet in global memory: of
 * GROUP neighbours, the block that arrives last, which an integer counter tells, adds them up in
 * the order of the parts, and of the groups the last one does the same. So the result does not
 * depend on which blocks these are, and nobody has to read all of it.
 */
#pragma once

#include "element.cuh"

enum { RUN = 16, GROUP = 16 };

/* Where a thread stands: its first channel, and its rows, `count` of them: the first begins for it at
   element `at`, the others `pitch` elements apart. `row` is the number of the first. */
struct Place {
    index_t channel, row, at;
    int pitch, count;
    bool inside;
};

template <int N> DEVICE Place place(index_t rows, index_t channels, index_t part_rows) {
    Place p;
    const index_t begin = blockIdx.x * part_rows;
    const index_t end = begin + part_rows < rows ? begin + part_rows : rows;
    p.channel = ((index_t)blockIdx.y * blockDim.x + threadIdx.x) * N;
    p.inside = p.channel < channels;
    p.row = begin + threadIdx.y;
    p.at = p.row * channels + p.channel;
    p.pitch = (int)(blockDim.y * channels);
    p.count = p.inside && p.row < end ? (int)((unsigned)(end - p.row - 1) / blockDim.y) + 1 : 0;
    return p;
}

/* N coefficients from `channel` on, of any type, or the same for all. */
template <int N, class C, class R>
DEVICE void coefficients(const C *table, index_t channel, bool inside, R otherwise, R (&to)[N]) {
    C from[N];
    if (table && inside) load<N>(table + channel, from);
#pragma unroll
    for (int n = 0; n < N; n++) to[n] = table && inside ? (R)from[n] : otherwise;
}

/* Call step(at, Count<rows at a time>) for all rows of a thread; they begin p.pitch apart. */
template <int FLIGHT, class Step> DEVICE void for_rows(const Place &p, Step step) {
    index_t at = p.at;
    int left = p.count;
    for (; left >= FLIGHT; left -= FLIGHT, at += FLIGHT * p.pitch) step(at, Count<FLIGHT>());
    if constexpr (FLIGHT > 1) {
        for (; left > 0; left--, at += p.pitch) step(at, Count<1>());
    }
}

/* What threads add their sums up in, and then the block: shared memory of each kernel. */
template <class T> struct Slot {
    typedef double type;
};
template <> struct Slot<float16> {
    typedef float type;
};
template <> struct Slot<bfloat16> {
    typedef float type;
};
template <class T, int S, int N> struct Table {
    enum {
        SLOTS = S * N * THREADS * (int)sizeof(typename Slot<T>::type) / (int)sizeof(double),
        DOUBLES = SLOTS > THREADS ? SLOTS : THREADS
    };
};

/* The loop of a kernel with sums: step(at, Count, run) adds to run[S][N]; `sums` is the total. */
template <class T, int FLIGHT, int S, int N, class Step>
DEVICE void sum_rows(const Place &p, double *table, typename Slot<T>::type (&sums)[S][N],
                     Step step) {
    typedef typename Slot<T>::type slot;
    slot *const own = reinterpret_cast<slot *>(table) + thread_number();
    real<T> run[S][N] = {};
    int length = 0;
#pragma unroll
    for (int i = 0; i < S * N; i++) own[i * THREADS] = 0;
    for_rows<FLIGHT>(p, [&](index_t at, auto flight) {
        step(at, flight, run);
        length += flight.value;
        if (length < RUN) return;
        length = 0;
#pragma unroll
        for (int i = 0; i < S * N; i++) {
            own[i * THREADS] += run[i / N][i % N];
            run[i / N][i % N] = 0;
        }
    });
#pragma unroll
    for (int i = 0; i < S * N; i++) {
        sums[i / N][i % N] = own[i * THREADS] + run[i / N][i % N];
    }
    __syncthreads(); /* the table is used anew */
}

/* Add up the sums of the threads of a block: entry s W + j of `table` for channel j of its W. The
   upper half of the warps adds to what the lower half has left: the table need hold no more. */
template <int S, int N, class Sums> DEVICE void sum_block(Sums sums_of, double *table) {
    enum { HALF = THREADS / WARP / 2 };
    const int across = blockDim.x, width = across * N;
    const int thread = thread_number(), lane = thread % WARP, warp = thread / WARP;
    double *own = table + warp % HALF * S * width + lane * N;
    for (int half = 0; half < 2; half++) {
        if (warp / HALF == half) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                double sums[S];
                sums_of(n, sums);
#pragma unroll
                for (int s = 0; s < S; s++) {
                    for (int offset = WARP / 2; offset >= across; offset /= 2) {
                        sums[s] += __shfl_down_sync(0xffffffff, sums[s], offset);
                    }
                    double *to = own + s * width + n;
                    if (lane < across) *to = half ? *to + sums[s] : sums[s];
                }
            }
        }
        __syncthreads();
    }
    for (int v = thread; v < S * width; v += THREADS) {
        for (int w = 1; w < HALF; w++) table[v] += table[w * S * width + v];
    }
    __syncthreads();
}

/* Write 0, as perhaps other threads do at the same time. */
DEVICE void clear(double *at) { atomicExch(reinterpret_cast<unsigned long long *>(at), 0ull); }

/* Whether this is the last of so many blocks that count here; what they wrote is then to be seen. */
DEVICE bool last_to_arrive(unsigned *arrived, unsigned blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (thread_number() == 0) {
        last = atomicInc(arrived, blocks - 1) == blocks - 1; /* then 0 again, for the next kernel */
    }
    __syncthreads();
    __threadfence();
    return last;
}

/* Add up `parts` sets of `values` doubles, `stride` sets apart, into the table: teams of threads
   take some each, in an order that the sizes alone decide. */
DEVICE void sum_parts(const double *partial, int parts, int stride, int values, double *table) {
    const int thread = thread_number();
    const int teams = values < THREADS ? THREADS / values : 1;
    for (int i = thread; i < teams * values; i += THREADS) {
        const int team = i / values, v = i - team * values;
        double total = 0;
#pragma unroll 8
        for (int part = team; part < parts; part += teams) {
            total += __ldcg(partial + (index_t)part * stride * values + v);
        }
        table[i] = total;
    }
    __syncthreads();
    for (int v = thread; v < values; v += THREADS) {
        for (int team = 1; team < teams; team++) table[v] += table[team * values + v];
    }
    __syncthreads();
}

/* Add up the sums of all blocks; finish(channel, totals[S]) is called once per channel.
 *
 * sums_of(n, sums[S]) gives the sums of channel n of a thread, in double. `partial` holds S W
 * doubles for each block, `arrived` counters for each column of blocks, one for each group and one
 * for the groups, 0 before and after.
 */
template <int S, int N, class Sums, class Finish>
DEVICE void finish_columns(Sums sums_of, double *table, index_t channels, double *partial,
                           unsigned *arrived, Finish finish) {
    const int width = blockDim.x * N, values = S * width;
    const int thread = thread_number(), parts = gridDim.x, part = blockIdx.x;
    sum_block<S, N>(sums_of, table);
    if (parts > 1) {
        const int groups = (parts + GROUP - 1) / GROUP, group = part / GROUP;
        const int first = group * GROUP, members = parts - first < GROUP ? parts - first : GROUP;
        partial += (index_t)blockIdx.y * parts * values;
        arrived += blockIdx.y * (groups > 1 ? groups + 1 : 1);
        double *own = partial + (index_t)part * values;
        for (int v = thread; v < values; v += THREADS) own[v] = table[v];
        if (!last_to_arrive(arrived + group, members)) return;
        own = partial + (index_t)first * values;
        sum_parts(own, members, 1, values, table);
        if (groups > 1) {
            for (int v = thread; v < values; v += THREADS) own[v] = table[v];
            if (!last_to_arrive(arrived + groups, groups)) return;
            sum_parts(partial, groups, GROUP, values, table);
        }
    }
#pragma unroll 1 /* a second round is rare, and would cost registers */
    for (int j = thread; j < width; j += THREADS) {
        const index_t channel = (index_t)blockIdx.y * width + j;
        double totals[S];
#pragma unroll
        for (int s = 0; s < S; s++) totals[s] = table[s * width + j];
        if (channel < channels) finish(channel, totals);
    }
}

/* The same for the sums of a thread as they are. */
template <int S, int N, class V, class Finish>
DEVICE void finish_columns(V (&sums)[S][N], double *table, index_t channels, double *partial,
                           unsigned *arrived, Finish finish) {
    const auto sums_of = [&](int n, double (&to)[S]) {
#pragma unroll
        for (int s = 0; s < S; s++) to[s] = sums[s][n];
    };
    finish_columns<S, N>(sums_of, table, channels, partial, arrived, finish);
}

/* Add up one double per thread of a grid of columns (1, THREADS) into *out, times `factor`. */
DEVICE void finish_total(double value, double factor, double *out, double *partial,
                         unsigned *arrived) {
    __shared__ double table[THREADS];
    double sums[1][1] = {{value}};
    finish_columns(sums, table, 1, partial, arrived,
                   [&](index_t, const double *totals) { *out = factor * totals[0]; });
}

template <class T> DEVICE void put(T *out, double value, bool accumulate) {
    *out = Narrow<T>::of((real<T>)(accumulate ? widen(*out) + value : value));
}
