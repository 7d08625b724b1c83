/* Distribution of items over threads: each has a range, and idle threads process the rest of other
 * ranges.
 *
 * Ranges follow each other along the batch, in the same proportions in every kernel, so that a
 * thread reads the images that it wrote in the kernel before, from its own L2. Reading from another
 * core's L2 is as slow as from L3, about five times slower; with dynamic distribution this would
 * affect every second image, 6 % of a step of ResNet-44 on two threads. Cores are not exactly
 * equally fast, however, and may run other processes. A thread that has finished its range
 * therefore processes items from the ends of the others, which their owners would process last.
 *
 * Both ends of the rest of a range are stored in one word, so that they change atomically.
 */
#ifndef PYDTNN_SHARES_H
#define PYDTNN_SHARES_H

#include <stddef.h>
#include <stdint.h>

/* Items [begin, end), fewer than 2^32 of them: begin << 32 | end. One to a cache line. */
struct share {
    _Alignas(64) uint64_t left;
};

/* Divide `items` items into one range for each of `shares` threads. */
static inline void share_out(struct share *share, int shares, ptrdiff_t items) {
    for (int i = 0; i < shares; i++) {
        const ptrdiff_t begin = items * i / shares, end = items * (i + 1) / shares;
        share[i].left = (uint64_t)begin << 32 | (uint64_t)end;
    }
}

/* Take the first or the last remaining item of a range; -1 if there is none. */
static inline ptrdiff_t share_take(struct share *share, int first) {
    uint64_t left = __atomic_load_n(&share->left, __ATOMIC_RELAXED), rest;
    uint32_t begin, end;
    do {
        begin = (uint32_t)(left >> 32);
        end = (uint32_t)left;
        if (begin == end) return -1;
        rest = first ? left + ((uint64_t)1 << 32) : left - 1;
    } while (!__atomic_compare_exchange_n(&share->left, &left, rest, 1, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return first ? begin : end - 1;
}

/* Take the next item for the owner of range number `own`: from that, then from those that follow;
 * -1 if there is none. */
static inline ptrdiff_t share_next(struct share *share, int shares, int own) {
    ptrdiff_t item = share_take(&share[own], 1);
    for (int i = 1; i < shares && item < 0; i++) item = share_take(&share[(own + i) % shares], 0);
    return item;
}

#endif
