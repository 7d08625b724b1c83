/* Maximum and mean over windows of images (N, H, W, C).
 *
 * Both directions gather: each output vector of channels is computed from all that it needs and stored once, so rows of the result are
 * independent and nothing is zeroed or scattered first. Forward, an output pixel looks at the inputs [first, stop) of its
 * window; backward, an input pixel looks at the windows [first, stop) that contain it. Both ranges are tables per axis, made once
 * a call, and with them sliding and adaptive windows are the same loops. Bound by memory where C fills vectors (the
 * overlap of windows is served by L1); smaller C uses masked vectors, one pixel each.
 */
#include <stdlib.h>

#include "lanes.h"
#include "parts.h"
#include "pool.h"

struct range {
    ptrdiff_t first, stop, origin; /* origin: position of the window's first tap, which may lie in the padding */
    real share;                    /* 1 / elements of the window along this axis */
};

/* The tables of one axis: windows by output position, and the windows that contain each input position. */
struct ranges {
    struct range *window, *cover;
};

struct plane {
    ptrdiff_t height, width, out_height, out_width, channels, kernel_width;
    struct ranges rows, columns;
};

static ptrdiff_t max_of(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

static struct range window_of(const struct pool_axis *a, ptrdiff_t o, int count_padding) {
    struct range r;
    if (a->kernel == 0) {
        r.first = r.origin = o * a->size / a->output;
        r.stop = parts_of((o + 1) * a->size, a->output);
    } else {
        r.origin = o * a->stride - a->before;
        r.first = min_of(max_of(r.origin, 0), a->size);
        r.stop = max_of(r.first, min_of(r.origin + a->kernel, a->size));
    }
    const ptrdiff_t count = count_padding && a->kernel ? a->kernel : r.stop - r.first;
    r.share = 1 / (real)count;
    return r;
}

/* Windows in order have non-decreasing first and stop, so those that contain i are neighbours. */
static struct range cover_of(const struct pool_axis *a, const struct range *window, ptrdiff_t i, ptrdiff_t from) {
    struct range r = {.first = from};
    while (r.first < a->output && window[r.first].stop <= i) r.first++;
    r.stop = r.first;
    while (r.stop < a->output && window[r.stop].first <= i) r.stop++;
    return r;
}

static struct ranges fill_ranges(const struct pool_axis *a, int count_padding, struct range *memory) {
    struct ranges r = {memory, memory + a->output};
    for (ptrdiff_t o = 0; o < a->output; o++) r.window[o] = window_of(a, o, count_padding);
    for (ptrdiff_t i = 0; i < a->size; i++) r.cover[i] = cover_of(a, r.window, i, i ? r.cover[i - 1].first : 0);
    return r;
}

static int plane_create(struct plane *plane, const struct pool_shape *s) {
    const size_t rows = (size_t)(s->rows.size + s->rows.output), columns = (size_t)(s->columns.size + s->columns.output);
    struct range *memory = malloc((rows + columns + 1) * sizeof *memory);
    if (!memory) return -1;
    *plane = (struct plane){s->rows.size, s->columns.size, s->rows.output, s->columns.output, s->channels, s->columns.kernel,
                            fill_ranges(&s->rows, s->count_padding, memory),
                            fill_ranges(&s->columns, s->count_padding, memory + rows)};
    return 0;
}

static void plane_free(struct plane *plane) { free(plane->rows.window); }

#if REAL_FLOAT /* taps are as wide as reals, whose masked loads and stores do not look at the bits */
INLINE ivec load_taps(const int32_t *p, ptrdiff_t lanes) { return (ivec)load((const real *)p, lanes); }
INLINE void store_taps(int32_t *p, ivec v, ptrdiff_t lanes) { store((real *)p, (vec)v, lanes); }
#else
typedef int32_t tapvec __attribute__((vector_size(LANES * sizeof(int32_t))));
INLINE ivec load_taps(const int32_t *p, ptrdiff_t lanes) {
    tapvec taps = {0};
    memcpy(&taps, p, (size_t)lanes * sizeof *p);
    return __builtin_convertvector(taps, ivec);
}
INLINE void store_taps(int32_t *p, ivec v, ptrdiff_t lanes) {
    tapvec taps = __builtin_convertvector(v, tapvec);
    memcpy(p, &taps, (size_t)lanes * sizeof *p);
}
#endif

/* do f(..., offset, lanes) for each vector of the channels: whole ones with a constant, so that they need no masks */
#define FOR_CHANNELS(channels, f, ...)                                        \
    do {                                                                      \
        ptrdiff_t c_ = 0;                                                     \
        for (; c_ + LANES <= (channels); c_ += LANES) f(__VA_ARGS__, c_, LANES); \
        if (c_ < (channels)) f(__VA_ARGS__, c_, (channels) - c_);             \
    } while (0)

/* -- maximum */

INLINE void max_window(const real *x, const struct plane *s, struct range h, struct range w, real *out, int32_t *index,
                       ptrdiff_t c, ptrdiff_t lanes) {
    vec best = vset((real)-__builtin_inf());
    ireal tap = (ireal)((h.first - h.origin) * s->kernel_width + w.first - w.origin);
    ivec which = (ivec){0} + (h.first < h.stop && w.first < w.stop ? tap : 0);
    for (ptrdiff_t i = h.first; i < h.stop; i++, tap += (ireal)s->kernel_width) {
        const real *p = x + (i * s->width + w.first) * s->channels + c;
        for (ireal t = tap; t < tap + (ireal)(w.stop - w.first); t++, p += s->channels) {
            const vec v = load(p, lanes);
            const ivec take = (v > best) | ((v != v) & (best == best)); /* the first NaN wins and stays */
            best = vselect(take, v, best);
            which = (take & t) | (~take & which);
        }
    }
    store(out + c, best, lanes);
    store_taps(index + c, which, lanes);
}

static void max_forward_row(const real *x, const struct plane *s, ptrdiff_t row, real *out, int32_t *index) {
    const struct range h = s->rows.window[row % s->out_height];
    const real *image = x + row / s->out_height * s->height * s->width * s->channels;
    for (ptrdiff_t j = 0; j < s->out_width; j++) {
        const ptrdiff_t at = (row * s->out_width + j) * s->channels;
        FOR_CHANNELS(s->channels, max_window, image, s, h, s->columns.window[j], out + at, index + at);
    }
}

INLINE void max_gather(const real *dy, const int32_t *index, const struct plane *s, struct range h, struct range w,
                       ptrdiff_t i, ptrdiff_t j, real *out, ptrdiff_t c, ptrdiff_t lanes) {
    vec sum = vzero();
    for (ptrdiff_t oi = h.first; oi < h.stop; oi++) {
        const ireal tap = (ireal)((i - s->rows.window[oi].origin) * s->kernel_width + j);
        for (ptrdiff_t oj = w.first; oj < w.stop; oj++) {
            const ptrdiff_t at = (oi * s->out_width + oj) * s->channels + c;
            const ivec mine = load_taps(index + at, lanes) == tap - (ireal)s->columns.window[oj].origin;
            sum += vselect(mine, load(dy + at, lanes), vzero());
        }
    }
    store(out + c, sum, lanes);
}

static void max_backward_row(const real *dy, const int32_t *index, const struct plane *s, ptrdiff_t row, real *out) {
    const ptrdiff_t i = row % s->height, image = row / s->height * s->out_height * s->out_width * s->channels;
    for (ptrdiff_t j = 0; j < s->width; j++) {
        FOR_CHANNELS(s->channels, max_gather, dy + image, index + image, s, s->rows.cover[i], s->columns.cover[j], i, j,
                     out + (row * s->width + j) * s->channels);
    }
}

/* -- mean */

INLINE void average_window(const real *x, const struct plane *s, struct range h, struct range w, real *out, ptrdiff_t c,
                           ptrdiff_t lanes) {
    vec sum = vzero();
    for (ptrdiff_t i = h.first; i < h.stop; i++) {
        const real *p = x + (i * s->width + w.first) * s->channels + c;
        vec line = vzero(); /* lines are summed apart: over a whole image the rounding errors stay small */
        for (ptrdiff_t j = w.first; j < w.stop; j++, p += s->channels) line += load(p, lanes);
        sum += line;
    }
    store(out + c, sum * (h.share * w.share), lanes);
}

static void average_forward_row(const real *x, const struct plane *s, ptrdiff_t row, real *out) {
    const struct range h = s->rows.window[row % s->out_height];
    const real *image = x + row / s->out_height * s->height * s->width * s->channels;
    for (ptrdiff_t j = 0; j < s->out_width; j++) {
        FOR_CHANNELS(s->channels, average_window, image, s, h, s->columns.window[j],
                     out + (row * s->out_width + j) * s->channels);
    }
}

INLINE void average_gather(const real *dy, const struct plane *s, struct range h, struct range w, real *out, ptrdiff_t c,
                           ptrdiff_t lanes) {
    vec sum = vzero();
    for (ptrdiff_t oi = h.first; oi < h.stop; oi++) {
        const real share = s->rows.window[oi].share;
        for (ptrdiff_t oj = w.first; oj < w.stop; oj++) {
            const vec v = load(dy + (oi * s->out_width + oj) * s->channels + c, lanes);
            sum += v * (share * s->columns.window[oj].share);
        }
    }
    store(out + c, sum, lanes);
}

static void average_backward_row(const real *dy, const struct plane *s, ptrdiff_t row, real *out) {
    const struct range h = s->rows.cover[row % s->height];
    const real *image = dy + row / s->height * s->out_height * s->out_width * s->channels;
    for (ptrdiff_t j = 0; j < s->width; j++) {
        FOR_CHANNELS(s->channels, average_gather, image, s, h, s->columns.cover[j],
                     out + (row * s->width + j) * s->channels);
    }
}

/* -- all rows of all images */

static ptrdiff_t elements(const struct pool_shape *s) { return s->batch * s->rows.size * s->columns.size * s->channels; }

static int max_forward(const void *x_, const struct pool_shape *shape, void *out_, int32_t *index, int threads) {
    const real *x = x_;
    real *out = out_;
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.out_height, elements(shape), threads, max_forward_row(x, &s, row, out, index));
    plane_free(&s);
    return 0;
}

static int max_backward(const void *dy_, const int32_t *index, const struct pool_shape *shape, void *out_, int threads) {
    const real *dy = dy_;
    real *out = out_;
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.height, elements(shape), threads, max_backward_row(dy, index, &s, row, out));
    plane_free(&s);
    return 0;
}

static int average_forward(const void *x_, const struct pool_shape *shape, void *out_, int threads) {
    const real *x = x_;
    real *out = out_;
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.out_height, elements(shape), threads, average_forward_row(x, &s, row, out));
    plane_free(&s);
    return 0;
}

static int average_backward(const void *dy_, const struct pool_shape *shape, void *out_, int threads) {
    const real *dy = dy_;
    real *out = out_;
    struct plane s;
    if (plane_create(&s, shape)) return -1;
    FOR_PARTS(row, shape->batch * s.height, elements(shape), threads, average_backward_row(dy, &s, row, out));
    plane_free(&s);
    return 0;
}

const struct pool_kernels NAME(pool_kernels) = {
    .max_forward = max_forward,
    .max_backward = max_backward,
    .average_forward = average_forward,
    .average_backward = average_backward,
};
