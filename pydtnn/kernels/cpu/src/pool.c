/* Maximum and mean over windows of images (N, H, W, C).
 *
 * Rows of the result are independent, and the threads share them out. Forward, each output pixel
 * looks at the inputs [first, stop) of its window. Backward, a row of dx is cleared and then, while
 * it is in L1, every window that reaches into it adds its gradient: what overlaps adds up in the
 * same order for every number of threads. The ranges are tables per axis, made once a call, and
 * with them sliding and adaptive windows are the same loops. Bound by memory where C fills vectors
 * (the overlap of windows is served by L1); smaller C uses masked vectors, one pixel each.
 */
#include <stdlib.h>

#include "lanes.h"
#include "parts.h"
#include "pool.h"

/* The inputs of one window along one axis. */
struct window {
    ptrdiff_t first, stop, origin; /* origin: of its first tap, which may lie in the padding */
    real share;                    /* 1 / elements along this axis */
};

/* The windows that contain an input row: neighbours, since in order they never step back. */
struct cover {
    ptrdiff_t first, stop;
};

struct plane {
    ptrdiff_t height, width, out_height, out_width, channels, kernel_width;
    struct window *rows, *columns; /* by output position */
    struct cover *covers;          /* by input row */
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

static int plane_create(struct plane *plane, const struct pool_shape *s) {
    const struct pool_axis *rows = &s->rows, *columns = &s->columns;
    const size_t windows = (size_t)(rows->output + columns->output) * sizeof(struct window);
    char *memory = malloc(windows + (size_t)rows->size * sizeof(struct cover) + 1);
    if (!memory) return -1;
    struct window *first = (struct window *)memory;
    *plane = (struct plane){
        .height = rows->size,
        .width = columns->size,
        .out_height = rows->output,
        .out_width = columns->output,
        .channels = s->channels,
        .kernel_width = columns->kernel,
        .rows = first,
        .columns = first + rows->output,
        .covers = (struct cover *)(memory + windows),
    };
    for (ptrdiff_t o = 0; o < rows->output; o++) {
        plane->rows[o] = window_of(rows, o, s->count_padding);
    }
    for (ptrdiff_t o = 0; o < columns->output; o++) {
        plane->columns[o] = window_of(columns, o, s->count_padding);
    }
    for (ptrdiff_t i = 0; i < rows->size; i++) {
        plane->covers[i] =
            cover_of(plane->rows, rows->output, i, i ? plane->covers[i - 1].first : 0);
    }
    return 0;
}

static void plane_free(struct plane *plane) { free(plane->rows); }

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

/* f(..., offset, lanes) for each vector of the channels: whole ones with a constant, without
   masks */
#define FOR_CHANNELS(channels, f, ...)                                           \
    do {                                                                         \
        ptrdiff_t c_ = 0;                                                        \
        for (; c_ + LANES <= (channels); c_ += LANES) f(__VA_ARGS__, c_, LANES); \
        if (c_ < (channels)) f(__VA_ARGS__, c_, (channels) - c_);                \
    } while (0)

/* -- maximum */

INLINE void max_window(const real *x, const struct plane *s, struct window h, struct window w,
                       real *out, struct taps index, ptrdiff_t at, ptrdiff_t c,
                       ptrdiff_t lanes) {
    vec best = vset((real)-__builtin_inf());
    ireal tap = (ireal)((h.first - h.origin) * s->kernel_width + w.first - w.origin);
    ivec which = (ivec){0} + (h.first < h.stop && w.first < w.stop ? tap : 0);
    for (ptrdiff_t i = h.first; i < h.stop; i++, tap += (ireal)s->kernel_width) {
        const real *p = x + (i * s->width + w.first) * s->channels + c;
        for (ireal t = tap; t < tap + (ireal)(w.stop - w.first); t++, p += s->channels) {
            const vec v = load(p, lanes);
            const ivec take = ~(v <= best) & (best == best); /* of NaN, too, the first wins */
            best = vselect(take, v, best);
            which = (take & t) | (~take & which);
        }
    }
    store(out + at + c, best, lanes);
    store_taps(index, at + c, which, lanes);
}

static void max_forward_row(const real *x, struct plane s, ptrdiff_t row, real *out,
                            struct taps index) {
    const struct window h = s.rows[row % s.out_height];
    const real *image = x + row / s.out_height * s.height * s.width * s.channels;
    for (ptrdiff_t j = 0; j < s.out_width; j++) {
        const ptrdiff_t at = (row * s.out_width + j) * s.channels;
        FOR_CHANNELS(s.channels, max_window, image, &s, h, s.columns[j], out, index, at);
    }
}

/* Add dy, where `index` is one of n taps from `tap` on, to the pixels at out, out + stride, ... */
INLINE void max_scatter(const real *dy, struct taps index, ptrdiff_t at, ireal tap, ptrdiff_t n,
                        ptrdiff_t stride, real *out, ptrdiff_t c, ptrdiff_t lanes) {
    const vec d = load(dy + at + c, lanes);
    const ivec taps = load_taps(index, at + c, lanes);
    real *p = out + c;
    for (ptrdiff_t k = 0; k < n; k++, p += stride) {
        store(p, load(p, lanes) + vselect(taps == tap + (ireal)k, d, vzero()), lanes);
    }
}

static void max_backward_row(const real *dy, struct taps index, struct plane s, ptrdiff_t row,
                             real *out) {
    const ptrdiff_t i = row % s.height, image = row / s.height * s.out_height;
    real *line = out + row * s.width * s.channels;
    memset(line, 0, (size_t)(s.width * s.channels) * sizeof *line);
    for (ptrdiff_t oi = s.covers[i].first; oi < s.covers[i].stop; oi++) {
        const ptrdiff_t tap = (i - s.rows[oi].origin) * s.kernel_width;
        for (ptrdiff_t oj = 0; oj < s.out_width; oj++) {
            const struct window w = s.columns[oj];
            const ptrdiff_t at = ((image + oi) * s.out_width + oj) * s.channels;
            FOR_CHANNELS(s.channels, max_scatter, dy, index, at,
                         (ireal)(tap + w.first - w.origin), w.stop - w.first, s.channels,
                         line + w.first * s.channels);
        }
    }
}

/* -- mean */

INLINE void average_window(const real *x, const struct plane *s, struct window h, struct window w,
                           real *out, ptrdiff_t c, ptrdiff_t lanes) {
    vec sum = vzero();
    for (ptrdiff_t i = h.first; i < h.stop; i++) {
        const real *p = x + (i * s->width + w.first) * s->channels + c;
        vec line = vzero(); /* lines apart: the rounding errors of a whole image stay small */
        for (ptrdiff_t j = w.first; j < w.stop; j++, p += s->channels) line += load(p, lanes);
        sum += line;
    }
    store(out + c, sum * (h.share * w.share), lanes);
}

static void average_forward_row(const real *x, struct plane s, ptrdiff_t row, real *out) {
    const struct window h = s.rows[row % s.out_height];
    const real *image = x + row / s.out_height * s.height * s.width * s.channels;
    for (ptrdiff_t j = 0; j < s.out_width; j++) {
        FOR_CHANNELS(s.channels, average_window, image, &s, h, s.columns[j],
                     out + (row * s.out_width + j) * s.channels);
    }
}

/* Add dy share to n pixels at out, out + stride, ... */
INLINE void average_scatter(const real *dy, real share, ptrdiff_t n, ptrdiff_t stride, real *out,
                            ptrdiff_t c, ptrdiff_t lanes) {
    const vec d = load(dy + c, lanes) * share;
    real *p = out + c;
    for (ptrdiff_t k = 0; k < n; k++, p += stride) store(p, load(p, lanes) + d, lanes);
}

static void average_backward_row(const real *dy, struct plane s, ptrdiff_t row, real *out) {
    const ptrdiff_t i = row % s.height, image = row / s.height * s.out_height;
    real *line = out + row * s.width * s.channels;
    memset(line, 0, (size_t)(s.width * s.channels) * sizeof *line);
    for (ptrdiff_t oi = s.covers[i].first; oi < s.covers[i].stop; oi++) {
        for (ptrdiff_t oj = 0; oj < s.out_width; oj++) {
            const struct window w = s.columns[oj];
            FOR_CHANNELS(s.channels, average_scatter,
                         dy + ((image + oi) * s.out_width + oj) * s.channels,
                         s.rows[oi].share * w.share, w.stop - w.first, s.channels,
                         line + w.first * s.channels);
        }
    }
}

/* -- all rows of all images */

static ptrdiff_t elements(const struct pool_shape *s) {
    return s->batch * s->rows.size * s->columns.size * s->channels;
}

static int max_forward(const void *x_, const struct pool_shape *shape, void *out_, void *index_,
                       int index_bytes, int threads) {
    const real *x = x_;
    real *out = out_;
    const struct taps index = {index_, index_bytes};
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.out_height, elements(shape), threads,
              max_forward_row(x, s, row, out, index));
    plane_free(&s);
    return 0;
}

static int max_backward(const void *dy_, const void *index_, int index_bytes,
                        const struct pool_shape *shape, void *out_, int threads) {
    const real *dy = dy_;
    real *out = out_;
    const struct taps index = {(char *)index_, index_bytes};
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.height, elements(shape), threads,
              max_backward_row(dy, index, s, row, out));
    plane_free(&s);
    return 0;
}

static int average_forward(const void *x_, const struct pool_shape *shape, void *out_,
                           int threads) {
    const real *x = x_;
    real *out = out_;
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.out_height, elements(shape), threads,
              average_forward_row(x, s, row, out));
    plane_free(&s);
    return 0;
}

static int average_backward(const void *dy_, const struct pool_shape *shape, void *out_,
                            int threads) {
    const real *dy = dy_;
    real *out = out_;
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.height, elements(shape), threads,
              average_backward_row(dy, s, row, out));
    plane_free(&s);
    return 0;
}

const struct pool_kernels NAME(pool_kernels) = {
    .max_forward = max_forward,
    .max_backward = max_backward,
    .average_forward = average_forward,
    .average_backward = average_backward,
};
