/* Operands, products and masks of blocks of attention. */
#include "attention_parts.h"
#include "philox.h"

void NAME(attention_pack)(ptrdiff_t rows, ptrdiff_t columns, const real *src, ptrdiff_t stride,
                          real *dst) {
    for (ptrdiff_t j = 0; j < columns; j += ROWS_COLUMNS) {
        NAME(gemm_pack)(rows, smaller(columns - j, ROWS_COLUMNS), src + j, stride, 1,
                        dst + j * rows);
    }
}

void NAME(attention_pack_turned)(ptrdiff_t rows, ptrdiff_t columns, const real *src,
                                 ptrdiff_t stride, real factor, real *dst) {
    for (ptrdiff_t j = 0; j < rows; j += ROWS_COLUMNS) {
        NAME(gemm_pack)(columns, smaller(rows - j, ROWS_COLUMNS), src + j * stride, 1, stride,
                        dst + j * columns);
    }
    const ptrdiff_t n = panels_size(columns, rows);
    for (ptrdiff_t i = 0; i < n; i += LANES) vstore(dst + i, vload(dst + i) * factor);
}

void NAME(attention_product)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const real *a,
                             ptrdiff_t lda, const real *b, ptrdiff_t panel_rows, ptrdiff_t first,
                             real *c, ptrdiff_t ldc, int accumulate) {
    ptrdiff_t a_offset[QUERIES], c_offset[QUERIES];
    const ptrdiff_t none = 0;
    for (ptrdiff_t i = 0; i < rows; i++) {
        a_offset[i] = i * lda;
        c_offset[i] = i * ldc;
    }
    for (ptrdiff_t j = 0; j < columns; j += ROWS_COLUMNS) {
        const ptrdiff_t count = smaller(columns - j, ROWS_COLUMNS), ldb = vectors_of(count) * LANES;
        const struct gemm_rows task = {.a = a,
                                       .a_offset = a_offset,
                                       .segment = &none,
                                       .b_row = &none,
                                       .segments = 1,
                                       .length = depth,
                                       .b = b + j * panel_rows + first * ldb,
                                       .ldb = ldb,
                                       .c = c + j,
                                       .c_offset = c_offset,
                                       .columns = count,
                                       .accumulate = accumulate};
        NAME(gemm_rows)(rows, &task);
    }
}

void NAME(attention_outer)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const real *a,
                           ptrdiff_t lda, const real *b, ptrdiff_t panel_rows, ptrdiff_t first,
                           real *c, ptrdiff_t ldc, int accumulate) {
    const ptrdiff_t none = 0;
    for (ptrdiff_t j = 0; j < columns; j += ROWS_COLUMNS) {
        const ptrdiff_t count = smaller(columns - j, ROWS_COLUMNS), ldb = vectors_of(count) * LANES;
        const struct gemm_outer task = {.a = a,
                                        .a_offset = &none,
                                        .lda = lda,
                                        .b = b + j * panel_rows + first * ldb,
                                        .b_offset = &none,
                                        .ldb = ldb,
                                        .segments = 1,
                                        .length = depth,
                                        .c = c + j,
                                        .ldc = ldc,
                                        .columns = count,
                                        .accumulate = accumulate};
        NAME(gemm_outer)(rows, &task);
    }
}

void NAME(attention_mask)(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                          ptrdiff_t query, ptrdiff_t first, ptrdiff_t keys, real *factor) {
    const struct draw draw = {s->seed, s->stream, s->epoch, s->threshold};
    const ptrdiff_t row = ceil_div(s->length, 4); /* counters of a row, of four words each */
    const ptrdiff_t place = (s->first_head + head) * s->length + query;
    const uint64_t counter = (uint64_t)(place * row + first / 4);
    uint32_t word[KEYS];
    for (ptrdiff_t j = 0; j < keys; j += 4 * WIDTH) {
        philox(draw, (uint64_t)s->samples[sample], counter + (uint64_t)j / 4, word + j);
    }
    for (ptrdiff_t j = 0; j < keys; j += LANES) {
        const ivec kept = at_least(word + j, draw.threshold);
        vstore(factor + j, vselect(kept, vset((real)s->factor), vzero()));
    }
}
