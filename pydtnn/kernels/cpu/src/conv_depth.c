/* The taps along the depth of a volume, as channels of planes: what two-dimensional kernels need to
 * convolve volumes (see volume.py).
 *
 * unfold: plane s = n outputs + o of the result has at each unit u (a column, and in it a group)
 * the channels of all taps k side by side,
 *
 *   out[s, h, u, k, c] = x[n, o stride + k dilation - padding, h, u, c], zeros outside of x.
 *
 * fold is the transpose: it adds planes to the volume that they were read from.
 *
 * Bound by memory: a row of a plane is written tap by tap, and with all taps is a few KB in L1;
 * each row of x is read once for each tap, from L2. Rows are independent in unfold. In fold the
 * planes that overlap are those of the same image and row, which one thread adds up in order, so
 * that results do not depend on the number of threads.
 */
#include "conv_depth.h"
#include "lanes.h"
#include "parts.h"

INLINE void clear(real *out, ptrdiff_t c, ptrdiff_t lanes) { store(out + c, vzero(), lanes); }
INLINE void copy(const real *x, real *out, ptrdiff_t c, ptrdiff_t lanes) {
    store(out + c, load(x + c, lanes), lanes);
}
INLINE void add(const real *x, real *out, ptrdiff_t c, ptrdiff_t lanes) {
    store(out + c, load(out + c, lanes) + load(x + c, lanes), lanes);
}

/* The depth that tap k of plane o reads; outside of [0, size) in the padding. */
static ptrdiff_t depth_of(const struct depth_shape *s, ptrdiff_t o, ptrdiff_t k) {
    return o * s->stride + k * s->dilation - s->padding;
}

static int is_inside(const struct depth_shape *s, ptrdiff_t d) { return d >= 0 && d < s->size; }

/* Row number `row` of the planes from `first` on. */
static void unfold_row(const struct depth_shape *s, const real *x, ptrdiff_t first, ptrdiff_t row,
                       real *out) {
    const ptrdiff_t plane = first + row / s->rows, line = s->units * s->channels;
    const ptrdiff_t image = plane / s->output, step = s->taps * s->channels;
    out += row * line * s->taps;
    for (ptrdiff_t k = 0; k < s->taps; k++, out += s->channels) {
        const ptrdiff_t d = depth_of(s, plane % s->output, k);
        if (!is_inside(s, d)) {
            for (ptrdiff_t u = 0; u < s->units; u++) {
                FOR_CHANNELS(s->channels, clear, out + u * step);
            }
            continue;
        }
        const real *from = x + ((image * s->size + d) * s->rows + row % s->rows) * line;
        for (ptrdiff_t u = 0; u < s->units; u++) {
            FOR_CHANNELS(s->channels, copy, from + u * s->channels, out + u * step);
        }
    }
}

/* Row number `row` of the images from that of plane `first` on: what the planes of this image among
   [first, stop) add to it. */
static void fold_row(const struct depth_shape *s, const real *planes, ptrdiff_t first,
                     ptrdiff_t stop, ptrdiff_t row, real *out) {
    const ptrdiff_t image = first / s->output + row / s->rows, h = row % s->rows;
    const ptrdiff_t line = s->units * s->channels, step = s->taps * s->channels;
    const ptrdiff_t end = min_of((image + 1) * s->output, stop);
    ptrdiff_t plane = image * s->output;
    for (plane = plane < first ? first : plane; plane < end; plane++) {
        const real *from = planes + ((plane - first) * s->rows + h) * line * s->taps;
        for (ptrdiff_t k = 0; k < s->taps; k++, from += s->channels) {
            const ptrdiff_t d = depth_of(s, plane % s->output, k);
            if (!is_inside(s, d)) continue;
            real *to = out + ((image * s->size + d) * s->rows + h) * line;
            for (ptrdiff_t u = 0; u < s->units; u++) {
                FOR_CHANNELS(s->channels, add, from + u * step, to + u * s->channels);
            }
        }
    }
}

void NAME(unfold)(const struct depth_shape *s, const void *x_, ptrdiff_t first, ptrdiff_t planes,
                  void *out_, int threads) {
    const real *x = x_;
    real *out = out_;
    const ptrdiff_t rows = planes * s->rows;
    FOR_PARTS(row, rows, rows * s->units * s->taps * s->channels, threads,
              unfold_row(s, x, first, row, out));
}

void NAME(fold)(const struct depth_shape *s, const void *planes_, ptrdiff_t first,
                ptrdiff_t planes, void *out_, int threads) {
    const real *from = planes_;
    real *out = out_;
    if (planes == 0) return;
    const ptrdiff_t last = first + planes - 1;
    const ptrdiff_t images = last / s->output - first / s->output + 1;
    FOR_PARTS(row, images * s->rows, planes * s->rows * s->units * s->taps * s->channels, threads,
              fold_row(s, from, first, last + 1, row, out));
}
