/* Maximum and mean over windows of images (N, H, W, C) and volumes (N, D, H, W, C).
 *
 * Rows of the result are independent, and the threads share them out. Forward, each output pixel
 * looks at the inputs [first, stop) of its window. Backward, a row of dx is cleared and then, while
 * it is in L1, every window that reaches into it adds its gradient: what overlaps adds up in the
 * same order for every number of threads. The ranges are tables per axis, made once a call, and
 * with them sliding and adaptive windows are the same loops; an image is a volume of depth 1. Bound
 * by memory where C fills vectors (the overlap of windows is served by L1); smaller C uses masked
 * vectors, one pixel each.
 */
#include <stdlib.h>

#include "lanes.h"
#include "parts.h"
#include "pool.h"
#include "stored.h"

/* The inputs of one window along one axis. */
struct window {
    ptrdiff_t first, stop, origin; /* origin: of its first tap, which may lie in the padding */
    real share;                    /* 1 / elements along this axis */
};

/* The windows that contain an input row: neighbours, since in order they never step back. */
struct cover {
    ptrdiff_t first, stop;
};

/* One axis, of which only the rows and depths have covers. */
struct line {
    ptrdiff_t size, output, kernel;
    struct window *windows; /* by output position */
    struct cover *covers;   /* by input */
};

struct volume {
    struct line depths, rows, columns;
    ptrdiff_t channels;
};

/* A window of all axes. */
struct box {
    struct window depths, rows, columns;
};

static ptrdiff_t max_of(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

static struct window window_of(const struct pool_axis *a, ptrdiff_t o, int count_padding) {
    struct window w;
    if (a->kernel == 0) {
        w.first = w.origin = o * a->size / a->output;
        w.stop = parts_of((o + 1) * a->size, a->output);
    } else {
        w.origin = o * a->stride - a->before;
        w.first = min_of(max_of(w.origin, 0), a->size);
        w.stop = max_of(w.first, min_of(w.origin + a->kernel, a->size));
    }
    const ptrdiff_t count = count_padding && a->kernel ? a->kernel : w.stop - w.first;
    w.share = 1 / (real)count;
    return w;
}

static struct cover cover_of(const struct window *windows, ptrdiff_t count, ptrdiff_t i,
                             ptrdiff_t from) {
    struct cover c = {from, from};
    while (c.first < count && windows[c.first].stop <= i) c.first++;
    c.stop = c.first;
    while (c.stop < count && windows[c.stop].first <= i) c.stop++;
    return c;
}

static struct line line_of(const struct pool_axis *a, int count_padding, struct window *windows,
                           struct cover *covers) {
    for (ptrdiff_t o = 0; o < a->output; o++) windows[o] = window_of(a, o, count_padding);
    for (ptrdiff_t i = 0; covers && i < a->size; i++) {
        covers[i] = cover_of(windows, a->output, i, i ? covers[i - 1].first : 0);
    }
    return (struct line){a->size, a->output, a->kernel, windows, covers};
}

static int volume_create(struct volume *volume, const struct pool_shape *s) {
    const struct pool_axis *depths = &s->depths, *rows = &s->rows, *columns = &s->columns;
    const ptrdiff_t windows = depths->output + rows->output + columns->output;
    const size_t covers = (size_t)(depths->size + rows->size) * sizeof(struct cover);
    struct window *first = malloc((size_t)windows * sizeof *first + covers + 1);
    if (!first) return -1;
    struct cover *cover = (struct cover *)(first + windows);
    struct window *row = first + depths->output;
    const int padding = s->count_padding;
    *volume = (struct volume){.depths = line_of(depths, padding, first, cover),
                              .rows = line_of(rows, padding, row, cover + depths->size),
                              .columns = line_of(columns, padding, row + rows->output, NULL),
                              .channels = s->channels};
    return 0;
}

static void volume_free(struct volume *volume) { free(volume->depths.windows); }

/* The place of a row among those of all volumes: the number of its volume, and its depth and height
   there. */
struct place {
    ptrdiff_t sample, depth, height;
};

static struct place place_of(ptrdiff_t row, ptrdiff_t depths, ptrdiff_t heights) {
    return (struct place){row / heights / depths, row / heights % depths, row % heights};
}

/* The first input of a volume. */
static ptrdiff_t start_of(const struct volume *s, ptrdiff_t sample) {
    return sample * s->depths.size * s->rows.size * s->columns.size * s->channels;
}

/* Which tap each maximum was: a byte each, or an int32 where windows have more taps than 256. */
struct taps {
    char *memory;
    int bytes;
};

/* gcc widens by one step at a time: bytes to int32 at once become scalars */
typedef uint8_t bytevec __attribute__((vector_size(LANES)));
typedef uint16_t halfvec __attribute__((vector_size(LANES * sizeof(uint16_t))));
typedef int32_t tapvec __attribute__((vector_size(LANES * sizeof(int32_t))));

INLINE ivec load_taps(struct taps index, ptrdiff_t at, ptrdiff_t lanes) {
    const char *p = index.memory + at * index.bytes;
    if (index.bytes == 1) {
        bytevec bytes = {0};
        memcpy(&bytes, p, (size_t)lanes);
        const halfvec halves = __builtin_convertvector(bytes, halfvec);
        return __builtin_convertvector(__builtin_convertvector(halves, tapvec), ivec);
    }
    tapvec taps = {0};
    memcpy(&taps, p, (size_t)lanes * sizeof(int32_t));
    return __builtin_convertvector(taps, ivec);
}

INLINE void store_taps(struct taps index, ptrdiff_t at, ivec v, ptrdiff_t lanes) {
    char *p = index.memory + at * index.bytes;
    if (index.bytes == 1) {
        const bytevec taps = __builtin_convertvector(v, bytevec);
        memcpy(p, &taps, (size_t)lanes);
    } else {
        const tapvec taps = __builtin_convertvector(v, tapvec);
        memcpy(p, &taps, (size_t)lanes * sizeof(int32_t));
    }
}


/* -- maximum */

/* The number of the first tap of a window that is inside. */
static ptrdiff_t first_tap(const struct volume *s, const struct box *b) {
    const ptrdiff_t plane = (b->depths.first - b->depths.origin) * s->rows.kernel +
                            b->rows.first - b->rows.origin;
    return plane * s->columns.kernel + b->columns.first - b->columns.origin;
}

static int is_empty(const struct window *w) { return w->first >= w->stop; }

INLINE void max_window(const stored *x, const struct volume *s, const struct box *b, stored *out,
                       struct taps index, ptrdiff_t at, ptrdiff_t c, ptrdiff_t lanes) {
    const ptrdiff_t width = s->columns.kernel, taps = b->columns.stop - b->columns.first;
    const int empty = is_empty(&b->depths) || is_empty(&b->rows) || is_empty(&b->columns);
    vec best = vset((real)-__builtin_inf());
    ptrdiff_t plane = first_tap(s, b);
    ivec which = (ivec){0} + (ireal)(empty ? 0 : plane);
    for (ptrdiff_t d = b->depths.first; d < b->depths.stop; d++, plane += s->rows.kernel * width) {
        ireal tap = (ireal)plane;
        for (ptrdiff_t i = b->rows.first; i < b->rows.stop; i++, tap += (ireal)width) {
            const ptrdiff_t row = (d * s->rows.size + i) * s->columns.size;
            const stored *p = x + (row + b->columns.first) * s->channels + c;
            for (ireal t = tap; t < tap + (ireal)taps; t++, p += s->channels) {
                const vec v = load_stored(p, lanes);
                const ivec take = ~(v <= best) & (best == best); /* of NaN, too, the first wins */
                best = vselect(take, v, best);
                which = (take & t) | (~take & which);
            }
        }
    }
    store_stored(out + at + c, best, lanes);
    store_taps(index, at + c, which, lanes);
}

static void max_forward_row(const stored *x, const struct volume *s, ptrdiff_t row, stored *out,
                            struct taps index) {
    const struct place o = place_of(row, s->depths.output, s->rows.output);
    struct box b = {.depths = s->depths.windows[o.depth], .rows = s->rows.windows[o.height]};
    x += start_of(s, o.sample);
    for (ptrdiff_t j = 0; j < s->columns.output; j++) {
        b.columns = s->columns.windows[j];
        const ptrdiff_t at = (row * s->columns.output + j) * s->channels;
        FOR_CHANNELS(s->channels, max_window, x, s, &b, out, index, at);
    }
}

/* Add dy, where `index` is one of n taps from `tap` on, to the pixels at out, out + stride, ... */
INLINE void max_scatter(const stored *dy, struct taps index, ptrdiff_t at, ireal tap, ptrdiff_t n,
                        ptrdiff_t stride, real *out, ptrdiff_t c, ptrdiff_t lanes) {
    const vec d = load_stored(dy + at + c, lanes);
    const ivec taps = load_taps(index, at + c, lanes);
    real *p = out + c;
    for (ptrdiff_t k = 0; k < n; k++, p += stride) {
        store(p, load(p, lanes) + vselect(taps == tap + (ireal)k, d, vzero()), lanes);
    }
}

/* The row of outputs number `height` at a depth of a volume, as a number of its first element. */
static ptrdiff_t output_row(const struct volume *s, ptrdiff_t sample, ptrdiff_t depth,
                            ptrdiff_t height) {
    const ptrdiff_t row = (sample * s->depths.output + depth) * s->rows.output + height;
    return row * s->columns.output * s->channels;
}

/* A row of dx full of zeros: the array's, or if its elements are not reals one that end_row writes
   to it, so that sums of the gradients of overlapping windows are rounded once. NULL if memory is
   short. */
static real *begin_row(const struct volume *s, ptrdiff_t row, stored *out) {
    const ptrdiff_t length = s->columns.size * s->channels;
    const size_t bytes = (size_t)length * sizeof(real);
    real *line = STORED_BF16 ? aligned_alloc(64, bytes) : (void *)(out + row * length);
    return line ? memset(line, 0, bytes) : NULL;
}

static void end_row(const struct volume *s, ptrdiff_t row, stored *out, real *line) {
    const ptrdiff_t length = s->columns.size * s->channels;
    if (!STORED_BF16) return;
    write_row(line, length, out + row * length);
    free(line);
}

static int max_backward_row(const stored *dy, struct taps index, const struct volume *s,
                            ptrdiff_t row, stored *out) {
    const struct place in = place_of(row, s->depths.size, s->rows.size);
    const struct cover depths = s->depths.covers[in.depth], rows = s->rows.covers[in.height];
    real *line = begin_row(s, row, out);
    if (!line) return -1;
    for (ptrdiff_t od = depths.first; od < depths.stop; od++) {
        const ptrdiff_t plane = (in.depth - s->depths.windows[od].origin) * s->rows.kernel;
        for (ptrdiff_t oi = rows.first; oi < rows.stop; oi++) {
            const ptrdiff_t down = plane + in.height - s->rows.windows[oi].origin;
            ptrdiff_t at = output_row(s, in.sample, od, oi);
            for (ptrdiff_t oj = 0; oj < s->columns.output; oj++, at += s->channels) {
                const struct window w = s->columns.windows[oj];
                const ptrdiff_t tap = down * s->columns.kernel + w.first - w.origin;
                FOR_CHANNELS(s->channels, max_scatter, dy, index, at, (ireal)tap,
                             w.stop - w.first, s->channels, line + w.first * s->channels);
            }
        }
    }
    end_row(s, row, out, line);
    return 0;
}

/* -- mean */

INLINE void average_window(const stored *x, const struct volume *s, const struct box *b,
                           stored *out, ptrdiff_t c, ptrdiff_t lanes) {
    vec sum = vzero();
    for (ptrdiff_t d = b->depths.first; d < b->depths.stop; d++) {
        vec plane = vzero(); /* planes and lines apart: the errors of large windows stay small */
        for (ptrdiff_t i = b->rows.first; i < b->rows.stop; i++) {
            const ptrdiff_t row = (d * s->rows.size + i) * s->columns.size;
            const stored *p = x + (row + b->columns.first) * s->channels + c;
            vec line = vzero();
            for (ptrdiff_t j = b->columns.first; j < b->columns.stop; j++, p += s->channels)
                line += load_stored(p, lanes);
            plane += line;
        }
        sum += plane;
    }
    store_stored(out + c, sum * (b->rows.share * b->columns.share * b->depths.share), lanes);
}

static void average_forward_row(const stored *x, const struct volume *s, ptrdiff_t row,
                                stored *out) {
    const struct place o = place_of(row, s->depths.output, s->rows.output);
    struct box b = {.depths = s->depths.windows[o.depth], .rows = s->rows.windows[o.height]};
    x += start_of(s, o.sample);
    for (ptrdiff_t j = 0; j < s->columns.output; j++) {
        b.columns = s->columns.windows[j];
        FOR_CHANNELS(s->channels, average_window, x, s, &b,
                     out + (row * s->columns.output + j) * s->channels);
    }
}

/* Add dy share to n pixels at out, out + stride, ... */
INLINE void average_scatter(const stored *dy, real share, ptrdiff_t n, ptrdiff_t stride, real *out,
                            ptrdiff_t c, ptrdiff_t lanes) {
    const vec d = load_stored(dy + c, lanes) * share;
    real *p = out + c;
    for (ptrdiff_t k = 0; k < n; k++, p += stride) store(p, load(p, lanes) + d, lanes);
}

static int average_backward_row(const stored *dy, const struct volume *s, ptrdiff_t row,
                                stored *out) {
    const struct place in = place_of(row, s->depths.size, s->rows.size);
    const struct cover depths = s->depths.covers[in.depth], rows = s->rows.covers[in.height];
    real *line = begin_row(s, row, out);
    if (!line) return -1;
    for (ptrdiff_t od = depths.first; od < depths.stop; od++) {
        for (ptrdiff_t oi = rows.first; oi < rows.stop; oi++) {
            const stored *from = dy + output_row(s, in.sample, od, oi);
            for (ptrdiff_t oj = 0; oj < s->columns.output; oj++, from += s->channels) {
                const struct window w = s->columns.windows[oj];
                FOR_CHANNELS(s->channels, average_scatter, from,
                             s->rows.windows[oi].share * w.share * s->depths.windows[od].share,
                             w.stop - w.first, s->channels, line + w.first * s->channels);
            }
        }
    }
    end_row(s, row, out, line);
    return 0;
}

/* -- all rows of all volumes */

static void note_failure(int *status, int failed) {
    if (!failed) return;
#pragma omp atomic write
    *status = -1;
}

static ptrdiff_t rows_of(const struct pool_shape *s) {
    return s->batch * s->depths.size * s->rows.size;
}

static ptrdiff_t out_rows_of(const struct pool_shape *s) {
    return s->batch * s->depths.output * s->rows.output;
}

static ptrdiff_t elements(const struct pool_shape *s) {
    return rows_of(s) * s->columns.size * s->channels;
}

static int max_forward(const void *x_, const struct pool_shape *shape, void *out_, void *index_,
                       int index_bytes, int threads) {
    const stored *x = x_;
    stored *out = out_;
    const struct taps index = {index_, index_bytes};
    struct volume s;
    if (volume_create(&s, shape)) return -1;
    FOR_PARTS(row, out_rows_of(shape), elements(shape), threads,
              max_forward_row(x, &s, row, out, index));
    volume_free(&s);
    return 0;
}

static int max_backward(const void *dy_, const void *index_, int index_bytes,
                        const struct pool_shape *shape, void *out_, int threads) {
    const stored *dy = dy_;
    stored *out = out_;
    const struct taps index = {(char *)index_, index_bytes};
    struct volume s;
    if (volume_create(&s, shape)) return -1;
    int status = 0;
    FOR_PARTS(row, rows_of(shape), elements(shape), threads,
              note_failure(&status, max_backward_row(dy, index, &s, row, out)));
    volume_free(&s);
    return status;
}

static int average_forward(const void *x_, const struct pool_shape *shape, void *out_,
                           int threads) {
    const stored *x = x_;
    stored *out = out_;
    struct volume s;
    if (volume_create(&s, shape)) return -1;
    FOR_PARTS(row, out_rows_of(shape), elements(shape), threads,
              average_forward_row(x, &s, row, out));
    volume_free(&s);
    return 0;
}

static int average_backward(const void *dy_, const struct pool_shape *shape, void *out_,
                            int threads) {
    const stored *dy = dy_;
    stored *out = out_;
    struct volume s;
    if (volume_create(&s, shape)) return -1;
    int status = 0;
    FOR_PARTS(row, rows_of(shape), elements(shape), threads,
              note_failure(&status, average_backward_row(dy, &s, row, out)));
    volume_free(&s);
    return status;
}

const struct pool_kernels NAME(pool_kernels) = {
    .max_forward = max_forward,
    .max_backward = max_backward,
    .average_forward = average_forward,
    .average_backward = average_backward,
};
