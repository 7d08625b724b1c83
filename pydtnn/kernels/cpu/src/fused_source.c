/* Rows of deferred arrays: v = shift + sum of factor (x - pivot), cut off at 0 or not.
 *
 *   for each WIDE vectors of columns    coefficients: registers
 *     for each row                      a load, a subtraction and a multiply-add per term, a maximum
 *
 * WIDE vectors are whole rows for 64 channels and fewer (AVX-512), so that memory is read in order.
 * Three operations a vector and term hide behind the loads and stores: from memory it runs as fast
 * as a copy, from L1 at 1 to 1.5 cycles a vector. Whether there are pivots, factors and a shift is
 * not compiled in (see load_map); the number of terms is. Rows of at most half a vector are folded.
 */
#include "fused_map.h"

enum { WIDE = VECTOR_BYTES == 64 ? 4 : 2 };

/* `vectors` vectors of columns, the last of which has `lanes`. */
INLINE void map_columns(const int terms, const int vectors, const struct source *s,
                        const struct window *w, ptrdiff_t column, ptrdiff_t lanes, real *dst,
                        ptrdiff_t stride) {
    const vec low = vset(s->relu ? 0 : -(real)__builtin_inf());
    const ptrdiff_t channels = w->channels, at = w->first * channels + column;
    const real *x[MOST_TERMS];
    struct map map;
    load_map(terms, vectors, s, column, lanes, &map);
    UNROLL
    for (int k = 0; k < terms; k++) x[k] = (const real *)s->term[k].x + at;
    for (ptrdiff_t i = 0; i < w->rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) {
            vec centred[MOST_TERMS];
            UNROLL
            for (int k = 0; k < terms; k++) {
                centred[k] = load(x[k] + i * channels + j * LANES, lanes) - map.pivot[k][j];
            }
            store(dst + i * stride + j * LANES, vmax(low, map_value(terms, &map, j, centred)),
                  lanes);
        }
    }
}

INLINE void map_window(const int terms, const struct source *s, const struct window *w, real *dst,
                       ptrdiff_t stride) {
    const ptrdiff_t end = w->column + w->columns;
    ptrdiff_t c = w->column;
    dst -= c;
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

static void copy_window(const real *src, ptrdiff_t from, const struct window *w, real *dst,
                        ptrdiff_t to) {
    if (w->columns == from && w->columns == to) {
        memcpy(dst, src, (size_t)(w->rows * w->columns) * sizeof *dst);
        return;
    }
    for (ptrdiff_t i = 0; i < w->rows; i++) {
        memcpy(dst + i * to, src + i * from, (size_t)w->columns * sizeof *dst);
    }
}

/* A window without a thought for the store. */
static void compute(const struct source *s, const struct window *w, real *dst, ptrdiff_t stride) {
    if (is_unmodified(s)) {
        const real *x = (const real *)s->term[0].x + w->first * w->channels + w->column;
        copy_window(x, w->channels, w, dst, stride);
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

void NAME(source_window)(const struct source *s, const struct window *w, real *dst,
                         ptrdiff_t stride) {
    real *store = s->store ? (real *)s->store + w->first * w->channels + w->column : NULL;
    real *to = dst ? dst : store;
    if (!dst) stride = w->channels;
    const ptrdiff_t fold = is_unmodified(s) ? 1 : fold_of(w, stride);
    if (fold > 1) {
        compute_folded(s, w, fold, to);
    } else {
        compute(s, w, to, stride);
    }
    if (dst && store) copy_window(dst, stride, w, store, w->channels);
}

void NAME(source_rows)(const struct source *source, ptrdiff_t first, ptrdiff_t rows,
                       ptrdiff_t channels, real *dst) {
    const struct window window = {first, rows, channels, 0, channels};
    NAME(source_window)(source, &window, dst, channels);
}
