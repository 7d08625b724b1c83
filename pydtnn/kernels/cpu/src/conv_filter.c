/* Backward of filters: dw[o, tap, c] = sum over pixels of dy[pixel, o] x[its window at tap, c].
 *
 *   for each part of the batch and piece of the filters (in parallel)
 *     for each block of the part                               copy with zeros around it: L2
 *                                                              deferred dy: a scratch, L2
 *       for each unit of up to 192 filters of the piece        tiles of dy packed: L2
 *         for each row of the kernel, 2 or 3 vectors of (tap, channel)     packed, too: L1
 *           for each tile of 6 or 9 filters                    gemm_outer
 *
 * Rows of outputs for which a row of the kernel is outside the image are omitted from its sums.
 * In NHWC a row of the kernel, taps x channels, lies side by side in x, so a vector of dw is a
 * plain load of x at every pixel. With less than LEAST_PACKED channels or filters nothing is packed.
 * With more, pixels lie so far apart, often by powers of two, that a tile's columns do not stay in
 * L1: they are packed, 4 to 20 % of the time, for a speed of 1.1 to 1.3 with AVX2. Expected: 0.8 to
 * 0.9 of the peak where taps x channels fill vectors.
 *
 * If such rows do not fill vectors, as with 3 channels, lanes are filters: gemm_turned.c.
 *
 * A deferred dy of 1x1 filters is not computed again if the gradient of the data runs together with
 * this one and has the same blocks: it is read from that one's copy.
 *
 * Where there are products of pairs of bfloat16 (HAS_DOTS), the copies of x and dy become pairs of
 * pixels that are neighbours in dy: of x at every pixel, since a pair may start at any.
 *
 * Every block is summed from zero in registers and added to its part's dw; the parts are added in
 * order at the end, or by a single thread one after the other, so that it has memory for two of
 * them. The first is dw itself, unless dw is added to. Their number, and therefore the bytes, depend
 * only on the shape; and the rounding error of float32 grows with the pixels of a block and the
 * number of blocks, not with the pixels of the batch. Where parts are few, and not equally many for
 * each thread, the filters are shared out, too, and every piece reads x again.
 */
#include <stdlib.h>
#include <string.h>

#include "conv_parts.h"
#include "conv_views.h"
#include "gemm.h"
#include "stored.h"

enum { PIECES = 16, REDUCE = 4096 };
enum { LEAST_FILTERS = 64, MOST_FILTERS = 192 }; /* of a unit */
/* Channels and filters, from which operands are packed; columns of x that are packed at a time. */
enum { LEAST_PACKED = 64, WIDE = 4 * OUTER_COLUMNS };
#define SUMS_BYTES ((ptrdiff_t)8 << 20) /* of all parts, if there are several */

struct filtering {
    struct plan plan;
    ptrdiff_t channels, filters, groups; /* channels and filters of one group */
    ptrdiff_t depth, size; /* elements of dw: per filter, and of one part */
    ptrdiff_t parts, pieces, units, units_per_group;
    struct views views; /* a single one, with all segments */
    ptrdiff_t dy_stride; /* from pixel to pixel of what is read of dy */
    int turned, paired, packed;
    ptrdiff_t rounding;  /* units are multiples of so many filters */
    ptrdiff_t tile;      /* from one packed tile of dy to the next */
    const struct source *x, *dy;
    ptrdiff_t others; /* parts that exist at a time besides the first */
    real *sums;       /* [other][size] */
    real *total;      /* [size]: the first part, and those that were added to it */
    real *dw;
    int accumulate;
};

static int prepare(struct filtering *f, const struct conv_shape *s, int threads) {
    f->groups = s->groups;
    f->channels = s->channels / s->groups;
    f->filters = s->filters / s->groups;
    f->depth = s->kernel[0] * s->kernel[1] * f->channels;
    f->size = f->depth * s->filters;
    enum reading reading = !is_plain(f->x)            ? COPIED
                           : f->channels % LANES == 0 ? PADDED
                                                      : COPIED;
    if (NAME(plan_make)(&f->plan, s, GATHER_INPUT, FILTER_PIXELS, FILTER_BYTES, reading, 1))
        return -1;
    if (NAME(views_make)(&f->views, &f->plan, &f->plan.axis[0][0], &f->plan.axis[1][0], f->channels,
                         CLIP_NONE, s->groups == 1))
        return -1;
    /* Vectors of (tap, channel) that are a fifth empty, where vectors of filters are full. */
    const ptrdiff_t length = f->views.view[0].length, lanes = vectors_of(length) * LANES;
    f->turned = f->filters % LANES == 0 && 5 * length <= 4 * lanes;
    f->paired = HAS_DOTS && !f->turned;
    f->packed = !f->turned && !f->paired && smaller(f->channels, f->filters) >= LEAST_PACKED;
    f->rounding = f->packed ? OUTER_ROWS : LANES;
    f->tile = f->plan.outputs * OUTER_ROWS + LANES;
    f->dy_stride = s->filters + (is_plain(f->dy) ? 0 : LANES); /* rows lie in different sets */
    const ptrdiff_t most = larger(SUMS_BYTES / (f->size * (ptrdiff_t)sizeof(real)), 1);
    f->parts = smaller(smaller(PIECES, most), ceil_div(f->plan.blocks, 2));
    const ptrdiff_t pieces = f->parts % threads == 0 ? 1 : ceil_div(PIECES, f->parts);
    f->units_per_group = larger(ceil_div(f->filters, MOST_FILTERS),
                                smaller(ceil_div(pieces, f->groups),
                                        ceil_div(f->filters, LEAST_FILTERS)));
    f->units = f->groups * f->units_per_group;
    f->pieces = smaller(f->units, pieces);
    f->others = larger(threads > 1 ? f->parts - 1 : smaller(f->parts - 1, 1), 0);
    f->sums = NAME(scratch_new)((f->others + f->accumulate) * f->size);
    f->total = f->accumulate ? f->sums + f->others * f->size : f->dw;
    if (f->sums && !f->parts) memset(f->total, 0, (size_t)f->size * sizeof(real)); /* no samples */
    return f->sums ? 0 : -1;
}

static void free_filtering(struct filtering *f) {
    NAME(views_free)(&f->views);
    free(f->sums);
    NAME(plan_free)(&f->plan);
    free(f);
}

/* The filters that come before unit number `unit`; units are equal but for rounding. */
static ptrdiff_t filters_before(const struct filtering *f, ptrdiff_t unit) {
    const ptrdiff_t parts = ceil_div(f->filters, f->rounding) * (unit % f->units_per_group);
    return unit / f->units_per_group * f->filters + parts / f->units_per_group * f->rounding;
}

/* Where the rows of outputs of a block start that row `tap` of the kernel sees inside the image, in
 * what is read and in dy from the block's first pixel. */
static ptrdiff_t output_rows(const struct filtering *f, const struct block *block, ptrdiff_t tap,
                             ptrdiff_t *in, ptrdiff_t *out) {
    const struct plan *plan = &f->plan;
    const struct axis *vertical = &plan->axis[0][0], *horizontal = &plan->axis[1][0];
    const ptrdiff_t pixel = f->packed ? OUTER_ROWS : f->dy_stride;
    ptrdiff_t n = 0, end = smaller(block->end, vertical->outputs);
    for (ptrdiff_t i = 0; i < block->images; i++) {
        for (ptrdiff_t u = block->row; u < end; u++) {
            ptrdiff_t row = vertical->first + u * vertical->step + vertical->offset[tap];
            if (row < 0 || row >= plan->in[0]) continue;
            in[n] = i * plan->image_stride +
                    (vertical->first + u * vertical->step - block->first_row) * plan->row_stride +
                    (horizontal->first - plan->first_column) * plan->in_channels;
            out[n++] = (i * plan->out[0] + u - block->row) * plan->out[1] * pixel;
        }
    }
    return n;
}

/* What a thread works with: packed windows of x, blocks of x and dy, packed tiles of dy; offsets of
 * rows in what is read, in dy and in the windows. */
struct workspace {
    real *memory, *x, *input, *dy;
    const real *lent; /* dy, where another walk has computed it; or NULL */
    ptrdiff_t in[];
};

/* Columns [column, column + columns) of the windows in `rows` rows of the block, in panels. */
static void pack_windows(const struct filtering *f, const real *x, const ptrdiff_t *in,
                         ptrdiff_t rows, ptrdiff_t columns, real *dst) {
    const ptrdiff_t width = f->plan.out[1];
    for (ptrdiff_t r = 0; r < rows; r++) {
        NAME(gemm_pack_panels)(width, columns, OUTER_COLUMNS, x + in[r],
                               f->plan.axis[1][0].step * f->plan.in_channels,
                               f->plan.outputs * OUTER_COLUMNS, dst + r * width * OUTER_COLUMNS);
    }
}

/* Add the products of packed operands for `count` filters and `columns` columns to c. Pixels of all
 * rows are one segment if they follow each other in both. */
static void add_packed(const struct filtering *f, const struct block *block, ptrdiff_t rows,
                       struct workspace *work, ptrdiff_t count, ptrdiff_t columns, int accumulate,
                       real *c) {
    const ptrdiff_t width = f->plan.out[1];
    ptrdiff_t *const out = work->in + f->plan.pixels, *const offset = out + f->plan.pixels;
    const real *x = work->x;
    for (ptrdiff_t r = 0; r < rows; r++) offset[r] = r * width * OUTER_COLUMNS;
    for (ptrdiff_t j = 0; j < columns; j += OUTER_COLUMNS, x += f->plan.outputs * OUTER_COLUMNS) {
        const ptrdiff_t n = smaller(columns - j, OUTER_COLUMNS);
        const int whole = rows * width == block->outputs && n == OUTER_COLUMNS;
        struct gemm_outer task = {.a = work->dy,
                                  .a_offset = out,
                                  .lda = OUTER_ROWS,
                                  .b = x,
                                  .b_offset = offset,
                                  .ldb = vectors_of(n) * LANES,
                                  .segments = whole ? 1 : rows,
                                  .length = whole ? rows * width : width,
                                  .c = c + j,
                                  .ldc = f->depth,
                                  .columns = n,
                                  .accumulate = accumulate};
        for (ptrdiff_t i = 0; i < count; i += OUTER_ROWS) {
            NAME(gemm_outer)(smaller(count - i, OUTER_ROWS), &task);
            task.a += f->tile;
            task.c += OUTER_ROWS * f->depth;
        }
    }
}

/* Add a block's share of a unit, some filters of a group, to dw. */
static void add_block(const struct filtering *f, const struct block *block, const real *dy,
                      struct workspace *work, ptrdiff_t unit, int accumulate, real *dw) {
    const struct view *view = &f->views.view[0];
    ptrdiff_t per_row = view->segments / f->plan.axis[0][0].taps, rows = 0;
    const ptrdiff_t group = unit / f->units_per_group, filter = filters_before(f, unit),
                    count = filters_before(f, unit + 1) - filter;
    const ptrdiff_t wide = f->turned ? view->length : f->packed ? WIDE : OUTER_COLUMNS;
    const ptrdiff_t pair = f->paired ? 2 : 1;
    ptrdiff_t *const in = work->in, *const out = in + f->plan.pixels;
    void (*const multiply)(ptrdiff_t, const struct gemm_outer *) =
        f->turned   ? NAME(gemm_outer_turned)
        : f->paired ? NAME(gemm_outer_pairs)
                    : NAME(gemm_outer);
    if (f->packed)
        NAME(gemm_pack_tiles)(block->outputs, count, OUTER_ROWS, dy + filter, f->dy_stride, f->tile,
                              work->dy);
    for (ptrdiff_t r = 0; r < view->segments; r++) {
        if (r % per_row == 0) rows = output_rows(f, block, r / per_row, in, out);
        for (ptrdiff_t column = 0; column < view->length; column += wide) {
            const ptrdiff_t columns = smaller(view->length - column, wide);
            const real *x = block->base + view->segment[r] + group * f->channels + column;
            real *c = dw + filter * f->depth + r * view->length + column;
            if (f->packed) {
                pack_windows(f, x, in, rows, columns, work->x);
                add_packed(f, block, rows, work, count, columns, accumulate, c);
                continue;
            }
            struct gemm_outer task = {.a = dy + filter,
                                      .a_offset = out,
                                      .lda = f->dy_stride,
                                      .b = x,
                                      .b_offset = in,
                                      .ldb = pair * f->plan.axis[1][0].step *
                                             f->plan.in_channels,
                                      .segments = rows,
                                      .length = ceil_div(f->plan.out[1], pair),
                                      .c = c,
                                      .ldc = f->depth,
                                      .columns = columns,
                                      .accumulate = accumulate};
            multiply(count, &task);
        }
    }
}

/* dy from the block's first pixel on: the array itself, or the columns of units [begin, end) in
 * `scratch`. */
static const real *load_dy(const struct filtering *f, const struct block *block, ptrdiff_t begin,
                           ptrdiff_t end, real *scratch) {
    const ptrdiff_t channels = f->plan.out_channels, first = filters_before(f, begin);
    if (is_plain(f->dy)) return (const real *)f->dy->term[0].x + block->first * channels;
    const struct window window = {block->first, block->outputs, channels, first,
                                  filters_before(f, end) - first};
    NAME(source_window)(f->dy, &window, scratch + first, f->dy_stride);
    return scratch;
}

/* row[i] and row[i + distance] become pairs, with zeros behind the last. */
static void pair_elements(real *row, ptrdiff_t n, ptrdiff_t distance) {
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        const ptrdiff_t others = larger(smaller(n - distance - i, LANES), 0);
        const ptrdiff_t lanes = smaller(n - i, LANES);
        const vec pair = vpair(vload_part(row + i, lanes), vload_part(row + i + distance, others));
        vstore_part(row + i, pair, lanes);
    }
}

/* Let every pixel of the copy of a block of x be the first of a pair. */
static void pair_x(const struct plan *plan, const struct block *block, real *x) {
    const ptrdiff_t rows = plan->image_stride / larger(plan->row_stride, 1);
    for (ptrdiff_t i = 0; i < block->images * rows; i++) {
        pair_elements(x + i * plan->row_stride, plan->row_stride,
                      plan->axis[1][0].step * plan->in_channels);
    }
}

/* Turn the rows of a unit's columns of dy into half as many pixels of pairs. */
static void pair_dy(const struct filtering *f, const struct block *block, ptrdiff_t unit,
                    real *dy) {
    const ptrdiff_t channels = f->dy_stride, width = f->plan.out[1];
    const ptrdiff_t first = filters_before(f, unit), count = filters_before(f, unit + 1) - first;
    dy += first;
    for (ptrdiff_t pixel = 0; pixel < block->outputs; pixel += width, dy += width * channels) {
        for (ptrdiff_t u = 0; u < width; u += 2) {
            const real *from = dy + u * channels;
            for (ptrdiff_t j = 0; j < count; j += LANES) {
                const ptrdiff_t lanes = smaller(count - j, LANES);
                const ptrdiff_t others = u + 1 < width ? lanes : 0;
                const vec second = vload_part(from + channels + j, others);
                vstore_part(dy + u / 2 * channels + j,
                            vpair(vload_part(from + j, lanes), second), lanes);
            }
        }
    }
}

static void shut(void *thread) {
    struct workspace *work = thread;
    free(work->memory);
    free(work);
}

static void *open(const struct walk *walk) {
    const struct filtering *f = walk->state;
    const struct plan *plan = &f->plan;
    ptrdiff_t mapped = is_plain(f->dy) ? 0 : plan->outputs * f->dy_stride;
    ptrdiff_t most = smaller(f->filters, MOST_FILTERS + OUTER_ROWS);
    ptrdiff_t tiles = f->packed ? ceil_div(most, OUTER_ROWS) : 0;
    ptrdiff_t windows = f->packed ? plan->outputs * WIDE : 0;
    struct workspace *work = malloc(sizeof *work + 3 * (size_t)plan->pixels * sizeof work->in[0]);
    if (!work) return NULL;
    work->lent = NULL;
    work->memory = NAME(scratch_new)(windows + plan->scratch + mapped + tiles * f->tile);
    if (work->memory) {
        work->x = work->memory;
        work->input = work->x + windows;
        work->dy = work->input + plan->scratch + mapped;
        return work;
    }
    shut(work);
    return NULL;
}

/* Elements [begin, end) of dw = [dw +] total + other parts, in order; dw may be the total. */
static void add_parts(const struct filtering *f, ptrdiff_t begin, ptrdiff_t end, real *dw) {
    for (ptrdiff_t i = begin; i < end; i += LANES) {
        const ptrdiff_t count = smaller(end - i, LANES);
        vec sum = vzero() + vload_part(f->total + i, count);
        for (ptrdiff_t p = 0; p < f->others; p++)
            sum += vload_part(f->sums + p * f->size + i, count);
        vstore_part(dw + i, dw != f->total ? vload_part(dw + i, count) + sum : sum, count);
    }
}

/* Add a block to its part's sum for the units of a piece. */
static void step(const struct walk *walk, ptrdiff_t part, ptrdiff_t number, ptrdiff_t piece,
                 void *thread) {
    const struct filtering *f = walk->state;
    const struct plan *plan = &f->plan;
    struct workspace *work = thread;
    real *input = work->input;
    real *dw = part ? f->sums + (part - 1) % f->others * f->size : f->total;
    const ptrdiff_t begin = f->units * piece / f->pieces, end = f->units * (piece + 1) / f->pieces;
    int first = number == first_block(walk, part);
    if (first && part > f->others) add_parts(f, 0, f->size, f->total); /* the one before */
    struct block block = NAME(plan_load)(plan, number, f->x, input);
    const real *g =
        work->lent ? work->lent : load_dy(f, &block, begin, end, input + plan->scratch);
    if (f->paired) pair_x(plan, &block, input);
    for (ptrdiff_t unit = begin; unit < end; unit++) {
        if (f->paired) pair_dy(f, &block, unit, input + plan->scratch);
        add_block(f, &block, g, work, unit, !first, dw);
    }
}

/* Elements [number REDUCE, ...) of dw. */
static void reduce(const struct walk *walk, ptrdiff_t number) {
    const struct filtering *f = walk->state;
    add_parts(f, number * REDUCE, smaller((number + 1) * REDUCE, f->size), f->dw);
}

static void borrow(const struct walk *walk, void *thread, const void *lender) {
    (void)walk;
    ((struct workspace *)thread)->lent = NAME(gather_pixels)(lender);
}

void NAME(filter_borrow)(struct walk *filter, const struct walk *data) {
    struct filtering *f = filter->state;
    const struct plan *own = &f->plan, *theirs = NAME(gather_copy)(data);
    if (!theirs || f->paired || is_plain(f->dy) || own->images != theirs->images ||
        own->rows != theirs->rows)
        return;
    f->dy_stride = theirs->in_channels;
    filter->borrow = borrow;
}

static void close(const struct walk *walk, int status) {
    (void)status;
    free_filtering(walk->state);
}

int NAME(filter_walk)(struct walk *walk, const struct conv_shape *s, const struct source *x,
                      const struct source *dy, real *dw, int accumulate, int threads) {
    struct filtering *f = malloc(sizeof *f);
    if (!f) return -1;
    *f = (struct filtering){.x = x, .dy = dy, .dw = dw, .accumulate = accumulate};
    if (prepare(f, s, threads)) {
        free_filtering(f);
        return -1;
    }
    *walk = (struct walk){.blocks = f->plan.blocks,
                          .parts = f->parts,
                          .pieces = f->pieces,
                          .ends = ceil_div(f->size, REDUCE),
                          .resident = f->size * (ptrdiff_t)sizeof(real),
                          .state = f,
                          .open = open,
                          .step = step,
                          .shut = shut,
                          .end = reduce,
                          .close = close};
    return 0;
}
