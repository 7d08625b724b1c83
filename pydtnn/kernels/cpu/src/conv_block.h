/* Passes and blocks of a convolution, and the padded copy of a block; see
 * conv_block.c. */
#ifndef PYDTNN_CONV_BLOCK_H
#define PYDTNN_CONV_BLOCK_H

#include "conv.h"
#include "fused_rows.h"

/* One axis of a pass: tap t of output u reads input first + u step + offset[t] and is number
 * index[t] of the kernel; output u lies at out_first + u out_step. Offsets ascend from 0. */
struct axis {
    ptrdiff_t outputs, first, step, taps, out_first, out_step;
    ptrdiff_t *offset, *index;
};

/* A direction of a convolution as gathers from `in` images into `out` images. */
struct plan {
    ptrdiff_t batch, in[2], in_channels, out[2], out_channels;
    ptrdiff_t pair; /* 2: what is read are pairs of bfloat16, which in_channels counts; or 1 */
    ptrdiff_t passes[2]; /* one axis per phase of the stride in backward of data, otherwise one */
    struct axis *axis[2];
    /* A block is `images` whole images, or `rows` outputs rows of one image. */
    ptrdiff_t images, rows, slabs, blocks;
    ptrdiff_t pixels, outputs; /* of a block, at most: per pass, and in all passes */
    int copy;                  /* whether blocks are read from a copy with zeros around it */
    ptrdiff_t first_column, row_stride, image_stride, scratch; /* of what is read, in elements */
};

struct block {
    ptrdiff_t image, images, row, end,
        first_row;            /* outputs rows [row, end); first_row: the first input row read */
    ptrdiff_t first, outputs; /* the pixels of the result that it computes, in all passes */
    const real *base;
};

/* Outputs [begin, end) of an axis, which use taps [tap, tap + taps) of the pass. */
struct span {
    ptrdiff_t begin, end, tap, taps;
};

enum gather { GATHER_INPUT, GATHER_GRADIENT };

/* How the kernels read an image: where it lies, so that they keep to the taps inside it; with zeros
 * around it, in a copy if taps leave it; or always in a copy, because it is deferred or they read
 * whole vectors of channels, also behind the last. */
enum reading { IN_PLACE, PADDED, COPIED };

/* Plan a direction; blocks have about `pixels` outputs and copies of at most `bytes`, if a single
 * row allows. `pair` is 2 if what is read are pairs of neighbouring channels, each in the place of
 * a real, or 1. Returns -1 if memory is short; free with plan_free. */
int NAME(plan_make)(struct plan *plan, const struct conv_shape *shape, enum gather gather,
                    ptrdiff_t pixels, ptrdiff_t bytes, enum reading reading, ptrdiff_t pair);
void NAME(plan_free)(struct plan *plan);

/* Make block number `number` readable, from the array `x` itself or from a padded copy in `scratch`
 * (plan->scratch elements). All blocks together write every element of the source's store once. */
struct block NAME(plan_load)(const struct plan *plan, ptrdiff_t number, const struct source *x,
                             real *scratch);

/* Rows [*low, *high) of the image that outputs rows [begin, end) read, over all passes; empty if
 * none. At most plan_height rows. */
void NAME(plan_rows)(const struct plan *plan, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t *low,
                     ptrdiff_t *high);
ptrdiff_t NAME(plan_height)(const struct plan *plan, ptrdiff_t rows);

/* Rows [*begin, *end) of each of its images that are this block's to store. */
void NAME(plan_stores)(const struct plan *plan, const struct block *block, ptrdiff_t *begin,
                       ptrdiff_t *end);

/* Offsets of the outputs of a block that lie in a span of rows and in one of columns of a pass: of
 * what tap 0 reads, from block->base, and of the result, from the block's first pixel. Returns
 * their number. */
ptrdiff_t NAME(plan_pixels)(const struct plan *plan, const struct block *block,
                            const struct axis *vertical, const struct axis *horizontal,
                            const struct span *rows, const struct span *columns, ptrdiff_t *in,
                            ptrdiff_t *out);

#endif
