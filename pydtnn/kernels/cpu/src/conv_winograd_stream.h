/* Prefetching what comes next, a little with each small product: the arrays of images are larger
 * than L2, they are read and written in bursts between the products, and these leave the memory
 * idle. Worth a tenth from L3 and a sixth to a half from memory in forward, little in the gradient
 * of filters. */
#ifndef PYDTNN_CONV_WINOGRAD_STREAM_H
#define PYDTNN_CONV_WINOGRAD_STREAM_H

#include "conv_winograd_parts.h"
#include "stored.h"

enum { LINE_BYTES = 64, MOST_STREAMS = 8 };

/* Ranges of memory, each touched in `steps` steps. */
struct streams {
    int count;
    ptrdiff_t steps;
    struct stream {
        const char *at, *end;
        ptrdiff_t step;
    } of[MOST_STREAMS];
};

/* Steps of a block: one for every product, or for PER_STEP of them if they are as short as those of
 * pairs. */
enum { PER_STEP = 4 };
INLINE ptrdiff_t steps_of(ptrdiff_t groups, ptrdiff_t products, enum factors factors) {
    return groups * (factors == SINGLE ? products : products / PER_STEP);
}
INLINE int is_step(ptrdiff_t product, enum factors factors) {
    return factors == SINGLE || product % PER_STEP == 0;
}

/* Add rows of `elements` elements of an array, unless it is NULL. */
INLINE void stream_add(struct streams *s, const void *array, ptrdiff_t first, ptrdiff_t elements) {
    if (!array) return;
    const char *at = (const char *)((const stored *)array + first);
    const ptrdiff_t bytes = elements * (ptrdiff_t)sizeof(stored);
    const ptrdiff_t lines = ceil_div(ceil_div(bytes, LINE_BYTES), s->steps);
    s->of[s->count++] = (struct stream){at, at + bytes, lines * LINE_BYTES};
}

/* What canvas_load will read for a block, and store. */
INLINE void stream_source(struct streams *s, const struct canvas *c, const struct tiling *t,
                          ptrdiff_t number, const struct source *source) {
    if (number >= t->blocks) return;
    const struct tile_block block = NAME(tiling_block)(t, number);
    const ptrdiff_t row = c->size[1] * c->channels;
    const ptrdiff_t top = larger(c->first[0] + start_of(t, 0, c->phases, block.row), 0);
    const ptrdiff_t end = start_of(t, 0, c->phases, block.row + block.rows);
    const ptrdiff_t bottom = smaller(c->first[0] + end + c->border[0], c->size[0]);
    const ptrdiff_t rows = (block.images - 1) * c->size[0] + bottom - top;
    for (int k = 0; k < source->terms; k++) {
        stream_add(s, source->term[k].x, (block.image * c->size[0] + top) * row, rows * row);
    }
    stream_add(s, source->store, (block.image * c->size[0] + top) * row, rows * row);
}

INLINE void stream_step(struct streams *s) {
    for (int i = 0; i < s->count; i++) {
        struct stream *one = &s->of[i];
        const char *at = one->at, *stop = at + one->step < one->end ? at + one->step : one->end;
        for (; at < stop; at += LINE_BYTES) __builtin_prefetch(at, 0, 2);
        one->at = at;
    }
}

#endif
