/* Gradient of filters by Winograd: dw = G^T (sum over tiles of (A g A^T) (B^T d B)) G, with the
 * product element by element.
 *
 *   for each part of the batch, about 64 filters and 64 channels (in parallel)
 *     for each block: an image or so                        x and dy packed with zeros around, L2
 *       for each group of 16 to 32 tiles
 *         transform the tiles of x and dy                   V [36][tiles][C], Z [36][tiles][O]: L2
 *         36 small products, dU += Z^T V                    dU [36][O][C], L2
 *   dw = G^T (sum of the parts) G
 *
 * dU is 36/9 of the weights, so large filters are divided, which provides work for all threads:
 * then there are no parts, each item transforms its own dU back, and dU is never stored. Tiles are
 * transformed again for every range, which costs an eighth each. Every group is summed from zero in
 * registers, every part from zero in dU, and the parts are added in order: the bytes depend only on
 * the shape.
 *
 * dy is often deferred, a map of two arrays. If the gradient of the data runs together with this
 * one and has the same blocks, tiles of dy are read from its canvas and not computed again.
 */
#include <assert.h>
#include <stdlib.h>

#include "conv_winograd_phases.h"
#include "conv_winograd_stream.h"

enum { PIECES = 8, BLOCK_BYTES = 65536, GROUP_CHANNELS = 2048 };
#define SUMS_BYTES ((ptrdiff_t)5 << 19) /* of all parts */

struct filtering {
    struct tiling tiling;
    struct canvas x, dy;
    struct phases phases;                         /* of x */
    ptrdiff_t kernel[2], step;                    /* taps of all phases; step: between neighbours */
    struct tile_group in, out;                    /* count: tiles of a full group */
    ptrdiff_t channels, filters, inputs, outputs; /* inputs, outputs: of a range */
    ptrdiff_t tile_pair; /* tiles in the place of a real: 2 if factors are pairs, otherwise 1 */
    ptrdiff_t matrices, parts, across, pairs;     /* across: ranges of inputs; pairs: of ranges */
    ptrdiff_t stride, size;                       /* of matrices, and elements, of du of a pair */
    real *du; /* [part][pair], unless there is one part, which each item finishes */
    struct source x_source, dy_source;
    real *dw;
    int accumulate;
    ptrdiff_t lent; /* where dy begins in the canvas of another walk; -1: not there */
};

struct scratch {
    real *x, *dy, *v, *z, *du;
    const real *read; /* dy, or another walk's canvas */
};

static int prepare(struct filtering *f, const struct conv_shape *s, struct tile tile) {
    const ptrdiff_t origin[2] = {0, 0}, bytes = sizeof(real);
    f->phases = phases_of(s, GATHER_INPUT, tile);
    f->kernel[0] = s->kernel[0];
    f->kernel[1] = s->kernel[1];
    f->step = s->stride[0];
    f->channels = s->channels;
    f->filters = s->filters;
    f->matrices = matrices_of(tile);
    const int line = is_line(tile);
    f->inputs = piece_of(s->channels, ceil_div(s->channels * f->phases.count,
                                               line ? LINE_INPUTS : BLOCK_CHANNELS));
    f->outputs = piece_of(s->filters, ceil_div(s->filters, line ? LINE_OUTPUTS : BLOCK_CHANNELS));
    f->across = ceil_div(s->channels, f->inputs);
    f->pairs = f->across * ceil_div(s->filters, f->outputs);
    f->in.width = vectors_of(f->phases.count * smaller(f->inputs, f->channels)) * LANES;
    f->out.width = f->outputs;
    f->stride = matrix_stride(f->in.width * f->outputs);
    /* winograd_filter_sum reads whole vectors of the channels of each phase */
    const ptrdiff_t inputs = smaller(f->inputs, f->channels);
    const ptrdiff_t last = (f->matrices - 1) * f->stride + (f->outputs - 1) * f->in.width;
    const ptrdiff_t reach = (f->phases.count - 1) * inputs + vectors_of(inputs) * LANES;
    f->size = larger(f->matrices * f->stride, last + reach);
    f->tile_pair = has_pairs(tile) ? 2 : 1;
    f->in.factors = f->out.factors = has_pairs(tile) ? PAIRED_TILES : SINGLE;
    const ptrdiff_t fit = GROUP_CHANNELS / (f->in.width + f->outputs) / 16 * 16;
    const ptrdiff_t group = line ? LINE_GROUP : f->tile_pair * smaller(32, larger(16, fit));
    const ptrdiff_t pixel = bytes * larger(f->in.width, f->outputs);
    f->tiling = NAME(tiling_make)(
        tile, 1, f->tile_pair == 1, s->batch, s->output,
        larger(line ? LINE_TILES : group, BLOCK_BYTES / (tile.rows * tile.columns * pixel)));
    f->parts =
        smaller(smaller(PIECES, SUMS_BYTES / (f->size * bytes)) / f->pairs, f->tiling.blocks);
    f->parts = larger(f->parts, 1);
    f->x = NAME(canvas_make)(&f->tiling, (int)f->step, s->size, s->channels, f->inputs,
                             f->phases.first, 1);
    f->dy = NAME(canvas_make)(&f->tiling, 1, s->output, s->filters, f->outputs, origin, 0);
    f->in.count = smaller(group, larger(1, f->tiling.images * f->tiling.rows * f->tiling.tiles[1]));
    f->in.stride = matrix_stride(ceil_div(f->in.count, f->tile_pair) * f->in.width +
                                 (f->phases.count > 1 ? LANES : 0));
    f->out.stride = matrix_stride(ceil_div(f->in.count, f->tile_pair) * f->outputs);
    if (f->parts == 1 && f->tiling.blocks > 0) return 0;
    f->du = NAME(scratch_new)(f->parts * f->pairs * f->size);
    if (!f->du) return -1;
    if (f->tiling.blocks == 0) memset(f->du, 0, (size_t)(f->pairs * f->size) * sizeof(real));
    return 0;
}

static void shut(void *thread) {
    struct scratch *scratch = thread;
    free(scratch->x);
    free(scratch->dy);
    free(scratch->v);
    free(scratch->z);
    free(scratch->du);
    free(scratch);
}

static void *open(const struct walk *walk) {
    const struct filtering *f = walk->state;
    struct scratch *scratch = malloc(sizeof *scratch);
    if (!scratch) return NULL;
    scratch->x = NAME(canvas_new)(&f->x);
    scratch->dy = f->lent < 0 ? NAME(canvas_new)(&f->dy) : NULL;
    scratch->read = scratch->dy;
    scratch->v = NAME(scratch_new)(f->matrices * f->in.stride);
    scratch->z = NAME(scratch_new)(f->matrices * f->out.stride);
    scratch->du = f->du ? NULL : NAME(scratch_new)(f->size);
    if (scratch->x && (f->lent >= 0 || scratch->dy) && scratch->v && scratch->z &&
        (f->du || scratch->du))
        return scratch;
    shut(scratch);
    return NULL;
}

static struct range inputs_of(const struct filtering *f, ptrdiff_t pair) {
    return range_of(f->channels, f->inputs, pair % f->across);
}

static struct range outputs_of(const struct filtering *f, ptrdiff_t pair) {
    return range_of(f->filters, f->outputs, pair / f->across);
}

/* A product of some of a group's tiles, or of several phases; there are neither of pairs. */
NOINLINE void outer_some(const struct filtering *f, int number, const struct tile_group *group,
                         const struct product *whole, const real *z, const real *v, real *du) {
    const struct range tiles = tiles_at(group, f->phases.place[number]);
    const struct runs runs = runs_of(&f->phases, number, whole->columns);
    struct product product = *whole;
    product.depth = tiles.count;
    z += tiles.first * product.lda;
    v += tiles.first * product.ldc;
    for (int i = 0; i < runs.count; i++) {
        const ptrdiff_t at = runs.of[i].first * whole->columns;
        product.columns = runs.of[i].count * whole->columns;
        NAME(winograd_outer)(&product, z, v + at, du + at);
    }
}

/* Add a block to dU of its part and of one pair of ranges. */
static void add_block(const struct filtering *f, ptrdiff_t number, int first, ptrdiff_t pair,
                      const struct scratch *scratch, real *du) {
    const struct tiling *t = &f->tiling;
    const struct range inputs = inputs_of(f, pair), outputs = outputs_of(f, pair);
    const struct tile_block block = NAME(tiling_block)(t, number);
    void (*const outer)(const struct product *, const real *, const real *, real *) =
        f->tile_pair == 2 ? NAME(winograd_outer_pairs) : NAME(winograd_outer);
    struct tile_group in = f->in, out = f->out;
    struct streams streams = {
        .steps = steps_of(ceil_div(block.tiles, f->in.count), f->matrices, f->in.factors)};
    if (f->pairs == 1) {
        stream_source(&streams, &f->x, t, number + 1, &f->x_source);
        if (f->lent < 0) stream_source(&streams, &f->dy, t, number + 1, &f->dy_source);
    }
    NAME(canvas_load)(&f->x, t, &block, inputs, &f->x_source, scratch->x);
    if (f->lent < 0) NAME(canvas_load)(&f->dy, t, &block, outputs, &f->dy_source, scratch->dy);
    for (ptrdiff_t begin = 0; begin < block.tiles; begin += f->in.count) {
        NAME(tile_group_set)(&in, t, &block, begin, f->in.count);
        NAME(tile_group_set)(&out, t, &block, begin, f->in.count);
        const struct product product = {.rows = outputs.count,
                                        .columns = inputs.count,
                                        .depth = ceil_div(in.count, f->tile_pair),
                                        .lda = out.width,
                                        .ldc = in.width,
                                        .accumulate = !first || begin > 0};
        NAME(winograd_input)(t, &block, &in, &f->x, scratch->x, inputs.count, scratch->v);
        NAME(winograd_gradient)(t, &block, &out, &f->dy, scratch->read, outputs.count,
                                scratch->z);
        const int whole = f->phases.count == 1 && all_full(&in);
        for (int p = 0; p < f->matrices; p++) {
            const real *z = scratch->z + p * out.stride, *v = scratch->v + p * in.stride;
            if (whole) {
                outer(&product, z, v, du + p * f->stride);
            } else {
                outer_some(f, p, &in, &product, z, v, du + p * f->stride);
            }
            if (is_step(p, f->in.factors)) stream_step(&streams);
        }
    }
}

/* Filter number o of a pair's range from the sums of all parts. */
static void finish_filter(const struct filtering *f, ptrdiff_t pair, ptrdiff_t o, const real *du) {
    const struct range inputs = inputs_of(f, pair), outputs = outputs_of(f, pair);
    const struct tile tile = f->tiling.tile;
    const ptrdiff_t row = f->kernel[1] * f->channels;
    struct filter_sum sum = {.parts = f->parts,
                             .part = f->pairs * f->size,
                             .stride = f->stride,
                             .row = f->step * row,
                             .column = f->step * f->channels,
                             .accumulate = f->accumulate};
    if (o >= outputs.count) return;
    real *dw = f->dw + (outputs.first + o) * f->kernel[0] * row + inputs.first;
    for (ptrdiff_t k = 0; k < f->phases.count; k++) {
        const int parts = f->step == 1; /* otherwise phases */
        const ptrdiff_t i = k / f->phases.across * (parts ? taps_along(tile, 0) : 1);
        const ptrdiff_t j = k % f->phases.across * (parts ? taps_along(tile, 1) : 1);
        sum.high = ceil_div(f->kernel[0] - i, f->step);
        sum.wide = ceil_div(f->kernel[1] - j, f->step);
        if (is_line(tile)) { /* a row, whichever way it lies */
            sum.wide = larger(sum.high, sum.wide);
            sum.high = 1;
        }
        NAME(winograd_filter_sum)(tile, &sum, inputs.count,
                                  du + o * f->in.width + k * inputs.count,
                                  dw + i * row + j * f->channels);
    }
}

static void step(const struct walk *walk, ptrdiff_t part, ptrdiff_t number, ptrdiff_t pair,
                 void *thread) {
    const struct filtering *f = walk->state;
    const struct scratch *scratch = thread;
    real *du = f->du ? f->du + (part * f->pairs + pair) * f->size : scratch->du;
    add_block(f, number, number == first_block(walk, part), pair, scratch, du);
    if (f->du || number + 1 < first_block(walk, part + 1)) return;
    for (ptrdiff_t o = 0; o < f->outputs; o++) finish_filter(f, pair, o, du);
}

static void end(const struct walk *walk, ptrdiff_t number) {
    const struct filtering *f = walk->state;
    const ptrdiff_t pair = number / f->outputs;
    finish_filter(f, pair, number % f->outputs, f->du + pair * f->size);
}

static void borrow(const struct walk *walk, void *thread, const void *lender) {
    const struct filtering *f = walk->state;
    struct scratch *scratch = thread;
    scratch->read = NAME(winograd_pixels)(lender) + f->lent;
}

void NAME(winograd_borrow)(struct walk *filter, const struct walk *data) {
    struct filtering *f = filter->state;
    const struct tiling *theirs, *own = &f->tiling;
    const struct canvas *canvas = NAME(winograd_canvas)(data, &theirs);
    if (!canvas || f->outputs < f->filters || !NAME(tiling_equal)(own, theirs)) return;
    assert(canvas->first[0] <= 0 && canvas->first[1] <= 0);
    f->lent = -canvas->first[0] * canvas->row - canvas->first[1] * canvas->pixel;
    f->dy = *canvas;
    filter->borrow = borrow;
}

static void close(const struct walk *walk, int status) {
    struct filtering *f = walk->state;
    (void)status;
    free(f->du);
    free(f);
}

int NAME(winograd_filter_walk)(struct walk *walk, const struct conv_shape *s, struct tile tile,
                               const struct source *x, const struct source *dy, real *dw,
                               int accumulate, int threads) {
    struct filtering *f = malloc(sizeof *f);
    if (!f) return -1;
    *f = (struct filtering){.dw = dw, .accumulate = accumulate, .lent = -1};
    *walk = (struct walk){
        .state = f, .open = open, .step = step, .shut = shut, .end = end, .close = close};
    if (prepare(f, s, tile)) {
        close(walk, -1);
        return -1;
    }
    const int once = f->tiling.slabs <= 1 && f->pairs == 1;
    f->x_source = NAME(canvas_settle)(x, &f->x, s->batch, once, threads);
    f->dy_source = NAME(canvas_settle)(dy, &f->dy, s->batch, once, threads);
    walk->blocks = f->tiling.blocks;
    walk->parts = f->parts;
    walk->pieces = f->pairs;
    walk->resident = f->size * (ptrdiff_t)sizeof(real);
    walk->ends = f->du ? f->pairs * f->outputs : 0;
    return 0;
}
