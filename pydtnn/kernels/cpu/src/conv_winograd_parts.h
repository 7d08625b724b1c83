/* The parts of Winograd's convolution; see conv_winograd.c. */
#ifndef PYDTNN_CONV_WINOGRAD_PARTS_H
#define PYDTNN_CONV_WINOGRAD_PARTS_H

#include "conv_block.h"
#include "conv_walk.h"
#include "fused_rows.h"
#include "gemm.h"
#include "stored.h"

/* Blocks of the small products: rows with two vectors, and with one. Groups are multiples. */
#if VECTOR_BYTES == 64
enum { BLOCK_ROWS_2 = 8, BLOCK_ROWS_1 = 16 };
#else
enum { BLOCK_ROWS_2 = 6, BLOCK_ROWS_1 = 12 };
#endif

#define NOINLINE static __attribute__((noinline))

/* Forget where a pointer or a stride came from, so that gcc does not replace a sum of few registers
 * by one of many that it has to spill. */
#define KEEP(value) __asm__("" : "+r"(value))

/* Along an axis: points, taps of a phase, and phases of a stride of 2. */
enum { MOST_POINTS = 8, MOST_TAPS = 4, MOST_PHASES = 2 };
enum { MOST_MATRICES = 36 };

/* What large filters are cut into, so that 36 matrices of as many inputs and outputs fit in L2, or
 * the 6 or 8 of lines; tiles of a group and of a block of lines. */
enum { BLOCK_CHANNELS = 64, LINE_INPUTS = 192, LINE_OUTPUTS = 96 };
enum { LINE_GROUP = 6 * BLOCK_ROWS_2, LINE_TILES = 2 * LINE_GROUP };

/* Some neighbouring channels. */
struct range {
    ptrdiff_t first, count;
};

/* Number i of the pieces of `size` that n channels are cut into. */
INLINE struct range range_of(ptrdiff_t n, ptrdiff_t size, ptrdiff_t i) {
    return (struct range){i * size, smaller(size, n - i * size)};
}

/* Channels cut into `pieces` of equal size, in whole vectors. */
INLINE ptrdiff_t piece_of(ptrdiff_t n, ptrdiff_t pieces) {
    return vectors_of(ceil_div(n, pieces)) * LANES;
}

/* The outputs of a tile: F(rows x columns, taps x taps), or F(outputs, taps) of a line, which has
 * one row or one column. Along an axis, a filter may have `parts` of `taps` each. */
struct tile {
    int rows, columns, taps, parts;
};

INLINE int outputs_along(struct tile t, int axis) { return axis == 0 ? t.rows : t.columns; }
INLINE int is_line(struct tile t) { return t.rows == 1 || t.columns == 1; }

/* Taps along an axis, of one part and of all. */
INLINE int taps_along(struct tile t, int axis) { return outputs_along(t, axis) > 1 ? t.taps : 1; }
INLINE int reach_along(struct tile t, int axis) {
    return outputs_along(t, axis) > 1 ? t.taps * t.parts : 1;
}

/* Points along an axis, of a filter of so many taps. */
INLINE int points_of(int outputs, int taps) { return outputs + taps - 1; }

/* Products of a tile and channel, each in a matrix of its own. */
INLINE int matrices_of(struct tile t) {
    return points_of(t.rows, taps_along(t, 0)) * points_of(t.columns, taps_along(t, 1));
}

/* How the tiles of a batch are walked: blocks of `images` whole images or of `rows` tile rows of
 * one. The output has `phases` x `phases` phases. Along an axis tiles from number `full` on have an
 * output less, if this is enough for the map: then they need no product at infinity, which only
 * the last output takes. So 14 outputs are 4 + 4 + 3 + 3, 22 products instead of 24. */
struct tiling {
    struct tile tile;
    int phases;
    ptrdiff_t batch, output[2], tiles[2], full[2], images, rows, slabs, blocks;
};

struct tile_block {
    ptrdiff_t image, images, row, rows, tiles; /* tile rows [row, row + rows) */
};

/* Where tile i begins along an axis, in an array of so many phases. */
INLINE ptrdiff_t start_of(const struct tiling *t, int axis, int phases, ptrdiff_t i) {
    return phases * (i * outputs_along(t->tile, axis) - larger(i - t->full[axis], 0));
}

/* Cut a batch into blocks of about `tiles` tiles, of which some may be `reduced`. */
struct tiling NAME(tiling_make)(struct tile tile, int phases, int reduced, ptrdiff_t batch,
                                const ptrdiff_t output[2], ptrdiff_t tiles);
int NAME(tiling_equal)(const struct tiling *a, const struct tiling *b);
struct tile_block NAME(tiling_block)(const struct tiling *t, ptrdiff_t number);

/* Images with zeros around them, in tiles: what a block of tiles reads. Row r and column c are row
 * and column first + r and first + c of the image; of its channels some are there. Tiles read
 * `border` pixels more than they are apart along an axis, of `phases` x `phases` phases. */
struct canvas {
    int phases;
    ptrdiff_t size[2], channels, first[2], border[2];
    ptrdiff_t pixel, row, image; /* strides in elements */
    ptrdiff_t elements;          /* all, with those behind the last image that transforms read */
};

/* How many elements from the first of a tile on its transform reads: whole vectors of `high` x
 * `wide` pixels of each phase. Those of a row's phases are one if all channels are there. */
INLINE ptrdiff_t reach_of(const struct canvas *c, ptrdiff_t high, ptrdiff_t wide) {
    const ptrdiff_t last = (c->phases * high - 1) * c->row + c->phases * (wide - 1) * c->pixel;
    const ptrdiff_t apart = (c->phases - 1) * c->pixel + vectors_of(c->pixel) * LANES;
    return last + larger(apart, vectors_of(c->phases * c->pixel) * LANES);
}

/* The canvas of at most `most` channels at a time of an array that tiles read from `first` on, with
 * a border or, for gradients of the outputs of tiles, without. */
struct canvas NAME(canvas_make)(const struct tiling *t, int phases, const ptrdiff_t size[2],
                                ptrdiff_t channels, ptrdiff_t most, const ptrdiff_t first[2],
                                int bordered);

/* A canvas for a block, full of zeros; NULL if memory is short. */
real *NAME(canvas_new)(const struct canvas *canvas);

/* Fill in the rows of a block. */
void NAME(canvas_load)(const struct canvas *canvas, const struct tiling *t,
                       const struct tile_block *block, struct range channels,
                       const struct source *source, real *dst);

/* The source itself, or an array if it is to be stored and is read more than once: then the values
 * are computed here. */
struct source NAME(canvas_settle)(const struct source *source, const struct canvas *canvas,
                                  ptrdiff_t batch, int once, int threads);

/* A stride between matrices of n elements: an odd number of cache lines, so that the same element
 * of all of them does not fall into the same set of the cache. */
INLINE ptrdiff_t matrix_stride(ptrdiff_t n) {
    const ptrdiff_t line = 64 / (ptrdiff_t)sizeof(real);
    return (ceil_div(n, line) | 1) * line;
}

/* The factors of products: reals, or rounded to bfloat16 and multiplied by pairs, of neighbouring
 * inputs or of neighbouring tiles, each in the place of a real. */
enum factors { SINGLE, PAIRED_INPUTS, PAIRED_TILES };

/* Whether there are products of pairs for tiles of this size. Their error is 2.6 times that of
 * rounding the result in F(2x2, 3x3), and 4 times in F(2x4, 3x3); in F(4x4, 3x3) it would be 6 to
 * 12 times. */
INLINE int has_pairs(struct tile tile) { return HAS_DOTS && tile.rows == 2; }

/* The tiles of a block by kind, in this order: of all images, row by row. */
enum kind { FEWER_COLUMNS, FULL, FEWER_ROWS, FEWER_BOTH, KINDS };
INLINE int fewer_rows(enum kind kind) { return kind == FEWER_ROWS || kind == FEWER_BOTH; }
INLINE int fewer_columns(enum kind kind) { return kind == FEWER_COLUMNS || kind == FEWER_BOTH; }

/* Tile rows of a block, and columns, of a kind. */
INLINE struct range rows_of(const struct tiling *t, const struct tile_block *b, enum kind kind) {
    const ptrdiff_t full = smaller(larger(t->full[0] - b->row, 0), b->rows);
    return fewer_rows(kind) ? (struct range){full, b->rows - full} : (struct range){0, full};
}
INLINE struct range columns_of(const struct tiling *t, enum kind kind) {
    const ptrdiff_t full = t->full[1];
    return fewer_columns(kind) ? (struct range){full, t->tiles[1] - full} : (struct range){0, full};
}

/* Tiles [begin, begin + count) of a block, so many of each kind, to or from matrices that are
 * `stride` apart, row t of which, `width` long, belongs to tile begin + t. */
struct tile_group {
    ptrdiff_t begin, count, kinds[KINDS], stride, width;
    enum factors factors;
};

/* Let a group be at most `most` tiles from `begin` on. */
void NAME(tile_group_set)(struct tile_group *group, const struct tiling *t,
                          const struct tile_block *block, ptrdiff_t begin, ptrdiff_t most);

/* Matrices by whether their points are infinity, and the tiles of a group that have products there:
 * as the kinds are ordered, they follow each other. */
enum place_of_matrix { INNER, LAST_COLUMN, LAST_ROW, LAST_BOTH };
INLINE struct range tiles_at(const struct tile_group *group, enum place_of_matrix place) {
    const ptrdiff_t *kinds = group->kinds, fewer = kinds[FEWER_COLUMNS], full = kinds[FULL];
    if (place == INNER) return (struct range){0, group->count};
    if (place == LAST_COLUMN) return (struct range){fewer, full + kinds[FEWER_ROWS]};
    if (place == LAST_ROW) return (struct range){0, fewer + full};
    return (struct range){fewer, full};
}
INLINE int all_full(const struct tile_group *group) { return group->kinds[FULL] == group->count; }

/* v = B^T d B of the tiles of a canvas; phases, or parts, follow each other, of `channels` each */
void NAME(winograd_input)(const struct tiling *t, const struct tile_block *block,
                          const struct tile_group *group, const struct canvas *canvas,
                          const real *d, ptrdiff_t channels, real *v);
/* z = A g A^T of the tiles of a canvas without border */
void NAME(winograd_gradient)(const struct tiling *t, const struct tile_block *block,
                             const struct tile_group *group, const struct canvas *canvas,
                             const real *g, ptrdiff_t channels, real *z);
/* y = A^T m A + bias, the part of it that lies inside the image; phases share the width of m's
 * rows; pixels of y are `pixel` apart, its images as high as the block; bias in whole vectors, or
 * NULL */
void NAME(winograd_output)(const struct tiling *t, const struct tile_block *block,
                           const struct tile_group *group, ptrdiff_t channels, const real *m,
                           const real *bias, real *y, ptrdiff_t pixel);

/* Filters as they are read, in one phase: tap t, input i and output o lie at tap[t] + i inner +
 * o outer; a negative tap is not there, and zero. */
struct filter_view {
    ptrdiff_t in, out, tap[MOST_TAPS * MOST_TAPS], inner, outer;
};

/* u = G w G^T of the filters of some inputs and outputs. u: [matrix][panel][row][columns] of these
 * outputs, in panels of ROWS_COLUMNS of rows.count rows, of which these inputs (or pairs of them)
 * are rows.first and following; matrices are `stride` apart. */
void NAME(winograd_filters)(struct tile tile, enum factors factors, const struct filter_view *view,
                            struct range inputs, struct range outputs, const real *w,
                            ptrdiff_t stride, struct range rows, real *u);

/* dw = [dw +] G^T (sum over parts of du) G for some channels of one filter, of whose taps, `row`
 * and `column` apart, the first `high` x `wide` are there; du: [part][matrix][channel] */
struct filter_sum {
    ptrdiff_t parts, part, stride, row, column, high, wide;
    int accumulate;
};
void NAME(winograd_filter_sum)(struct tile tile, const struct filter_sum *sum, ptrdiff_t channels,
                               const real *du, real *dw);

/* c[t, o] = [c +] sum over inputs k of a[t, k] u[first + k, o]; u: [panel][in][columns] */
struct product {
    ptrdiff_t rows, columns, first, depth, in;
    ptrdiff_t lda, ldc;
    int accumulate;
};
void NAME(winograd_multiply)(const struct product *product, const real *a, const real *u, real *c);
/* c[o, i] = [c +] sum over tiles t < depth of a[t, o] b[t, i], rows of b as far apart as those of c
 */
void NAME(winograd_outer)(const struct product *product, const real *a, const real *b, real *c);
/* The same for pairs: inputs and tiles are counted in pairs. */
void NAME(winograd_multiply_pairs)(const struct product *product, const real *a, const real *u,
                                   real *c);
void NAME(winograd_outer_pairs)(const struct product *product, const real *a, const real *b,
                                real *c);

/* Walks as in conv_parts.h. A source that must be written once and that blocks share is settled
 * here, with `threads` threads. */
int NAME(winograd_gather_walk)(struct walk *walk, const struct conv_shape *shape,
                               enum gather gather, struct tile tile, const struct source *x,
                               const real *w, const real *b, const struct sink *y, double *sums,
                               int threads);
int NAME(winograd_filter_walk)(struct walk *walk, const struct conv_shape *shape, struct tile tile,
                               const struct source *x, const struct source *dy, real *dw,
                               int accumulate, int threads);

/* Let the walk of filters read dy from the canvas of that of data, which is made by the walk before
 * and computes the same block first, if their blocks are equal and both read all channels. */
void NAME(winograd_borrow)(struct walk *filter, const struct walk *data);
/* The canvas of a walk of data, NULL if it has some of the channels; where a thread keeps it. */
const struct canvas *NAME(winograd_canvas)(const struct walk *data, const struct tiling **tiling);
const real *NAME(winograd_pixels)(const void *thread);

#endif
