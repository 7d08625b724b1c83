/* A row of both gradients of a depthwise convolution, or only that of the filters.
 *
 *   for each strip of the row, 4 KB or 8 elements     so that memory is read nearly in order
 *     for each vector of channels
 *       for 3 rows x 3 taps, or 2 x 5, of the kernel  filters and their gradients: registers
 *         for each element of x and dx
 *           for each tap                              one load of dy: dx += dy w, dw += dy x
 *
 * For each tap an element of x and the same element of dx use the same dy, so one pass computes
 * both: 10 loads for 18 multiply-adds, and 3 arrays from memory instead of 4. The gradient of only
 * the filters is bound by loads, 10 for 9. If the kernel has more rows or taps, the elements are
 * processed again and added to dx. Channels after the last whole vector take one row of the kernel
 * at a time: less code, and the same sums.
 *
 * A strip is summed from zero in registers and then added to dw. Expected: 0.7 to 0.8 of the
 * bandwidth of a copy from L3.
 */
#include "conv_depthwise.h"
#include "gemm.h"
#include "lanes.h"

enum { MOST_ROWS = 3, MOST = 10 }; /* rows, and rows times taps, of a portion */
enum { STRIP_BYTES = 4096, STRIP_LEAST = 8 };

/* Rows and taps of the kernel from r0 and k0 on, the vector at `channel`, elements [from, to). */
struct portion {
    ptrdiff_t r0, k0, channel, from, to;
};

/* Compute a portion of `rows` x `taps`. Those after the first add to dx. */
INLINE void backward_taps(const int rows, const int taps, const int both, const struct depthwise *t,
                          const struct portion *s, const ptrdiff_t lanes, const real *x, real *dx,
                          real *const *to) {
    vec filter[MOST], dw[MOST];
    const real *in[MOST_ROWS];
    const ptrdiff_t pixel = t->pixel, out_pixel = t->out_pixel, tap = t->tap;
    const ptrdiff_t inside = smaller(larger(t->inside, s->from), s->to),
                    outside = larger(smaller(t->outside, s->to), inside);
    const int adds = both && s->r0 + s->k0 > 0;
    UNROLL
    for (int r = 0; r < rows; r++) {
        in[r] = t->in[s->r0 + r] + inside * pixel + s->k0 * tap + s->channel;
        UNROLL
        for (int k = 0; k < taps; k++) {
            dw[r * taps + k] = vzero();
            if (both)
                filter[r * taps + k] = vload(t->w[s->r0 + r] + (s->k0 + k) * t->w_tap + s->channel);
        }
    }
    x += s->channel;
    if (both) dx += s->channel;
/* Element u, for which row r and tap k read dy at `address`. */
#define ELEMENT(u, address)                                           \
    do {                                                              \
        const vec one = load(x + (u) * out_pixel, lanes);             \
        vec sum = adds ? load(dx + (u) * out_pixel, lanes) : vzero(); \
        UNROLL                                                        \
        for (int r = 0; r < rows; r++) {                              \
            UNROLL                                                    \
            for (int k = 0; k < taps; k++) {                          \
                vec dy = load(address, lanes);                        \
                if (both) HOLD(dy);                                   \
                if (both) sum += dy * filter[r * taps + k];           \
                dw[r * taps + k] += dy * one;                         \
            }                                                         \
        }                                                             \
        if (both) store(dx + (u) * out_pixel, sum, lanes);            \
    } while (0)
    const ptrdiff_t all = t->rows * t->taps, skipped = smaller(s->from, t->outside) - t->inside;
    const real *const *edge =
        t->edge + (s->from - larger(skipped, 0)) * all + s->r0 * t->taps + s->k0;
    for (ptrdiff_t u = s->from, to = inside;; to = s->to) { /* left of the inside, right of it */
        for (; u < to; u++, edge += all) ELEMENT(u, edge[r * t->taps + k] + s->channel);
        if (to == s->to) break;
        for (; u < outside; u++) {
            ELEMENT(u, in[r] + k * tap);
            UNROLL
            for (int r = 0; r < rows; r++) in[r] += pixel;
        }
    }
#undef ELEMENT
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int k = 0; k < taps; k++) {
            real *p = to[s->r0 + r] + (s->k0 + k) * t->w_tap + s->channel;
            vstore(p, vload(p) + dw[r * taps + k]);
        }
    }
}

/* `taps` of all rows, as many rows at a time as registers allow. */
INLINE void backward_rows(const int taps, const int both, const struct depthwise *t,
                          struct portion *s, const ptrdiff_t lanes, const real *x, real *dx,
                          real *const *to) {
    s->r0 = 0;
    const int most = lanes != LANES ? 1 : taps <= 3 ? 3 : 2;
    for (; most >= 3 && s->r0 + 3 <= t->rows; s->r0 += 3)
        backward_taps(3, most >= 3 ? taps : 1, both, t, s, lanes, x, dx, to);
    for (; most >= 2 && s->r0 + 2 <= t->rows; s->r0 += 2)
        backward_taps(2, taps, both, t, s, lanes, x, dx, to);
    for (; s->r0 < t->rows; s->r0++) backward_taps(1, taps, both, t, s, lanes, x, dx, to);
}

INLINE void backward_vector(const int both, const struct depthwise *t, struct portion s,
                            const ptrdiff_t lanes, const real *x, real *dx, real *const *to) {
    s.k0 = 0;
    for (; s.k0 + 5 <= t->taps; s.k0 += 5) backward_rows(5, both, t, &s, lanes, x, dx, to);
    for (; s.k0 + 3 <= t->taps; s.k0 += 3) backward_rows(3, both, t, &s, lanes, x, dx, to);
    for (; s.k0 + 2 <= t->taps; s.k0 += 2) backward_rows(2, both, t, &s, lanes, x, dx, to);
    if (s.k0 < t->taps) backward_rows(1, both, t, &s, lanes, x, dx, to);
}

INLINE void backward(const int both, const struct depthwise *t, const real *x, real *dx,
                     real *const *to) {
    const ptrdiff_t fit = STRIP_BYTES / (ptrdiff_t)sizeof(real) / t->channels,
                    strip = larger(fit, STRIP_LEAST);
    struct portion s = {0};
    for (; s.from < t->outputs; s.from = s.to) {
        s.to = s.from + 2 * strip > t->outputs ? t->outputs : s.from + strip;
        for (s.channel = 0; s.channel + LANES <= t->channels; s.channel += LANES)
            backward_vector(both, t, s, LANES, x, dx, to);
        if (s.channel < t->channels)
            backward_vector(both, t, s, t->channels - s.channel, x, dx, to);
    }
}

/* List what elements outside [inside, outside) read, row by row and tap by tap. */
static void list_edges(const struct depthwise *t) {
    const real **edge = t->edge;
    for (ptrdiff_t u = 0; u < t->outputs; u++) {
        if (u >= t->inside && u < t->outside) continue;
        for (ptrdiff_t r = 0; r < t->rows; r++) {
            edge = list_inputs(t, t->in[r] + u * t->pixel, t->column + u * t->step, t->gap, t->tap,
                               t->taps, edge);
        }
    }
}

void NAME(depthwise_backward)(const struct depthwise *task, const real *x, real *dx,
                              real *const *dw) {
    if (task->rows == 0 || task->taps == 0) {
        if (dx) NAME(depthwise_gather)(task, dx);
        return;
    }
    list_edges(task);
    if (dx) {
        backward(1, task, x, dx, dw);
    } else {
        backward(0, task, x, NULL, dw);
    }
}
