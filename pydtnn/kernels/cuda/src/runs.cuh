/* Rows, and groups of channels of several rows, that teams of threads take several times.
 *
 * What a team works on are runs of neighbours, `pitch` elements apart: a row is one run. It is cut
 * into vectors of 16 bytes (or, where they do not fit, elements), which the threads take in turns.
 * The first vectors of each thread are all fetched at once and stay in registers, so that rows of
 * up to SIZE HELD vectors are read once; what is beyond is read again, from the caches. Nothing is
 * divided on the way: a thread's next vector is a fixed number of runs and vectors ahead. All runs of
 * a team lie within 2^31 elements.
 */
#pragma once

#include "element.cuh"

/* INPUTS arrays of one shape; N elements of each are a vector, of which HELD stay. */
template <class T, int N, int SIZE, int INPUTS> struct Runs {
    enum { HELD = N > 1 ? 8 / INPUTS : 2 }; /* single elements are the exception: short code */
    const T *from[INPUTS];
    int vectors, lane, across; /* of all runs; this thread's first; of one run */
    int right, ahead, wrap;    /* SIZE vectors on: vectors in a run, elements, and if it ends more */
    int start;
    Pack<T, N> held[HELD][INPUTS];

    __device__ __forceinline__ Runs(int lane_, int width, int runs, int pitch) {
        lane = lane_;
        across = width / N;
        vectors = across * runs;
        right = SIZE % across;
        ahead = SIZE / across * pitch + right * N;
        wrap = pitch - across * N;
        start = lane / across * pitch + lane % across * N;
    }

    /* Where a thread is: its vector, where that begins in the arrays, and in its run. */
    struct Walk {
        int vector, column, at;
    };
    __device__ __forceinline__ Walk begin() const {
        return {lane, lane % across * N, start};
    }
    __device__ __forceinline__ void advance(Walk &walk) const {
        walk.vector += SIZE;
        walk.column += right * N;
        walk.at += ahead;
        if (walk.column >= across * N) {
            walk.column -= across * N;
            walk.at += wrap;
        }
    }

    __device__ __forceinline__ void hold() {
        Walk walk = begin();
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (walk.vector < vectors) {
#pragma unroll
                for (int i = 0; i < INPUTS; i++) held[k][i] = fetch<N>(from[i] + walk.at);
            }
            advance(walk);
        }
    }

    /* Call step(at, column, values[INPUTS][N]) for each vector of a thread. */
    template <class Step> __device__ __forceinline__ void each(Step step) const {
        Walk walk = begin();
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            if (walk.vector < vectors) take(walk, held[k], step);
            advance(walk);
        }
        for (; walk.vector < vectors; advance(walk)) {
            Pack<T, N> more[INPUTS];
#pragma unroll
            for (int i = 0; i < INPUTS; i++) more[i] = fetch<N>(from[i] + walk.at);
            take(walk, more, step);
        }
    }
    template <class Step>
    static __device__ __forceinline__ void take(const Walk &walk, const Pack<T, N> (&packs)[INPUTS],
                                                Step step) {
        real<T> values[INPUTS][N];
#pragma unroll
        for (int i = 0; i < INPUTS; i++) widen<N>(packs[i], values[i]);
        step(walk.at, walk.column, values);
    }
};
