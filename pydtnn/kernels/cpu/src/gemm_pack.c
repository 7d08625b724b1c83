/* Packing and turning of operands, and scratch memory.
 *
 * A matrix is turned in squares of LANES x LANES that pass through registers: log2(LANES) rounds of
 * interleaving, 64 permutations for 256 floats with AVX-512. Remaining elements are copied one by
 * one.
 */
#include <stdlib.h>

#include "gemm.h"

/* Lanes of the lower and of the upper halves of two vectors, taken in turns. */
#if VECTOR_BYTES / (8 - 4 * REAL_FLOAT) == 16
#define LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif VECTOR_BYTES / (8 - 4 * REAL_FLOAT) == 8
#define LOWER 0, 8, 1, 9, 2, 10, 3, 11
#define UPPER 4, 12, 5, 13, 6, 14, 7, 15
#elif VECTOR_BYTES / (8 - 4 * REAL_FLOAT) == 4
#define LOWER 0, 4, 1, 5
#define UPPER 2, 6, 3, 7
#else
#define LOWER 0, 2
#define UPPER 1, 3
#endif
#ifdef __clang__
#define INTERLEAVE(a, b, lanes) __builtin_shufflevector(a, b, lanes)
#else
#define INTERLEAVE(a, b, lanes) __builtin_shuffle(a, b, (ivec){lanes})
#endif

/* Turn a square of LANES x LANES: row i of the result is column i of the source. Taking turns with
 * the row half a square away, log2(LANES) times over, brings every element to its place. */
static void transpose_square(const real *src, ptrdiff_t stride, real *dst, ptrdiff_t width) {
    vec row[LANES], next[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) row[i] = vload(src + i * stride);
    UNROLL
    for (int step = 1; step < LANES; step *= 2) {
        UNROLL
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = INTERLEAVE(row[i], row[i + LANES / 2], LOWER);
            next[2 * i + 1] = INTERLEAVE(row[i], row[i + LANES / 2], UPPER);
        }
        UNROLL
        for (int i = 0; i < LANES; i++) row[i] = next[i];
    }
    UNROLL
    for (int i = 0; i < LANES; i++) vstore(dst + i * width, row[i]);
}

void NAME(gemm_transpose)(ptrdiff_t rows, ptrdiff_t columns, const real *src, ptrdiff_t stride,
                          real *dst, ptrdiff_t width) {
    for (ptrdiff_t i = 0; i < rows; i += LANES) {
        ptrdiff_t j = 0, high = smaller(rows - i, LANES);
        for (; high == LANES && j + LANES <= columns; j += LANES) {
            transpose_square(src + i * stride + j, stride, dst + j * width + i, width);
        }
        for (; j < columns; j++) {
            for (ptrdiff_t r = i; r < i + high; r++) dst[j * width + r] = src[r * stride + j];
        }
    }
}

/* How many rows ahead of the one that is packed memory is fetched: about 2 KiB. The parts of rows
 * are too short, and too far apart, for the hardware to see a stream. */
INLINE ptrdiff_t rows_ahead(ptrdiff_t columns) {
    return 1 + 2048 / (ptrdiff_t)sizeof(real) / larger(columns, 1);
}

INLINE void fetch_row(const real *row, ptrdiff_t columns) {
    for (ptrdiff_t j = 0; j < columns; j += 64 / (ptrdiff_t)sizeof(real))
        __builtin_prefetch(row + j);
}

/* Rows are too short for a call of memcpy. */
INLINE void pack_row(ptrdiff_t columns, const real *row, real *dst) {
    ptrdiff_t j = 0;
    for (; j + LANES <= columns; j += LANES) vstore(dst + j, vload(row + j));
    if (j < columns) vstore(dst + j, vload_part(row + j, columns - j));
}

void NAME(gemm_pack)(ptrdiff_t depth, ptrdiff_t columns, const real *src, ptrdiff_t sk,
                     ptrdiff_t sj, real *dst) {
    const ptrdiff_t width = vectors_of(columns) * LANES, ahead = rows_ahead(columns);
    if (sj == 1) {
        for (ptrdiff_t k = 0; k < depth; k++) {
            if (k + ahead < depth) fetch_row(src + (k + ahead) * sk, columns);
            pack_row(columns, src + k * sk, dst + k * width);
        }
    } else { /* sk == 1 */
        NAME(gemm_transpose)(columns, depth, src, sj, dst, width);
    }
    for (ptrdiff_t k = 0; sj != 1 && columns < width && k < depth; k++) {
        for (ptrdiff_t j = columns; j < width; j++) dst[k * width + j] = 0;
    }
}

void NAME(gemm_pack_panels)(ptrdiff_t depth, ptrdiff_t columns, ptrdiff_t panel, const real *src,
                            ptrdiff_t stride, ptrdiff_t distance, real *dst) {
    const ptrdiff_t full = columns / panel, rest = columns % panel, width = vectors_of(rest) * LANES;
    const ptrdiff_t ahead = rows_ahead(columns);
    for (ptrdiff_t k = 0; k < depth; k++) {
        const real *row = src + k * stride;
        if (k + ahead < depth) fetch_row(row + ahead * stride, columns);
        for (ptrdiff_t p = 0; p < full; p++)
            pack_row(panel, row + p * panel, dst + p * distance + k * panel);
        pack_row(rest, row + full * panel, dst + full * distance + k * width);
    }
}

void NAME(gemm_pack_tiles)(ptrdiff_t depth, ptrdiff_t columns, ptrdiff_t tile, const real *src,
                           ptrdiff_t stride, ptrdiff_t distance, real *dst) {
    const ptrdiff_t whole = vectors_of(tile) * LANES;
    for (ptrdiff_t k = 0; k < depth; k++) {
        const real *row = src + k * stride, *next = row + (k + 4 < depth ? 4 * stride : 0);
        real *to = dst + k * tile;
        ptrdiff_t j = 0;
        for (; j + whole <= columns; j += tile, to += distance) {
            __builtin_prefetch(next + j);
            for (ptrdiff_t i = 0; i < tile; i += LANES) vstore(to + i, vload(row + j + i));
        }
        for (; j < columns; j += tile, to += distance) {
            const ptrdiff_t n = columns - j < tile ? columns - j : tile;
            __builtin_prefetch(next + j);
            for (ptrdiff_t i = 0; i < n; i += LANES) /* the next row overwrites the vector's end */
                vstore(to + i, vload_part(row + j + i, smaller(n - i, LANES)));
        }
    }
}

void *NAME(scratch_new)(ptrdiff_t n) {
    return aligned_alloc(64, (size_t)n * sizeof(real));
}
