/* Register-blocked matrix kernels.
 *
 * Both keep a tile of C in registers, broadcast one element of A at a time and multiply it with
 * vectors of B:
 *
 *   gemm_rows    rows of A anywhere, the summed index contiguous in them; B packed in panels:
 *                forward and backward of data
 *   gemm_outer   the summed index outside in A and in B, nothing packed: gradients of weights
 *
 * Register block, rows x vectors: AVX-512 14x2 and 16x1 (rows), 9x3 and 16x1 (outer); with 16
 * registers (AVX2, SSE2) 6x2 and 12x1. 14x2 needs 16 loads for 28 multiply-adds, of which a core
 * does as many per cycle: 0.99 of the peak from L1. 16x1 needs 17 for 16 and is bound by the loads:
 * 0.87. A number of rows that is no multiple is shared out over tiles of about equal sizes; columns
 * that are left over compute whole vectors and store part.
 *
 * Rows of A are addressed as row[i] + k with one index k for all, even across the taps of a
 * convolution: the pointers are set up once per tile, and those that do not fit in registers are
 * reloaded once per two or four steps.
 *
 * gemm_pairs.c compiles this file again for pairs of bfloat16.
 *
 * Ideas: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS
 * 34(3), 2008; rows by pointer: Dukhan, "The indirect convolution algorithm", 2019
 * (arXiv:1907.02129).
 */
#ifndef __clang__
/* A loop of outer_tile is two cache lines long: if it lies in three, it is slower by a tenth while
   another thread uses the same core. */
#pragma GCC optimize("align-loops=64")
#endif

#include "gemm.h"
#include "products.h"

/* Bounds of a tile's arrays are constants: gcc keeps no others in registers. With 16 registers, it
   keeps one sum of a 6x2 or 5x2 tile in memory if four steps follow each other, 0.9 of the speed. */
enum { MOST_ROWS = 16, MOST_VECTORS = 3, TWO_STEPS = VECTOR_BYTES == 64 ? 0 : 8 };

/* One step of the sum: vectors of B, one broadcast per row of A. */
#define MULTIPLY_ADD(b, element)                                         \
    do {                                                                 \
        vec w[MOST_VECTORS];                                             \
        UNROLL                                                           \
        for (int j = 0; j < vectors; j++) w[j] = vload((b) + j * LANES); \
        UNROLL                                                           \
        for (int i = 0; i < rows; i++) {                                 \
            const vec x = broadcast(&(element));                         \
            UNROLL                                                       \
            for (int j = 0; j < vectors; j++)                            \
                sum[i][j] = add_product(sum[i][j], x, w[j]);             \
        }                                                                \
    } while (0)

/* Store one row of a tile of C, adding the previous contents if required; the last vector may be
 * partial. */
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

/* Store a tile of C whose row i is at c + offset[i], or at c + i ldc without offsets. */
INLINE void store_rows(const int rows, const int vectors, const vec (*sum)[MOST_VECTORS], real *c,
                       const ptrdiff_t *offset, ptrdiff_t ldc, ptrdiff_t columns,
                       int accumulate) {
    UNROLL
    for (int i = 0; i < rows; i++) {
        store_row(vectors, sum[i], c + (offset ? offset[i] : i * ldc), columns, accumulate);
    }
}

/* The same, with the branches of each vector outside: after short sums they take long. */
INLINE void store_tile(const int rows, const int vectors, const vec (*sum)[MOST_VECTORS], real *c,
                       const ptrdiff_t *offset, ptrdiff_t ldc, ptrdiff_t columns,
                       int accumulate) {
    const ptrdiff_t whole = vectors * LANES;
    if (columns < whole) {
        store_rows(rows, vectors, sum, c, offset, ldc, columns, accumulate);
    } else if (accumulate) {
        store_rows(rows, vectors, sum, c, offset, ldc, whole, 1);
    } else {
        store_rows(rows, vectors, sum, c, offset, ldc, whole, 0);
    }
}

INLINE void rows_tile(const int rows, const int vectors, const struct gemm_rows *t,
                      ptrdiff_t first) {
    vec sum[MOST_ROWS][MOST_VECTORS];
    const real *row[MOST_ROWS];
    const ptrdiff_t ldb = t->ldb;
    const int steps = rows <= TWO_STEPS ? 2 : 4;
    UNROLL
    for (int j = 0; j < vectors; j++) {
        vec start = t->start ? vload(t->start + j * LANES) : vzero();
        UNROLL
        for (int i = 0; i < rows; i++) sum[i][j] = start;
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        row[i] = t->a + t->a_offset[first + i];
        UNROLL
        for (int j = 0; j < vectors; j++)
            __builtin_prefetch(t->c + t->c_offset[first + i] + j * LANES, 1);
    }
    for (ptrdiff_t s = 0; s < t->segments; s++) {
        ptrdiff_t k = t->segment[s], end = k + t->length;
        const real *b = t->b + t->b_row[s] * ldb;
        for (; k + steps <= end; k += steps) {
            UNROLL
            for (int u = 0; u < steps; u++) MULTIPLY_ADD(b + u * ldb, row[i][k + u]);
            b += steps * ldb;
        }
        for (; k < end; k++) {
            MULTIPLY_ADD(b, row[i][k]);
            b += ldb;
        }
    }
    store_tile(rows, vectors, sum, t->c, t->c_offset + first, 0, t->columns, t->accumulate);
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
    store_tile(rows, vectors, sum, t->c + first * t->ldc, NULL, t->ldc, t->columns, t->accumulate);
}

/* Tiles of all useful sizes, with constant rows and vectors, largest first. */
struct rows_size {
    ptrdiff_t rows;
    void (*run)(const struct gemm_rows *, ptrdiff_t);
};
struct outer_size {
    ptrdiff_t rows;
    void (*run)(const struct gemm_outer *, ptrdiff_t);
};

#if VECTOR_BYTES == 64
#define ROWS_1(_) \
    _(rows, 16, 1) _(rows, 12, 1) _(rows, 8, 1) _(rows, 4, 1) _(rows, 2, 1) _(rows, 1, 1)
#define ROWS_2(_) \
    _(rows, 14, 2) _(rows, 12, 2) _(rows, 10, 2) _(rows, 8, 2) _(rows, 6, 2) _(rows, 4, 2) \
    _(rows, 2, 2) _(rows, 1, 2)
#define OUTER_1(_) \
    _(outer, 16, 1) _(outer, 12, 1) _(outer, 9, 1) _(outer, 8, 1) _(outer, 4, 1) _(outer, 2, 1) \
    _(outer, 1, 1)
#define OUTER_2(_) \
    _(outer, 12, 2) _(outer, 9, 2) _(outer, 8, 2) _(outer, 4, 2) _(outer, 2, 2) _(outer, 1, 2)
#define OUTER_3(_) \
    _(outer, 9, 3) _(outer, 8, 3) _(outer, 7, 3) _(outer, 6, 3) _(outer, 4, 3) _(outer, 2, 3) \
    _(outer, 1, 3)
#else
#define ROWS_1(_) \
    _(rows, 12, 1) _(rows, 8, 1) _(rows, 6, 1) _(rows, 4, 1) _(rows, 2, 1) _(rows, 1, 1)
#define ROWS_2(_) \
    _(rows, 6, 2) _(rows, 5, 2) _(rows, 4, 2) _(rows, 3, 2) _(rows, 2, 2) _(rows, 1, 2)
#define OUTER_1(_) \
    _(outer, 12, 1) _(outer, 9, 1) _(outer, 8, 1) _(outer, 4, 1) _(outer, 2, 1) _(outer, 1, 1)
#define OUTER_2(_) \
    _(outer, 6, 2) _(outer, 5, 2) _(outer, 4, 2) _(outer, 3, 2) _(outer, 2, 2) _(outer, 1, 2)
#endif

#define TILE(kind, rows, vectors)                                                            \
    static void kind##_##rows##x##vectors(const struct gemm_##kind *task, ptrdiff_t first) { \
        kind##_tile(rows, vectors, task, first);                                             \
    }
#define ENTRY(kind, rows, vectors) {rows, kind##_##rows##x##vectors},

ROWS_1(TILE)
ROWS_2(TILE)
OUTER_1(TILE)
OUTER_2(TILE)
static const struct rows_size rows_1[] = {ROWS_1(ENTRY)}, rows_2[] = {ROWS_2(ENTRY)};
static const struct outer_size outer_1[] = {OUTER_1(ENTRY)}, outer_2[] = {OUTER_2(ENTRY)};
static const struct rows_size *const rows_sizes[] = {rows_1, rows_2};
#if VECTOR_BYTES == 64
OUTER_3(TILE)
static const struct outer_size outer_3[] = {OUTER_3(ENTRY)};
static const struct outer_size *const outer_sizes[] = {outer_1, outer_2, outer_3};
#else
static const struct outer_size *const outer_sizes[] = {outer_1, outer_2};
#endif

/* Run tiles over all rows: as few as the largest size allows, and of equal sizes rather than large
 * ones and a small rest, which would be bound by latency. Divisions of 32 bits take half as long. */
#define RUN(sizes, rows, task)                                                                  \
    for (ptrdiff_t first = 0; first < (rows);) {                                                \
        const uint32_t left = (uint32_t)((rows) - first), most = (uint32_t)(sizes)[0].rows,     \
                       tiles = (left + most - 1) / most, even = (left + tiles - 1) / tiles;     \
        ptrdiff_t n = 0;                                                                        \
        while ((sizes)[n].rows > left) n++;                                                     \
        while ((sizes)[n].rows > 1 && (sizes)[n + 1].rows >= even) n++;                         \
        (sizes)[n].run(task, first);                                                            \
        first += (sizes)[n].rows;                                                               \
    }

void PRODUCTS(gemm_rows)(ptrdiff_t rows, const struct gemm_rows *task) {
    const struct rows_size *sizes = rows_sizes[vectors_of(task->columns) - 1];
    RUN(sizes, rows, task)
}

void PRODUCTS(gemm_outer)(ptrdiff_t rows, const struct gemm_outer *task) {
    const struct outer_size *sizes = outer_sizes[vectors_of(task->columns) - 1];
    RUN(sizes, rows, task)
}
