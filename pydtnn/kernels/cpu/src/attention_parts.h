/* Blocks of attention and what forward and backward do with them; see attention.c. Included after
 * attention.h. */
#ifndef PYDTNN_ATTENTION_PARTS_H
#define PYDTNN_ATTENTION_PARTS_H

#include <string.h>

#include "attention.h"
#include "gemm.h"

/* Queries and keys of a block. Blocks of queries are four tiles of gemm_rows; a block of scores of
 * float stays in L1 with the panel of its operand. Keys are whole panels and whole counters. */
enum { QUERIES = 56, KEYS = 128 };

/* Panels of ROWS_COLUMNS columns: of a matrix (rows, columns) with rows `stride` apart, and of its
 * transpose times a factor. */
void NAME(attention_pack)(ptrdiff_t rows, ptrdiff_t columns, const real *src, ptrdiff_t stride,
                          real *dst);
void NAME(attention_pack_turned)(ptrdiff_t rows, ptrdiff_t columns, const real *src,
                                 ptrdiff_t stride, real factor, real *dst);

/* Elements of panels with `rows` rows, and of those of a transpose. */
INLINE ptrdiff_t panels_size(ptrdiff_t rows, ptrdiff_t columns) {
    return rows * vectors_of(columns) * LANES;
}

/* C (rows, columns) = A (rows, depth) B, or C += A B; rows of A and C are lda and ldc apart, rows
 * of B are rows [first, first + depth) of panels of `panel_rows` rows. At most QUERIES rows. */
void NAME(attention_product)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const real *a,
                             ptrdiff_t lda, const real *b, ptrdiff_t panel_rows, ptrdiff_t first,
                             real *c, ptrdiff_t ldc, int accumulate);

/* C (rows, columns) = A' B, or C += A' B, for A (depth, rows). */
void NAME(attention_outer)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const real *a,
                           ptrdiff_t lda, const real *b, ptrdiff_t panel_rows, ptrdiff_t first,
                           real *c, ptrdiff_t ldc, int accumulate);

/* Number of positions of a sample. */
INLINE ptrdiff_t positions(const struct attention_shape *s, ptrdiff_t sample) {
    return s->lengths ? (ptrdiff_t)s->lengths[sample] : s->length;
}

/* Set rows [first, last) of `columns` elements, `stride` apart, to 0. */
INLINE void zero_rows(ptrdiff_t first, ptrdiff_t last, ptrdiff_t columns, real *x,
                      ptrdiff_t stride) {
    const size_t size = (size_t)columns * sizeof(real);
    for (ptrdiff_t i = first; i < last; i++) memset(x + i * stride, 0, size);
}

/* Number of keys of a block, from key `first`, that query `query` has weights for. */
INLINE ptrdiff_t keys_seen(const struct attention_shape *s, ptrdiff_t query, ptrdiff_t first,
                           ptrdiff_t keys) {
    if (!s->causal) return keys;
    return larger(smaller(query + 1 - first, keys), 0);
}

/* factor[j] = s->factor for weights that are kept and 0 for others: of keys [first, first + keys)
 * of a query, in whole vectors. */
void NAME(attention_mask)(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                          ptrdiff_t query, ptrdiff_t first, ptrdiff_t keys, real *factor);

/* Gradients of one head, and the elements of its scratch memory. */
ptrdiff_t NAME(attention_backward_scratch)(const struct attention_shape *s);
void NAME(attention_backward_head)(const struct attention_shape *s, ptrdiff_t sample,
                                   ptrdiff_t head, const real *dy, const real *qkv, const real *y,
                                   const real *log_sums, real *dqkv, real *scratch);

#endif
