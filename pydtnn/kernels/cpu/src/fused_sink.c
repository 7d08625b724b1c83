/* Operations on rows of y after they were computed: y += add, 0 where the gate is closed,
 * max(y, 0), sums over the rows.
 *
 *   for each chunk of rows
 *     for each row                         of more than NARROW columns: sums in L1 (sink_span)
 *       for each vector of columns         every operand is loaded once
 *     for each WIDE vectors of columns     what is left: coefficients and sums in registers
 *       for each row
 *
 * Memory delivers rows in their order 3 times as fast as columns of them. In narrow rows FLIGHT
 * vectors at a time, with separate sums, hide the latency of an addition; up to WIDE of them are
 * adjacent. Within a chunk sums are in the arrays' own type; they are converted to double at its
 * end, so the error of float32 grows with the rows of a chunk. Moments are taken about the mean of
 * a few rows of the chunk, from which those about zero are computed in double: with a pivot k
 * deviations from the mean the variance has an error of eps k^2, for any mean.
 *
 * Whether there is an array to add is a run-time branch, which is always the same. The gate is
 * compiled in: its value (from its terms, or kept in an array) or only its centred terms, for the
 * sums. Expected: as fast as memory; from L1 2 to 4 cycles a vector.
 */
#include "fused_map.h"
#include "stored.h"

enum gating { OPEN, BY_VALUE, BY_KEPT };
enum { FLIGHT = VECTOR_BYTES == 64 ? 4 : 2, WIDE = FLIGHT, PIVOT_ROWS = 4 };
enum { NARROW = 256 / sizeof(real), GROUP = 4 }; /* columns; rows that lie in the cache */
enum { CHUNK_BYTES = 131072, MOST_ROWS = 256, LEAST_ROWS = 16 }; /* of a chunk */

/* Pointers to a chunk: its first row and the first column of the array. */
struct chunk {
    const real *from;
    const stored *add, *kept, *x[MOST_TERMS];
    stored *y;
    ptrdiff_t rows, stride, channels; /* stride: from row to row of `from` */
    int writes; /* 0: y is where it was computed, and does not change */
    const struct source *gate;
    vec low, limit; /* of y; from where on the gate is closed: NaN if nowhere */
};

/* y where the gate's value is open; where the value is NaN, y passes. */
INLINE vec pass(const struct chunk *c, vec value, vec y) {
    return vselect((value <= 0) | (value >= c->limit), vzero(), y);
}

/* Vector number j from `column` on of y at row i, done. */
INLINE vec finish(const int terms, const enum gating gating, const struct chunk *c,
                  const struct map *map, ptrdiff_t i, ptrdiff_t column, const int j,
                  ptrdiff_t lanes, vec *centred) {
    const ptrdiff_t at = i * c->channels + column + j * LANES;
    vec y = load(c->from + i * c->stride + column + j * LANES, lanes);
    if (c->add) y += load_stored(c->add + at, lanes);
    UNROLL
    for (int k = 0; k < terms; k++)
        centred[k] = load_stored(c->x[k] + at, lanes) - map->pivot[k][j];
    if (gating == BY_VALUE) y = pass(c, map_value(terms, map, j, centred), y);
    if (gating == BY_KEPT) y = pass(c, load_stored(c->kept + at, lanes), y);
    return vmax(c->low, y);
}

/* Sums over rows for a vector of columns: of u = y - pivot, and products of u. */
struct sums {
    vec pivot, sum, product[MOST_TERMS];
};

/* Add those of a chunk to the table; the pivot is 0 but for moments, which are turned into those
 * about 0. */
INLINE void add_lanes(const struct sums *s, const int products, const struct chunk *c,
                      const ptrdiff_t lanes, double *to) {
    real pivot[LANES], sum[LANES], product[LANES];
    double y[LANES];
    vstore(pivot, s->pivot);
    vstore(sum, s->sum);
    for (ptrdiff_t l = 0; l < lanes; l++) {
        y[l] = (double)c->rows * pivot[l] + sum[l];
        to[l] += y[l];
    }
    for (int k = 0; k < products; k++) {
        to += c->channels;
        vstore(product, s->product[k]);
        for (ptrdiff_t l = 0; l < lanes; l++)
            to[l] += (double)product[l] + (double)pivot[l] * (sum[l] + y[l]);
    }
}
static __attribute__((noinline)) void add_sums(const struct sums *s, const int products,
                                               const struct chunk *c, ptrdiff_t lanes, double *to) {
    if (lanes == LANES) {
        add_lanes(s, products, c, LANES, to);
    } else {
        add_lanes(s, products, c, lanes, to);
    }
}

/* Sums of no rows, with the pivot of vector number `j` from `column` on. */
INLINE struct sums no_sums(const int terms, const enum gating gating, const enum sink_sums kind,
                           const struct chunk *c, const struct map *map, ptrdiff_t column,
                           const int j, ptrdiff_t lanes) {
    struct sums s = {.pivot = vzero()};
    vec centred[MOST_TERMS];
    if (kind != SUMS_MOMENTS) return s;
    for (int k = 0; k < PIVOT_ROWS; k++) {
        const ptrdiff_t i = c->rows * k / PIVOT_ROWS;
        s.pivot += finish(terms, gating, c, map, i, column, j, lanes, centred);
    }
    s.pivot *= (real)1 / PIVOT_ROWS;
    return s;
}

/* Finish and store vector number `j` from `column` on of row i, and add it to `s`, about `pivot`.
 */
INLINE void sink_vector(const int terms, const enum gating gating, const enum sink_sums kind,
                        const struct chunk *c, const struct map *map, ptrdiff_t i,
                        ptrdiff_t column, const int j, ptrdiff_t lanes, vec pivot,
                        struct sums *s) {
    const int products = kind == SUMS_MOMENTS ? 1 : terms;
    vec centred[MOST_TERMS];
    vec y = finish(terms, gating, c, map, i, column, j, lanes, centred);
    if (c->writes) store_stored(c->y + i * c->channels + column + j * LANES, y, lanes);
    if (kind == SUMS_NONE) return;
    y = sround(y);
    if (kind == SUMS_MOMENTS) centred[0] = y = y - pivot;
    s->sum += y;
    UNROLL
    for (int k = 0; k < products; k++) s->product[k] += y * centred[k];
}

/* Some vectors of columns of a chunk, with sums in registers; sums are added to the double tables
 * at `column`. */
INLINE void sink_vectors(const int terms, const enum gating gating, const enum sink_sums kind,
                         const int vectors, const struct chunk *c, ptrdiff_t column,
                         ptrdiff_t lanes, double *sums) {
    const int flight = FLIGHT / vectors, products = kind == SUMS_MOMENTS ? 1 : terms;
    struct sums sum[FLIGHT];
    struct map map;
    if (terms) load_map(terms, vectors, c->gate, column, lanes, &map);
    UNROLL
    for (int g = 0; g < FLIGHT; g++) {
        sum[g] = (struct sums){.pivot = vzero()};
        if (g < vectors) sum[g] = no_sums(terms, gating, kind, c, &map, column, g, lanes);
    }
#define ROW(i, g)                                                                     \
    do {                                                                              \
        UNROLL                                                                        \
        for (int j = 0; j < vectors; j++)                                             \
            sink_vector(terms, gating, kind, c, &map, i, column, j, lanes,            \
                        sum[j].pivot, &sum[(g) * vectors + j]);                       \
    } while (0)
    ptrdiff_t i = 0;
    for (; i + flight <= c->rows; i += flight) {
        UNROLL
        for (int g = 0; g < flight; g++) ROW(i + g, g);
    }
    for (; i < c->rows; i++) ROW(i, 0);
#undef ROW
    if (kind == SUMS_NONE) return;
    UNROLL
    for (int j = 0; j < vectors; j++) {
        UNROLL
        for (int g = 1; g < flight; g++) {
            sum[j].sum += sum[g * vectors + j].sum;
            UNROLL
            for (int k = 0; k < products; k++)
                sum[j].product[k] += sum[g * vectors + j].product[k];
        }
        add_sums(&sum[j], products, c, lanes, sums + column + j * LANES);
    }
}

/* Whole vectors of columns of a chunk, row by row, with sums in L1. */
INLINE void sink_span(const int terms, const enum gating gating, const enum sink_sums kind,
                      const ptrdiff_t vectors, const struct chunk *c, ptrdiff_t column,
                      double *sums) {
    const int products = kind == SUMS_MOMENTS ? 1 : terms;
    struct sums sum[SPAN];
    struct tables tables;
    struct map map;
    if (terms) tables = tables_of(terms, c->gate, column);
    for (ptrdiff_t j = 0; j < vectors; j++) {
        if (terms) read_tables(terms, &tables, j * LANES, &map);
        sum[j] = no_sums(terms, gating, kind, c, &map, column + j * LANES, 0, LANES);
    }
#define ROWS(i, group)                                                                         \
    for (ptrdiff_t j = 0; j < vectors; j++) {                                                  \
        struct sums s = sum[j];                                                                \
        if (terms) read_tables(terms, &tables, j * LANES, &map);                               \
        UNROLL                                                                                 \
        for (int g = 0; g < (group); g++)                                                      \
            sink_vector(terms, gating, kind, c, &map, (i) + g, column + j * LANES, 0, LANES,   \
                        s.pivot, &s);                                                          \
        sum[j].sum = s.sum;                                                                    \
        UNROLL                                                                                 \
        for (int k = 0; k < products; k++) sum[j].product[k] = s.product[k];                   \
    }
    ptrdiff_t i = 0;
    for (; kind == SUMS_MOMENTS && i + GROUP <= c->rows; i += GROUP) ROWS(i, GROUP)
    for (; i < c->rows; i++) ROWS(i, 1)
#undef ROWS
    if (kind == SUMS_NONE) return;
    for (ptrdiff_t j = 0; j < vectors; j++)
        add_sums(&sum[j], products, c, LANES, sums + column + j * LANES);
}

INLINE void sink_columns(const int terms, const enum gating gating, const enum sink_sums kind,
                         const struct chunk *c, const struct window *w, double *sums) {
    const ptrdiff_t end = w->column + w->columns;
    ptrdiff_t column = w->column;
    while (w->columns > NARROW && column + LANES <= end) {
        const ptrdiff_t left = (end - column) / LANES, vectors = left < SPAN ? left : SPAN;
        sink_span(terms, gating, kind, vectors, c, column, sums);
        column += vectors * LANES;
    }
    for (; column + WIDE * LANES <= end; column += WIDE * LANES) {
        sink_vectors(terms, gating, kind, WIDE, c, column, LANES, sums);
    }
    for (; column + 2 * LANES <= end; column += 2 * LANES) {
        sink_vectors(terms, gating, kind, 2, c, column, LANES, sums);
    }
    if (column + LANES <= end) {
        sink_vectors(terms, gating, kind, 1, c, column, LANES, sums);
        column += LANES;
    }
    if (column < end) sink_vectors(terms, gating, kind, 1, c, column, end - column, sums);
}

static void sink_chunk(const struct sink *sink, const struct chunk *c, const struct window *w,
                       double *sums) {
    const int terms = sink->gate ? sink->gate->terms : 0, gated = terms && sink->gate->relu;
    if (sink->sums == SUMS_MOMENTS) {
        sink_columns(0, OPEN, SUMS_MOMENTS, c, w, sums);
    } else if (sink->sums == SUMS_GATE && terms == 1) {
        if (gated) {
            sink_columns(1, BY_VALUE, SUMS_GATE, c, w, sums);
        } else {
            sink_columns(1, OPEN, SUMS_GATE, c, w, sums);
        }
    } else if (sink->sums == SUMS_GATE) {
        if (gated) {
            sink_columns(2, BY_VALUE, SUMS_GATE, c, w, sums);
        } else {
            sink_columns(2, OPEN, SUMS_GATE, c, w, sums);
        }
    } else if (!gated) {
        sink_columns(0, OPEN, SUMS_NONE, c, w, sums);
    } else if (c->kept) {
        sink_columns(0, BY_KEPT, SUMS_NONE, c, w, sums);
    } else if (terms == 1) {
        sink_columns(1, BY_VALUE, SUMS_NONE, c, w, sums);
    } else {
        sink_columns(2, BY_VALUE, SUMS_NONE, c, w, sums);
    }
}

static const stored *at(const void *array, ptrdiff_t offset) {
    return array ? (const stored *)array + offset : NULL;
}

/* Rows of any width, chunk by chunk. */
static void sink_chunks(const struct sink *sink, const struct window *w, const real *from,
                        ptrdiff_t stride, double *sums) {
    const ptrdiff_t fit = CHUNK_BYTES / (ptrdiff_t)sizeof(real) / (w->columns + 1);
    const ptrdiff_t size = fit < LEAST_ROWS ? LEAST_ROWS : fit > MOST_ROWS ? MOST_ROWS : fit;
    struct chunk c = {.stride = stride, .channels = w->channels, .gate = sink->gate};
    const stored *to = (const stored *)sink->y + w->first * w->channels + w->column;
    c.writes = (const void *)from != to || sink->add || sink->gate || sink->relu;
    c.low = vset(sink->relu ? 0 : -(real)__builtin_inf());
    const int limited = sink->gate && sink->gate->limit < __builtin_inf();
    c.limit = vset(limited ? (real)sink->gate->limit : (real)__builtin_nan(""));
    for (ptrdiff_t i = 0; i < w->rows; i += size) {
        const ptrdiff_t offset = (w->first + i) * w->channels;
        c.rows = w->rows - i < size ? w->rows - i : size;
        c.from = from + i * stride - w->column;
        c.y = (stored *)sink->y + offset;
        c.add = at(sink->add, offset);
        if (sink->gate) {
            c.kept = at(sink->gate->store, offset);
            for (int k = 0; k < sink->gate->terms; k++) {
                c.x[k] = at(sink->gate->term[k].x, offset);
            }
        }
        sink_chunk(sink, &c, w, sums);
    }
}

static void sink_folded(const struct sink *sink, const struct window *w, ptrdiff_t fold,
                        const real *from, double *sums) {
    struct folded f;
    struct sink s = *sink;
    double folded[(MOST_TERMS + 1) * FOLD_MOST] = {0};
    const ptrdiff_t start = w->first * w->channels, lines = w->rows / fold, done = lines * fold;
    const ptrdiff_t columns = fold * w->channels, kinds = sums_of(sink);
    if (sink->gate) {
        fold_source(sink->gate, w, fold, &f);
        s.gate = &f.source;
    }
    s.y = (stored *)sink->y + start;
    s.add = at(sink->add, start);
    sink_chunks(&s, &(struct window){0, lines, columns, 0, columns}, from, columns, folded);
    for (ptrdiff_t k = 0; k < kinds; k++) {
        for (ptrdiff_t j = 0; j < columns; j++) {
            sums[k * w->channels + j % w->channels] += folded[k * columns + j];
        }
    }
    sink_chunks(sink,
                &(struct window){w->first + done, w->rows - done, w->channels, 0, w->channels},
                from + done * w->channels, w->channels, sums);
}

void NAME(sink_window)(const struct sink *sink, const struct window *w, const real *from,
                       ptrdiff_t stride, double *sums) {
    const ptrdiff_t fold = fold_of(w, stride);
    if (fold > 1) {
        sink_folded(sink, w, fold, from, sums);
    } else {
        sink_chunks(sink, w, from, stride, sums);
    }
}
