/* Scaled dot-product attention in blocks, without a matrix of all weights.
 *
 * The weights of a head are computed in blocks of QUERIES x KEYS, by gemm_rows from the queries
 * where they lie and packed keys. Forward goes along a row of blocks and keeps each query's
 * largest score so far and its sum of exponentials; both are corrected, with the output, when a
 * larger score appears. A row needs no more than the logarithm of its sum for backward, which
 * computes each block again. Causal attention skips the blocks above the diagonal, and in those on
 * it what panels and strips of rows do not need.
 *
 *   forward    s = q k' / sqrt(E)     gemm_rows, keys turned and scaled while they are packed
 *              y += exp(s - top) v    gemm_rows
 *   backward   see attention_backward.c
 *
 * Packed operands of a head, T x E elements each, stay in L2 up to some 500 positions of 64
 * elements. A thread computes whole heads, so each sum has one order for any number of threads.
 * Expected: 0.55 of the peak of multiply-adds with E = 64 and 200 positions, where exponentials and
 * packing take most of the rest; heads narrower than a vector waste lanes.
 *
 * Ideas: Dao et al., "FlashAttention", NeurIPS 2022, algorithms 1 and 4; the running maximum:
 * Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
 */
#include "attention_parts.h"
#include "rows.h"

/* Replace a block of scores by weights exp(s - top), dropped ones 0, and update the largest scores
 * and sums of its queries. Outputs so far are multiplied by exp(old top - top). */
static void weigh(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                  const struct block *block, real *score, real *top, real *sum, real *y,
                  ptrdiff_t ldy) {
    for (ptrdiff_t i = 0; i < block->queries; i++) {
        real *row = score + i * KEYS, *out = y + i * ldy;
        const ptrdiff_t seen = seen_by(block, i);
        memset(row + seen, 0, (size_t)zeros_of(block, i) * sizeof(real));
        if (seen == 0) continue;
        const real largest = row_max(row, seen), before = top[i];
        top[i] = largest > before ? largest : before;
        vec last;
        const real added = row_exp(row, seen, top[i], row, &last);
        vstore_part(row + seen - seen % LANES, last, seen % LANES);
        if (block->key == 0) {
            sum[i] = added;
        } else {
            const vec correction = vexp(vset(before - top[i]));
            sum[i] = sum[i] * correction[0] + added;
            ptrdiff_t e = 0;
            for (; e + LANES <= s->width; e += LANES) vstore(out + e, vload(out + e) * correction);
            vstore_part(out + e, vload_part(out + e, s->width - e) * correction, s->width - e);
        }
        if (s->samples) {
            real factor[KEYS] __attribute__((aligned(64)));
            NAME(attention_mask)(s, sample, head, block->query + i, block->key, seen,
                                 factor);
            for (ptrdiff_t j = 0; j < seen; j += LANES) {
                const ptrdiff_t n = smaller(seen - j, LANES);
                store(row + j, load(row + j, n) * vload(factor + j), n);
            }
        }
    }
}

/* Divide outputs by the sums, and store the logarithms of the sums. */
static void normalize(const struct attention_shape *s, ptrdiff_t queries, const real *top,
                      const real *sum, real *y, ptrdiff_t ldy, real *log_sums) {
    for (ptrdiff_t i = 0; i < queries; i++) {
        const vec inverse = vset(1 / sum[i]);
        real *out = y + i * ldy;
        for (ptrdiff_t e = 0; e < s->width; e += LANES) {
            const ptrdiff_t n = smaller(s->width - e, LANES);
            store(out + e, load(out + e, n) * inverse, n);
        }
        const vec logarithm = vlog(vset(sum[i]));
        log_sums[i] = top[i] + logarithm[0];
    }
}

static ptrdiff_t forward_scratch(const struct attention_shape *s) {
    return panels_size(s->width, s->length) + panels_size(s->length, s->width) + QUERIES * KEYS;
}

/* Output of one head; scratch: forward_scratch. */
static void forward_head(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                         const real *qkv, real *y, real *log_sums, real *scratch) {
    const ptrdiff_t length = positions(s, sample), width = s->width, ldy = s->heads * width,
                    ld = 3 * ldy;
    const real *q = qkv + sample * s->length * ld + head * width, *k = q + ldy, *v = k + ldy;
    real *keys_packed = scratch, *values = keys_packed + panels_size(width, length),
         *score = values + panels_size(length, width), top[QUERIES], sum[QUERIES];
    y += sample * s->length * ldy + head * width;
    log_sums += (sample * s->heads + head) * s->length;
    zero_rows(length, s->length, width, y, ldy);
    zero_rows(length, s->length, 1, log_sums, 1);
    NAME(attention_pack_turned)(length, width, k, ld, (real)(1 / __builtin_sqrt((double)width)),
                                keys_packed);
    NAME(attention_pack)(length, width, v, ld, values);
    for (ptrdiff_t i = 0; i < length; i += QUERIES) {
        const ptrdiff_t queries = smaller(length - i, QUERIES);
        for (ptrdiff_t r = 0; r < queries; r++) top[r] = (real)-__builtin_inf();
        for (ptrdiff_t j = 0; j < (s->causal ? i + queries : length); j += KEYS) {
            const struct block block = block_of(s, length, i, j);
            NAME(attention_scores)(&block, length, width, q + i * ld, ld, keys_packed, score);
            weigh(s, sample, head, &block, score, top, sum, y + i * ldy, ldy);
            NAME(attention_values)(&block, length, width, score, values, y + i * ldy, ldy);
        }
        normalize(s, queries, top, sum, y + i * ldy, ldy, log_sums + i);
    }
}

static int forward(const struct attention_shape *s, const void *qkv, void *y, void *log_sums,
                   int threads) {
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        real *scratch = NAME(scratch_new)(forward_scratch(s));
        if (!scratch) {
#pragma omp atomic write
            status = -1;
        }
#pragma omp for schedule(static) nowait
        for (ptrdiff_t i = 0; i < s->batch * s->heads; i++) {
            if (!scratch) continue;
            forward_head(s, i / s->heads, i % s->heads, qkv, y, log_sums, scratch);
        }
        free(scratch);
    }
    return status;
}

static int backward(const struct attention_shape *s, const void *dy, const void *qkv,
                    const void *y, const void *log_sums, void *dqkv, int threads) {
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        real *scratch = NAME(scratch_new)(NAME(attention_backward_scratch)(s));
        if (!scratch) {
#pragma omp atomic write
            status = -1;
        }
#pragma omp for schedule(static) nowait
        for (ptrdiff_t i = 0; i < s->batch * s->heads; i++) {
            if (!scratch) continue;
            NAME(attention_backward_head)(s, i / s->heads, i % s->heads, dy, qkv, y, log_sums,
                                          dqkv, scratch);
        }
        free(scratch);
    }
    return status;
}

const struct attention_kernels NAME(attention_kernels) = {.forward = forward,
                                                          .backward = backward};
