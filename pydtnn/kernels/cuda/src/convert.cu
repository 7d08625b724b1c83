/* Copies between element types, or sums: out = x, out += x.
 *
 * A vector has as many elements as 16 bytes of the smaller type hold, so that the larger one moves
 * in two or four of 16 bytes. float64 becomes a 16-bit type by way of float32.
 */
#include "flat.cuh"

enum { FLIGHT = 2 };

template <class From, class To, int N>
DEVICE void convert(const From *x, To *out, index_t accumulate, index_t n) {
    for_elements<N, FLIGHT>(n, [&](index_t first, auto width, auto flight, index_t distance) {
        constexpr int M = width.value;
        real<From> from[flight.value][M];
        real<To> to[flight.value][M];
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
            load<M>(x + first + f * distance, from[f]);
            if (accumulate) load<M>(out + first + f * distance, to[f]);
        }
#pragma unroll
        for (int f = 0; f < flight.value; f++) {
#pragma unroll
            for (int i = 0; i < M; i++) {
                to[f][i] = (real<To>)(accumulate ? from[f][i] + to[f][i] : from[f][i]);
            }
            store<M>(to[f], out + first + f * distance);
        }
    });
}

#define WIDTHS(From, To, WIDTH, N)                                                                 \
    KERNEL(convert_##From##_##WIDTH##_##To)                                                        \
    (const From *x, To *out, index_t accumulate, index_t n) {                                      \
        convert<From, To, N>(x, out, accumulate, n);                                               \
    }

#define PAIR(From, To)                                                                             \
    WIDTHS(From, To, wide, (16 / (int)(sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To))))    \
    WIDTHS(From, To, single, 1)

#define DEFINE(T)                                                                                  \
    PAIR(float32, T)                                                                               \
    PAIR(float64, T)                                                                               \
    PAIR(float16, T)                                                                               \
    PAIR(bfloat16, T)

ELEMENTS(DEFINE)
