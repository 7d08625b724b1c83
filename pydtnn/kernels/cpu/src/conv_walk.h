/* Directions of a convolution as walks over blocks, which can be run alone or together; see
 * conv_walk.c. */
#ifndef PYDTNN_CONV_WALK_H
#define PYDTNN_CONV_WALK_H

#include "simd.h"

/* Blocks follow each other along the batch. Those of a part, from block first_block(part) to
 * first_block(part + 1), are computed in order by one thread; parts, and pieces (shares of every
 * block, by channels), are independent of each other. */
struct walk {
    ptrdiff_t blocks, parts, pieces;
    ptrdiff_t packs, ends; /* independent calls of `pack` before the blocks, of `end` after them */
    ptrdiff_t resident;    /* bytes that every block reads or adds to: filters or their gradient */
    void *state;
    void *(*open)(const struct walk *walk); /* what a thread works with; NULL if memory is short */
    /* NULL, or called before the steps with what a walk run together with it works with, whose
     * step of a block is always before this one's */
    void (*borrow)(const struct walk *walk, void *thread, const void *lender);
    void (*pack)(const struct walk *walk, ptrdiff_t number);
    void (*step)(const struct walk *walk, ptrdiff_t part, ptrdiff_t block, ptrdiff_t piece,
                 void *thread);
    void (*shut)(void *thread);
    void (*end)(const struct walk *walk, ptrdiff_t number);
    void (*close)(const struct walk *walk, int status); /* status 0: add the sums; free the state */
};

INLINE ptrdiff_t first_block(const struct walk *walk, ptrdiff_t part) {
    return walk->blocks * part / walk->parts;
}

/* Run a walk and close it. Returns 0, or -1 if memory is short. */
int NAME(walk_run)(const struct walk *walk, int threads);

/* Whether two walks over the same batch can be run together, in the parts of the second, and find
 * room in L2. */
int NAME(walks_fit)(const struct walk *a, const struct walk *b);
int NAME(walk_run_both)(const struct walk *a, const struct walk *b, int threads);

#endif
