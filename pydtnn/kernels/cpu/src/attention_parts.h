/* Blocks of attention and what forward and backward do with them; see attention.c. Included after
 * attention.h. */
#ifndef PYDTNN_ATTENTION_PARTS_H
#define PYDTNN_ATTENTION_PARTS_H

#include <string.h>

#include "attention.h"
#include "gemm.h"
#include "lanes.h"

/* Queries and keys of a block: whole strips and tiles of gemm_rows, and whole panels and counters.
 * A block of scores of float stays in L1. Where some queries do not see all
 * keys, it is divided into strips of STRIP rows. Rows are PITCH apart, a cache line more than KEYS,
 * so that what a tile has of each does not fall into a few sets of L1. */
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

/* Queries and keys of a block, which begins at `query` and `key` of its sample. Query i sees the
 * keys from[i] to before to[i]; keys behind those that any query sees are not among them. */
struct block {
    ptrdiff_t query, queries, key, keys;
    int whole;   /* all queries see all keys */
    int gradual; /* the next query begins and ends to see at the same key, or the next */
    uint8_t from[QUERIES], to[QUERIES];
};

/* The blocks of a sample, those of the first queries first. They are those of all heads, and of all
 * samples if `seen` is. */
struct blocks {
    ptrdiff_t sample;       /* -1: none yet */
    ptrdiff_t length, keys; /* as far as the last query that sees a key, and the last key seen */
    struct block *at;
};

/* Positions from the first one to before the other. */
struct interval {
    ptrdiff_t from, to;
};

/* Find the blocks of a sample, unless they are known. */
void NAME(attention_find_blocks)(const struct attention_shape *s, ptrdiff_t sample,
                                 struct blocks *blocks);

/* Memory for blocks, which are not known yet; NULL if there is none. */
struct block *NAME(attention_new_blocks)(const struct attention_shape *s, struct blocks *blocks);

/* The keys that some of the queries [i, i + rows) of a block see. */
INLINE struct interval keys_of(const struct block *b, ptrdiff_t i, ptrdiff_t rows) {
    if (b->whole) return (struct interval){0, b->keys};
    if (b->gradual) return (struct interval){b->from[i], b->to[i + rows - 1]};
    int from = KEYS, to = 0;
    for (ptrdiff_t r = i; r < i + rows; r++) {
        const int sees = b->from[r] < b->to[r], first = sees ? b->from[r] : KEYS;
        from = first < from ? first : from;
        to = sees && b->to[r] > to ? b->to[r] : to;
    }
    return (struct interval){from, to};
}

/* The queries that see some of the keys [j, j + columns) of a block, and those between them. */
INLINE struct interval queries_of(const struct block *b, ptrdiff_t j, ptrdiff_t columns) {
    if (b->whole) return (struct interval){0, b->queries};
    const int begin = (int)j, end = (int)(j + columns);
    int first = QUERIES, last = 0;
    if (b->gradual) { /* it takes at least so many queries to reach a key */
        first = (int)larger(begin + 1 - b->to[0], 0);
        last = (int)(b->queries - larger(b->from[b->queries - 1] - end + 1, 0));
        while (first < last && b->to[first] <= begin) first++;
        while (first < last && b->from[last - 1] >= end) last--;
        return (struct interval){first, last};
    }
    for (int i = 0; i < b->queries; i++) {
        const int from = b->from[i] > begin ? b->from[i] : begin,
                  to = b->to[i] < end ? b->to[i] : end, row = from < to ? i : QUERIES;
        first = row < first ? row : first;
        last = from < to ? i + 1 : last;
    }
    return (struct interval){first, last};
}

/* Set what row i of a block has of keys that are not seen to 0, as far as products of strips of
 * rows or keys read it. */
INLINE void zero_unseen(const struct block *b, ptrdiff_t i, real *row) {
    if (b->whole) return;
    const ptrdiff_t reach = b->gradual ? STRIP : KEYS, from = b->from[i], to = b->to[i];
    const ptrdiff_t first = larger(from - reach, 0), last = smaller(to + reach, b->keys);
    for (ptrdiff_t j = first; j < smaller(from, b->keys); j++) row[j] = 0;
    for (ptrdiff_t j = to; j < last; j++) row[j] = 0;
}

/* Add biases to the scores of a block, and subtract slopes times distances. */
void NAME(attention_add_bias)(const struct attention_shape *s, ptrdiff_t head,
                              const struct block *block, real *scores);

/* Vector j of a row, `other` outside of [from, to). */
INLINE vec vector_of(const real *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, vec other) {
    const ivec at = vlanes(j);
    return vselect((at >= (ireal)from) & (at < (ireal)to), vload(row + j), other);
}

/* scores (queries, keys) = a b, for queries in rows of a, lda apart, and panels b of the `length`
 * keys of a sample, turned, of `width` rows. Rows of blocks are PITCH apart. */
void NAME(attention_scores)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                            const real *a, ptrdiff_t lda, const real *b, real *scores);

/* c (queries, width) = weights b, or c += weights b, for panels b of `length` rows; rows of c are
 * ldc apart. What no weight is for is left as it is. */
void NAME(attention_values)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                            const real *weights, const real *b, real *c, ptrdiff_t ldc,
                            int accumulate);

/* c (keys, width) = weights' b, or c += weights' b, for panels b of `length` rows; rows of c are
 * ldc apart. What no weight is for is left as it is. */
void NAME(attention_outer)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                           const real *weights, const real *b, real *c, ptrdiff_t ldc,
                           int accumulate);

/* Set rows [first, last) of `columns` elements, `stride` apart, to 0. */
INLINE void zero_rows(ptrdiff_t first, ptrdiff_t last, ptrdiff_t columns, real *x,
                      ptrdiff_t stride) {
    const size_t size = (size_t)columns * sizeof(real);
    for (ptrdiff_t i = first; i < last; i++) memset(x + i * stride, 0, size);
}

/* 2^(x factor) are weights of scores x before they are multiplied by the scale. */
INLINE real to_powers_of_2(const struct attention_shape *s) {
    return (real)(1.4426950408889634 * s->scale);
}

/* factor[j] = s->factor for weights that are kept and 0 for others: of keys [first, first + keys)
 * of a query, in whole vectors. */
void NAME(attention_mask)(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                          ptrdiff_t query, ptrdiff_t first, ptrdiff_t keys, real *factor);

/* Gradients of one head, and the elements of its scratch memory. */
ptrdiff_t NAME(attention_backward_scratch)(const struct attention_shape *s);
void NAME(attention_backward_head)(const struct attention_shape *s, ptrdiff_t sample,
                                   ptrdiff_t head, const struct blocks *blocks, const real *dy,
                                   const real *q, const real *k, const real *y,
                                   const real *log_sums, real *dq, real *dk, real *dbias,
                                   real *scratch);

#endif
