/* Scaled dot-product attention in blocks, without a matrix of all weights.
 *
 * The weights of a head are computed in blocks of QUERIES x KEYS, by gemm_rows from the queries
 * where they lie and packed keys. Forward goes along a row of blocks and keeps each query's
 * largest score so far and its sum of exponentials; both are corrected, with the output, when a
 * larger score appears. The largest scores of all queries of a block are found first: no
 * exponential waits for one. A row needs no more than the logarithm of its sum for backward, which
 * computes each block again. Blocks in which no query sees a key are skipped, and in those where
 * some do not see all, what panels and strips of rows do not need.
 *
 *   forward    s = q k'                            gemm_rows, keys turned while they are packed
 *              y += exp((s - top) / sqrt(E)) v     gemm_rows
 *   backward   see attention_backward.c
 *
 * Packed operands of a head, T x E elements each, stay in L2 up to some 500 positions of 64
 * elements. A thread computes whole heads, so each sum has one order for any number of threads.
 * Expected: 0.65 of the peak of multiply-adds with E = 64 and 200 positions; the rest is packing,
 * exponentials, which take a tenth each, and partial tiles. Heads narrower than a vector waste
 * lanes.
 *
 * Ideas: Dao et al., "FlashAttention", NeurIPS 2022, algorithms 1 and 4; the running maximum:
 * Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
 */
#include "attention_parts.h"
#include "functions.h"

/* The largest score of each query so far, and the sum of its exponentials; in whole vectors. */
struct softmax {
    real top[QUERIES + LANES], sum[QUERIES + LANES];
};

/* Update the largest scores, and store what they were before. */
static void find_tops(const struct block *b, const real *score, real *top, real *before) {
    for (ptrdiff_t i = 0; i < b->queries; i++) {
        const real *row = score + i * PITCH;
        const ptrdiff_t from = b->from[i], to = b->to[i];
        const vec old = vset(top[i]);
        vec largest = old;
        ptrdiff_t j = from - from % LANES;
        if (j < from && j < to) largest = vmax(vector_of(row, j, from, to, old), old), j += LANES;
        for (; j + LANES <= to; j += LANES) largest = vmax(largest, vload(row + j));
        if (j < to) largest = vmax(largest, vector_of(row, j, from, to, old));
        before[i] = top[i];
        top[i] = vtop(largest);
    }
}

/* Replace a vector of scores by weights; return those of [from, to). */
INLINE vec weigh_part(real *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, real top, real factor) {
    vstore(row + j, vexp2((vector_of(row, j, from, to, vset(top)) - top) * factor));
    return vector_of(row, j, from, to, vzero());
}

/* Replace scores of row i by weights 2^((score - top) factor); return their sum. */
static real find_weights(const struct block *b, ptrdiff_t i, real top, real factor, real *row) {
    const ptrdiff_t from = b->from[i], to = b->to[i];
    vec sum = vzero();
    ptrdiff_t j = from - from % LANES;
    if (j < from && j < to) sum = weigh_part(row, j, from, to, top, factor), j += LANES;
    for (; j + LANES <= to; j += LANES) {
        const vec weight = vexp2((vload(row + j) - top) * factor);
        vstore(row + j, weight);
        sum += weight;
    }
    if (j < to) sum += weigh_part(row, j, from, to, top, factor);
    zero_unseen(b, i, row);
    return vsum(sum);
}

/* Multiply a row of outputs. */
INLINE void scale_row(ptrdiff_t width, real factor, real *y) {
    ptrdiff_t e = 0;
    for (; e + LANES <= width; e += LANES) vstore(y + e, vload(y + e) * factor);
    if (e < width) vstore_part(y + e, vload_part(y + e, width - e) * factor, width - e);
}

/* Replace a block of scores by weights, dropped ones 0. Sums and outputs so far, unless it is the
 * first block, are multiplied by 2^((old top - top) factor). */
static void weigh(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                  const struct block *b, int first, real *score, struct softmax *state, real *y,
                  ptrdiff_t ldy) {
    const real factor = to_powers_of_2(s);
    real correction[QUERIES + LANES];
    find_tops(b, score, state->top, correction);
    for (ptrdiff_t i = 0; !first && i < b->queries; i += LANES) {
        const vec before = vload(correction + i), top = vload(state->top + i);
        vstore(correction + i, vexp2(vselect(before == top, vzero(), before - top) * factor));
    }
    for (ptrdiff_t i = 0; i < b->queries; i++) {
        real *row = score + i * PITCH;
        const real added = find_weights(b, i, state->top[i], factor, row);
        state->sum[i] = first ? added : state->sum[i] * correction[i] + added;
        if (s->samples) {
            real kept[KEYS] __attribute__((aligned(64)));
            const ptrdiff_t from = b->from[i] - b->from[i] % LANES, to = b->to[i];
            NAME(attention_mask)(s, sample, head, b->query + i, b->key + from, to - from, kept);
            for (ptrdiff_t j = from; j < to; j += LANES) {
                vstore(row + j, vload(row + j) * vload(kept + j - from));
            }
            zero_unseen(b, i, row);
        }
    }
    for (ptrdiff_t i = 0; !first && i < b->queries; i++) {
        scale_row(s->width, correction[i], y + i * ldy);
    }
}

/* Divide outputs by the sums, and store the logarithms of the sums. */
static void normalize(const struct attention_shape *s, ptrdiff_t queries,
                      const struct softmax *state, real *y, ptrdiff_t ldy, real *log_sums) {
    for (ptrdiff_t i = 0; i < queries; i += LANES) {
        const vec log_sum = vload(state->top + i) * (real)s->scale + vlog(vload(state->sum + i));
        vstore_part(log_sums + i, log_sum, smaller(queries - i, LANES));
    }
    for (ptrdiff_t i = 0; i < queries; i++) {
        if (state->sum[i] > 0) scale_row(s->width, 1 / state->sum[i], y + i * ldy);
    }
}

static ptrdiff_t forward_scratch(const struct attention_shape *s) {
    return panels_size(s->width, s->keys) + panels_size(s->keys, s->width) + QUERIES * PITCH;
}

/* Output of one head; scratch: forward_scratch. */
static void forward_head(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                         const struct blocks *blocks, const real *q, const real *k, real *y,
                         real *log_sums, real *scratch) {
    const ptrdiff_t length = blocks->length, keys = blocks->keys, width = s->width,
                    ldy = s->heads * width, ldq = s->ldq;
    const struct block *block = blocks->at;
    real *keys_packed = scratch, *values = keys_packed + panels_size(width, keys),
         *score = values + panels_size(keys, width);
    struct softmax state;
    q += sample * s->length * ldq + head * width;
    k += sample * s->keys * s->ldk + head * width;
    y += sample * s->length * ldy + head * width;
    log_sums += (sample * s->heads + head) * s->length;
    zero_rows(s->seen ? 0 : length, s->length, width, y, ldy);
    for (ptrdiff_t i = length; i < s->length; i++) log_sums[i] = (real)-__builtin_inf();
    NAME(attention_pack_turned)(keys, width, k, s->ldk, keys_packed);
    NAME(attention_pack)(keys, width, k + ldy, s->ldk, values);
    for (ptrdiff_t i = 0; i < length; i += QUERIES) {
        const ptrdiff_t queries = smaller(length - i, QUERIES);
        for (ptrdiff_t r = 0; r < QUERIES + LANES; r++) {
            state.top[r] = (real)-__builtin_inf();
            state.sum[r] = 0;
        }
        int first = 1;
        for (ptrdiff_t j = 0; j < keys; j += KEYS, block++) {
            if (block->keys == 0) continue;
            NAME(attention_scores)(block, keys, width, q + i * ldq, ldq, keys_packed, score);
            if (s->bias || s->slopes) NAME(attention_add_bias)(s, head, block, score);
            weigh(s, sample, head, block, first, score, &state, y + i * ldy, ldy);
            NAME(attention_values)(block, keys, width, score, values, y + i * ldy, ldy,
                                   s->seen || !first);
            first = 0;
        }
        normalize(s, queries, &state, y + i * ldy, ldy, log_sums + i);
    }
}

static int forward(const struct attention_shape *s, const void *q, const void *k, void *y,
                   void *log_sums, int threads) {
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        struct blocks blocks;
        real *scratch = NAME(scratch_new)(forward_scratch(s));
        const int ready = NAME(attention_new_blocks)(s, &blocks) && scratch;
        if (!ready) {
#pragma omp atomic write
            status = -1;
        }
#pragma omp for schedule(static) nowait
        for (ptrdiff_t i = 0; i < s->batch * s->heads; i++) {
            if (!ready) continue;
            NAME(attention_find_blocks)(s, i / s->heads, &blocks);
            forward_head(s, i / s->heads, i % s->heads, &blocks, q, k, y, log_sums, scratch);
        }
        free(blocks.at);
        free(scratch);
    }
    return status;
}

static int backward(const struct attention_shape *s, const void *dy, const void *q, const void *k,
                    const void *y, const void *log_sums, void *dq, void *dk, void *dbias,
                    int threads) {
    /* the gradient of the bias of a head is a sum over samples */
    const ptrdiff_t samples = dbias ? s->batch : 1, size = s->length * s->keys;
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        struct blocks blocks;
        real *scratch = NAME(scratch_new)(NAME(attention_backward_scratch)(s));
        const int ready = NAME(attention_new_blocks)(s, &blocks) && scratch;
        if (!ready) {
#pragma omp atomic write
            status = -1;
        }
#pragma omp for schedule(static) nowait
        for (ptrdiff_t i = 0; i < (dbias ? 1 : s->batch) * s->heads; i++) {
            if (!ready) continue;
            real *own = dbias ? (real *)dbias + i * size : NULL;
            if (own) memset(own, 0, (size_t)size * sizeof(real));
            for (ptrdiff_t n = 0; n < samples; n++) {
                NAME(attention_find_blocks)(s, i / s->heads + n, &blocks);
                NAME(attention_backward_head)(s, i / s->heads + n, i % s->heads, &blocks, dy, q, k,
                                              y, log_sums, dq, dk, own, scratch);
            }
        }
        free(blocks.at);
        free(scratch);
    }
    return status;
}

const struct attention_kernels NAME(attention_kernels) = {.forward = forward,
                                                          .backward = backward};
