/* Register-blocked matrix kernels.
 *
 * Both keep a tile of C in registers, broadcast one element of A at a time and multiply it with
 * vectors of B:
 *
 *   gemm_rows    rows of A anywhere, the summed index contiguous in them; B packed in panels:
 *                forward and backward of data
 *   gemm_outer   the summed index outside in A and in B, nothing packed: gradients of weights
 *
 * Register block, rows x vectors: AVX-512 14x2 and 16x1 (rows), 8x3 and 16x1 (outer); with 16
 * registers (AVX2, SSE2) 6x2 and 12x1. 14x2 needs 16 loads for 28 multiply-adds, of which a core
 * does as many per cycle: 0.99 of the peak from L1. 16x1 needs 17 for 16 and is bound by the loads:
 * 0.87. Rows that are left over are cut into smaller tiles, greedily; columns that are left over
 * compute whole vectors and store part.
 *
 * Rows of A are addressed as row[i] + k with one index k for all, even across the taps of a
 * convolution: the pointers are set up once per tile, and those that do not fit in registers are
 * reloaded once per UNROLL_K steps.
 *
 * Ideas: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS
 * 34(3), 2008; rows by pointer: Dukhan, "The indirect convolution algorithm", 2019
 * (arXiv:1907.02129), here with a padded copy of the input instead of a row of zeros.
 */
#include "gemm.h"

/* Bounds of a tile's arrays are constants: gcc keeps no others in registers. */
enum { UNROLL_K = 4, MOST_ROWS = 16, MOST_VECTORS = 3 };

/* One step of the sum: vectors of B, one broadcast per row of A. */
#define MULTIPLY_ADD(b, element)                                         \
    do {                                                                 \
        vec w[MOST_VECTORS];                                             \
        UNROLL                                                           \
        for (int j = 0; j < vectors; j++) w[j] = vload((b) + j * LANES); \
        UNROLL                                                           \
        for (int i = 0; i < rows; i++) {                                 \
            vec x = vset(element);                                       \
            UNROLL                                                       \
            for (int j = 0; j < vectors; j++) sum[i][j] += x * w[j];     \
        }                                                                \
    } while (0)

/* Store one row of a tile of C, adding what is there if told so; the last vector may be cut. */
INLINE void store_row(const int vectors, const vec *sum, real *c, ptrdiff_t columns,
                      int accumulate) {
    UNROLL
    for (int j = 0; j < vectors; j++) {
        real *p = c + j * LANES;
        ptrdiff_t n = columns - j * LANES;
        if (n >= LANES) {
            vstore(p, accumulate ? vload(p) + sum[j] : sum[j]);
        } else {
            vstore_part(p, accumulate ? vload_part(p, n) + sum[j] : sum[j], n);
        }
    }
}

INLINE void rows_tile(const int rows, const int vectors, const struct gemm_rows *t,
                      ptrdiff_t first) {
    vec sum[MOST_ROWS][MOST_VECTORS];
    const real *row[MOST_ROWS];
    const ptrdiff_t ldb = t->ldb;
    UNROLL
    for (int j = 0; j < vectors; j++) {
        vec start = t->start ? vload(t->start + j * LANES) : vzero();
        UNROLL
        for (int i = 0; i < rows; i++) sum[i][j] = start;
    }
    UNROLL
    for (int i = 0; i < rows; i++) row[i] = t->a + t->a_offset[first + i];
    for (ptrdiff_t s = 0; s < t->segments; s++) {
        ptrdiff_t k = t->segment[s], end = k + t->length;
        const real *b = t->b + t->b_row[s] * ldb;
        for (; k + UNROLL_K <= end; k += UNROLL_K) {
            UNROLL
            for (int u = 0; u < UNROLL_K; u++) MULTIPLY_ADD(b + u * ldb, row[i][k + u]);
            b += UNROLL_K * ldb;
        }
        for (; k < end; k++) {
            MULTIPLY_ADD(b, row[i][k]);
            b += ldb;
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        store_row(vectors, sum[i], t->c + t->c_offset[first + i], t->columns, t->accumulate);
    }
}

INLINE void outer_tile(const int rows, const int vectors, const struct gemm_outer *t,
                       ptrdiff_t first) {
    vec sum[MOST_ROWS][MOST_VECTORS];
    const ptrdiff_t lda = t->lda, ldb = t->ldb, length = t->length;
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = vzero();
    }
    for (ptrdiff_t s = 0; s < t->segments; s++) {
        const real *a = t->a + t->a_offset[s] + first, *b = t->b + t->b_offset[s];
        for (ptrdiff_t k = 0; k < length; k++) {
            MULTIPLY_ADD(b, a[i]);
            a += lda;
            b += ldb;
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        store_row(vectors, sum[i], t->c + (first + i) * t->ldc, t->columns, t->accumulate);
    }
}

/* Tiles of each number of rows, largest first, with constant rows and vectors. */
struct rows_size {
    ptrdiff_t rows;
    void (*run)(const struct gemm_rows *, ptrdiff_t);
};
struct outer_size {
    ptrdiff_t rows;
    void (*run)(const struct gemm_outer *, ptrdiff_t);
};

/* clang-format off */
#define TILE(kind, rows, vectors)                                                            \
    static void kind##_##rows##x##vectors(const struct gemm_##kind *task, ptrdiff_t first) { \
        kind##_tile(rows, vectors, task, first);                                             \
    }
#define ENTRY(kind, rows, vectors) {rows, kind##_##rows##x##vectors}
#define SIZES(kind, vectors, a, b, c, d, e)                             \
    TILE(kind, a, vectors)                                              \
    TILE(kind, b, vectors)                                              \
    TILE(kind, c, vectors)                                              \
    TILE(kind, d, vectors)                                              \
    TILE(kind, e, vectors)                                              \
    static const struct kind##_size kind##_sizes_##vectors[] = {        \
        ENTRY(kind, a, vectors), ENTRY(kind, b, vectors),               \
        ENTRY(kind, c, vectors), ENTRY(kind, d, vectors),               \
        ENTRY(kind, e, vectors)};
/* clang-format on */

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
