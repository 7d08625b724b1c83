/* The two register-blocked matrix kernels that everything dense stands on; see gemm.c. Included
 * after simd.h. */
#ifndef PYDTNN_GEMM_H
#define PYDTNN_GEMM_H

#include "simd.h"

#if VECTOR_BYTES == 64
enum { ROWS_VECTORS = 2, OUTER_VECTORS = 3 };
#else
enum { ROWS_VECTORS = 2, OUTER_VECTORS = 2 };
#endif
enum { ROWS_COLUMNS = ROWS_VECTORS * LANES, OUTER_COLUMNS = OUTER_VECTORS * LANES };
enum { OUTER_ROWS = VECTOR_BYTES == 64 ? 9 : 6 }; /* of gemm_outer's tile of OUTER_COLUMNS */

/* C[i, j] = start[j] + sum over segments s and k < length of A_i[segment[s] + k]
 * B[b_row[s] + k, j]; + C[i, j] if accumulate.
 *
 * Row i of A starts at a + a_offset[i], row i of C at c + c_offset[i]; rows of B are ldb apart. B
 * and start are read in whole vectors, C only in its columns. An output pixel of a convolution is a
 * row: its offset is the start of its window, the segments are the taps, so no im2row matrix is
 * written. */
struct gemm_rows {
    const real *a;
    const ptrdiff_t *a_offset;
    const ptrdiff_t *segment, *b_row;
    ptrdiff_t segments, length;
    const real *b;
    ptrdiff_t ldb;
    real *c;
    const ptrdiff_t *c_offset;
    ptrdiff_t columns; /* 1 to ROWS_COLUMNS */
    const real *start; /* NULL: zero */
    int accumulate;
};

void NAME(gemm_rows)(ptrdiff_t rows, const struct gemm_rows *task);

/* C[i, j] = sum over segments s and k < length of A_s[k, i] B_s[k, j]; + C[i, j] if accumulate:
 * both operands have the summed index outside, as in the gradient of weights.
 *
 * A_s starts at a + a_offset[s], B_s at b + b_offset[s]; their rows are lda and ldb apart, those of
 * C ldc. B is read in whole vectors, C only in its columns. */
struct gemm_outer {
    const real *a;
    const ptrdiff_t *a_offset;
    ptrdiff_t lda;
    const real *b;
    const ptrdiff_t *b_offset;
    ptrdiff_t ldb;
    ptrdiff_t segments, length;
    real *c;
    ptrdiff_t ldc;
    ptrdiff_t columns; /* 1 to OUTER_COLUMNS */
    int accumulate;
};

void NAME(gemm_outer)(ptrdiff_t rows, const struct gemm_outer *task);

/* The same with pairs of bfloat16 in A and B, over which k runs. */
void NAME(gemm_rows_pairs)(ptrdiff_t rows, const struct gemm_rows *task);
void NAME(gemm_outer_pairs)(ptrdiff_t rows, const struct gemm_outer *task);

/* The same with lanes along the rows of C, for any number of columns: A is read in whole vectors, B
 * element by element; see gemm_turned.c. */
void NAME(gemm_outer_turned)(ptrdiff_t rows, const struct gemm_outer *task);

/* dst[k, j] = src[k sk + j sj] for j < columns, 0 up to the next multiple of LANES, which is also
 * the length of dst's rows. One of the strides is 1. */
void NAME(gemm_pack)(ptrdiff_t depth, ptrdiff_t columns, const real *src, ptrdiff_t sk,
                     ptrdiff_t sj, real *dst);

/* The same of panels of `panel` columns, which begin `distance` apart in dst, for rows of src that
 * are `stride` apart. Rows of src are read as a whole, so that memory is read in its order. */
void NAME(gemm_pack_panels)(ptrdiff_t depth, ptrdiff_t columns, ptrdiff_t panel, const real *src,
                            ptrdiff_t stride, ptrdiff_t distance, real *dst);

/* The same in panels of `tile` columns with nothing between their rows, the last one, too: each of
 * them may be followed by LANES elements that are overwritten. */
void NAME(gemm_pack_tiles)(ptrdiff_t depth, ptrdiff_t columns, ptrdiff_t tile, const real *src,
                           ptrdiff_t stride, ptrdiff_t distance, real *dst);

/* dst[j, i] = src[i, j] for a matrix (rows, columns); rows of src are `stride` apart, those of dst
 * `width`. */
void NAME(gemm_transpose)(ptrdiff_t rows, ptrdiff_t columns, const real *src, ptrdiff_t stride,
                          real *dst, ptrdiff_t width);

/* n elements, aligned to 64 bytes; NULL if memory is short. */
void *NAME(scratch_new)(ptrdiff_t n);

/* Before a loop over a tile: its array of vectors is kept in registers only if the loop is
 * unrolled. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

INLINE ptrdiff_t vectors_of(ptrdiff_t columns) { return (columns + LANES - 1) / LANES; }
INLINE ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
INLINE ptrdiff_t larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }
INLINE ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return (a + b - 1) / b; }

#endif
