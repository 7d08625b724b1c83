/* Convolutions of 3x3 filters and stride 1 by Winograd's F(4x4, 3x3) and F(2x2, 3x3): forward, and
 * backward of data, which is the same with filters flipped and turned.
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

#include "conv_winograd_stream.h"

enum { PARTS = 32, PIECES = 8, BLOCK_BYTES = 65536, RUN_BYTES = 512 };
#define SHARED_BYTES ((ptrdiff_t)3 << 20) /* transformed filters in L2, for all threads */

struct gathering {
    struct tiling tiling;
    struct canvas canvas;
    struct filter_view view;
    struct tile_group in, out;                /* count: tiles of a full group */
    ptrdiff_t matrices, filters;              /* filters: the stride between matrices of u */
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

static struct filter_view view_filters(const struct conv_shape *s, enum gather gather) {
    const int forward = gather == GATHER_INPUT;
    const ptrdiff_t depth = TAPS * s->channels;
    struct filter_view view = {.in = forward ? s->channels : s->filters,
                               .out = forward ? s->filters : s->channels,
                               .inner = forward ? 1 : depth,
                               .outer = forward ? depth : 1};
    for (int t = 0; t < TAPS; t++) view.tap[t] = (forward ? t : TAPS - 1 - t) * s->channels;
    return view;
}

/* Choose ranges of channels, groups and blocks. */
static void cut(struct gathering *g, const struct conv_shape *s, struct tile tile,
                const ptrdiff_t output[2]) {
    const ptrdiff_t in = vectors_of(g->view.in) * LANES, out = vectors_of(g->view.out) * LANES;
    const ptrdiff_t bytes = g->matrices * in * out * (ptrdiff_t)sizeof(real);
    const ptrdiff_t pixel = larger(g->view.in, g->view.out) * (ptrdiff_t)sizeof(real);
    ptrdiff_t group = 2 * BLOCK_ROWS_2, tiles;
    g->shared = bytes <= SHARED_BYTES;
    if (g->shared) {
        g->inputs = in;
        g->outputs = out;
        if (bytes > SHARED_BYTES / 3) group *= 2;
        if (g->pair == 2) group *= 2;
        tiles = larger(group, BLOCK_BYTES / (tile.rows * tile.columns * pixel));
    } else {
        g->inputs = piece_of(in, ceil_div(in, BLOCK_CHANNELS));
        g->outputs = piece_of(out, ceil_div(out, BLOCK_CHANNELS));
        tiles = group *= 4;
    }
    g->tiling = NAME(tiling_make)(tile, s->batch, output, tiles);
    tiles = larger(g->tiling.images * g->tiling.rows * g->tiling.tiles[1], 1);
    g->in.count = g->out.count = g->shared ? smaller(group, tiles) : tiles;
    g->pieces = ceil_div(g->view.out, g->outputs);
    g->parts = smaller(g->shared ? PARTS : ceil_div(PIECES, g->pieces), g->tiling.blocks);
}

static int prepare(struct gathering *g, const struct conv_shape *s, enum gather gather,
                   struct tile tile, const real *b, const struct sink *sink) {
    const int forward = gather == GATHER_INPUT;
    const ptrdiff_t *in = forward ? s->size : s->output, *out = forward ? s->output : s->size;
    const ptrdiff_t first[2] = {forward ? -s->padding[0] : s->padding[0] - 2,
                                forward ? -s->padding[1] : s->padding[1] - 2};
    g->view = view_filters(s, gather);
    g->matrices = matrices_of(tile);
    g->pair = has_pairs(tile) && g->view.in % 2 == 0 ? 2 : 1;
    g->in.factors = g->pair == 2 ? PAIRED_INPUTS : SINGLE;
    cut(g, s, tile, out);
    g->canvas = NAME(canvas_make)(&g->tiling, in, g->view.in, g->inputs, first, 2);
    g->in.width = g->inputs / g->pair;
    g->out.width = g->outputs;
    g->in.stride = matrix_stride(g->in.count * g->in.width);
    g->out.stride = matrix_stride(g->in.count * g->outputs);
    g->filters = matrix_stride(g->view.in / g->pair * g->outputs);
    g->in_place = writes_directly(sink) &&
                  tile.columns * smaller(g->view.out, g->outputs) * (ptrdiff_t)sizeof(real) >=
                      RUN_BYTES;
    const ptrdiff_t padded = g->pieces * g->outputs;
    g->u = g->shared ? NAME(scratch_new)(g->matrices * g->filters) : NULL;
    g->start = b ? NAME(scratch_new)(padded) : NULL;
    if ((g->shared && !g->u) || (b && !g->start)) return -1;
    for (ptrdiff_t j = 0; b && j < padded; j++) g->start[j] = j < g->view.out ? b[j] : 0;
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
    const ptrdiff_t y = t->images * t->rows * t->tile.rows * t->output[1] * g->outputs;
    struct scratch *scratch = malloc(sizeof *scratch);
    if (!scratch) return NULL;
    scratch->canvas = NAME(canvas_new)(t, &g->canvas);
    scratch->u = g->shared ? NULL : NAME(scratch_new)(g->matrices * g->filters);
    scratch->v = NAME(scratch_new)(g->matrices * g->in.stride);
    scratch->m = NAME(scratch_new)(g->matrices * g->out.stride);
    scratch->y = g->in_place ? NULL : NAME(scratch_new)(y);
    if (scratch->canvas && (g->shared || scratch->u) && scratch->v && scratch->m &&
        (g->in_place || scratch->y))
        return scratch;
    shut(scratch);
    return NULL;
}

/* A part of the batch and a range of outputs, for one thread. */
struct item {
    const struct gathering *g;
    const struct source *x;
    const real *w;
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
    const ptrdiff_t first = pixels.first * g->view.out, elements = pixels.count * g->view.out;
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
    for (ptrdiff_t c = 0; c < g->view.in; c += g->inputs) {
        const struct range inputs = {c, smaller(g->inputs, g->view.in - c)};
        const struct product product = {.rows = in->count,
                                        .columns = t->outputs.count,
                                        .first = inputs.first / g->pair,
                                        .depth = inputs.count / g->pair,
                                        .in = g->view.in / g->pair,
                                        .lda = in->width,
                                        .ldc = out->width,
                                        .accumulate = c > 0};
        if (first && !g->shared)
            NAME(winograd_filters)(g->tiling.tile, g->in.factors, &g->view, inputs, t->outputs,
                                   t->w, g->filters, scratch->u);
        if (in->begin == 0)
            NAME(canvas_load)(&g->canvas, &g->tiling, block, inputs, t->x, scratch->canvas);
        NAME(winograd_input)(&g->tiling, block, in, &g->canvas, scratch->canvas, inputs.count,
                             scratch->v);
        for (ptrdiff_t p = 0; p < g->matrices; p++) {
            multiply(&product, scratch->v + p * in->stride, u + p * g->filters,
                     scratch->m + p * out->stride);
            if (is_step(p, g->in.factors)) stream_step(streams);
        }
    }
}

static void run_block(const struct item *t, ptrdiff_t number, int first) {
    const struct gathering *g = t->g;
    const struct tiling *tiling = &g->tiling;
    const struct tile_block block = NAME(tiling_block)(tiling, number);
    const ptrdiff_t top = block.row * tiling->tile.rows;
    const ptrdiff_t rows = smaller(block.rows * tiling->tile.rows, tiling->output[0] - top);
    const struct range pixels = {(block.image * tiling->output[0] + top) * tiling->output[1],
                                 block.images * rows * tiling->output[1]};
    struct streams streams = streams_of(t, number, block.tiles, pixels);
    struct tile_group in = g->in, out = g->out;
    const real *start = g->start ? g->start + t->outputs.first : NULL;
    real *y = (real *)t->sink->y + pixels.first * g->view.out + t->outputs.first;
    real *to = g->in_place ? y : t->scratch->y;
    const ptrdiff_t pixel = g->in_place ? g->view.out : t->outputs.count;
    for (ptrdiff_t begin = 0; begin < block.tiles; begin += g->in.count) {
        in.begin = out.begin = begin;
        in.count = out.count = smaller(g->in.count, block.tiles - begin);
        run_group(t, &block, first, &in, &out, &streams);
        NAME(winograd_output)(tiling, &block, &out, t->outputs.count, t->scratch->m, start, to,
                              pixel);
    }
    if (!g->in_place) {
        const struct window window = {pixels.first, pixels.count, g->view.out, t->outputs.first,
                                      t->outputs.count};
        NAME(sink_window)(t->sink, &window, to, pixel, t->sums);
    }
}

/* Transform the filters of a panel of outputs. */
static void pack(const struct walk *walk, ptrdiff_t number) {
    const struct gathering *g = walk->state;
    const struct range inputs = {0, g->view.in};
    const struct range panel = range_of(g->view.out, ROWS_COLUMNS, number);
    NAME(winograd_filters)(g->tiling.tile, g->in.factors, &g->view, inputs, panel, g->w, g->filters,
                           g->u + panel.first * (g->view.in / g->pair));
}

const struct canvas *NAME(winograd_canvas)(const struct walk *walk, const struct tiling **tiling) {
    const struct gathering *g = walk->state;
    *tiling = &g->tiling;
    return g->inputs >= g->view.in ? &g->canvas : NULL;
}

const real *NAME(winograd_pixels)(const void *thread) {
    return ((const struct scratch *)thread)->canvas;
}

static void step(const struct walk *walk, ptrdiff_t part, ptrdiff_t number, ptrdiff_t piece,
                 void *thread) {
    const struct gathering *g = walk->state;
    const struct item item = {.g = g,
                              .x = &g->x,
                              .w = g->w,
                              .sink = g->sink,
                              .sums = g->sums + part * sums_of(g->sink) * g->view.out,
                              .scratch = thread,
                              .outputs = range_of(g->view.out, g->outputs, piece)};
    run_block(&item, number, number == first_block(walk, part));
}

static void close(const struct walk *walk, int status) {
    struct gathering *g = walk->state;
    const ptrdiff_t length = status == 0 ? sums_of(g->sink) * g->view.out : 0;
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
    g->sums = calloc((size_t)(g->parts * sums_of(y) * g->view.out + 1), sizeof *g->sums);
    if (status || !g->sums) {
        close(walk, -1);
        return -1;
    }
    const int once = g->tiling.slabs <= 1 && g->pieces == 1;
    g->x = NAME(canvas_settle)(x, &g->canvas, s->batch, once, threads);
    walk->blocks = g->tiling.blocks;
    walk->parts = g->parts;
    walk->pieces = g->pieces;
    walk->resident = g->matrices * g->filters * (ptrdiff_t)sizeof(real);
    walk->packs = g->shared ? ceil_div(g->view.out, ROWS_COLUMNS) : 0;
    return 0;
}
