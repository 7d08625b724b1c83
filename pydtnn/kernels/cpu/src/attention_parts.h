/* Blocks of attention and what forward and backward do with them; see attention.c. Included after
 * attention.h. */
#ifndef PYDTNN_ATTENTION_PARTS_H
#define PYDTNN_ATTENTION_PARTS_H

#include <string.h>

#include "attention.h"
#include "gemm.h"
#include "lanes.h"

/* Queries and keys of a block: whole strips and tiles of gemm_rows, and whole panels and counters.
 * A block of scores of float stays in L1. Along the diagonal of causal attention, a block is
 * divided into strips of STRIP rows. Rows are PITCH apart, a cache line more than KEYS, so that
 * what a tile has of each does not fall into a few sets of L1. */
enum { QUERIES = 60, KEYS = 128, STRIP = 12 };
enum { PITCH = KEYS + 64 / sizeof(real) };

/* Panels of ROWS_COLUMNS columns: of a matrix (rows, columns) with rows `stride` apart, and of its
 * transpose. */
void NAME(attention_pack)(ptrdiff_t rows, ptrdiff_t columns, const real *src, ptrdiff_t stride,
                          real *dst);
void NAME(attention_pack_turned)(ptrdiff_t rows, ptrdiff_t columns, const real *src,
                                 ptrdiff_t stride, real *dst);

/* Elements of panels with `rows` rows, and of those of a transpose. */
INLINE ptrdiff_t panels_size(ptrdiff_t rows, ptrdiff_t columns) {
    return rows * vectors_of(columns) * LANES;
}

/* Queries and keys of a block, which begins at `query` and `key` of its sample. */
struct block {
    ptrdiff_t query, queries, key, keys; /* keys that no query sees are not among them */
    int causal;
    ptrdiff_t seen; /* keys, or causal those of the first query: each one sees one more */
};

/* Positions between the first key and the first query. */
INLINE ptrdiff_t ahead(const struct attention_shape *s) {
    return s->query - s->key;
}

INLINE struct block block_of(const struct attention_shape *s, ptrdiff_t length, ptrdiff_t all,
                             ptrdiff_t query, ptrdiff_t key) {
    const ptrdiff_t queries = smaller(length - query, QUERIES), keys = smaller(all - key, KEYS);
    if (!s->causal) return (struct block){query, queries, key, keys, 0, keys};
    const ptrdiff_t seen = query + ahead(s) + 1 - key;
    return (struct block){query, queries, key, smaller(keys, seen + queries - 1), 1, seen};
}

/* Number of keys that row i of a block has weights for. */
INLINE ptrdiff_t seen_by(const struct block *b, ptrdiff_t i) {
    return larger(smaller(b->seen + i, b->keys), 0);
}

/* Set the weights of row i of a block that are not seen to 0, as far as products of strips read
 * them. */
INLINE void zero_unseen(const struct block *b, ptrdiff_t i, real *row) {
    const ptrdiff_t seen = seen_by(b, i), end = smaller(b->seen + i + STRIP, b->keys);
    for (ptrdiff_t j = seen; j < end; j++) row[j] = 0;
}

/* Vector j of a row of a block, `other` behind the first n elements. */
INLINE vec vector_of(const real *row, ptrdiff_t j, ptrdiff_t n, vec other) {
    return vselect(vlanes(j) < (ireal)n, vload(row + j), other);
}

/* scores (queries, keys) = a b, for queries in rows of a, lda apart, and panels b of the `length`
 * keys of a sample, turned, of `width` rows. Rows of blocks are PITCH apart. */
void NAME(attention_scores)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                            const real *a, ptrdiff_t lda, const real *b, real *scores);

/* c (queries, width) = weights b, or c += weights b for all keys but the first block, for panels b
 * of `length` rows; rows of c are ldc apart. */
void NAME(attention_values)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                            const real *weights, const real *b, real *c, ptrdiff_t ldc);

/* c (keys, width) = weights' b for panels b of `length` rows, or c += weights' b: of causal
 * attention always, else for all queries but the first block. Rows of c are ldc apart. */
void NAME(attention_outer)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                           const real *weights, const real *b, real *c, ptrdiff_t ldc);

/* Number of positions of a sample, of queries or keys. */
INLINE ptrdiff_t positions(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t most) {
    return s->lengths ? (ptrdiff_t)s->lengths[sample] : most;
}

/* Set rows [first, last) of `columns` elements, `stride` apart, to 0. */
INLINE void zero_rows(ptrdiff_t first, ptrdiff_t last, ptrdiff_t columns, real *x,
                      ptrdiff_t stride) {
    const size_t size = (size_t)columns * sizeof(real);
    for (ptrdiff_t i = first; i < last; i++) memset(x + i * stride, 0, size);
}

/* 2^(x factor) are weights of scores x before they are divided by sqrt(width). */
INLINE real to_powers_of_2(const struct attention_shape *s) {
    return (real)(1.4426950408889634 / __builtin_sqrt((double)s->width));
}

/* factor[j] = s->factor for weights that are kept and 0 for others: of keys [first, first + keys)
 * of a query, in whole vectors. */
void NAME(attention_mask)(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                          ptrdiff_t query, ptrdiff_t first, ptrdiff_t keys, real *factor);

/* Gradients of one head, and the elements of its scratch memory. */
ptrdiff_t NAME(attention_backward_scratch)(const struct attention_shape *s);
void NAME(attention_backward_head)(const struct attention_shape *s, ptrdiff_t sample,
                                   ptrdiff_t head, const real *dy, const real *q, const real *k,
                                   const real *y, const real *log_sums, real *dq, real *dk,
                                   real *scratch);

#endif
