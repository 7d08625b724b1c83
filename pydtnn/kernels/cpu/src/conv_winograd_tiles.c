/* Blocks and tiles of Winograd's convolution.
 *
 * A block is several small images or some tile rows of a large one. Its rows are packed into a
 * canvas in L2 with zeros around them, so that tiles need no border conditions and deferred arrays
 * are computed while they are copied. The columns left and right of the images are cleared once;
 * rows above and below them are cleared per block. Blocks depend only on the shape, never on the
 * number of threads.
 */
#include "conv_winograd_parts.h"

enum { SETTLE_ROWS = 1024 };

struct tiling NAME(tiling_make)(struct tile tile, int phases, int reduced, ptrdiff_t batch,
                                const ptrdiff_t output[2], ptrdiff_t tiles) {
    struct tiling t = {.tile = tile, .phases = phases, .batch = batch, .images = 1};
    for (int d = 0; d < 2; d++) {
        const ptrdiff_t outputs = outputs_along(tile, d);
        const ptrdiff_t own = ceil_div(output[d], phases);
        t.output[d] = output[d];
        t.tiles[d] = ceil_div(own, outputs);
        t.full[d] = reduced ? larger(own - t.tiles[d] * (outputs - 1), 0) : t.tiles[d];
    }
    const ptrdiff_t rows = larger(tiles / larger(t.tiles[1], 1), 1);
    t.rows = t.tiles[0];
    if (rows >= t.rows) {
        t.images = smaller(larger(rows / larger(t.rows, 1), 1), larger(batch, 1));
    } else { /* slabs of about equal height */
        t.rows = ceil_div(t.rows, ceil_div(t.rows, rows));
        t.full[0] = t.tiles[0];
    }
    t.slabs = ceil_div(t.tiles[0], larger(t.rows, 1));
    t.blocks = t.tiles[1] > 0 ? ceil_div(batch, t.images) * t.slabs : 0;
    return t;
}

int NAME(tiling_equal)(const struct tiling *a, const struct tiling *b) {
    return a->tile.rows == b->tile.rows && a->tile.columns == b->tile.columns &&
           a->tile.taps == b->tile.taps && a->tile.parts == b->tile.parts &&
           a->phases == b->phases && a->batch == b->batch &&
           a->output[0] == b->output[0] && a->output[1] == b->output[1] &&
           a->images == b->images && a->rows == b->rows && a->full[0] == b->full[0] &&
           a->full[1] == b->full[1];
}

struct tile_block NAME(tiling_block)(const struct tiling *t, ptrdiff_t number) {
    struct tile_block block;
    block.image = number / t->slabs * t->images;
    block.images = smaller(t->images, t->batch - block.image);
    block.row = number % t->slabs * t->rows;
    block.rows = smaller(t->rows, t->tiles[0] - block.row);
    block.tiles = block.images * block.rows * t->tiles[1];
    return block;
}

struct canvas NAME(canvas_make)(const struct tiling *t, int phases, const ptrdiff_t size[2],
                                ptrdiff_t channels, ptrdiff_t most, const ptrdiff_t first[2],
                                int bordered) {
    struct canvas c = {.phases = phases, .channels = channels, .pixel = smaller(channels, most)};
    for (int d = 0; d < 2; d++) {
        if (bordered) c.border[d] = phases * (reach_along(t->tile, d) - 1);
        c.size[d] = size[d];
        c.first[d] = first[d];
    }
    c.row = (start_of(t, 1, phases, t->tiles[1]) + c.border[1]) * c.pixel;
    c.image = (start_of(t, 0, phases, t->rows) + c.border[0]) * c.row;
    c.elements = t->images * c.image;
    if (t->rows == 0 || t->tiles[1] == 0) return c;
    /* Tiles of inputs are read as if they had all outputs, those of gradients without the rest. */
    const ptrdiff_t down = start_of(t, 0, phases, t->rows - 1);
    const ptrdiff_t right = start_of(t, 1, phases, t->tiles[1] - 1);
    const ptrdiff_t high = bordered ? points_of(t->tile.rows, reach_along(t->tile, 0))
                                    : start_of(t, 0, phases, t->rows) - down;
    const ptrdiff_t wide = bordered ? points_of(t->tile.columns, reach_along(t->tile, 1))
                                    : start_of(t, 1, phases, t->tiles[1]) - right;
    const ptrdiff_t last = (t->images - 1) * c.image + down * c.row + right * c.pixel;
    c.elements = larger(c.elements, last + reach_of(&c, high, wide));
    return c;
}

real *NAME(canvas_new)(const struct canvas *c) {
    real *canvas = NAME(scratch_new)(c->elements);
    if (canvas) memset(canvas, 0, (size_t)c->elements * sizeof(real));
    return canvas;
}

void NAME(tile_group_set)(struct tile_group *group, const struct tiling *t,
                          const struct tile_block *block, ptrdiff_t begin, ptrdiff_t most) {
    group->begin = begin;
    group->count = smaller(most, block->tiles - begin);
    ptrdiff_t first = 0; /* of a kind */
    for (enum kind kind = 0; kind < KINDS; kind++) {
        const ptrdiff_t end = first + block->images * rows_of(t, block, kind).count *
                                          columns_of(t, kind).count;
        group->kinds[kind] =
            larger(smaller(begin + group->count, end) - larger(begin, first), 0);
        first = end;
    }
}

void NAME(canvas_load)(const struct canvas *c, const struct tiling *t,
                       const struct tile_block *block, struct range channels,
                       const struct source *source, real *dst) {
    const ptrdiff_t width = c->row / c->pixel, left = smaller(larger(-c->first[1], 0), width);
    const ptrdiff_t skip = larger(c->first[1], 0);
    const ptrdiff_t inside = larger(smaller(width - left, c->size[1] - skip), 0);
    const ptrdiff_t top = c->first[0] + start_of(t, 0, c->phases, block->row);
    const ptrdiff_t end = start_of(t, 0, c->phases, block->row + block->rows);
    const ptrdiff_t bottom = c->first[0] + end + c->border[0];
    struct window window = {0, inside, c->channels, channels.first, channels.count};
    if (inside == 0) return;
    for (ptrdiff_t i = 0; i < block->images; i++) {
        real *row = dst + i * c->image + left * c->pixel;
        for (ptrdiff_t r = top; r < bottom; r++, row += c->row) {
            if (r < 0 || r >= c->size[0]) {
                memset(row, 0, (size_t)(inside * c->pixel) * sizeof(real));
            } else {
                window.first = ((block->image + i) * c->size[0] + r) * c->size[1] + skip;
                NAME(source_window)(source, &window, row, c->pixel);
            }
        }
    }
}

struct source NAME(canvas_settle)(const struct source *source, const struct canvas *c,
                                  ptrdiff_t batch, int once, int threads) {
    const ptrdiff_t rows = batch * c->size[0] * c->size[1];
    if (!source->store || once) return *source;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (ptrdiff_t i = 0; i < rows; i += SETTLE_ROWS) {
        NAME(source_rows)(source, i, smaller(SETTLE_ROWS, rows - i), c->channels, NULL);
    }
    return plain_source(source->store);
}
