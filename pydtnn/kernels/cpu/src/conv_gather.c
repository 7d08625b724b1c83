/* Forward and backward of data: gathers, as products of output pixels with packed filters.
 *
 *   for each block of images or rows (in parallel)    copy with zeros around it, <= 256 KB: L2
 *     for each phase, group and panel of outputs      packed filters, [tap][channel][columns]
 *       for each tile of 14 pixels                    gemm_rows: taps are segments of a row
 *
 * Filters are packed once per call (they change between calls): columns in whole vectors, the taps
 * of a phase in the order in which its segments read them, which flips them in backward of data.
 * Where there are fewer blocks than PIECES, a block is shared out by panels, each share with its
 * own copy.
 *
 * One vector of outputs takes conv_slide.c where a row of the kernel has 2 or 3 taps side by side,
 * and depthwise convolutions take the same walk with conv_depthwise.c: `compute` chooses. Expected:
 * 0.85 to 0.95 of the peak for 32 outputs and up, 0.75 for 16; 1x1 is bound by memory.
 */
#include <stdlib.h>

#include "conv_parts.h"
#include "gemm.h"

enum { PIXELS = 512, BYTES = 256 * 1024, PIECES = 16 };

/* What a group of filters looks like in one direction: weight (tap, i, o) lies at tap * tap_stride
 * + i * inner + o * outer. */
struct filters {
    ptrdiff_t in, out, group, tap_stride, inner, outer;
};

static struct filters view_filters(const struct conv_shape *s, enum gather gather) {
    ptrdiff_t channels = s->channels / s->groups, filters = s->filters / s->groups;
    ptrdiff_t depth = s->kernel[0] * s->kernel[1] * channels;
    if (gather == GATHER_INPUT)
        return (struct filters){channels, filters, filters * depth, channels, 1, depth};
    return (struct filters){filters, channels, filters * depth, channels, depth, 1};
}

/* One pass with its place in the packed filters and its segments. */
struct phase {
    const struct axis *vertical, *horizontal;
    ptrdiff_t segments, length, depth;
    int slides; /* whether conv_slide.c can compute it */
    ptrdiff_t *segment;
    real *packed; /* [group][panel][depth][columns] */
};

struct gathering {
    struct plan plan;
    struct filters filters;
    ptrdiff_t groups, phases, panels, padded,
        pieces; /* padded: outputs of a group in whole vectors */
    int depthwise;
    struct phase *phase;
    real *packed, *start;
    ptrdiff_t *segments;
};

static const real *bias_of(const struct gathering *g, ptrdiff_t group, ptrdiff_t panel) {
    return g->start ? g->start + group * g->padded + panel * ROWS_COLUMNS : NULL;
}

static void free_gathering(struct gathering *g) {
    free(g->phase);
    free(g->segments);
    free(g->packed);
    free(g->start);
    NAME(plan_free)(&g->plan);
}

/* Lay out the phases and allocate what all threads share. */
static int prepare(struct gathering *g, const struct conv_shape *s, enum gather gather, int bias) {
    g->depthwise = is_depthwise(s);
    g->filters = view_filters(s, gather);
    g->groups = g->depthwise ? 1 : s->groups;
    if (g->depthwise)
        g->filters = (struct filters){1, s->channels, 0, 1, 1, s->kernel[0] * s->kernel[1]};
    g->padded = vectors_of(g->filters.out) * LANES;
    g->panels = ceil_div(g->filters.out, ROWS_COLUMNS);
    g->phase = NULL;
    g->segments = NULL;
    g->packed = g->start = NULL;
    if (NAME(plan_make)(&g->plan, s, gather, PIXELS, BYTES,
                        g->depthwise && g->padded != s->channels))
        return -1;
    g->phases = g->plan.passes[0] * g->plan.passes[1];
    g->pieces = smaller(g->groups * g->panels, ceil_div(PIECES, larger(g->plan.blocks, 1)));
    ptrdiff_t taps = s->kernel[0] * s->kernel[1];
    g->phase = malloc((size_t)g->phases * sizeof *g->phase);
    g->segments = malloc((size_t)taps * sizeof *g->segments);
    g->packed = NAME(scratch_new)(taps * g->filters.in * g->groups * g->padded);
    if (bias) g->start = NAME(scratch_new)(g->groups * g->padded);
    if (!g->phase || !g->segments || !g->packed || (bias && !g->start)) return -1;
    ptrdiff_t *segment = g->segments;
    real *packed = g->packed;
    for (ptrdiff_t p = 0; p < g->phases; p++) {
        struct phase *phase = &g->phase[p];
        phase->vertical = &g->plan.axis[0][p / g->plan.passes[1]];
        phase->horizontal = &g->plan.axis[1][p % g->plan.passes[1]];
        phase->segment = segment;
        phase->segments =
            NAME(plan_segments)(&g->plan, phase->vertical, phase->horizontal, s->groups == 1,
                                g->filters.in, segment, &phase->length);
        phase->slides = s->groups == 1 && phase->horizontal->step == 1 &&
                        phase->segments == phase->vertical->taps &&
                        (phase->horizontal->taps == 2 || phase->horizontal->taps == 3);
        phase->depth = phase->vertical->taps * phase->horizontal->taps * g->filters.in;
        phase->packed = packed;
        segment += phase->segments;
        packed += phase->depth * g->groups * g->padded;
    }
    return 0;
}

/* Pack panel number `number`, counted over phases, groups and panels. */
static void pack(const struct gathering *g, const struct conv_shape *s, const real *w,
                 ptrdiff_t number) {
    const struct phase *phase = &g->phase[number / (g->groups * g->panels)];
    ptrdiff_t group = number / g->panels % g->groups, panel = number % g->panels;
    const struct filters *f = &g->filters;
    ptrdiff_t columns = smaller(f->out - panel * ROWS_COLUMNS, ROWS_COLUMNS),
              width = vectors_of(columns) * LANES;
    real *dst = phase->packed + phase->depth * (group * g->padded + panel * ROWS_COLUMNS);
    const real *src = w + group * f->group + panel * ROWS_COLUMNS * f->outer;
    for (ptrdiff_t r = 0; r < phase->vertical->taps; r++) {
        for (ptrdiff_t t = 0; t < phase->horizontal->taps; t++) {
            ptrdiff_t tap = phase->vertical->index[r] * s->kernel[1] + phase->horizontal->index[t];
            NAME(gemm_pack)(f->in, columns, src + tap * f->tap_stride, f->inner, f->outer, dst);
            dst += f->in * width;
        }
    }
}

static void pack_bias(const struct gathering *g, const real *b) {
    for (ptrdiff_t group = 0; group < g->groups; group++) {
        for (ptrdiff_t j = 0; j < g->padded; j++) {
            g->start[group * g->padded + j] =
                j < g->filters.out ? b[group * g->filters.out + j] : 0;
        }
    }
}

/* Compute panels [begin, end), counted over groups, of one phase of a block. */
static void compute(const struct gathering *g, const struct phase *phase, const struct block *block,
                    ptrdiff_t begin, ptrdiff_t end, ptrdiff_t pixels, const ptrdiff_t *in,
                    const ptrdiff_t *out, real *y) {
    for (ptrdiff_t number = begin; number < end; number++) {
        ptrdiff_t group = number / g->panels, panel = number % g->panels,
                  column = panel * ROWS_COLUMNS;
        ptrdiff_t columns = smaller(g->filters.out - column, ROWS_COLUMNS);
        const real *packed = phase->packed + phase->depth * (group * g->padded + column);
        if (g->depthwise) {
            struct depthwise task = {.x = block->base + column,
                                     .w = packed,
                                     .in = in,
                                     .out = out,
                                     .tap = phase->segment,
                                     .taps = phase->segments,
                                     .ldw = vectors_of(columns) * LANES,
                                     .start = bias_of(g, 0, panel),
                                     .y = y + column,
                                     .channels = columns};
            NAME(depthwise_gather)(pixels, &task);
        } else if (phase->slides && columns <= LANES) {
            const struct axis *across = phase->horizontal;
            struct slide task = {.row = phase->segment,
                                 .rows = phase->segments,
                                 .channels = g->filters.in,
                                 .pixel = g->plan.in_channels,
                                 .w = packed,
                                 .start = bias_of(g, group, panel),
                                 .y_pixel = across->out_step * g->plan.out_channels,
                                 .outputs = across->outputs,
                                 .columns = columns};
            for (ptrdiff_t i = 0; i < pixels; i += across->outputs) {
                NAME(slide_gather)(&task, across->taps, block->base + in[i], y + out[i] + column);
            }
        } else {
            struct gemm_rows task = {.a = block->base + group * g->filters.in,
                                     .a_offset = in,
                                     .segment = phase->segment,
                                     .segments = phase->segments,
                                     .length = phase->length,
                                     .b = packed,
                                     .ldb = vectors_of(columns) * LANES,
                                     .c = y + group * g->filters.out + column,
                                     .c_offset = out,
                                     .columns = columns,
                                     .start = bias_of(g, group, panel)};
            NAME(gemm_rows)(pixels, &task);
        }
    }
}

/* Offsets of the last block that a thread computed: blocks of whole images share them. */
struct offsets {
    ptrdiff_t images, row, *pixels, *in, *out;
};

static void update_offsets(const struct gathering *g, const struct block *block,
                           struct offsets *o) {
    if (o->images == block->images && o->row == block->row) return;
    o->images = block->images;
    o->row = block->row;
    for (ptrdiff_t p = 0; p < g->phases; p++) {
        ptrdiff_t at = p * g->plan.pixels;
        o->pixels[p] = NAME(plan_pixels)(&g->plan, block, g->phase[p].vertical,
                                         g->phase[p].horizontal, o->in + at, o->out + at);
    }
}

static void run_item(const struct gathering *g, ptrdiff_t item, const real *x, real *y,
                     real *scratch, struct offsets *offsets) {
    ptrdiff_t panels = g->groups * g->panels, piece = item % g->pieces;
    struct block block = NAME(plan_load)(&g->plan, item / g->pieces, x, scratch);
    update_offsets(g, &block, offsets);
    y += block.image * g->plan.out[0] * g->plan.out[1] * g->plan.out_channels;
    for (ptrdiff_t p = 0; p < g->phases; p++) {
        ptrdiff_t at = p * g->plan.pixels;
        compute(g, &g->phase[p], &block, panels * piece / g->pieces,
                panels * (piece + 1) / g->pieces, offsets->pixels[p], offsets->in + at,
                offsets->out + at, y);
    }
}

int NAME(conv_gather)(const struct conv_shape *s, enum gather gather, const real *x, const real *w,
                      const real *b, real *y, int threads) {
    struct gathering g;
    int status = prepare(&g, s, gather, b != NULL);
    if (status == 0 && b) pack_bias(&g, b);
    if (status == 0) {
        ptrdiff_t packs = g.phases * g.groups * g.panels, items = g.plan.blocks * g.pieces;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            struct offsets offsets = {.images = -1};
            real *scratch = NAME(scratch_new)(g.plan.scratch);
            ptrdiff_t *table = malloc((size_t)(g.phases * (1 + 2 * g.plan.pixels)) * sizeof *table);
            int ready = scratch && table;
            if (!ready) {
#pragma omp atomic write
                status = -1;
            }
            offsets.pixels = table;
            offsets.in = table + g.phases;
            offsets.out = offsets.in + g.phases * g.plan.pixels;
#pragma omp for schedule(static)
            for (ptrdiff_t i = 0; i < packs; i++) pack(&g, s, w, i);
#pragma omp for schedule(dynamic)
            for (ptrdiff_t i = 0; i < items; i++) {
                if (ready) run_item(&g, i, x, y, scratch, &offsets);
            }
            free(scratch);
            free(table);
        }
    }
    free_gathering(&g);
    return status;
}
