/* Division of memory-bound kernels into parts for the threads.
 *
 * The number of parts depends only on the array, so a sum that is taken part by part, and then
 * over the parts in order, has the same bytes for every number of threads. Opening a parallel
 * region costs microseconds, the cost of SERIAL elements: below that one thread processes all
 * parts.
 */
#ifndef PYDTNN_PARTS_H
#define PYDTNN_PARTS_H

#include <stddef.h>

enum { SERIAL = 32768, PART = 8192 };

#define PARTS_PRAGMA(x) _Pragma(#x)

/* for (p = 0; p < parts; p++) { the rest of the arguments; } over the threads that `elements`
   elements are worth */
#define FOR_PARTS(p, parts, elements, threads, ...)                            \
    do {                                                                       \
        const ptrdiff_t parts_ = (parts);                                      \
        const int team_ = (elements) < SERIAL ? 1 : (threads);                 \
        if (team_ <= 1) {                                                      \
            for (ptrdiff_t p = 0; p < parts_; p++) {                           \
                __VA_ARGS__;                                                   \
            }                                                                  \
        } else {                                                               \
            PARTS_PRAGMA(omp parallel for num_threads(team_) schedule(static)) \
            for (ptrdiff_t p = 0; p < parts_; p++) {                           \
                __VA_ARGS__;                                                   \
            }                                                                  \
        }                                                                      \
    } while (0)

static inline ptrdiff_t min_of(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static inline ptrdiff_t parts_of(ptrdiff_t n, ptrdiff_t size) { return (n + size - 1) / size; }

/* Length of part p of n elements cut into pieces of `size`. */
static inline ptrdiff_t part_length(ptrdiff_t n, ptrdiff_t size, ptrdiff_t p) {
    return min_of(size, n - p * size);
}

#endif
