/* Depthwise convolutions, one filter per channel: the walk over the rows of a batch.
 *
 *   for each block of images or rows, and share of the channels  (in parallel)
 *     for each go of rows, 32 KB of outputs or more
 *       deferred inputs: the rows that are new                   a ring of rows: L1 or L2
 *       for each row of outputs
 *         for each phase of a stride                             conv_depthwise_gather.c, or
 *                                                                conv_depthwise_backward.c
 *       the sink's work on the go                                from a scratch: L1 or L2
 *
 * There is no reuse between channels, and little between outputs, so every array should be read
 * from memory only once. A plain input is therefore read in place, a deferred one is computed row
 * by row just before it is read, without zeros around it, and both gradients are computed in one
 * pass. Backward of filters is a pass over the elements of x, as backward of data is over those of
 * dx; with a stride both fall into phases (conv_block.c), and no zeros are inserted.
 *
 * The gradient of the filters is summed per part of the batch, parts are added in order, and their
 * number depends only on the shape.
 */
#include <stdlib.h>

#include "conv_depthwise.h"
#include "conv_parts.h"
#include "gemm.h"
#include "stored.h"

enum {
    BLOCK_BYTES = 1 << 20, /* of outputs, at most; but a row at least */
    BLOCKS = 32,           /* how many there should be */
    PIECES = 16,           /* shares and parts, if there are fewer blocks */
    UNIT = 4,              /* vectors of channels that are not shared */
    GO_BYTES = 32768,
    GO_PIXELS = 16
};

struct depthwise_walk {
    struct plan plan;
    const struct conv_shape *shape;
    const struct depthwise_task *task;
    ptrdiff_t taps, ldw, units; /* ldw: channels in whole vectors */
    ptrdiff_t parts, pieces;
    ptrdiff_t rows, go, ring; /* of a go, per phase and in all; of the ring: 0 if read in place */
    real *packed, *start, *zero;
    real *gradients; /* [part][tap][channel] */
    double *sums;    /* [block][what the sink sums][channel] */
};

static void free_walk(struct depthwise_walk *d) {
    free(d->packed);
    free(d->start);
    free(d->zero);
    free(d->gradients);
    free(d->sums);
    NAME(plan_free)(&d->plan);
    free(d);
}

static ptrdiff_t sums_length(const struct depthwise_walk *d) {
    return d->task->out ? sums_of(d->task->out) * d->shape->channels : 0;
}

/* Outputs of a block: an image if it fits, or several if that leaves enough blocks. */
static ptrdiff_t pixels_of(const struct conv_shape *s, enum gather gather) {
    const ptrdiff_t *size = gather == GATHER_INPUT ? s->output : s->size;
    const ptrdiff_t image = size[0] * size[1], wanted = image * s->batch / BLOCKS,
                    fit = BLOCK_BYTES / (ptrdiff_t)sizeof(real) / s->channels;
    return larger(smaller(larger(image, wanted), fit), 1);
}

static int prepare(struct depthwise_walk *d) {
    const struct conv_shape *s = d->shape;
    const struct depthwise_task *task = d->task;
    const ptrdiff_t pixels = pixels_of(s, task->gather);
    if (NAME(plan_make)(&d->plan, s, task->gather, pixels, BLOCK_BYTES, IN_PLACE, 1)) return -1;
    const ptrdiff_t blocks = d->plan.blocks, width = larger(d->plan.out[1], 1),
                    phases = d->plan.axis[0][0].out_step,
                    fit = GO_BYTES / (ptrdiff_t)sizeof(real) / (width * s->channels);
    d->taps = s->kernel[0] * s->kernel[1];
    d->ldw = vectors_of(s->channels) * LANES;
    d->units = ceil_div(d->ldw, UNIT * LANES);
    d->parts = task->dw ? smaller(PIECES, blocks) : blocks;
    d->pieces = smaller(d->units, ceil_div(PIECES, larger(blocks, 1)));
    d->rows = ceil_div(larger(fit, ceil_div(GO_PIXELS, width)), phases);
    d->go = d->rows * phases;
    if (!is_plain(task->in)) d->ring = larger(NAME(plan_height)(&d->plan, d->rows), 1);
    d->packed = NAME(scratch_new)(d->taps * d->ldw);
    d->zero = calloc((size_t)d->ldw, sizeof *d->zero);
    d->sums = calloc((size_t)(blocks * sums_length(d) + 1), sizeof *d->sums);
    if (task->b) d->start = calloc((size_t)d->ldw, sizeof *d->start);
    if (task->dw) d->gradients = NAME(scratch_new)(d->parts * d->taps * d->ldw);
    if (!d->packed || !d->zero || !d->sums || (task->b && !d->start) || (task->dw && !d->gradients))
        return -1;
    if (task->b) memcpy(d->start, task->b, (size_t)s->channels * sizeof *d->start);
    return 0;
}

/* `count` channels from `begin` on; `whole` is their number in whole vectors. */
struct range {
    ptrdiff_t begin, count, whole;
};

/* Of units [first, last). */
static struct range range_of(const struct depthwise_walk *d, ptrdiff_t first, ptrdiff_t last) {
    const ptrdiff_t begin = first * UNIT * LANES, end = last * UNIT * LANES;
    return (struct range){begin, smaller(end, d->shape->channels) - begin,
                          smaller(end, d->ldw) - begin};
}

static struct range piece_of(const struct depthwise_walk *d, ptrdiff_t piece) {
    return range_of(d, d->units * piece / d->pieces, d->units * (piece + 1) / d->pieces);
}

/* Pack the filters of a unit as [tap][channel]. */
static void pack(const struct walk *walk, ptrdiff_t unit) {
    const struct depthwise_walk *d = walk->state;
    const struct range r = range_of(d, unit, unit + 1);
    if (!d->task->w) return;
    NAME(gemm_transpose)
    (r.count, d->taps, (const real *)d->task->w + r.begin * d->taps, d->taps, d->packed + r.begin,
     d->ldw);
    for (ptrdiff_t t = 0; t < d->taps; t++) {
        for (ptrdiff_t c = r.begin + r.count; c < r.begin + r.whole; c++)
            d->packed[t * d->ldw + c] = 0;
    }
}

/* Buffers of a thread: the ring, outputs and x of a group of rows; a row, and its dw. */
struct workspace {
    real *ring, *out, *x;
    real **dw;
    struct depthwise row;
};

static void shut(void *thread) {
    struct workspace *work = thread;
    free(work->ring);
    free(work);
}

static void *open(const struct walk *walk) {
    const struct depthwise_walk *d = walk->state;
    const struct plan *plan = &d->plan;
    const ptrdiff_t rows = d->shape->kernel[0];
    const size_t edges = (size_t)(d->taps * larger(DEPTHWISE_INPUTS, plan->out[1]));
    struct workspace *work = malloc(sizeof *work + ((size_t)(3 * rows) + edges) * sizeof(real *));
    if (!work) return NULL;
    work->dw = (real **)(work + 1);
    work->row = (struct depthwise){.in = (const real **)(work->dw + rows)};
    work->row.w = work->row.in + rows;
    work->row.edge = work->row.w + rows;
    const ptrdiff_t ring = d->ring * plan->row_stride;
    const ptrdiff_t go = d->go * plan->out[1] * plan->out_channels;
    const ptrdiff_t out = d->task->out && !writes_directly(d->task->out) ? go : 0;
    const ptrdiff_t x = d->task->dw && !is_plain(d->task->x) ? go : 0;
    work->ring = NAME(scratch_new)(ring + out + x);
    if (work->ring) {
        work->out = work->ring + ring;
        work->x = work->out + out;
        return work;
    }
    shut(work);
    return NULL;
}

/* The outputs of an axis whose taps all lie in an image of `size`. */
static void find_inside(const struct axis *axis, ptrdiff_t size, struct depthwise *row) {
    const ptrdiff_t reach = axis->taps ? axis->first + axis->offset[axis->taps - 1] : 0;
    const ptrdiff_t inside = axis->first < 0 ? ceil_div(-axis->first, axis->step) : 0;
    const ptrdiff_t outside = reach < size ? (size - 1 - reach) / axis->step + 1 : 0;
    row->inside = smaller(inside, axis->outputs);
    row->outside = larger(row->inside, smaller(outside, axis->outputs));
}

/* Set pointers to the rows of the kernel that output row `number` uses inside the image. `tap` is
 * the first tap of the phase, `left` the column that it reads for output 0. */
static void find_rows(const struct depthwise_walk *d, const struct block *block, ptrdiff_t image,
                      ptrdiff_t number, const struct range *range, ptrdiff_t tap, ptrdiff_t left,
                      struct workspace *work, real *gradients) {
    const struct plan *plan = &d->plan;
    const ptrdiff_t phases = plan->passes[0], padded = number + d->shape->padding[0];
    const struct axis *down = &plan->axis[0][phases > 1 ? padded % phases : 0];
    const ptrdiff_t first = down->first + number / down->out_step * down->step;
    const real *base = d->ring ? work->ring : block->base + image * plan->image_stride;
    struct depthwise *row = &work->row;
    row->rows = 0;
    for (ptrdiff_t r = 0; r < down->taps; r++) {
        const ptrdiff_t in = first + down->offset[r], slot = d->ring ? in % d->ring : in;
        if (in < 0 || in >= plan->in[0]) continue;
        const ptrdiff_t w = down->index[r] * d->shape->kernel[1] + tap;
        row->in[row->rows] =
            base + slot * plan->row_stride + left * plan->in_channels + range->begin;
        row->w[row->rows] = d->packed + w * d->ldw + range->begin;
        if (gradients) work->dw[row->rows] = gradients + w * d->ldw + range->begin;
        row->rows++;
    }
}

/* Row number `number` of outputs, its phases one after the other; x and out point to its first
 * pixel. dw goes to `gradients`, if not NULL. */
static void compute_row(const struct depthwise_walk *d, const struct block *block, ptrdiff_t image,
                        ptrdiff_t number, const struct range *range, struct workspace *work,
                        const real *x, real *out, real *gradients) {
    const struct plan *plan = &d->plan;
    const ptrdiff_t channels = plan->in_channels;
    struct depthwise *row = &work->row;
    for (ptrdiff_t p = 0; p < plan->passes[1]; p++) {
        const struct axis *across = &plan->axis[1][p];
        if (across->outputs == 0) continue;
        row->taps = across->taps;
        row->column = across->first;
        row->step = across->step;
        row->gap = across->taps > 1 ? across->offset[1] : 1;
        row->width = plan->in[1];
        row->pixel = row->step * channels;
        row->tap = row->gap * channels;
        row->w_tap = across->taps > 1 ? (across->index[1] - across->index[0]) * d->ldw : 0;
        row->outputs = across->outputs;
        row->out_pixel = across->out_step * channels;
        row->channels = range->count;
        row->start = d->start ? d->start + range->begin : NULL;
        row->zero = d->zero;
        find_inside(across, plan->in[1], row);
        find_rows(d, block, image, number, range, across->taps ? across->index[0] : 0,
                  across->first, work, gradients);
        const ptrdiff_t at = across->out_first * channels + range->begin;
        if (gradients) {
            NAME(depthwise_backward)(row, x + at, out ? out + at : NULL, work->dw);
        } else {
            NAME(depthwise_gather)(row, out + at);
        }
    }
}

/* Compute rows [from, to) of an image of a deferred input: into the ring if they are `read`, into
 * the store if they are the block's to store. */
static void map_rows(const struct depthwise_walk *d, const struct block *block, ptrdiff_t image,
                     const struct range *range, ptrdiff_t from, ptrdiff_t to, int read,
                     real *ring) {
    const struct plan *plan = &d->plan;
    const ptrdiff_t width = plan->in[1], channels = plan->in_channels;
    struct source source = *d->task->in;
    void *const store = source.store;
    ptrdiff_t begin, end, next;
    NAME(plan_stores)(plan, block, &begin, &end);
    for (ptrdiff_t row = from; row < to; row = next) { /* up to where something changes */
        const int stores = row >= begin && row < end;
        real *const slot = read ? ring + row % d->ring * plan->row_stride + range->begin : NULL;
        next = smaller(to, stores ? end : row < begin ? begin : to);
        if (read) next = smaller(next, row + d->ring - row % d->ring);
        source.store = stores ? store : NULL;
        if (!read && !source.store) continue;
        const struct window window = {((block->image + image) * plan->in[0] + row) * width,
                                      (next - row) * width, channels, range->begin, range->count};
        NAME(source_window)(&source, &window, slot, channels);
    }
}

/* Outputs [u, last) of each phase of an image, in one go. `mapped` is up to where the ring has been
 * filled. */
static void run_go(const struct depthwise_walk *d, const struct block *block, ptrdiff_t image,
                   ptrdiff_t u, ptrdiff_t last, const struct range *range, struct workspace *work,
                   ptrdiff_t *mapped, real *gradients, double *sums) {
    const struct depthwise_task *task = d->task;
    const struct plan *plan = &d->plan;
    const ptrdiff_t channels = plan->out_channels, size = plan->out[1] * channels,
                    step = plan->axis[0][0].out_step, row = u * step,
                    rows = smaller(last * step, plan->out[0]) - row,
                    first = ((block->image + image) * plan->out[0] + row) * plan->out[1];
    const struct window go = {first, rows * plan->out[1], channels, range->begin, range->count};
    if (d->ring) {
        ptrdiff_t low, high;
        NAME(plan_rows)(plan, u, last, &low, &high);
        map_rows(d, block, image, range, *mapped, low, 0, work->ring);
        map_rows(d, block, image, range, larger(*mapped, low), high, 1, work->ring);
        *mapped = larger(*mapped, high);
    }
    const real *x = work->x;
    if (task->dw && is_plain(task->x)) {
        x = (const real *)task->x->term[0].x + first * channels;
    } else if (task->dw) {
        NAME(source_window)(task->x, &go, work->x + range->begin, channels);
    }
    const int direct = task->out && writes_directly(task->out);
    real *out = direct ? (real *)task->out->y + first * channels : task->out ? work->out : NULL;
    for (ptrdiff_t r = 0; r < rows; r++) {
        compute_row(d, block, image, row + r, range, work, x + r * size,
                    out ? out + r * size : NULL, gradients);
    }
    if (out && !direct) NAME(sink_window)(task->out, &go, out + range->begin, channels, sums);
}

static void step(const struct walk *walk, ptrdiff_t part, ptrdiff_t number, ptrdiff_t piece,
                 void *thread) {
    const struct depthwise_walk *d = walk->state;
    const struct plan *plan = &d->plan;
    struct workspace *work = thread;
    const struct range range = piece_of(d, piece);
    real *gradients = d->gradients ? d->gradients + part * d->taps * d->ldw : NULL;
    double *sums = d->sums + number * sums_length(d);
    const struct block block = NAME(plan_load)(plan, number, d->task->in, NULL);
    if (gradients && number == first_block(walk, part)) {
        for (ptrdiff_t t = 0; t < d->taps; t++)
            memset(gradients + t * d->ldw + range.begin, 0, (size_t)range.whole * sizeof(real));
    }
    const ptrdiff_t end = smaller(block.end, ceil_div(plan->out[0], plan->axis[0][0].out_step));
    ptrdiff_t low, high, stores, stored;
    NAME(plan_rows)(plan, block.row, block.end, &low, &high);
    NAME(plan_stores)(plan, &block, &stores, &stored);
    for (ptrdiff_t i = 0; i < block.images; i++) {
        ptrdiff_t mapped = smaller(low, stores);
        for (ptrdiff_t u = block.row; u < end; u += d->rows)
            run_go(d, &block, i, u, smaller(u + d->rows, end), &range, work, &mapped, gradients,
                   sums);
        if (d->ring) map_rows(d, &block, i, &range, mapped, stored, 0, work->ring);
    }
}

/* dw (channel, tap) = [dw +] sum of the parts, which are (tap, channel), in order. */
static void end(const struct walk *walk, ptrdiff_t unit) {
    const struct depthwise_walk *d = walk->state;
    const struct range r = range_of(d, unit, unit + 1);
    real sum[UNIT * LANES], *dw = (real *)d->task->dw + r.begin * d->taps;
    for (ptrdiff_t t = 0; t < d->taps; t++) {
        for (ptrdiff_t c = 0; c < r.count; c++) sum[c] = 0;
        for (ptrdiff_t p = 0; p < d->parts; p++) {
            const real *part = d->gradients + (p * d->taps + t) * d->ldw + r.begin;
            for (ptrdiff_t c = 0; c < r.count; c++) sum[c] += part[c];
        }
        for (ptrdiff_t c = 0; c < r.count; c++) {
            real *to = dw + c * d->taps + t;
            *to = d->task->accumulate ? *to + sum[c] : sum[c];
        }
    }
}

static void close(const struct walk *walk, int status) {
    struct depthwise_walk *d = walk->state;
    const ptrdiff_t length = sums_length(d);
    for (ptrdiff_t j = 0; status == 0 && j < length; j++) {
        double sum = 0;
        for (ptrdiff_t block = 0; block < d->plan.blocks; block++)
            sum += d->sums[block * length + j];
        d->task->sums[j] = sum;
    }
    free_walk(d);
}

int NAME(depthwise_run)(const struct conv_shape *s, const struct depthwise_task *task,
                        int threads) {
    struct depthwise_walk *d = malloc(sizeof *d);
    if (!d) return -1;
    *d = (struct depthwise_walk){.shape = s, .task = task};
    if (prepare(d)) {
        free_walk(d);
        return -1;
    }
    const struct walk walk = {.blocks = d->plan.blocks,
                              .parts = d->parts,
                              .pieces = d->pieces,
                              .packs = d->units,
                              .ends = task->dw ? d->units : 0,
                              .state = d,
                              .open = open,
                              .pack = pack,
                              .step = step,
                              .shut = shut,
                              .end = end,
                              .close = close};
    return NAME(walk_run)(&walk, threads);
}
