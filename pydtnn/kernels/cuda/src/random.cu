/* Dropout: each thread draws the four words of one block of a sample and keeps or drops as many
 * elements, whose loads are under way meanwhile. Ten rounds of two multiplications for four
 * elements are about as much as memory leaves time for.
 */
#include "philox.cuh"

template <class T, bool WIDE>
DEVICE void dropout(const T *x, const index_t *samples, index_t seed, index_t stream, index_t epoch,
                    const index_t *epoch_at, index_t threshold, double factor, T *out,
                    index_t rows, index_t count) {
    const index_t blocks = (count + 3) / 4;
    const index_t thread = (index_t)blockIdx.x * THREADS + threadIdx.x;
    if (thread >= rows * blocks) return;
    const index_t row = thread / blocks, block = thread - row * blocks;
    const index_t first = row * count + 4 * block;
    const index_t left = count - 4 * block < 4 ? count - 4 * block : 4;
    const real<T> scale = rounded<T>((real<T>)factor); /* as the reference multiplies arrays of T */
    real<T> v[4] = {};
    if constexpr (WIDE) {
        load<4>(x + first, v);
    } else {
        for (int i = 0; i < left; i++) v[i] = widen(x[first + i]);
    }
    const Words words = philox((unsigned)block, (unsigned long long)samples[row],
                               (unsigned)(epoch_at ? *epoch_at : epoch), (unsigned)seed,
                               (unsigned)stream);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = words.at[i] >= (unsigned)threshold ? v[i] * scale : 0;
    }
    if constexpr (WIDE) {
        store<4>(v, out + first);
    } else {
        for (int i = 0; i < left; i++) out[first + i] = Narrow<T>::of(v[i]);
    }
}

#define WIDTHS(T, WIDTH, WIDE)                                                                     \
    KERNEL(dropout_##WIDTH##_##T)                                                                  \
    (const T *x, const index_t *samples, index_t seed, index_t stream, index_t epoch,              \
     const index_t *epoch_at, index_t threshold, double factor, T *out, index_t rows,              \
     index_t count) {                                                                              \
        dropout<T, WIDE>(x, samples, seed, stream, epoch, epoch_at, threshold, factor, out, rows,  \
                         count);                                                                   \
    }

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, true)                                                                          \
    WIDTHS(T, single, false)

ELEMENTS(DEFINE)
