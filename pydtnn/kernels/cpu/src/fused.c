/* Deferred arrays and gradients through a ReLU as passes of their own: parts of rows in parallel,
 * each by fused_source.c or fused_sink.c.
 *
 * Both are bound by memory: expected is the bandwidth of a copy, counting every array once. Sums
 * are taken per part and added in order, so that their bytes do not depend on the threads. */
#include <stdlib.h>

#include "fused_rows.h"
#include "parts.h"

enum { MOST_PARTS = 64 };

static ptrdiff_t rows_per_part(ptrdiff_t rows, ptrdiff_t channels) {
    const ptrdiff_t least = parts_of(rows, MOST_PARTS), fit = parts_of(PART, channels + 1);
    return least > fit ? least : fit;
}

static int evaluate(const struct source *source, ptrdiff_t rows, ptrdiff_t channels, void *out,
                    int threads) {
    struct source values = *source;
    const ptrdiff_t size = parts_of(PART, channels + 1);
    values.store = out;
    FOR_PARTS(p, parts_of(rows, size), rows * channels, threads,
              NAME(source_rows)(&values, p * size, part_length(rows, size, p), channels, NULL));
    return 0;
}

static void gate_window(const void *dy, const struct sink *sink, const struct window *w,
                        double *sums) {
#if STORED_BF16
    real piece[PIECE] __attribute__((aligned(64)));
    const struct source source = plain_source(dy);
    const ptrdiff_t pieces = pieces_of(w);
    for (ptrdiff_t i = 0; i < pieces; i++) {
        const struct window part = piece_of_window(w, i);
        NAME(source_window)(&source, &part, piece, part.columns);
        NAME(sink_window)(sink, &part, piece, part.columns, sums);
    }
#else
    NAME(sink_window)
    (sink, w, (const real *)dy + w->first * w->channels, w->channels, sums);
#endif
}

static int gate(const void *dy, const struct sink *sink, ptrdiff_t rows, ptrdiff_t channels,
                double *sums, int threads) {
    const ptrdiff_t size = rows_per_part(rows, channels), parts = parts_of(rows, size);
    const ptrdiff_t length = sums_of(sink) * channels;
    double *part = calloc((size_t)(parts * length) + 1, sizeof *part);
    if (!part) return -1;
    FOR_PARTS(
        p, parts, rows * channels, threads,
        const struct window window = {p * size, part_length(rows, size, p), channels, 0, channels};
        gate_window(dy, sink, &window, part + p * length));
    for (ptrdiff_t j = 0; j < length; j++) {
        double sum = 0;
        for (ptrdiff_t p = 0; p < parts; p++) sum += part[p * length + j];
        sums[j] = sum;
    }
    free(part);
    return 0;
}

const struct fused_kernels NAME(fused_kernels) = {.evaluate = evaluate, .gate = gate};
