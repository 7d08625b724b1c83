/* Operands, products and masks of blocks of attention. */
#include "attention_parts.h"
#include "philox.h"

void NAME(attention_pack)(ptrdiff_t rows, ptrdiff_t columns, const real *src, ptrdiff_t stride,
                          real *dst) {
    NAME(gemm_pack_panels)(rows, columns, ROWS_COLUMNS, src, stride, rows * ROWS_COLUMNS, dst);
}

void NAME(attention_pack_turned)(ptrdiff_t rows, ptrdiff_t columns, const real *src,
                                 ptrdiff_t stride, real *dst) {
    for (ptrdiff_t j = 0; j < rows; j += ROWS_COLUMNS) {
        NAME(gemm_pack)(columns, smaller(rows - j, ROWS_COLUMNS), src + j * stride, 1, stride,
                        dst + j * columns);
    }
}

/* Row offsets of a block. */
static void row_offsets(ptrdiff_t rows, ptrdiff_t distance, ptrdiff_t *offset) {
    for (ptrdiff_t i = 0; i < rows; i++) offset[i] = i * distance;
}

/* Elements of a row of the panel that begins at column j of a matrix with `columns`. */
INLINE ptrdiff_t panel_width(ptrdiff_t columns, ptrdiff_t j) {
    return vectors_of(smaller(columns - j, ROWS_COLUMNS)) * LANES;
}

void NAME(attention_scores)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                            const real *a, ptrdiff_t lda, const real *b, real *scores) {
    ptrdiff_t a_offset[QUERIES], c_offset[QUERIES];
    const ptrdiff_t none = 0;
    row_offsets(block->queries, lda, a_offset);
    row_offsets(block->queries, PITCH, c_offset);
    for (ptrdiff_t j = 0; j < block->keys; j += ROWS_COLUMNS) {
        /* rows before the first that sees key j */
        const ptrdiff_t skipped = block->causal ? larger(j + 1 - block->seen, 0) : 0;
        const struct gemm_rows task = {.a = a,
                                       .a_offset = a_offset + skipped,
                                       .segment = &none,
                                       .b_row = &none,
                                       .segments = 1,
                                       .length = width,
                                       .b = b + (block->key + j) * width,
                                       .ldb = panel_width(length, block->key + j),
                                       .c = scores + j,
                                       .c_offset = c_offset + skipped,
                                       .columns = smaller(block->keys - j, ROWS_COLUMNS)};
        NAME(gemm_rows)(block->queries - skipped, &task);
    }
}

void NAME(attention_values)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                            const real *weights, const real *b, real *c, ptrdiff_t ldc) {
    ptrdiff_t a_offset[QUERIES], c_offset[QUERIES];
    const ptrdiff_t none = 0, strip = block->seen < block->keys ? STRIP : QUERIES;
    row_offsets(block->queries, PITCH, a_offset);
    row_offsets(block->queries, ldc, c_offset);
    for (ptrdiff_t i = 0; i < block->queries; i += strip) {
        const ptrdiff_t rows = smaller(block->queries - i, strip);
        const ptrdiff_t keys = seen_by(block, i + rows - 1);
        for (ptrdiff_t j = 0; keys && j < width; j += ROWS_COLUMNS) {
            const ptrdiff_t ldb = panel_width(width, j);
            const struct gemm_rows task = {.a = weights,
                                           .a_offset = a_offset + i,
                                           .segment = &none,
                                           .b_row = &none,
                                           .segments = 1,
                                           .length = keys,
                                           .b = b + j * length + block->key * ldb,
                                           .ldb = ldb,
                                           .c = c + j,
                                           .c_offset = c_offset + i,
                                           .columns = smaller(width - j, ROWS_COLUMNS),
                                           .accumulate = block->key > 0};
            NAME(gemm_rows)(rows, &task);
        }
    }
}

void NAME(attention_outer)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                           const real *weights, const real *b, real *c, ptrdiff_t ldc) {
    const ptrdiff_t none = 0, strip = block->seen < block->keys ? STRIP : KEYS;
    for (ptrdiff_t r = 0; r < block->keys; r += strip) {
        /* queries before the first that sees key r */
        const ptrdiff_t skipped = block->causal ? larger(r + 1 - block->seen, 0) : 0;
        for (ptrdiff_t j = 0; j < width; j += ROWS_COLUMNS) {
            const ptrdiff_t ldb = panel_width(width, j);
            const struct gemm_outer task = {
                .a = weights + skipped * PITCH + r,
                .a_offset = &none,
                .lda = PITCH,
                .b = b + j * length + (block->query + skipped) * ldb,
                .b_offset = &none,
                .ldb = ldb,
                .segments = 1,
                .length = block->queries - skipped,
                .c = c + r * ldc + j,
                .ldc = ldc,
                .columns = smaller(width - j, ROWS_COLUMNS),
                .accumulate = block->causal || block->query > 0,
            };
            NAME(gemm_outer)(smaller(block->keys - r, strip), &task);
        }
    }
}

void NAME(attention_mask)(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                          ptrdiff_t query, ptrdiff_t first, ptrdiff_t keys, real *factor) {
    const struct draw draw = {s->seed, s->stream, s->epoch, s->threshold};
    const ptrdiff_t row = ceil_div(s->whole, 4); /* counters of a row, of four words each */
    const ptrdiff_t place = (s->first_head + head) * s->whole + s->query + query;
    const ptrdiff_t key = s->key + first, skipped = key % 4;
    const uint64_t counter = (uint64_t)(place * row + key / 4);
    uint32_t word[KEYS + 4 * WIDTH];
    for (ptrdiff_t j = 0; j < keys + skipped; j += 4 * WIDTH) {
        philox(draw, (uint64_t)s->samples[sample], counter + (uint64_t)j / 4, word + j);
    }
    for (ptrdiff_t j = 0; j < keys; j += LANES) {
        const ivec kept = at_least(word + skipped + j, draw.threshold);
        vstore(factor + j, vselect(kept, vset((real)s->factor), vzero()));
    }
}
