/* Walks over the blocks of a convolution, alone or two together.
 *
 *   pack the filters, in parallel
 *   for each part of the batch and piece of the channels, in parallel
 *     for each block: a step
 *   add what the parts have summed up, in parallel
 *
 * The gradients of the data and of the filters both read dy, and what one reads for its gate the
 * other reads as its input. Run one after the other, each array comes from memory twice; side by
 * side, the second to reach a block finds it in L2. A block of either covers some 10 to 100 KB of
 * each array, so both fit. Their blocks need not be alike: whichever is behind takes the next step.
 * The steps of each are in the same order as when it runs alone, and so are its sums.
 */
#include <stdlib.h>

#include "conv_walk.h"
#include "gemm.h"

enum { MOST_WALKS = 2 };

/* Blocks [at, end) of a part. */
struct range {
    ptrdiff_t begin, at, end;
};

static struct range range_of(const struct walk *walk, ptrdiff_t part) {
    const ptrdiff_t begin = first_block(walk, part);
    return (struct range){begin, begin, first_block(walk, part + 1)};
}

/* Whether the first of two ranges takes the next step: its share done after it is not the larger. */
static int leads(const struct range *a, const struct range *b) {
    if (a->at == a->end || b->at == b->end) return a->at < a->end;
    return (a->at + 1 - a->begin) * (b->end - b->begin) <=
           (b->at + 1 - b->begin) * (a->end - a->begin);
}

static void run_part(const struct walk *walk, int walks, ptrdiff_t part, ptrdiff_t piece,
                     void *const *scratch) {
    struct range range[MOST_WALKS] = {{0}};
    for (int w = 0; w < walks; w++) range[w] = range_of(&walk[w], part);
    while (range[0].at < range[0].end || range[1].at < range[1].end) {
        const int w = leads(&range[0], &range[1]) ? 0 : 1;
        walk[w].step(&walk[w], part, range[w].at++, piece, scratch[w]);
    }
}

/* Walks of equal parts and pieces. */
static int run(const struct walk *walk, int walks, int threads) {
    int status = 0;
    const ptrdiff_t items = walk->parts * walk->pieces;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        void *scratch[MOST_WALKS] = {NULL};
        int ready = 1;
        for (int w = 0; w < walks; w++) {
            scratch[w] = NAME(scratch_new)(ceil_div(walk[w].scratch, sizeof(real)));
            if (scratch[w]) {
                walk[w].start(&walk[w], scratch[w]);
            } else {
                ready = 0;
            }
        }
        if (!ready) {
#pragma omp atomic write
            status = -1;
        }
        for (int w = 0; w < walks; w++) {
#pragma omp for schedule(dynamic)
            for (ptrdiff_t i = 0; i < walk[w].packs; i++) {
                if (ready) walk[w].pack(&walk[w], i, scratch[w]);
            }
        }
#pragma omp for schedule(dynamic)
        for (ptrdiff_t i = 0; i < items; i++) {
            if (ready) run_part(walk, walks, i / walk->pieces, i % walk->pieces, scratch);
        }
        for (int w = 0; w < walks; w++) {
#pragma omp for schedule(static)
            for (ptrdiff_t i = 0; i < walk[w].ends; i++) walk[w].end(&walk[w], i);
        }
        for (int w = 0; w < walks; w++) free(scratch[w]);
    }
    for (int w = 0; w < walks; w++) walk[w].close(&walk[w], status);
    return status;
}

int NAME(walk_run)(const struct walk *walk, int threads) { return run(walk, 1, threads); }

int NAME(walks_fit)(const struct walk *a, const struct walk *b) {
    return a->pieces == 1 && b->pieces == 1 && a->blocks >= b->parts;
}

int NAME(walk_run_both)(const struct walk *a, const struct walk *b, int threads) {
    struct walk walk[MOST_WALKS] = {*a, *b};
    walk[0].parts = b->parts;
    return run(walk, 2, threads);
}
