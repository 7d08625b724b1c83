/* How a convolution walks over its images: passes, blocks, and the padded copy of a block; see
 * conv_block.c. */
#ifndef PYDTNN_CONV_BLOCK_H
#define PYDTNN_CONV_BLOCK_H

#include "conv.h"
#include "simd.h"

/* One axis of a pass: tap t of output u reads input first + u step + offset[t] and is number
 * index[t] of the kernel; output u lies at out_first + u out_step. Offsets ascend from 0. */
struct axis {
    ptrdiff_t outputs, first, step, taps, out_first, out_step;
    ptrdiff_t *offset, *index;
};

/* A direction of a convolution as gathers from `in` images into `out` images. */
struct plan {
    ptrdiff_t batch, in[2], in_channels, out[2], out_channels;
    ptrdiff_t passes[2]; /* one axis per phase of the stride in backward of data, otherwise one */
    struct axis *axis[2];
    /* A block is `images` whole images, or `rows` outputs rows of one image. */
    ptrdiff_t images, rows, slabs, blocks, pixels; /* pixels: at most, per block and pass */
    int copy; /* whether blocks are read from a copy with zeros around it */
    ptrdiff_t first_column, row_stride, image_stride, scratch; /* of what is read, in elements */
};

struct block {
    ptrdiff_t image, images, row, end,
        first_row; /* outputs rows [row, end); first_row: the first input row read */
    const real *base;
};

enum gather { GATHER_INPUT, GATHER_GRADIENT };

/* Plan a direction; blocks have about `pixels` outputs and copies of at most `bytes`, if a single
 * row allows. `overread`: the kernels read whole vectors of channels, also behind the last. Returns
 * -1 if memory is short; free with plan_free. */
int NAME(plan_make)(struct plan *plan, const struct conv_shape *shape, enum gather gather,
                    ptrdiff_t pixels, ptrdiff_t bytes, int overread);
void NAME(plan_free)(struct plan *plan);

/* Make block number `number` readable, from `x` itself or from a padded copy in `scratch`
 * (plan->scratch elements). */
struct block NAME(plan_load)(const struct plan *plan, ptrdiff_t number, const real *x,
                             real *scratch);

/* Offsets of the outputs of a block in a pass: of what tap 0 reads, from block->base, and of the
 * result, from the block's first image. Returns their number. */
ptrdiff_t NAME(plan_pixels)(const struct plan *plan, const struct block *block,
                            const struct axis *vertical, const struct axis *horizontal,
                            ptrdiff_t *in, ptrdiff_t *out);

/* Offsets of the taps of a pass, row by row; if `merge`, those of one row of the kernel that lie
 * side by side become one segment. Returns how many there are and in *length how many elements, of
 * `channels` each tap has, a segment covers. */
ptrdiff_t NAME(plan_segments)(const struct plan *plan, const struct axis *vertical,
                              const struct axis *horizontal, int merge, ptrdiff_t channels,
                              ptrdiff_t *segment, ptrdiff_t *length);

#endif
