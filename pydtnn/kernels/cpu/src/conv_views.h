/* The outputs of a pass, grouped by the taps that they use inside the image; see conv_views.c. */
#ifndef PYDTNN_CONV_VIEWS_H
#define PYDTNN_CONV_VIEWS_H

#include "conv_block.h"

/* Outputs of a pass that use the same taps. A segment is a tap, or neighbouring taps of one row of
 * the kernel: it lies at segment[s] from what tap 0 of an output reads, holds `length` elements and
 * belongs to rows weight[s], weight[s] + 1, ... of the pass's packed filters. */
struct view {
    struct span rows, columns;
    ptrdiff_t segments, length;
    const ptrdiff_t *segment, *weight;
};

struct views {
    ptrdiff_t count;
    struct view *view;
    ptrdiff_t *table;
};

enum clipping {
    CLIP_NONE, /* zeros lie around what is read */
    CLIP_ROWS, /* rows of the kernel that leave the image are left out */
    CLIP_BOTH  /* taps that leave the image are left out: it is read where it lies */
};

/* The views of a pass, whose taps have `channels` elements each; if `merge`, the taps of a row of
 * the kernel that lie side by side are one segment. Returns -1 if memory is short; free with
 * views_free. */
int NAME(views_make)(struct views *views, const struct plan *plan, const struct axis *vertical,
                     const struct axis *horizontal, ptrdiff_t channels, enum clipping clipping,
                     int merge);
void NAME(views_free)(struct views *views);

#endif
