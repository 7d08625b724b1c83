/* A row of outputs of a depthwise convolution.
 *
 *   for each tile of 8 (7, 4, 1) neighbouring outputs   sums: registers
 *     for each whole vector of channels                 pixels are read from end to end
 *       for each row of the kernel                      its filters: registers
 *         for each input under the tile                 one load, for all outputs that see it
 *
 * and the same, in tiles of 4, for channels after the last whole vector.
 *
 * 3 taps side by side take 30 + 9 loads for the 72 multiply-adds of 8 outputs, 5 taps 60 + 25 for
 * 200. Other taps (dilated, even, or of a phase of a stride) are taken one at a time, a load for
 * each multiply-add. The last tile of a row overlaps the one before it and computes the same again.
 * A tile at the border reads through pointers, of which those outside the image lead to zeros, so
 * that the inner loop has no conditions.
 *
 * With 18 operations for 8 bytes a core with AVX-512 is bound by memory from L2 on. Expected, and
 * reached: 0.85 to 0.95 of what a copy moves from L3.
 */
#include "conv_depthwise.h"
#include "gemm.h"
#include "lanes.h"

enum { TILE = 8, MOST_TAPS = 5 };

/* How the taps of a row of the kernel are taken: `taps` at a time, side by side, for outputs `step`
 * columns apart; or one at a time, which may lie anywhere. */
struct manner {
    int taps, step;
};

/* Hide the origin of a pointer: gcc would otherwise address every input by a separate offset in
 * memory. */
#define KEEP(pointer) __asm__("" : "+r"(pointer))

INLINE int inputs_of(const struct manner m, const int outputs) {
    return m.taps == 1 ? outputs : (outputs - 1) * m.step + m.taps;
}

/* A vector of channels, of which `lanes` exist, of `outputs` outputs from number `first` on. */
INLINE void gather_tile(const struct manner m, const int outputs, const int edge,
                        const struct depthwise *t, ptrdiff_t first, ptrdiff_t channel,
                        const ptrdiff_t lanes, real *out) {
    vec sum[TILE], start = t->start ? vload(t->start + channel) : vzero();
    const int inputs = inputs_of(m, outputs), step = m.taps == 1 ? 1 : m.step;
    const ptrdiff_t next = m.taps == 1 ? t->pixel : t->tap;
    const real *const *listed = t->edge;
    UNROLL
    for (int o = 0; o < outputs; o++) sum[o] = start;
    for (ptrdiff_t r = 0; r < t->rows; r++) {
        const real *in = t->in[r] + first * t->pixel + channel, *w = t->w[r] + channel;
        for (ptrdiff_t taken = 0; taken < t->taps; taken += m.taps) {
            const real *at = in;
            vec filter[MOST_TAPS];
            UNROLL
            for (int k = 0; k < m.taps; k++, w += t->w_tap) filter[k] = vload(w);
            UNROLL
            for (int i = 0; i < inputs; i++) {
                vec one = load(edge ? listed[i] + channel : at, lanes);
                HOLD(one);
                at += next;
                KEEP(at);
                UNROLL
                for (int k = 0; k < m.taps; k++) {
                    const int o = (i - k) / step;
                    if (i >= k && (i - k) % step == 0 && o < outputs) sum[o] += one * filter[k];
                }
            }
            in += m.taps * t->tap;
            listed += inputs;
        }
    }
    UNROLL
    for (int o = 0; o < outputs; o++)
        store(out + (first + o) * t->out_pixel + channel, sum[o], lanes);
}

/* List what a tile reads, in the order in which it does. */
static void list_tile(const struct manner m, const struct depthwise *t, ptrdiff_t first,
                      ptrdiff_t inputs) {
    const ptrdiff_t gap = m.taps == 1 ? t->step : t->gap, tap = m.taps == 1 ? t->pixel : t->tap;
    const real **edge = t->edge;
    for (ptrdiff_t r = 0; r < t->rows; r++) {
        for (ptrdiff_t k = 0; k < t->taps; k += m.taps) {
            edge = list_inputs(t, t->in[r] + first * t->pixel + k * t->tap,
                               t->column + first * t->step + k * t->gap, gap, tap, inputs, edge);
        }
    }
}

/* All tiles of a row: of whole vectors of channels, or, if there is a `tail`, only of those after
 * them. */
INLINE void gather_tiles(const struct manner m, const int outputs, const int tail,
                         const struct depthwise *t, real *out) {
    const ptrdiff_t whole = t->channels / LANES * LANES, last = t->channels - whole;
    for (ptrdiff_t u = 0; u < t->outputs; u += outputs) {
        const ptrdiff_t first = smaller(u, t->outputs - outputs);
        const int edge = first < t->inside || first + outputs > t->outside;
        if (edge) list_tile(m, t, first, inputs_of(m, outputs));
        if (tail && edge) {
            gather_tile(m, outputs, 1, t, first, whole, last, out);
        } else if (tail) {
            gather_tile(m, outputs, 0, t, first, whole, last, out);
        } else if (edge) {
            for (ptrdiff_t c = 0; c < whole; c += LANES)
                gather_tile(m, outputs, 1, t, first, c, LANES, out);
        } else {
            for (ptrdiff_t c = 0; c < whole; c += LANES)
                gather_tile(m, outputs, 0, t, first, c, LANES, out);
        }
    }
}

INLINE void gather_row(const struct manner m, const struct depthwise *t, real *out) {
    if (t->outputs % 7 == 0) { /* 7, 14, 28, 56, 112: a tile of 8 would do an eighth twice */
        gather_tiles(m, 7, 0, t, out);
    } else if (t->outputs >= TILE) {
        gather_tiles(m, TILE, 0, t, out);
    } else {
        gather_tiles(m, 4, 0, t, out);
    }
    if (t->channels % LANES) gather_tiles(m, 4, 1, t, out);
}

void NAME(depthwise_gather)(const struct depthwise *task, real *out) {
    const ptrdiff_t step = task->gap == 1 ? task->step : 0;
    if (task->outputs < 4) { /* none would use what another has loaded */
        gather_tiles((struct manner){1, 1}, 1, 0, task, out);
        if (task->channels % LANES) gather_tiles((struct manner){1, 1}, 1, 1, task, out);
    } else if (step == 1 && task->taps == 3) {
        gather_row((struct manner){3, 1}, task, out);
    } else if (step == 2 && task->taps == 3) {
        gather_row((struct manner){3, 2}, task, out);
    } else if (step == 1 && task->taps == 5) {
        gather_row((struct manner){5, 1}, task, out);
    } else {
        gather_row((struct manner){1, 1}, task, out);
    }
}
