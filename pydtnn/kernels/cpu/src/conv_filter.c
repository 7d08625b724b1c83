/* Backward of filters: dw[o, tap, c] = sum over pixels of dy[pixel, o] x[its window at tap, c].
 *
 *   for each part of the batch and 64 filters (in parallel)    their dw: L2
 *     for each block of the part                               copy with zeros around it: L2
 *       for each row of the kernel, 3 vectors of (tap, channel)
 *         for each tile of 8 filters                           gemm_outer: a segment per row
 *
 * In NHWC a row of the kernel, taps x channels, lies side by side in x, so a vector of dw is a plain
 * load of x at every pixel and nothing is packed: 11 loads for 24 multiply-adds. Expected: 0.8 to
 * 0.9 of the peak where taps x channels fill vectors.
 *
 * Every block is summed from zero in registers and added to its part's dw; the parts are added in
 * order at the end. Their number depends on the shape alone, so do the bytes; and the rounding
 * error of float32 grows with the pixels of a block and the number of blocks, not with the pixels
 * of the batch.
 */
#include <stdlib.h>

#include "conv_parts.h"
#include "gemm.h"

enum { PIXELS = 256, BYTES = 512 * 1024, PIECES = 16, UNIT_FILTERS = 64, REDUCE = 4096 };

struct filtering {
    struct plan plan;
    ptrdiff_t channels, filters, groups; /* channels and filters of one group */
    ptrdiff_t depth,
        size; /* elements of dw: per filter, and of one part, in whole vectors if depthwise */
    ptrdiff_t parts, units, units_per_group;
    ptrdiff_t segments, length, *segment;
    int depthwise;
    real *sums; /* [part][size] */
};

static int prepare(struct filtering *f, const struct conv_shape *s) {
    f->depthwise = is_depthwise(s);
    f->groups = s->groups;
    f->channels = s->channels / s->groups;
    f->filters = s->filters / s->groups;
    f->depth = s->kernel[0] * s->kernel[1] * f->channels;
    f->size = f->depthwise ? f->depth * vectors_of(s->channels) * LANES : f->depth * s->filters;
    f->segment = NULL;
    f->sums = NULL;
    int overread = (f->depthwise ? s->channels : f->channels) % LANES != 0;
    if (NAME(plan_make)(&f->plan, s, GATHER_INPUT, PIXELS, BYTES, overread)) return -1;
    f->segment = malloc((size_t)(s->kernel[0] * s->kernel[1]) * sizeof *f->segment);
    if (!f->segment) return -1;
    f->segments = NAME(plan_segments)(&f->plan, &f->plan.axis[0][0], &f->plan.axis[1][0],
                                      s->groups == 1, f->channels, f->segment, &f->length);
    f->units_per_group = ceil_div(f->filters, UNIT_FILTERS);
    f->units = f->depthwise ? 1 : f->groups * f->units_per_group;
    f->parts = smaller(ceil_div(PIECES, f->units), f->plan.blocks);
    f->sums = NAME(scratch_new)(f->parts * f->size);
    return f->sums ? 0 : -1;
}

static void free_filtering(struct filtering *f) {
    free(f->segment);
    free(f->sums);
    NAME(plan_free)(&f->plan);
}

/* Where the rows of outputs of a block start, in what is read and in dy from the block's first
 * image. */
static ptrdiff_t output_rows(const struct plan *plan, const struct block *block, ptrdiff_t *in,
                             ptrdiff_t *out) {
    const struct axis *vertical = &plan->axis[0][0], *horizontal = &plan->axis[1][0];
    ptrdiff_t n = 0, end = smaller(block->end, vertical->outputs);
    for (ptrdiff_t i = 0; i < block->images; i++) {
        for (ptrdiff_t u = block->row; u < end; u++, n++) {
            in[n] = i * plan->image_stride +
                    (vertical->first + u * vertical->step - block->first_row) * plan->row_stride +
                    (horizontal->first - plan->first_column) * plan->in_channels;
            out[n] = (i * plan->out[0] + u) * plan->out[1] * plan->out_channels;
        }
    }
    return n;
}

/* Add a block's share of a unit, some filters of a group, to dw. */
static void add_dense(const struct filtering *f, const struct block *block, const real *dy,
                      ptrdiff_t rows, const ptrdiff_t *in, const ptrdiff_t *out, ptrdiff_t unit,
                      int accumulate, real *dw) {
    ptrdiff_t group = unit / f->units_per_group, first = unit % f->units_per_group * UNIT_FILTERS;
    ptrdiff_t filter = group * f->filters + first,
              count = smaller(f->filters - first, UNIT_FILTERS);
    for (ptrdiff_t r = 0; r < f->segments; r++) {
        for (ptrdiff_t column = 0; column < f->length; column += OUTER_COLUMNS) {
            struct gemm_outer task = {.a = dy + filter,
                                      .a_offset = out,
                                      .lda = f->plan.out_channels,
                                      .b = block->base + f->segment[r] + group * f->channels +
                                           column,
                                      .b_offset = in,
                                      .ldb = f->plan.axis[1][0].step * f->plan.in_channels,
                                      .segments = rows,
                                      .length = f->plan.out[1],
                                      .c = dw + filter * f->depth + r * f->length + column,
                                      .ldc = f->depth,
                                      .columns = smaller(f->length - column, OUTER_COLUMNS),
                                      .accumulate = accumulate};
            NAME(gemm_outer)(count, &task);
        }
    }
}

static void add_depthwise(const struct filtering *f, const struct block *block, const real *dy,
                          const ptrdiff_t *in, const ptrdiff_t *out, ptrdiff_t pixels, real *dw) {
    struct depthwise task = {.x = block->base,
                             .in = in,
                             .out = out,
                             .tap = f->segment,
                             .taps = f->segments,
                             .ldw = vectors_of(f->plan.in_channels) * LANES,
                             .channels = f->plan.in_channels};
    NAME(depthwise_filter)(pixels, &task, dy, dw);
}

/* Sum one part of the batch for one unit, whose dw stays in L2. */
static void run_item(const struct filtering *f, ptrdiff_t item, const real *x, const real *dy,
                     real *scratch, ptrdiff_t *table) {
    const struct plan *plan = &f->plan;
    ptrdiff_t part = item / f->units, unit = item % f->units, *in = table,
              *out = table + plan->pixels;
    ptrdiff_t begin = plan->blocks * part / f->parts, end = plan->blocks * (part + 1) / f->parts;
    real *dw = f->sums + part * f->size;
    if (f->depthwise) memset(dw, 0, (size_t)f->size * sizeof(real));
    for (ptrdiff_t number = begin; number < end; number++) {
        struct block block = NAME(plan_load)(plan, number, x, scratch);
        const real *g = dy + block.image * plan->out[0] * plan->out[1] * plan->out_channels;
        if (f->depthwise) {
            ptrdiff_t pixels =
                NAME(plan_pixels)(plan, &block, &plan->axis[0][0], &plan->axis[1][0], in, out);
            add_depthwise(f, &block, g, in, out, pixels, dw);
        } else {
            ptrdiff_t rows = output_rows(plan, &block, in, out);
            add_dense(f, &block, g, rows, in, out, unit, number > begin, dw);
        }
    }
}

/* dw[begin, end) = [dw +] sum of the parts, in order. */
static void reduce_dense(const struct filtering *f, ptrdiff_t begin, ptrdiff_t end, real *dw,
                         int accumulate) {
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        ptrdiff_t count = smaller(end - i, LANES);
        vec sum = vzero();
        for (ptrdiff_t p = 0; p < f->parts; p++)
            sum += vload_part(f->sums + p * f->size + i, count);
        vstore_part(dw + i, accumulate ? vload_part(dw + i, count) + sum : sum, count);
    }
}

/* The same for a depthwise dw (channel, tap), of which parts are (tap, channel). */
static void reduce_depthwise(const struct filtering *f, real *dw, int accumulate) {
    for (ptrdiff_t i = 0; i < f->plan.in_channels * f->depth; i++) {
        ptrdiff_t at = i % f->depth * (f->size / f->depth) + i / f->depth;
        real sum = 0;
        for (ptrdiff_t p = 0; p < f->parts; p++) sum += f->sums[p * f->size + at];
        dw[i] = accumulate ? dw[i] + sum : sum;
    }
}

int NAME(conv_filter)(const struct conv_shape *s, const real *x, const real *dy, real *dw,
                      int accumulate, int threads) {
    struct filtering f;
    int status = prepare(&f, s);
    if (status == 0) {
        ptrdiff_t items = f.parts * f.units, elements = f.depthwise ? 0 : f.depth * s->filters;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            real *scratch = NAME(scratch_new)(f.plan.scratch);
            ptrdiff_t *table = malloc((size_t)(1 + 2 * f.plan.pixels) * sizeof *table);
            int ready = scratch && table;
            if (!ready) {
#pragma omp atomic write
                status = -1;
            }
#pragma omp for schedule(dynamic)
            for (ptrdiff_t i = 0; i < items; i++) {
                if (ready) run_item(&f, i, x, dy, scratch, table);
            }
#pragma omp for schedule(static)
            for (ptrdiff_t i = 0; i < elements; i += REDUCE) {
                reduce_dense(&f, i, smaller(i + REDUCE, elements), dw, accumulate);
            }
            free(scratch);
            free(table);
        }
    }
    if (status == 0 && f.depthwise) reduce_depthwise(&f, dw, accumulate);
    free_filtering(&f);
    return status;
}
