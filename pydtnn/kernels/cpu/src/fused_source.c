/* Rows of deferred arrays: v = shift + sum of factor (x - pivot), cut off at 0 or not.
 *
 *   for each WIDE vectors of columns    coefficients: registers
 *     for each row                      a load, a subtraction, a multiply-add per term, two bounds
 *
 * Rows of more than WIDE vectors are computed row by row, with coefficients from L1 (map_span):
 * memory that is read in its order comes 2.5 times as fast. Three operations a vector and term hide
 * behind the loads and stores: from memory it runs as fast as a copy, from L1 at 1 to 1.5 cycles a
 * vector, row by row at 2. Whether there are pivots,
 * factors and a shift is not compiled in (see load_map); the number of terms is. Rows of at most
 * half a vector are folded.
 *
 * Values go to an array of reals, from there to the store. If only the store matters they are
 * written to it directly, or if its elements are not reals by way of a piece in L1.
 */
#include "fused_map.h"
#include "stored.h"

enum { WIDE = VECTOR_BYTES == 64 ? 4 : 2 };

/* The range of the values; NaN remains, as the second operand of vmax and vmin. */
INLINE real lowest(const struct source *s) { return s->relu ? 0 : -(real)__builtin_inf(); }
INLINE real highest(const struct source *s) {
    return s->relu ? (real)s->limit : (real)__builtin_inf();
}

/* `vectors` vectors of columns, the last of which has `lanes`. */
INLINE void map_columns(const int terms, const int vectors, const struct source *s,
                        const struct window *w, ptrdiff_t column, ptrdiff_t lanes, real *dst,
                        ptrdiff_t stride) {
    const vec low = vset(lowest(s)), high = vset(highest(s));
    const ptrdiff_t channels = w->channels, at = w->first * channels + column;
    const stored *x[MOST_TERMS];
    struct map map;
    load_map(terms, vectors, s, column, lanes, &map);
    UNROLL
    for (int k = 0; k < terms; k++) x[k] = (const stored *)s->term[k].x + at;
    for (ptrdiff_t i = 0; i < w->rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) {
            vec centred[MOST_TERMS];
            UNROLL
            for (int k = 0; k < terms; k++) {
                centred[k] = load_stored(x[k] + i * channels + j * LANES, lanes) - map.pivot[k][j];
            }
            const vec value = map_value(terms, &map, j, centred);
            store(dst + i * stride + j * LANES, vmin(high, vmax(low, value)), lanes);
        }
    }
}

/* Whole vectors of columns, row by row. */
INLINE void map_span(const int terms, const ptrdiff_t vectors, const struct source *s,
                     const struct window *w, ptrdiff_t column, real *dst, ptrdiff_t stride) {
    const vec low = vset(lowest(s)), high = vset(highest(s));
    const ptrdiff_t channels = w->channels, at = w->first * channels + column;
    const struct tables tables = tables_of(terms, s, column);
    const stored *x[MOST_TERMS];
    struct map map;
    UNROLL
    for (int k = 0; k < terms; k++) x[k] = (const stored *)s->term[k].x + at;
    for (ptrdiff_t i = 0; i < w->rows; i++) {
        for (ptrdiff_t j = 0; j < vectors * LANES; j += LANES) {
            vec centred[MOST_TERMS];
            read_tables(terms, &tables, j, &map);
            UNROLL
            for (int k = 0; k < terms; k++)
                centred[k] = sload(x[k] + i * channels + j) - map.pivot[k][0];
            const vec value = map_value(terms, &map, 0, centred);
            vstore(dst + i * stride + j, vmin(high, vmax(low, value)));
        }
    }
}

INLINE void map_window(const int terms, const struct source *s, const struct window *w, real *dst,
                       ptrdiff_t stride) {
    const ptrdiff_t end = w->column + w->columns;
    ptrdiff_t c = w->column;
    dst -= c;
    while (w->columns > WIDE * LANES && c + LANES <= end) {
        const ptrdiff_t left = (end - c) / LANES, vectors = left < SPAN ? left : SPAN;
        map_span(terms, vectors, s, w, c, dst + c, stride);
        c += vectors * LANES;
    }
    for (; c + WIDE * LANES <= end; c += WIDE * LANES) {
        map_columns(terms, WIDE, s, w, c, LANES, dst + c, stride);
    }
    for (; c + 2 * LANES <= end; c += 2 * LANES) {
        map_columns(terms, 2, s, w, c, LANES, dst + c, stride);
    }
    if (c + LANES <= end) {
        map_columns(terms, 1, s, w, c, LANES, dst + c, stride);
        c += LANES;
    }
    if (c < end) map_columns(terms, 1, s, w, c, end - c, dst + c, stride);
}

/* copy_row(...) for the rows of a window, which are one if they lie side by side. */
#define COPY_WINDOW(copy_row, src, from, w, dst, to)                                   \
    do {                                                                               \
        if ((w)->columns == (from) && (w)->columns == (to)) {                          \
            copy_row(src, (w)->rows * (w)->columns, dst);                              \
            break;                                                                     \
        }                                                                              \
        for (ptrdiff_t i_ = 0; i_ < (w)->rows; i_++)                                   \
            copy_row((src) + i_ * (from), (w)->columns, (dst) + i_ * (to));            \
    } while (0)

/* Rows of a constant number of vectors, too short for a call of memcpy each. */
INLINE void read_vectors(const int vectors, const stored *src, ptrdiff_t from, ptrdiff_t rows,
                         real *dst, ptrdiff_t to) {
    for (ptrdiff_t i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) {
            vstore(dst + i * to + j * LANES, sload(src + i * from + j * LANES));
        }
    }
}

static void read_window(const stored *src, ptrdiff_t from, const struct window *w, real *dst,
                        ptrdiff_t to) {
    if (w->columns == from && w->columns == to) {
        read_row(src, w->rows * w->columns, dst);
    } else if (w->columns == LANES) {
        read_vectors(1, src, from, w->rows, dst, to);
    } else if (w->columns == 2 * LANES) {
        read_vectors(2, src, from, w->rows, dst, to);
    } else if (w->columns == 4 * LANES) {
        read_vectors(4, src, from, w->rows, dst, to);
    } else {
        COPY_WINDOW(read_row, src, from, w, dst, to);
    }
}

static void write_window(const real *src, ptrdiff_t from, const struct window *w, stored *dst,
                         ptrdiff_t to) {
    COPY_WINDOW(write_row, src, from, w, dst, to);
}

/* A window without a thought for the store. */
static void compute(const struct source *s, const struct window *w, real *dst, ptrdiff_t stride) {
    if (is_unmodified(s)) {
        const stored *x = (const stored *)s->term[0].x + w->first * w->channels + w->column;
        read_window(x, w->channels, w, dst, stride);
    } else if (s->terms == 1) {
        map_window(1, s, w, dst, stride);
    } else {
        map_window(2, s, w, dst, stride);
    }
}

static void compute_folded(const struct source *s, const struct window *w, ptrdiff_t fold,
                           real *dst) {
    struct folded f;
    fold_source(s, w, fold, &f);
    const ptrdiff_t lines = w->rows / fold, done = lines * fold;
    compute(&f.source, &(struct window){0, lines, f.columns, 0, f.columns}, dst, f.columns);
    compute(s, &(struct window){w->first + done, w->rows - done, w->channels, 0, w->channels},
            dst + done * w->channels, w->channels);
}

static void compute_window(const struct source *s, const struct window *w, real *dst,
                           ptrdiff_t stride) {
    const ptrdiff_t fold = is_unmodified(s) ? 1 : fold_of(w, stride);
    if (fold > 1) {
        compute_folded(s, w, fold, dst);
    } else {
        compute(s, w, dst, stride);
    }
}

/* Write the values of a window only to the store. */
static void store_window(const struct source *s, const struct window *w) {
    stored *store = (stored *)s->store + w->first * w->channels;
#if STORED_BF16
    real piece[PIECE] __attribute__((aligned(64)));
    const ptrdiff_t pieces = pieces_of(w);
    for (ptrdiff_t i = 0; i < pieces; i++) {
        const struct window part = piece_of_window(w, i);
        compute_window(s, &part, piece, part.columns);
        write_window(piece, part.columns, &part,
                     store + (part.first - w->first) * w->channels + part.column, w->channels);
    }
#else
    compute_window(s, w, store + w->column, w->channels);
#endif
}

void NAME(source_window)(const struct source *s, const struct window *w, real *dst,
                         ptrdiff_t stride) {
    if (!dst) {
        store_window(s, w);
        return;
    }
    compute_window(s, w, dst, stride);
    if (s->store) {
        stored *store = (stored *)s->store + w->first * w->channels + w->column;
        write_window(dst, stride, w, store, w->channels);
    }
}

void NAME(source_rows)(const struct source *source, ptrdiff_t first, ptrdiff_t rows,
                       ptrdiff_t channels, real *dst) {
    const struct window window = {first, rows, channels, 0, channels};
    NAME(source_window)(source, &window, dst, channels);
}
