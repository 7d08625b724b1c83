/* Forward and backward of data: gathers, as products of output pixels with packed filters.
 *
 *   for each block of images or rows (in parallel)    its input stays in L2
 *     for each phase, group and panel of outputs      packed filters, [tap][channel][columns]
 *       for each view, and in it each tile of pixels  gemm_rows: taps are segments of a row
 *     the sink's work on the block's outputs          in L1 or L2, where they are
 *
 * A view (conv_views.c) is the set of pixels that use the same taps inside the image: no product
 * with the padding is computed, and a plain input is read in place. A deferred one is computed into
 * a copy with zeros around it.
 *
 * Filters are packed once per call (they change between calls): columns in whole vectors, the taps
 * of a phase in the order in which its segments read them, which flips them in backward of data.
 * Where there are fewer blocks than PIECES, the sink's work on a block is done in shares of panels;
 * unless there are equally many blocks for each thread, these are computed in parallel, each with its
 * own copy of the input. Sums are kept per block and share, in whatever thread, and added in order.
 * Outputs are first computed in a scratch array if the sink adds their previous contents, if
 * their elements are not real, and if the sink has a gate, which reads memory anyway and then writes
 * it in its order: 3 to 10 % of a 1x1 convolution of 128 filters.
 *
 * Where there are products of pairs of bfloat16 (HAS_DOTS), pairs of neighbouring channels are what
 * is read, in place or from a copy, and filters are packed by pairs.
 *
 * One vector of outputs takes conv_slide.c where a row of the kernel has 2 or 3 taps side by side.
 * Expected, of the peak and counting the products that are left out as done: 1.1 for 64 outputs on
 * maps of 8x8, 0.95 to 1 from 32 outputs up, 0.87 for 16; 1x1 is bound by memory.
 */
#include <stdlib.h>

#include "conv_parts.h"
#include "conv_views.h"
#include "gemm.h"
#include "stored.h"

enum { PIXELS = 512, BYTES = 256 * 1024, PIECES = 16, PACKED_ROWS = 32 };

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

/* One pass with its views and its place in the packed filters. */
struct phase {
    const struct axis *vertical, *horizontal;
    struct views views;
    ptrdiff_t first_view, depth; /* views of the phases before; rows of a panel */
    int slides;                  /* whether conv_slide.c computes it */
    int before, after;           /* whether it reads one column left and right of what is read */
    real *packed;                /* [group][panel][depth][columns] */
};

struct gathering {
    struct plan plan;
    struct filters filters;
    ptrdiff_t in; /* inputs of a group, or pairs of them */
    ptrdiff_t groups, phases, views, panels,
        padded;               /* outputs of a group in whole vectors */
    ptrdiff_t shares, pieces; /* of panels: for the sink; in parallel, of one or all shares */
    struct phase *phase;
    real *packed, *start, *zero;
    const struct conv_shape *shape;
    const struct source *x;
    const real *w;
    const struct sink *sink;
    int aside;            /* whether outputs are computed in a scratch */
    double *sums, *total; /* sums: [block][what the sink sums][channel] */
};

static const real *bias_of(const struct gathering *g, ptrdiff_t group, ptrdiff_t panel) {
    return g->start ? g->start + group * g->padded + panel * ROWS_COLUMNS : NULL;
}

static void free_gathering(struct gathering *g) {
    for (ptrdiff_t p = 0; g->phase && p < g->phases; p++) NAME(views_free)(&g->phase[p].views);
    free(g->phase);
    free(g->packed);
    free(g->start);
    free(g->zero);
    free(g->sums);
    NAME(plan_free)(&g->plan);
    free(g);
}

/* Whether one vector of outputs is computed by conv_slide.c: 2 or 3 taps side by side, of which at
 * most one leaves the image on each side. */
static int slides(const struct gathering *g, struct phase *phase) {
    const struct axis *across = phase->horizontal;
    if (g->filters.out > LANES || across->step != 1 || across->outputs == 0 ||
        across->taps < 2 || across->taps > 3 ||
        across->offset[across->taps - 1] != across->taps - 1)
        return 0;
    ptrdiff_t before = -across->first,
              after = across->first + across->outputs + across->taps - 1 - g->plan.in[1];
    phase->before = !g->plan.copy && before > 0;
    phase->after = !g->plan.copy && after > 0;
    return g->plan.copy || (before <= 1 && after <= 1);
}

/* Lay out the phases and allocate what all threads share. */
static int prepare(struct gathering *g, enum gather gather, int bias, int threads) {
    const struct conv_shape *s = g->shape;
    const struct sink *sink = g->sink;
    g->aside = STORED_BF16 || sink->gate || (sink->add && sink->add == sink->y);
    g->filters = view_filters(s, gather);
    g->groups = s->groups;
    g->padded = vectors_of(g->filters.out) * LANES;
    g->panels = ceil_div(g->filters.out, ROWS_COLUMNS);
    const ptrdiff_t pair = HAS_DOTS && g->filters.in % 2 == 0 ? 2 : 1;
    const int plain = pair == 2 ? is_unmodified(g->x) && !g->x->store : is_plain(g->x);
    enum reading reading = plain ? IN_PLACE : COPIED;
    g->in = g->filters.in / pair;
    const int lends = gather == GATHER_GRADIENT && is_lending(s);
    if (NAME(plan_make)(&g->plan, s, gather, lends ? FILTER_PIXELS : PIXELS,
                        lends ? FILTER_BYTES : BYTES, reading, pair))
        return -1;
    g->phases = g->plan.passes[0] * g->plan.passes[1];
    g->shares = smaller(g->groups * g->panels, ceil_div(PIECES, larger(g->plan.blocks, 1)));
    g->pieces = g->plan.blocks % threads == 0 ? 1 : g->shares;
    ptrdiff_t taps = s->kernel[0] * s->kernel[1];
    g->phase = calloc((size_t)g->phases, sizeof *g->phase);
    g->zero = calloc((size_t)g->in, sizeof *g->zero);
    g->packed = NAME(scratch_new)(taps * g->in * g->groups * g->padded);
    if (bias) g->start = NAME(scratch_new)(g->groups * g->padded);
    g->sums = calloc((size_t)(g->plan.blocks * sums_of(sink) * g->plan.out_channels + 1),
                     sizeof *g->sums);
    if (!g->phase || !g->packed || !g->sums || !g->zero || (bias && !g->start)) return -1;
    real *packed = g->packed;
    g->views = 0;
    for (ptrdiff_t p = 0; p < g->phases; p++) {
        struct phase *phase = &g->phase[p];
        phase->vertical = &g->plan.axis[0][p / g->plan.passes[1]];
        phase->horizontal = &g->plan.axis[1][p % g->plan.passes[1]];
        phase->slides = slides(g, phase);
        if (NAME(views_make)(&phase->views, &g->plan, phase->vertical, phase->horizontal,
                             g->in, phase->slides ? CLIP_ROWS : CLIP_BOTH,
                             phase->slides || s->groups == 1))
            return -1;
        phase->first_view = g->views;
        g->views += phase->views.count;
        phase->depth = phase->vertical->taps * phase->horizontal->taps * g->in;
        phase->packed = packed;
        packed += phase->depth * g->groups * g->padded;
    }
    return 0;
}

/* The filters of a tap, `columns` outputs: by inputs, or by pairs of them. */
static void pack_tap(const struct gathering *g, const real *src, ptrdiff_t columns, real *dst) {
    const struct filters *f = &g->filters;
    if (g->plan.pair == 1) {
        NAME(gemm_pack)(f->in, columns, src, f->inner, f->outer, dst);
        return;
    }
    const ptrdiff_t width = vectors_of(columns) * LANES;
    real some[PACKED_ROWS * ROWS_COLUMNS] __attribute__((aligned(64)));
    for (ptrdiff_t k = 0; k < f->in; k += PACKED_ROWS) {
        const ptrdiff_t rows = smaller(f->in - k, PACKED_ROWS);
        NAME(gemm_pack)(rows, columns, src + k * f->inner, f->inner, f->outer, some);
        for (ptrdiff_t r = 0; r < rows; r += 2, dst += width) {
            for (ptrdiff_t j = 0; j < width; j += LANES) {
                const real *row = some + r * width + j;
                vstore(dst + j, vpair(vload(row), vload(row + width)));
            }
        }
    }
}

/* Pack panel number `number`, counted over phases, groups and panels. */
static void pack(const struct walk *walk, ptrdiff_t number) {
    const struct gathering *g = walk->state;
    const struct phase *phase = &g->phase[number / (g->groups * g->panels)];
    ptrdiff_t group = number / g->panels % g->groups, panel = number % g->panels;
    const struct filters *f = &g->filters;
    ptrdiff_t columns = smaller(f->out - panel * ROWS_COLUMNS, ROWS_COLUMNS),
              width = vectors_of(columns) * LANES;
    real *dst = phase->packed + phase->depth * (group * g->padded + panel * ROWS_COLUMNS);
    const real *src = g->w + group * f->group + panel * ROWS_COLUMNS * f->outer;
    for (ptrdiff_t r = 0; r < phase->vertical->taps; r++) {
        for (ptrdiff_t t = 0; t < phase->horizontal->taps; t++) {
            ptrdiff_t tap =
                phase->vertical->index[r] * g->shape->kernel[1] + phase->horizontal->index[t];
            pack_tap(g, src + tap * f->tap_stride, columns, dst);
            dst += g->in * width;
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

/* Compute one panel of outputs for the pixels of a view. */
static void compute_view(const struct gathering *g, const struct phase *phase,
                         const struct view *view, ptrdiff_t number, ptrdiff_t pixels,
                         const ptrdiff_t *in, const ptrdiff_t *out, const real *x, real *y) {
    ptrdiff_t group = number / g->panels, panel = number % g->panels, column = panel * ROWS_COLUMNS;
    ptrdiff_t columns = smaller(g->filters.out - column, ROWS_COLUMNS);
    const real *packed = phase->packed + phase->depth * (group * g->padded + column);
    const struct axis *across = phase->horizontal;
    const int pairs = g->plan.pair == 2;
    if (phase->slides) {
        void (*const slide)(const struct slide *, ptrdiff_t, const real *, real *) =
            pairs ? NAME(slide_gather_pairs) : NAME(slide_gather);
        struct slide task = {.row = view->segment,
                             .w_row = view->weight,
                             .rows = view->segments,
                             .channels = g->in,
                             .pixel = g->plan.in_channels,
                             .w = packed,
                             .start = bias_of(g, group, panel),
                             .before = phase->before,
                             .after = phase->after,
                             .zero = g->zero,
                             .y_pixel = across->out_step * g->plan.out_channels,
                             .outputs = across->outputs,
                             .columns = columns};
        for (ptrdiff_t i = 0; i < pixels; i += across->outputs) {
            slide(&task, across->taps, x + group * g->in + in[i],
                  y + out[i] + group * g->filters.out);
        }
    } else {
        void (*const multiply)(ptrdiff_t, const struct gemm_rows *) =
            pairs ? NAME(gemm_rows_pairs) : NAME(gemm_rows);
        struct gemm_rows task = {.a = x + group * g->in,
                                 .a_offset = in,
                                 .segment = view->segment,
                                 .b_row = view->weight,
                                 .segments = view->segments,
                                 .length = view->length,
                                 .b = packed,
                                 .ldb = vectors_of(columns) * LANES,
                                 .c = y + group * g->filters.out + column,
                                 .c_offset = out,
                                 .columns = columns,
                                 .start = bias_of(g, group, panel)};
        multiply(pixels, &task);
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
        const struct phase *phase = &g->phase[p];
        ptrdiff_t at = p * g->plan.pixels;
        for (ptrdiff_t v = 0; v < phase->views.count; v++) {
            const struct view *view = &phase->views.view[v];
            ptrdiff_t n = NAME(plan_pixels)(&g->plan, block, phase->vertical, phase->horizontal,
                                            &view->rows, &view->columns, o->in + at, o->out + at);
            o->pixels[phase->first_view + v] = n;
            at += n;
        }
    }
}

/* What a thread works with. */
struct workspace {
    real *input, *output;
    struct offsets offsets;
};

static void shut(void *thread) {
    struct workspace *work = thread;
    free(work->input);
    free(work);
}

static void *open(const struct walk *walk) {
    const struct gathering *g = walk->state;
    ptrdiff_t outputs = g->aside ? g->plan.outputs * g->plan.out_channels : 0;
    ptrdiff_t offsets = g->views + 2 * g->phases * g->plan.pixels;
    struct workspace *work = malloc(sizeof *work + (size_t)offsets * sizeof *work->offsets.in);
    if (!work) return NULL;
    ptrdiff_t *table = (ptrdiff_t *)(work + 1);
    work->offsets = (struct offsets){.images = -1, .pixels = table, .in = table + g->views};
    work->offsets.out = work->offsets.in + g->phases * g->plan.pixels;
    work->input = NAME(scratch_new)(g->plan.scratch + outputs);
    if (work->input) {
        work->output = work->input + g->plan.scratch;
        return work;
    }
    shut(work);
    return NULL;
}

/* The channels of panels [0, panel), counted over groups. */
static ptrdiff_t channels_before(const struct gathering *g, ptrdiff_t panel) {
    return panel / g->panels * g->filters.out + panel % g->panels * ROWS_COLUMNS;
}

static void step(const struct walk *walk, ptrdiff_t part, ptrdiff_t number, ptrdiff_t piece,
                 void *thread) {
    (void)part;
    const struct gathering *g = walk->state;
    const struct plan *plan = &g->plan;
    struct workspace *work = thread;
    ptrdiff_t channels = plan->out_channels, panels = g->groups * g->panels;
    ptrdiff_t first = g->shares * piece / g->pieces, last = g->shares * (piece + 1) / g->pieces;
    ptrdiff_t begin = panels * first / g->shares, end = panels * last / g->shares;
    struct source unstored = *g->x;
    unstored.store = NULL;
    struct block block = NAME(plan_load)(plan, number, piece ? &unstored : g->x, work->input);
    real *y = g->aside ? work->output : (real *)g->sink->y + block.first * channels;
    struct offsets *o = &work->offsets;
    update_offsets(g, &block, o);
    for (ptrdiff_t p = 0; p < g->phases; p++) {
        const struct phase *phase = &g->phase[p];
        const ptrdiff_t *pixels = o->pixels + phase->first_view;
        for (ptrdiff_t n = begin; n < end; n++) {
            ptrdiff_t at = p * plan->pixels;
            for (ptrdiff_t v = 0; v < phase->views.count; v++) {
                compute_view(g, phase, &phase->views.view[v], n, pixels[v], o->in + at, o->out + at,
                             block.base, y);
                at += pixels[v];
            }
        }
    }
    if (is_idle(g->sink) && !g->aside) return;
    for (ptrdiff_t s = first; s < last; s++) {
        const ptrdiff_t column = channels_before(g, panels * s / g->shares),
                        after = channels_before(g, panels * (s + 1) / g->shares);
        const struct window done = {block.first, block.outputs, channels, column, after - column};
        NAME(sink_window)(g->sink, &done, y + column, channels,
                          g->sums + number * sums_of(g->sink) * channels);
    }
}

const struct plan *NAME(gather_copy)(const struct walk *data) {
    const struct gathering *g = data->state;
    return g->plan.copy && g->plan.pair == 1 && is_lending(g->shape) ? &g->plan : NULL;
}

const real *NAME(gather_pixels)(const void *thread) {
    return ((const struct workspace *)thread)->input;
}

/* The blocks' sums, added in order. */
static void add_sums(const struct gathering *g) {
    ptrdiff_t length = sums_of(g->sink) * g->plan.out_channels;
    for (ptrdiff_t j = 0; j < length; j++) g->total[j] = 0;
    for (ptrdiff_t block = 0; block < g->plan.blocks; block++) {
        for (ptrdiff_t j = 0; j < length; j++) g->total[j] += g->sums[block * length + j];
    }
}

static void close(const struct walk *walk, int status) {
    struct gathering *g = walk->state;
    if (status == 0) add_sums(g);
    free_gathering(g);
}

int NAME(gather_walk)(struct walk *walk, const struct conv_shape *s, enum gather gather,
                      const struct source *x, const real *w, const real *b, const struct sink *y,
                      double *sums, int threads) {
    struct gathering *g = malloc(sizeof *g);
    if (!g) return -1;
    *g = (struct gathering){.shape = s, .x = x, .w = w, .sink = y, .total = sums};
    if (prepare(g, gather, b != NULL, threads)) {
        free_gathering(g);
        return -1;
    }
    if (b) pack_bias(g, b);
    *walk = (struct walk){.blocks = g->plan.blocks,
                          .parts = g->plan.blocks,
                          .pieces = g->pieces,
                          .packs = g->phases * g->groups * g->panels,
                          .resident = (ptrdiff_t)sizeof(real) * s->kernel[0] * s->kernel[1] *
                                      g->in * g->groups * g->padded,
                          .state = g,
                          .open = open,
                          .pack = pack,
                          .step = step,
                          .shut = shut,
                          .close = close};
    return 0;
}
