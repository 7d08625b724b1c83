/* The rows of deferred arrays and of sinks, for kernels that read and write blocks; see
 * fused_source.c and fused_sink.c. Included after simd.h. */
#ifndef PYDTNN_FUSED_ROWS_H
#define PYDTNN_FUSED_ROWS_H

#include "fused.h"
#include "simd.h"

/* Rows [first, first + rows) and columns [column, column + columns) of arrays of `channels`. */
struct window {
    ptrdiff_t first, rows, channels, column, columns;
};

/* Whether the values of a source are those of an array. */
INLINE int is_unmodified(const struct source *s) {
    return s->terms == 1 && !s->term[0].pivot && !s->term[0].factor && !s->shift && !s->relu;
}

/* Whether a source is an unmodified array, which may be read in place if its elements are reals. */
INLINE int is_plain(const struct source *s) {
    return !STORED_BF16 && is_unmodified(s) && !s->store;
}

/* An unmodified array. */
INLINE struct source plain_source(const void *x) {
    return (struct source){.term = {{.x = x}}, .terms = 1};
}

/* dst[r, c] = value of the source at row `first` + r, for `rows` rows of `channels`, which also go
 * to source->store (rounded). dst is contiguous; it may be NULL if only the store matters. */
void NAME(source_rows)(const struct source *source, ptrdiff_t first, ptrdiff_t rows,
                       ptrdiff_t channels, real *dst);

/* The same for a window; rows of dst are `stride` apart. */
void NAME(source_window)(const struct source *source, const struct window *window, real *dst,
                         ptrdiff_t stride);

/* Apply the sink to a window whose y lies in `from`, where rows are `stride` apart, write it to
 * sink->y, and add to `sums` (as many rows of `channels` doubles as enum sink_sums lists; NULL for
 * SUMS_NONE), which are those of the values that are written. If sink->add is given, y + add is
 * computed here, so add must not have been overwritten; it may be sink->y. Moments have no gate. */
void NAME(sink_window)(const struct sink *sink, const struct window *window, const real *from,
                       ptrdiff_t stride, double *sums);

/* A window cut into pieces of at most PIECE elements, for arrays that are computed in L1. */
enum { PIECE = 2048 };
INLINE ptrdiff_t pieces_of(const struct window *w) {
    const ptrdiff_t columns = w->columns < PIECE ? w->columns : PIECE;
    if (columns == 0) return 0;
    const ptrdiff_t rows = PIECE / columns, across = (w->columns + columns - 1) / columns;
    return (w->rows + rows - 1) / rows * across;
}
INLINE struct window piece_of_window(const struct window *w, ptrdiff_t number) {
    const ptrdiff_t columns = w->columns < PIECE ? w->columns : PIECE, rows = PIECE / columns;
    const ptrdiff_t across = (w->columns + columns - 1) / columns;
    const ptrdiff_t i = number / across * rows, j = number % across * columns;
    return (struct window){w->first + i, w->rows - i < rows ? w->rows - i : rows, w->channels,
                           w->column + j, w->columns - j < columns ? w->columns - j : columns};
}

/* Whether a sink has nothing to do. */
INLINE int is_idle(const struct sink *s) {
    return !s->add && !s->gate && !s->relu && s->sums == SUMS_NONE;
}

/* Whether kernels may write its result to its y in place. */
INLINE int writes_directly(const struct sink *s) { return !STORED_BF16 && is_idle(s); }

/* Rows of `channels` doubles that a sink sums. */
INLINE ptrdiff_t sums_of(const struct sink *s) {
    return s->sums == SUMS_NONE ? 0 : s->sums == SUMS_MOMENTS ? 2 : 1 + s->gate->terms;
}

#endif
