/* Gradient of a bias: the sum of each column.
 *
 * Memory-bound: one pass over dy with up to four vectors of columns in registers. Rows are divided
 * into parts of PART_ROWS for any number of threads; each part is summed from zero and the parts
 * are added in order, so that the bytes do not depend on the threads and the rounding error grows
 * with the length of a part, not of the column.
 */
#include <stdlib.h>

#include "linear_parts.h"
#include "stored.h"

enum { PART_ROWS = 1024, BLOCK = 4 };

static void sum_rows(const stored *dy, ptrdiff_t rows, ptrdiff_t columns, real *sum) {
    ptrdiff_t j = 0;
    for (; j + BLOCK * LANES <= columns; j += BLOCK * LANES) {
        vec s[BLOCK] = {{0}};
        for (ptrdiff_t i = 0; i < rows; i++) {
            for (int b = 0; b < BLOCK; b++) s[b] += sload(dy + i * columns + j + b * LANES);
        }
        for (int b = 0; b < BLOCK; b++) vstore(sum + j + b * LANES, s[b]);
    }
    for (; j < columns; j += LANES) {
        ptrdiff_t tail = columns - j < LANES ? columns - j : LANES;
        vec s = vzero();
        for (ptrdiff_t i = 0; i < rows; i++) s += sload_part(dy + i * columns + j, tail);
        vstore_part(sum + j, s, tail);
    }
}

int NAME(linear_bias)(const stored *dy, ptrdiff_t rows, ptrdiff_t columns, real *out,
                      int accumulate, int threads) {
    ptrdiff_t parts = (rows + PART_ROWS - 1) / PART_ROWS;
    real *sums = malloc(((size_t)(parts * columns) + 1) * sizeof(real));
    if (!sums) return -1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (ptrdiff_t p = 0; p < parts; p++) {
        ptrdiff_t first = p * PART_ROWS,
                  count = rows - first < PART_ROWS ? rows - first : PART_ROWS;
        sum_rows(dy + first * columns, count, columns, sums + p * columns);
    }
    for (ptrdiff_t j = 0; j < columns; j++) {
        real total = 0;
        for (ptrdiff_t p = 0; p < parts; p++) total += sums[p * columns + j];
        out[j] = accumulate ? out[j] + total : total;
    }
    free(sums);
    return 0;
}
