/* gemm_outer with its operands in exchanged places, for products that are too narrow for vectors.
 *
 * Where C has few columns, as the 9 of a row of a 3x3 kernel over 3 channels, a vector of them is
 * half empty. Its rows are many, so lanes take rows: C' is computed in pieces of DEPTH rows on the
 * stack, in L1, and added to C element by element, once for hundreds of products. 9 x 1 vectors
 * need 10 loads for 9 multiply-adds and 9 x 3 need 12 for 27, with no lane wasted.
 */
#include "gemm.h"

enum { DEPTH = 32 };

static void add_turned(ptrdiff_t rows, ptrdiff_t columns, const real *turned, real *c,
                       ptrdiff_t ldc, int accumulate) {
    for (ptrdiff_t i = 0; i < rows; i++) {
        for (ptrdiff_t j = 0; j < columns; j++) {
            real value = turned[j * OUTER_COLUMNS + i], *p = c + i * ldc + j;
            *p = accumulate ? *p + value : value;
        }
    }
}

void NAME(gemm_outer_turned)(ptrdiff_t rows, const struct gemm_outer *task) {
    real turned[DEPTH * OUTER_COLUMNS] __attribute__((aligned(64)));
    for (ptrdiff_t j = 0; j < task->columns; j += DEPTH) {
        ptrdiff_t columns = smaller(task->columns - j, DEPTH);
        for (ptrdiff_t i = 0; i < rows; i += OUTER_COLUMNS) {
            ptrdiff_t count = smaller(rows - i, OUTER_COLUMNS);
            struct gemm_outer piece = {.a = task->b + j,
                                       .a_offset = task->b_offset,
                                       .lda = task->ldb,
                                       .b = task->a + i,
                                       .b_offset = task->a_offset,
                                       .ldb = task->lda,
                                       .segments = task->segments,
                                       .length = task->length,
                                       .c = turned,
                                       .ldc = OUTER_COLUMNS,
                                       .columns = count};
            NAME(gemm_outer)(columns, &piece);
            add_turned(count, columns, turned, task->c + i * task->ldc + j, task->ldc,
                       task->accumulate);
        }
    }
}
