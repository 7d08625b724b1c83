/* Dropout: each thread draws the words of one or two blocks of Philox, four elements each, and keeps
 * or drops as many elements, 16 bytes or (float64) 32. Ten rounds of two multiplications for four
 * elements take about half of the time that memory takes for them, of 16-bit ones nearly all.
 *
 *   blockIdx.x, threadIdx.x   elements of a sample; FLIGHT times as many as there are threads
 *   blockIdx.y, threadIdx.y   samples, in turns where there are more of them than threads
 */
#include "philox.cuh"

enum { FLIGHT = 2 };

template <class T, bool WIDE>
DEVICE void dropout(const T *x, const index_t *samples, index_t seed, index_t stream, Number now,
                    index_t threshold, double factor, T *out, index_t rows, int count) {
    enum { M = WIDE ? (int)Width<T>::FLAT : 1, N = M > 4 ? M : 4, PACKS = N / M };
    const real<T> scale = (real<T>)factor;
    const unsigned epoch = (unsigned)(unsigned long long)now.get();
    const int first = (int)((blockIdx.x * FLIGHT * blockDim.x + threadIdx.x) * N);
    const int apart = (int)blockDim.x * N;
    index_t row = (index_t)blockIdx.y * blockDim.y + threadIdx.y;
    for (; row < rows; row += gridDim.y * blockDim.y) {
        const unsigned long long sample = samples[row];
        Pack<T, M> v[FLIGHT][PACKS];
#pragma unroll
        for (int i = 0; i < FLIGHT * PACKS; i++) {
            const int at = first + i / PACKS * apart + i % PACKS * M;
            if (at < count) v[i / PACKS][i % PACKS] = fetch<M>(x + row * count + at);
        }
#pragma unroll
        for (int i = 0; i < FLIGHT * N; i += 4) {
            const int at = first + i / N * apart + i % N;
            const Words words = philox((unsigned)(at / 4), sample, epoch, (unsigned)seed,
                                       (unsigned)stream);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                T &e = v[i / N][(i + j) % N / M].at[(i + j) % M];
                e = Narrow<T>::of(words.at[j] >= (unsigned)threshold ? widen(e) * scale : 0);
            }
        }
#pragma unroll
        for (int i = 0; i < FLIGHT * PACKS; i++) {
            const int at = first + i / PACKS * apart + i % PACKS * M;
            if (at < count) put_pack(v[i / PACKS][i % PACKS], out + row * count + at);
        }
    }
}

#define WIDTHS(T, WIDTH, WIDE)                                                                     \
    KERNEL_OF(3, dropout_##WIDTH##_##T)                                                            \
    (const T *x, const index_t *samples, index_t seed, index_t stream, double epoch,               \
     const double *epoch_at, index_t threshold, double factor, T *out, index_t rows,               \
     index_t count) {                                                                              \
        dropout<T, WIDE>(x, samples, seed, stream, Number{epoch, epoch_at}, threshold, factor,     \
                         out, rows, (int)count);                                                   \
    }

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, true)                                                                          \
    WIDTHS(T, single, false)

ELEMENTS(DEFINE)
