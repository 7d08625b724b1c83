/* Operands, products and masks of blocks of attention. */
#include "attention_parts.h"
#include "philox.h"

static const int64_t *seen_of(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t query) {
    return s->seen + sample * s->seen_stride + 2 * query;
}

static void find_block(const struct attention_shape *s, const struct blocks *all, ptrdiff_t query,
                       ptrdiff_t key, struct block *b) {
    const int keys = (int)smaller(all->keys - key, KEYS);
    *b = (struct block){.query = query,
                        .queries = smaller(all->length - query, QUERIES),
                        .key = key,
                        .keys = keys,
                        .whole = 1};
    memset(b->to, keys, sizeof b->to);
    if (!s->seen) return;
    const int64_t *seen = seen_of(s, all->sample, query);
    int last = 0, steep = 0;
    for (ptrdiff_t i = 0; i < b->queries; i++) {
        const ptrdiff_t from = smaller(larger(seen[2 * i] - key, 0), keys);
        const ptrdiff_t to = larger(smaller(seen[2 * i + 1] - key, keys), from);
        b->from[i] = (uint8_t)from;
        b->to[i] = (uint8_t)to;
        b->whole &= from == 0 && to == keys;
        last = from < to && to > last ? (int)to : last;
        steep |= i > 0 && (unsigned)(b->from[i] - b->from[i - 1]) > 1;
        steep |= i > 0 && (unsigned)(b->to[i] - b->to[i - 1]) > 1;
    }
    b->gradual = !steep;
    b->keys = last;
}

void NAME(attention_find_blocks)(const struct attention_shape *s, ptrdiff_t sample,
                                 struct blocks *blocks) {
    if (blocks->sample == sample || (blocks->sample >= 0 && s->seen_stride == 0)) return;
    blocks->sample = sample;
    blocks->length = s->seen ? 0 : s->length;
    blocks->keys = s->seen ? 0 : s->keys;
    for (ptrdiff_t i = 0; s->seen && i < s->length; i++) {
        const int64_t *seen = seen_of(s, sample, i);
        if (seen[0] >= seen[1]) continue;
        blocks->length = i + 1;
        blocks->keys = larger(blocks->keys, seen[1]);
    }
    struct block *block = blocks->at;
    for (ptrdiff_t i = 0; i < blocks->length; i += QUERIES) {
        for (ptrdiff_t j = 0; j < blocks->keys; j += KEYS) find_block(s, blocks, i, j, block++);
    }
}

struct block *NAME(attention_new_blocks)(const struct attention_shape *s, struct blocks *blocks) {
    const ptrdiff_t n = ceil_div(s->length, QUERIES) * ceil_div(s->keys, KEYS);
    *blocks = (struct blocks){.sample = -1, .at = malloc(larger(n, 1) * sizeof(struct block))};
    return blocks->at;
}

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
        const struct interval rows = queries_of(block, j, ROWS_COLUMNS);
        if (rows.from >= rows.to) continue;
        const struct gemm_rows task = {.a = a,
                                       .a_offset = a_offset + rows.from,
                                       .segment = &none,
                                       .b_row = &none,
                                       .segments = 1,
                                       .length = width,
                                       .b = b + (block->key + j) * width,
                                       .ldb = panel_width(length, block->key + j),
                                       .c = scores + j,
                                       .c_offset = c_offset + rows.from,
                                       .columns = smaller(block->keys - j, ROWS_COLUMNS)};
        NAME(gemm_rows)(rows.to - rows.from, &task);
    }
}

void NAME(attention_values)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                            const real *weights, const real *b, real *c, ptrdiff_t ldc,
                            int accumulate) {
    ptrdiff_t a_offset[QUERIES], c_offset[QUERIES];
    const ptrdiff_t none = 0, strip = block->whole ? QUERIES : STRIP;
    row_offsets(block->queries, PITCH, a_offset);
    row_offsets(block->queries, ldc, c_offset);
    for (ptrdiff_t i = 0; i < block->queries; i += strip) {
        const ptrdiff_t rows = smaller(block->queries - i, strip);
        const struct interval keys = keys_of(block, i, rows);
        for (ptrdiff_t j = 0; keys.from < keys.to && j < width; j += ROWS_COLUMNS) {
            const ptrdiff_t ldb = panel_width(width, j);
            const struct gemm_rows task = {.a = weights + keys.from,
                                           .a_offset = a_offset + i,
                                           .segment = &none,
                                           .b_row = &none,
                                           .segments = 1,
                                           .length = keys.to - keys.from,
                                           .b = b + j * length + (block->key + keys.from) * ldb,
                                           .ldb = ldb,
                                           .c = c + j,
                                           .c_offset = c_offset + i,
                                           .columns = smaller(width - j, ROWS_COLUMNS),
                                           .accumulate = accumulate};
            NAME(gemm_rows)(rows, &task);
        }
    }
}

void NAME(attention_outer)(const struct block *block, ptrdiff_t length, ptrdiff_t width,
                           const real *weights, const real *b, real *c, ptrdiff_t ldc,
                           int accumulate) {
    const ptrdiff_t none = 0, strip = block->whole ? KEYS : STRIP;
    for (ptrdiff_t r = 0; r < block->keys; r += strip) {
        const ptrdiff_t keys = smaller(block->keys - r, strip);
        const struct interval rows = queries_of(block, r, keys);
        for (ptrdiff_t j = 0; rows.from < rows.to && j < width; j += ROWS_COLUMNS) {
            const ptrdiff_t ldb = panel_width(width, j);
            const struct gemm_outer task = {
                .a = weights + rows.from * PITCH + r,
                .a_offset = &none,
                .lda = PITCH,
                .b = b + j * length + (block->query + rows.from) * ldb,
                .b_offset = &none,
                .ldb = ldb,
                .segments = 1,
                .length = rows.to - rows.from,
                .c = c + r * ldc + j,
                .ldc = ldc,
                .columns = smaller(width - j, ROWS_COLUMNS),
                .accumulate = accumulate,
            };
            NAME(gemm_outer)(keys, &task);
        }
    }
}

void NAME(attention_add_bias)(const struct attention_shape *s, ptrdiff_t head,
                              const struct block *block, real *scores) {
    const real unscaled = (real)(1 / s->scale);
    const real slope = s->slopes ? (real)(s->slopes[head] / s->scale) : 0;
    for (ptrdiff_t i = 0; i < block->queries; i++) {
        real *row = scores + i * PITCH;
        const ptrdiff_t query = block->query + i, from = block->from[i], to = block->to[i];
        if (s->bias) {
            const real *bias =
                (const real *)s->bias + (head * s->length + query) * s->keys + block->key;
            for (ptrdiff_t j = from; j < to; j++) row[j] += bias[j] * unscaled;
        }
        const int ahead = (int)(s->query + query - s->key - block->key);
        for (int j = (int)from; s->slopes && j < to; j++) {
            row[j] -= slope * (real)(j < ahead ? ahead - j : j - ahead);
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
