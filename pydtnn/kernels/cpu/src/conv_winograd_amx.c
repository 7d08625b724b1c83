/* The products of Winograd's convolution for pairs of bfloat16, by tile registers: those of
 * gemm_amx.c, on matrices whose rows are equally far apart. */
#include "amx.h"
#include "conv_winograd_parts.h"

#if HAS_AMX
void NAME(winograd_multiply_pairs)(const struct product *t, const real *a, const real *u,
                                   real *c) {
    const ptrdiff_t start = 0, first = t->first;
    ptrdiff_t in[AMX_BLOCK], out[AMX_BLOCK];
    for (ptrdiff_t i = 0; i < AMX_BLOCK; i++) {
        in[i] = i * t->lda;
        out[i] = i * t->ldc;
    }
    for (ptrdiff_t j = 0; j < t->columns; j += ROWS_COLUMNS) {
        const ptrdiff_t width = vectors_of(smaller(t->columns - j, ROWS_COLUMNS)) * LANES;
        struct gemm_rows task = {.a_offset = in,
                                 .segment = &start,
                                 .b_row = &first,
                                 .segments = 1,
                                 .length = t->depth,
                                 .b = u + j * t->in,
                                 .ldb = width,
                                 .c_offset = out,
                                 .columns = width,
                                 .accumulate = t->accumulate};
        for (ptrdiff_t i = 0; i < t->rows; i += AMX_BLOCK) {
            task.a = a + i * t->lda;
            task.c = c + i * t->ldc + j;
            NAME(gemm_rows_pairs)(smaller(t->rows - i, AMX_BLOCK), &task);
        }
    }
}

void NAME(winograd_outer_pairs)(const struct product *t, const real *a, const real *b, real *c) {
    const ptrdiff_t start = 0, whole = vectors_of(t->columns) * LANES;
    for (ptrdiff_t j = 0; j < whole; j += OUTER_COLUMNS) {
        const struct gemm_outer task = {.a = a,
                                        .a_offset = &start,
                                        .lda = t->lda,
                                        .b = b + j,
                                        .b_offset = &start,
                                        .ldb = t->ldc,
                                        .segments = 1,
                                        .length = t->depth,
                                        .c = c + j,
                                        .ldc = t->ldc,
                                        .columns = smaller(whole - j, OUTER_COLUMNS),
                                        .accumulate = t->accumulate};
        NAME(gemm_outer_pairs)(t->rows, &task);
    }
}
#else
typedef int there_are_no_tile_registers; /* an empty source is no C */
#endif
