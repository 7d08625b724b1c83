/* Gradient of an embedding: rows that are added to chosen rows of a matrix.
 *
 * Every thread adds all rows, in their order, to columns of its own, so that the bytes do not
 * depend on the threads and no two threads write to the same cache line. Most of the time is the
 * clearing of the matrix, in contiguous parts.
 */
#include <string.h>

#include "linear_parts.h"
#include "parts.h"
#include "stored.h"

enum { COLUMNS = 64 / sizeof(real) };

int NAME(linear_add_rows)(const stored *dy, const int64_t *chosen, ptrdiff_t rows, real *out,
                          ptrdiff_t count, ptrdiff_t columns, int accumulate, int threads) {
    const ptrdiff_t blocks = (columns + COLUMNS - 1) / COLUMNS, size = count * columns;
    if (!accumulate)
        FOR_PARTS(p, parts_of(size, PART), size, threads,
                  memset(out + p * PART, 0, (size_t)part_length(size, PART, p) * sizeof(real)));
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        const ptrdiff_t first = blocks * t / threads * COLUMNS,
                        stop = blocks * (t + 1) / threads * COLUMNS,
                        width = (stop < columns ? stop : columns) - first;
        if (width <= 0) continue;
        for (ptrdiff_t i = 0; i < rows; i++) {
            const stored *from = dy + i * columns + first;
            real *to = out + chosen[i] * columns + first;
            for (ptrdiff_t j = 0; j < width; j++) to[j] += widened(from[j]);
        }
    }
    return 0;
}
