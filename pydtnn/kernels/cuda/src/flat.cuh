/* Arrays as flat sequences of elements.
 *
 * A thread takes FLIGHT vectors of 16 bytes, THREADS vectors apart, and loads them all before it
 * uses the first; the last elements, too few for a vector, go to the first threads one by one. The
 * grid covers the array once. Arrays that are not aligned to 16 bytes are taken element by element.
 */
#pragma once

#include "element.cuh"

/* Call step(first element, Count<elements>, Count<vectors>, distance) for all that is a thread's;
   the vectors begin `distance` elements apart. */
template <int N, int FLIGHT, class Step> DEVICE void for_elements(index_t n, Step step) {
    const index_t vectors = n / N;
    index_t v = (index_t)blockIdx.x * (THREADS * FLIGHT) + thread_number();
    if (v + (FLIGHT - 1) * THREADS < vectors) {
        step(v * N, Count<N>(), Count<FLIGHT>(), (index_t)THREADS * N);
    } else {
        for (int f = 0; f < FLIGHT && v < vectors; f++, v += THREADS) {
            step(v * N, Count<N>(), Count<1>(), (index_t)0);
        }
    }
    const index_t rest = vectors * N + thread_number();
    if (N > 1 && blockIdx.x == 0 && rest < n) step(rest, Count<1>(), Count<1>(), (index_t)0);
}

/* out = f(x0, x1, ...) for each element; `out` may be one of the inputs. */
template <class T, int N, int FLIGHT, int INPUTS, class Function>
DEVICE void map_elements(const T *const (&in)[INPUTS], T *out, index_t n, Function f) {
    for_elements<N, FLIGHT>(n, [&](index_t first, auto width, auto flight, index_t distance) {
        real<T> x[flight.value][INPUTS][width.value];
#pragma unroll
        for (int i = 0; i < flight.value * INPUTS; i++) {
            load<width.value>(in[i % INPUTS] + first + i / INPUTS * distance,
                              x[i / INPUTS][i % INPUTS]);
        }
#pragma unroll
        for (int v = 0; v < flight.value; v++) {
            real<T> y[width.value];
#pragma unroll
            for (int e = 0; e < width.value; e++) {
                real<T> arguments[INPUTS];
#pragma unroll
                for (int i = 0; i < INPUTS; i++) arguments[i] = x[v][i][e];
                y[e] = f(arguments);
            }
            store<width.value>(y, out + first + v * distance);
        }
    });
}
