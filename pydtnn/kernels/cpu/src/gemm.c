/* Register-blocked matrix kernels.
 *
 * Both keep a tile of C in registers, broadcast one element of A at a time and multiply it with vectors of B:
 *
 *   gemm_rows    A row by row (rows anywhere, the summed index contiguous), B packed in panels: forward and backward of data
 *   gemm_outer   the summed index outside in A and in B, nothing packed: gradients of weights
 *
 * Register block, rows x vectors: AVX-512 14x2 and 16x1 (rows), 8x3 and 16x1 (outer); 16 registers (AVX2, SSE2) 6x2 and 12x1.
 * 14x2 needs 16 loads for 28 multiply-adds, of which a core does as many per cycle: 0.99 of the peak from L1. 16x1 needs 17
 * for 16 and is bound by the loads: 0.87. Rows that are left over are cut into smaller tiles, greedily; columns that are left
 * over compute whole vectors and store part.
 *
 * Rows of A are addressed as row[i] + k with one index k for all, even across the taps of a convolution: the pointers are set up
 * once per tile and what does not fit in registers is reloaded once per UNROLL_K steps.
 *
 * Idea: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008; rows by pointer: Dukhan,
 * "The indirect convolution algorithm", 2019 (arXiv:1907.02129), here with a padded copy of the input instead of a zero row.
 */
#include <stdlib.h>

#include "gemm.h"

enum { UNROLL_K = 4, MOST_ROWS = 16, MOST_VECTORS = 3 }; /* arrays of a tile have constant bounds: gcc keeps no others in registers */

/* One step of the sum: vectors of B, one broadcast per row of A. */
#define MULTIPLY_ADD(b, element)                                    \
    do {                                                            \
        vec w[MOST_VECTORS];                                             \
        UNROLL for (int j = 0; j < vectors; j++) w[j] = vload((b) + j * LANES); \
        UNROLL for (int i = 0; i < rows; i++) {                     \
            vec x = vset(element);                                  \
            UNROLL for (int j = 0; j < vectors; j++) sum[i][j] += x * w[j]; \
        }                                                           \
    } while (0)

/* Store one row of a tile of C, adding what is there if told so; only the last vector may be cut. */
INLINE void store_row(const int vectors, const vec *sum, real *c, ptrdiff_t columns, int accumulate) {
    UNROLL for (int j = 0; j < vectors; j++) {
        real *p = c + j * LANES;
        ptrdiff_t n = columns - j * LANES;
        if (n >= LANES) {
            vstore(p, accumulate ? vload(p) + sum[j] : sum[j]);
        } else {
            vstore_part(p, accumulate ? vload_part(p, n) + sum[j] : sum[j], n);
        }
    }
}

INLINE void rows_tile(const int rows, const int vectors, const struct gemm_rows *t, ptrdiff_t first) {
    vec sum[MOST_ROWS][MOST_VECTORS];
    const real *row[MOST_ROWS], *b = t->b;
    const ptrdiff_t ldb = t->ldb;
    UNROLL for (int j = 0; j < vectors; j++) {
        vec start = t->start ? vload(t->start + j * LANES) : vzero();
        UNROLL for (int i = 0; i < rows; i++) sum[i][j] = start;
    }
    UNROLL for (int i = 0; i < rows; i++) row[i] = t->a + t->a_offset[first + i];
    for (ptrdiff_t s = 0; s < t->segments; s++) {
        ptrdiff_t k = t->segment[s], end = k + t->length;
        for (; k + UNROLL_K <= end; k += UNROLL_K) {
            UNROLL for (int u = 0; u < UNROLL_K; u++) MULTIPLY_ADD(b + u * ldb, row[i][k + u]);
            b += UNROLL_K * ldb;
        }
        for (; k < end; k++) {
            MULTIPLY_ADD(b, row[i][k]);
            b += ldb;
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        store_row(vectors, sum[i], t->c + t->c_offset[first + i], t->columns, t->accumulate);
    }
}

INLINE void outer_tile(const int rows, const int vectors, const struct gemm_outer *t, ptrdiff_t first) {
    vec sum[MOST_ROWS][MOST_VECTORS];
    const ptrdiff_t lda = t->lda, ldb = t->ldb, length = t->length;
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = vzero();
    }
    for (ptrdiff_t s = 0; s < t->segments; s++) {
        const real *a = t->a + t->a_offset[s] + first, *b = t->b + t->b_offset[s];
        for (ptrdiff_t k = 0; k < length; k++) {
            MULTIPLY_ADD(b, a[i]);
            a += lda;
            b += ldb;
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        store_row(vectors, sum[i], t->c + (first + i) * t->ldc, t->columns, t->accumulate);
    }
}

#define TILE(kind, rows, vectors)                                                                     \
    static void kind##_##rows##x##vectors(const struct gemm_##kind *task, ptrdiff_t first) {          \
        kind##_tile(rows, vectors, task, first);                                                      \
    }
#define ENTRY(kind, rows, vectors) {rows, kind##_##rows##x##vectors}
#define SIZES(kind, vectors, a, b, c, d, e)                                                           \
    TILE(kind, a, vectors) TILE(kind, b, vectors) TILE(kind, c, vectors) TILE(kind, d, vectors) TILE(kind, e, vectors)  \
    static const struct kind##_size kind##_sizes_##vectors[] = {                                      \
        ENTRY(kind, a, vectors), ENTRY(kind, b, vectors), ENTRY(kind, c, vectors), ENTRY(kind, d, vectors), ENTRY(kind, e, vectors)};

struct rows_size {
    ptrdiff_t rows;
    void (*run)(const struct gemm_rows *, ptrdiff_t);
};
struct outer_size {
    ptrdiff_t rows;
    void (*run)(const struct gemm_outer *, ptrdiff_t);
};

#if VECTOR_BYTES == 64
SIZES(rows, 1, 16, 8, 4, 2, 1)
SIZES(rows, 2, 14, 8, 4, 2, 1)
SIZES(outer, 1, 16, 8, 4, 2, 1)
SIZES(outer, 2, 12, 8, 4, 2, 1)
SIZES(outer, 3, 8, 6, 4, 2, 1)
static const struct outer_size *const outer_sizes[] = {outer_sizes_1, outer_sizes_2, outer_sizes_3};
#else
SIZES(rows, 1, 12, 8, 4, 2, 1)
SIZES(rows, 2, 6, 4, 3, 2, 1)
SIZES(outer, 1, 12, 8, 4, 2, 1)
SIZES(outer, 2, 6, 4, 3, 2, 1)
static const struct outer_size *const outer_sizes[] = {outer_sizes_1, outer_sizes_2};
#endif
static const struct rows_size *const rows_sizes[] = {rows_sizes_1, rows_sizes_2};

void NAME(gemm_rows)(ptrdiff_t rows, const struct gemm_rows *task) {
    const struct rows_size *size = rows_sizes[vectors_of(task->columns) - 1];
    for (ptrdiff_t first = 0; first < rows; first += size->rows) {
        while (first + size->rows > rows) size++;
        size->run(task, first);
    }
}

void NAME(gemm_outer)(ptrdiff_t rows, const struct gemm_outer *task) {
    const struct outer_size *size = outer_sizes[vectors_of(task->columns) - 1];
    for (ptrdiff_t first = 0; first < rows; first += size->rows) {
        while (first + size->rows > rows) size++;
        size->run(task, first);
    }
}

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

/* Turn a square of LANES x LANES: row i of the result is column i of the source. Taking turns with the row half a square away,
 * log2(LANES) times over, brings every element to its place. */
static void transpose_square(const real *src, ptrdiff_t stride, real *dst, ptrdiff_t width) {
    vec row[LANES], next[LANES];
    UNROLL for (int i = 0; i < LANES; i++) row[i] = vload(src + i * stride);
    UNROLL for (int step = 1; step < LANES; step *= 2) {
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = INTERLEAVE(row[i], row[i + LANES / 2], LOWER);
            next[2 * i + 1] = INTERLEAVE(row[i], row[i + LANES / 2], UPPER);
        }
        UNROLL for (int i = 0; i < LANES; i++) row[i] = next[i];
    }
    UNROLL for (int i = 0; i < LANES; i++) vstore(dst + i * width, row[i]);
}

void NAME(gemm_transpose)(ptrdiff_t rows, ptrdiff_t columns, const real *src, ptrdiff_t stride, real *dst, ptrdiff_t width) {
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

void NAME(gemm_pack)(ptrdiff_t depth, ptrdiff_t columns, const real *src, ptrdiff_t sk, ptrdiff_t sj, real *dst) {
    ptrdiff_t width = vectors_of(columns) * LANES;
    if (sj == 1) {
        for (ptrdiff_t k = 0; k < depth; k++) memcpy(dst + k * width, src + k * sk, (size_t)columns * sizeof(real));
    } else { /* sk == 1 */
        NAME(gemm_transpose)(columns, depth, src, sj, dst, width);
    }
    for (ptrdiff_t k = 0; columns < width && k < depth; k++) {
        for (ptrdiff_t j = columns; j < width; j++) dst[k * width + j] = 0;
    }
}

void *NAME(scratch_new)(ptrdiff_t n) {
    size_t bytes = ((size_t)n * sizeof(real) + 63) / 64 * 64;
    return aligned_alloc(64, bytes ? bytes : 64);
}
