/* Convolutions of 3x3 filters and stride 1 by Winograd's F(4x4, 3x3) and F(2x2, 3x3): forward, and
 * backward of data, which is the same with filters flipped and turned. A stride of 2 is the same
 * again, of phases, filters of 5x5 are the same with parts: see conv_winograd_phases.h. Filters of
 * one row or column have tiles of one row or column, by F(4, 3) and F(5, 4).
 *
 *   transform the filters                                        U [36][C][O], L2
 *   for each part of the batch (in parallel)
 *     for each block: an image or so                             packed with zeros around it, L2
 *       for each group of about 16 tiles
 *         transform the tiles                                    V [36][tiles][C], L1 and L2
 *         36 small products V U                                  M [36][tiles][O], L1 and L2
 *         transform back, add the bias                           y, or a copy of the block
 *       finish the block's rows if the sink has work
 *
 * 36 multiplications compute 16 outputs that otherwise need 144: four times fewer (F(2x2, 3x3): 16
 * for 4 instead of 36, 2.25 times). The transforms cost 270 vector operations per tile and vector
 * of channels, as many as half of the products for 16 channels and an eighth for 64. So of the
 * bound of 4 about 2.7 remain for 16 channels and 3.4 for 64, before memory. Expected, in multiples
 * of the peak as if all 144 multiplications were done: 1.7 for 16 channels and 2.8 for 64 from L2,
 * 1.2 and 2.3 with images in L3, where reading and writing them takes a fifth of the time for 16
 * channels.
 *
 * F(2x4, 3x3), 24 products for 8 outputs, is for pairs of bfloat16: with them 16 outputs cost as
 * much as 24 products of reals, 32 in F(2x2, 3x3), and 36 in F(4x4, 3x3), which has reals. Expected
 * beside F(4x4, 3x3): 1.3 times for 64 channels, less for 16, as the transforms are the same work.
 *
 * Filters that do not fit in L2 transformed are cut: an item is a part of the batch and a range of
 * about 64 outputs, whose filters each thread transforms for itself as it needs them; groups are
 * larger, M is summed over ranges of about 64 inputs, and the tiles are transformed again for every
 * range of outputs, which costs a seventh.
 *
 * Rows of y shorter than a few cache lines per tile are gathered in a copy of the block and written
 * in order.
 */
#include <stdlib.h>

#include "conv_winograd_phases.h"
#include "conv_winograd_stream.h"

enum { PARTS = 32, PIECES = 8, BLOCK_BYTES = 65536, RUN_BYTES = 512 };
#define SHARED_BYTES ((ptrdiff_t)3 << 20) /* transformed filters in L2, for all threads */
#define SHARED_LINE_BYTES ((ptrdiff_t)4 << 20) /* those of lines, whose groups are larger */

struct gathering {
    struct tiling tiling;
    struct canvas canvas;
    struct phases phases;
    ptrdiff_t in_phases, out_phases;          /* phases of inputs, or parts, and of outputs */
    ptrdiff_t channels, filters;              /* inputs and outputs of a phase */
    struct tile_group in, out;                /* count: tiles of a full group */
    ptrdiff_t matrices, stride, section;      /* the strides between matrices of u, and phases */
    ptrdiff_t parts, inputs, outputs, pieces; /* inputs, outputs: channels of a range; pieces: of
                                                 outputs */
    int shared, in_place;
    ptrdiff_t pair; /* inputs in the place of a real: 2 if factors are pairs, otherwise 1 */
    real *u, *start;
    struct source x;
    const real *w;
    const struct sink *sink;
    double *sums, *total; /* sums: [part][what the sink sums][channel] */
};

struct scratch {
    real *canvas, *u, *v, *m, *y;
};

/* Choose ranges of channels, groups and blocks. */
static void cut(struct gathering *g, const struct conv_shape *s, struct tile tile,
                const ptrdiff_t output[2]) {
    const ptrdiff_t in = vectors_of(g->channels) * LANES, out = vectors_of(g->filters) * LANES;
    const ptrdiff_t bytes =
        g->matrices * in * out * g->phases.count * (ptrdiff_t)sizeof(real);
    const ptrdiff_t pixel = larger(g->channels * g->in_phases, g->filters * g->out_phases) *
                            (ptrdiff_t)sizeof(real);
    const int phases = g->out_phases > 1 ? (int)s->stride[0] : 1;
    const int line = is_line(tile);
    ptrdiff_t group = 2 * BLOCK_ROWS_2, tiles;
    g->shared = bytes <= (line ? SHARED_LINE_BYTES : SHARED_BYTES);
    if (g->shared) {
        g->inputs = in;
        g->outputs = out;
        if (bytes > SHARED_BYTES / 3) group *= 2;
        if (g->pair == 2) group *= 2;
        if (line) group = LINE_GROUP;
        tiles = larger(line ? LINE_TILES : group, BLOCK_BYTES / (tile.rows * tile.columns * pixel));
    } else {
        g->inputs = piece_of(in, ceil_div(in * g->in_phases, line ? LINE_INPUTS : BLOCK_CHANNELS));
        g->outputs =
            piece_of(out, ceil_div(out * g->out_phases, line ? LINE_OUTPUTS : BLOCK_CHANNELS));
        tiles = group *= 4;
    }
    g->tiling = NAME(tiling_make)(tile, phases, 1, s->batch, output, tiles);
    tiles = larger(g->tiling.images * g->tiling.rows * g->tiling.tiles[1], 1);
    g->in.count = g->out.count = g->shared ? smaller(group, tiles) : tiles;
    g->pieces = ceil_div(g->filters, g->outputs);
    g->parts = smaller(g->shared ? PARTS : ceil_div(PIECES, g->pieces), g->tiling.blocks);
}

static int prepare(struct gathering *g, const struct conv_shape *s, enum gather gather,
                   struct tile tile, const real *b, const struct sink *sink) {
    const int forward = gather == GATHER_INPUT;
    const ptrdiff_t *in = forward ? s->size : s->output, *out = forward ? s->output : s->size;
    g->phases = phases_of(s, gather, tile);
    g->channels = g->phases.view[0].in;
    g->filters = g->phases.view[0].out;
    g->out_phases = forward || s->stride[0] == 1 ? 1 : g->phases.count;
    g->in_phases = g->phases.count / (int)g->out_phases;
    g->matrices = matrices_of(tile);
    g->pair = has_pairs(tile) && g->channels % 2 == 0 ? 2 : 1;
    g->in.factors = g->pair == 2 ? PAIRED_INPUTS : SINGLE;
    cut(g, s, tile, out);
    g->canvas = NAME(canvas_make)(&g->tiling, forward ? (int)s->stride[0] : 1, in, g->channels,
                                  g->inputs, g->phases.first, 1);
    g->in.width = g->in_phases == 1
                      ? g->inputs / g->pair
                      : vectors_of(g->in_phases * smaller(g->inputs, g->channels)) * LANES;
    g->out.width = g->out_phases * g->outputs;
    g->in.stride = matrix_stride(g->in.count * g->in.width + (g->in_phases > 1 ? LANES : 0));
    g->out.stride = matrix_stride(g->in.count * g->out.width);
    g->section = g->channels * g->in_phases / g->pair * g->outputs;
    g->stride = matrix_stride(g->section * g->out_phases);
    g->in_place = writes_directly(sink) &&
                  tile.columns * smaller(g->filters, g->outputs) * (ptrdiff_t)sizeof(real) >=
                      RUN_BYTES;
    const ptrdiff_t padded = g->pieces * g->outputs;
    g->u = g->shared ? NAME(scratch_new)(g->matrices * g->stride) : NULL;
    g->start = b ? NAME(scratch_new)(padded) : NULL;
    if ((g->shared && !g->u) || (b && !g->start)) return -1;
    for (ptrdiff_t j = 0; b && j < padded; j++) g->start[j] = j < g->filters ? b[j] : 0;
    return 0;
}

static void shut(void *thread) {
    struct scratch *scratch = thread;
    free(scratch->canvas);
    free(scratch->u);
    free(scratch->v);
    free(scratch->m);
    free(scratch->y);
    free(scratch);
}

static void *open(const struct walk *walk) {
    const struct gathering *g = walk->state;
    const struct tiling *t = &g->tiling;
    const ptrdiff_t y = t->images * start_of(t, 0, t->phases, t->rows) * t->output[1] * g->outputs;
    struct scratch *scratch = malloc(sizeof *scratch);
    if (!scratch) return NULL;
    scratch->canvas = NAME(canvas_new)(&g->canvas);
    scratch->u = g->shared ? NULL : NAME(scratch_new)(g->matrices * g->stride);
    scratch->v = NAME(scratch_new)(g->matrices * g->in.stride);
    scratch->m = NAME(scratch_new)(g->matrices * g->out.stride);
    scratch->y = g->in_place ? NULL : NAME(scratch_new)(y);
    if (scratch->canvas && (g->shared || scratch->u) && scratch->v && scratch->m &&
        (g->in_place || scratch->y)) {
        if (g->out_phases > 1) /* phases without products in a matrix */
            memset(scratch->m, 0, (size_t)(g->matrices * g->out.stride) * sizeof(real));
        return scratch;
    }
    shut(scratch);
    return NULL;
}

/* A part of the batch and a range of outputs, for one thread. */
struct item {
    const struct gathering *g;
    const struct source *x;
    const struct sink *sink;
    double *sums; /* of the part */
    const struct scratch *scratch;
    struct range outputs;
};

/* What is read and written after the products of a block: the next block, and its outputs. */
static struct streams streams_of(const struct item *t, ptrdiff_t number, ptrdiff_t tiles,
                                 struct range pixels) {
    const struct gathering *g = t->g;
    const struct sink *sink = t->sink;
    const ptrdiff_t first = pixels.first * g->filters, elements = pixels.count * g->filters;
    struct streams s = {
        .steps = steps_of(ceil_div(tiles, g->in.count), g->matrices, g->in.factors)};
    if (!g->shared) return s;
    stream_source(&s, &g->canvas, &g->tiling, number + 1, t->x);
    stream_add(&s, sink->y, first, elements);
    stream_add(&s, sink->add, first, elements);
    for (int k = 0; sink->gate && k < sink->gate->terms; k++) {
        stream_add(&s, sink->gate->term[k].x, first, elements);
    }
    return s;
}

/* U of some inputs and outputs, which are panels of u. */
static void transform(const struct gathering *g, struct range inputs, struct range outputs,
                      real *u) {
    struct range rows = {g->in_phases * inputs.first, g->in_phases * g->channels};
    for (int k = 0; k < g->phases.count; k++) {
        NAME(winograd_filters)(g->tiling.tile, g->in.factors, &g->phases.view[k], inputs, outputs,
                               g->w, g->stride, rows, u);
        if (g->in_phases > 1) rows.first += inputs.count;
        if (g->out_phases > 1) u += g->section;
    }
}

/* A product of some of a group's tiles, or of several phases: those of inputs are one long sum,
 * those of outputs side by side. */
NOINLINE void multiply_some(const struct gathering *g, int number, const struct tile_group *group,
                            const struct product *whole, const real *v, const real *u, real *m) {
    const struct range tiles = tiles_at(group, g->phases.place[number]);
    const struct runs runs = runs_of(&g->phases, number, g->out_phases > 1 ? LANES : whole->depth);
    void (*const run)(const struct product *, const real *, const real *, real *) =
        g->pair == 2 ? NAME(winograd_multiply_pairs) : NAME(winograd_multiply);
    struct product product = *whole;
    product.rows = tiles.count;
    v += tiles.first * product.lda;
    m += tiles.first * product.ldc;
    for (int i = 0; i < runs.count; i++) {
        const struct range phases = runs.of[i];
        if (g->out_phases == 1) {
            product.first = whole->first + phases.first * whole->depth;
            product.depth = phases.count * whole->depth;
            product.accumulate = whole->accumulate || i > 0;
            run(&product, v + phases.first * whole->depth, u, m);
            continue;
        }
        for (ptrdiff_t k = phases.first; k < phases.first + phases.count; k++) {
            run(&product, v, u + k * g->section, m + k * g->outputs);
        }
    }
}

/* M of a group: the sum over all inputs. With ranges of inputs a group is a whole block, and the
 * first block of an item finds a range's filters not yet transformed. */
static void run_group(const struct item *t, const struct tile_block *block, int first,
                      const struct tile_group *in, const struct tile_group *out,
                      struct streams *streams) {
    const struct gathering *g = t->g;
    const struct scratch *scratch = t->scratch;
    const real *u = g->shared ? g->u : scratch->u;
    void (*const multiply)(const struct product *, const real *, const real *, real *) =
        g->pair == 2 ? NAME(winograd_multiply_pairs) : NAME(winograd_multiply);
    const int whole = g->phases.count == 1 && all_full(in);
    for (ptrdiff_t c = 0; c < g->channels; c += g->inputs) {
        const struct range inputs = {c, smaller(g->inputs, g->channels - c)};
        const struct product product = {.rows = in->count,
                                        .columns = t->outputs.count,
                                        .first = g->in_phases * inputs.first / g->pair,
                                        .depth = inputs.count / g->pair,
                                        .in = g->in_phases * g->channels / g->pair,
                                        .lda = in->width,
                                        .ldc = out->width,
                                        .accumulate = c > 0};
        if (first && !g->shared) transform(g, inputs, t->outputs, scratch->u);
        if (in->begin == 0)
            NAME(canvas_load)(&g->canvas, &g->tiling, block, inputs, t->x, scratch->canvas);
        NAME(winograd_input)(&g->tiling, block, in, &g->canvas, scratch->canvas, inputs.count,
                             scratch->v);
        for (int p = 0; p < g->matrices; p++) {
            const real *a = scratch->v + p * in->stride, *b = u + p * g->stride;
            real *c = scratch->m + p * out->stride;
            if (whole) {
                multiply(&product, a, b, c);
            } else {
                multiply_some(g, p, in, &product, a, b, c);
            }
            if (is_step(p, g->in.factors)) stream_step(streams);
        }
    }
}

static void run_block(const struct item *t, ptrdiff_t number, int first) {
    const struct gathering *g = t->g;
    const struct tiling *tiling = &g->tiling;
    const struct tile_block block = NAME(tiling_block)(tiling, number);
    const ptrdiff_t top = start_of(tiling, 0, tiling->phases, block.row);
    const ptrdiff_t end = start_of(tiling, 0, tiling->phases, block.row + block.rows);
    const ptrdiff_t rows = smaller(end, tiling->output[0]) - top;
    const struct range pixels = {(block.image * tiling->output[0] + top) * tiling->output[1],
                                 block.images * rows * tiling->output[1]};
    struct streams streams = streams_of(t, number, block.tiles, pixels);
    struct tile_group in = g->in, out = g->out;
    const real *start = g->start ? g->start + t->outputs.first : NULL;
    real *y = (real *)t->sink->y + pixels.first * g->filters + t->outputs.first;
    real *to = g->in_place ? y : t->scratch->y;
    const ptrdiff_t pixel = g->in_place ? g->filters : t->outputs.count;
    for (ptrdiff_t begin = 0; begin < block.tiles; begin += g->in.count) {
        NAME(tile_group_set)(&in, tiling, &block, begin, g->in.count);
        NAME(tile_group_set)(&out, tiling, &block, begin, g->in.count);
        run_group(t, &block, first, &in, &out, &streams);
        NAME(winograd_output)(tiling, &block, &out, t->outputs.count, t->scratch->m, start, to,
                              pixel);
    }
    if (!g->in_place) {
        const struct window window = {pixels.first, pixels.count, g->filters, t->outputs.first,
                                      t->outputs.count};
        NAME(sink_window)(t->sink, &window, to, pixel, t->sums);
    }
}

/* Transform the filters of a panel of outputs. */
static void pack(const struct walk *walk, ptrdiff_t number) {
    const struct gathering *g = walk->state;
    const struct range inputs = {0, g->channels};
    const struct range panel = range_of(g->filters, ROWS_COLUMNS, number);
    transform(g, inputs, panel, g->u + panel.first * (g->in_phases * g->channels / g->pair));
}

const struct canvas *NAME(winograd_canvas)(const struct walk *walk, const struct tiling **tiling) {
    const struct gathering *g = walk->state;
    *tiling = &g->tiling;
    return g->inputs >= g->channels ? &g->canvas : NULL;
}

const real *NAME(winograd_pixels)(const void *thread) {
    return ((const struct scratch *)thread)->canvas;
}

static void step(const struct walk *walk, ptrdiff_t part, ptrdiff_t number, ptrdiff_t piece,
                 void *thread) {
    const struct gathering *g = walk->state;
    const struct item item = {.g = g,
                              .x = &g->x,
                              .sink = g->sink,
                              .sums = g->sums + part * sums_of(g->sink) * g->filters,
                              .scratch = thread,
                              .outputs = range_of(g->filters, g->outputs, piece)};
    run_block(&item, number, number == first_block(walk, part));
}

static void close(const struct walk *walk, int status) {
    struct gathering *g = walk->state;
    const ptrdiff_t length = status == 0 ? sums_of(g->sink) * g->filters : 0;
    for (ptrdiff_t j = 0; j < length; j++) {
        g->total[j] = 0;
        for (ptrdiff_t i = 0; i < g->parts; i++) g->total[j] += g->sums[i * length + j];
    }
    free(g->sums);
    free(g->u);
    free(g->start);
    free(g);
}

int NAME(winograd_gather_walk)(struct walk *walk, const struct conv_shape *s, enum gather gather,
                               struct tile tile, const struct source *x, const real *w,
                               const real *b, const struct sink *y, double *sums, int threads) {
    struct gathering *g = malloc(sizeof *g);
    if (!g) return -1;
    *g = (struct gathering){.w = w, .sink = y, .total = sums};
    *walk = (struct walk){
        .state = g, .open = open, .pack = pack, .step = step, .shut = shut, .close = close};
    const int status = prepare(g, s, gather, tile, b, y);
    g->sums = calloc((size_t)(g->parts * sums_of(y) * g->filters + 1), sizeof *g->sums);
    if (status || !g->sums) {
        close(walk, -1);
        return -1;
    }
    const int once = g->tiling.slabs <= 1 && g->pieces == 1;
    g->x = NAME(canvas_settle)(x, &g->canvas, s->batch, once, threads);
    walk->blocks = g->tiling.blocks;
    walk->parts = g->parts;
    walk->pieces = g->pieces;
    walk->resident = g->matrices * g->stride * (ptrdiff_t)sizeof(real);
    walk->packs = g->shared ? ceil_div(g->filters, ROWS_COLUMNS) : 0;
    return 0;
}
