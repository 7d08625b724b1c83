/* The map of a deferred array for some vectors of columns: coefficients in registers, and tables of
 * them for rows that are shorter than a vector. */
#ifndef PYDTNN_FUSED_MAP_H
#define PYDTNN_FUSED_MAP_H

#include "fused_rows.h"
#include "lanes.h"
#include "stored.h"

enum { MOST_TERMS = 2, MOST_VECTORS = 4 };

/* Loops over terms and vectors must be unrolled to keep their arrays in registers. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

struct map {
    vec pivot[MOST_TERMS][MOST_VECTORS], factor[MOST_TERMS][MOST_VECTORS], shift[MOST_VECTORS];
};

INLINE vec load_or(const void *table, ptrdiff_t at, ptrdiff_t lanes, real otherwise) {
    return table ? load((const real *)table + at, lanes) : vset(otherwise);
}

/* The coefficients of `vectors` vectors from `column` on. What is not given costs an operation that
 * changes nothing, and saves a kernel for every combination. */
INLINE void load_map(const int terms, const int vectors, const struct source *s, ptrdiff_t column,
                     ptrdiff_t lanes, struct map *map) {
    UNROLL
    for (int j = 0; j < vectors; j++) {
        UNROLL
        for (int k = 0; k < terms; k++) {
            map->pivot[k][j] = load_or(s->term[k].pivot, column + j * LANES, lanes, 0);
            map->factor[k][j] = load_or(s->term[k].factor, column + j * LANES, lanes, 1);
        }
        map->shift[j] = load_or(s->shift, column + j * LANES, lanes, 0);
    }
}

/* -- rows of more vectors than fit in registers: memory delivers them 2.5 times as fast in its own
 * order as in columns, so tables of a span of columns are read again for every row */

enum { SPAN = 4096 / VECTOR_BYTES }; /* vectors; their tables, and sums, are in L1 */

static const real no_pivot[SPAN * LANES], no_factor[] = {[0 ... SPAN * LANES - 1] = 1};

struct tables {
    const real *pivot[MOST_TERMS], *factor[MOST_TERMS], *shift;
};

INLINE struct tables tables_of(const int terms, const struct source *s, ptrdiff_t column) {
    struct tables t = {.shift = s->shift ? (const real *)s->shift + column : no_pivot};
    for (int k = 0; k < terms; k++) {
        const struct term *term = &s->term[k];
        t.pivot[k] = term->pivot ? (const real *)term->pivot + column : no_pivot;
        t.factor[k] = term->factor ? (const real *)term->factor + column : no_factor;
    }
    return t;
}

/* Load the map of the vector at `i` of a span. */
INLINE void read_tables(const int terms, const struct tables *t, ptrdiff_t i, struct map *map) {
    UNROLL
    for (int k = 0; k < terms; k++) {
        map->pivot[k][0] = vload(t->pivot[k] + i);
        map->factor[k][0] = vload(t->factor[k] + i);
    }
    map->shift[0] = vload(t->shift + i);
}

/* The value before the cut at 0 from the centred terms x - pivot. */
INLINE vec map_value(const int terms, const struct map *map, int j, const vec *centred) {
    vec v = map->shift[j];
    UNROLL
    for (int k = 0; k < terms; k++) v += centred[k] * map->factor[k][j];
    return v;
}

/* -- rows of at most half a vector: `fold` of them are one row of whole vectors */

enum { FOLD_MOST = LANES * LANES / 2 + 1 };

struct folded {
    struct source source; /* starts at the window's first row */
    ptrdiff_t fold, columns;
    real table[2 * MOST_TERMS + 1][FOLD_MOST];
};

/* Number of rows to fold: 1 if folding is not faster. */
INLINE ptrdiff_t fold_of(const struct window *w, ptrdiff_t stride) {
    if (2 * w->channels > LANES || w->columns != w->channels || stride != w->channels) return 1;
    const ptrdiff_t common = w->channels & -w->channels; /* largest power of two in channels */
    const ptrdiff_t fold = LANES / common;
    return w->rows >= 4 * fold ? fold : 1;
}

static inline const void *fold_table(const struct folded *f, ptrdiff_t channels, const void *table,
                                     real *copies) {
    if (!table) return table;
    for (ptrdiff_t j = 0; j < f->columns; j += channels) {
        memcpy(copies + j, table, (size_t)channels * sizeof *copies);
    }
    return copies;
}

static inline void fold_source(const struct source *s, const struct window *w, ptrdiff_t fold,
                               struct folded *f) {
    const ptrdiff_t start = w->first * w->channels;
    f->source = *s;
    f->fold = fold;
    f->columns = fold * w->channels;
    for (int k = 0; k < s->terms; k++) {
        struct term *t = &f->source.term[k];
        t->x = (const stored *)t->x + start;
        t->pivot = fold_table(f, w->channels, t->pivot, f->table[2 * k]);
        t->factor = fold_table(f, w->channels, t->factor, f->table[2 * k + 1]);
    }
    f->source.shift = fold_table(f, w->channels, s->shift, f->table[2 * MOST_TERMS]);
    if (s->store) f->source.store = (stored *)s->store + start;
}

#endif
