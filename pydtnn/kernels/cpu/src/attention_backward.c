/* Gradients of attention, block by block, with weights that are computed again.
 *
 *   p = exp(q k' scale - log_sums)        gemm_rows, as in forward
 *   dp = dy v'                            gemm_rows, values turned while they are packed
 *   ds = p (dp - sum(dy y)) scale         in the block
 *   dv += p' dy, dk += ds' q              gemm_outer, rows of dy and q packed
 *   dq += ds k                            gemm_rows, rows of k packed
 *
 * The sum over a row of p dp is that of dy y over the elements of the head, so a block needs no
 * others. Blocks are ordered by keys: dv and dk of a block of keys, KEYS x E elements, stay in L1
 * while the queries pass, and dq is in L2. Dropped weights are drawn again: p for dv and dp for ds
 * are multiplied by the same mask. Five products of the size of forward's two.
 *
 * Idea: Dao et al., "FlashAttention", NeurIPS 2022, appendix B.2 and algorithm 4.
 */
#include "attention_parts.h"
#include "functions.h"

/* Turn vectors j of a row of scores and of dp into those of weights for dv, and of ds. */
INLINE void differentiate_vector(real *p, real *dp, const real *kept, ptrdiff_t j, real factor,
                                 real log_sum, real dot, real scale) {
    const vec weight = vexp2(vload(p + j) * factor - log_sum);
    const vec mask = kept ? vload(kept + j) : vset(1);
    vstore(dp + j, weight * (vload(dp + j) * mask - dot) * scale);
    vstore(p + j, weight * mask);
}

/* Turn a block of scores into weights for dv, and one of dp into ds. */
static void differentiate(const struct attention_shape *s, ptrdiff_t sample, ptrdiff_t head,
                          const struct block *b, const real *log_sums, const real *dot, real *p,
                          real *dp, real *dbias) {
    const real scale = (real)s->scale, unscaled = (real)(1 / s->scale),
               factor = to_powers_of_2(s), log2_e = (real)1.4426950408889634;
    real kept[KEYS] __attribute__((aligned(64)));
    for (ptrdiff_t i = 0; i < b->queries; i++, p += PITCH, dp += PITCH) {
        const ptrdiff_t from = b->from[i] - b->from[i] % LANES, to = b->to[i];
        const real log_sum = log_sums[i] * log2_e;
        if (s->samples) {
            NAME(attention_mask)(s, sample, head, b->query + i, b->key + from, to - from, kept);
            for (ptrdiff_t j = 0; j < to - from; j += LANES) {
                differentiate_vector(p + from, dp + from, kept, j, factor, log_sum, dot[i], scale);
            }
        } else {
            for (ptrdiff_t j = from; j < to; j += LANES) {
                differentiate_vector(p, dp, 0, j, factor, log_sum, dot[i], scale);
            }
        }
        zero_unseen(b, i, p);
        zero_unseen(b, i, dp);
        if (dbias) {
            real *row = dbias + (b->query + i) * s->keys + b->key;
            for (ptrdiff_t j = b->from[i]; j < b->to[i]; j++) row[j] += dp[j] * unscaled;
        }
    }
}

/* Sum of dy y of each row. */
static void row_dots(const struct attention_shape *s, ptrdiff_t rows, const real *dy, const real *y,
                     real *dot) {
    for (ptrdiff_t i = 0; i < rows; i++) {
        vec sum = vzero();
        for (ptrdiff_t e = 0; e < s->width; e += LANES) {
            const ptrdiff_t n = smaller(s->width - e, LANES);
            sum += load(dy + e, n) * load(y + e, n);
        }
        dot[i] = vsum(sum);
        dy += s->heads * s->width;
        y += s->heads * s->width;
    }
}

ptrdiff_t NAME(attention_backward_scratch)(const struct attention_shape *s) {
    return 2 * panels_size(s->width, s->keys) + panels_size(s->keys, s->width) +
           2 * panels_size(s->length, s->width) + 2 * QUERIES * PITCH + s->length;
}

void NAME(attention_backward_head)(const struct attention_shape *s, ptrdiff_t sample,
                                   ptrdiff_t head, const struct blocks *blocks, const real *dy,
                                   const real *q, const real *k, const real *y,
                                   const real *log_sums, real *dq, real *dk, real *dbias,
                                   real *scratch) {
    const ptrdiff_t length = blocks->length, keys = blocks->keys, width = s->width,
                    ldy = s->heads * width, ldq = s->ldq, ldk = s->ldk;
    const ptrdiff_t at = sample * s->length * ldy + head * width,
                    at_q = sample * s->length * ldq + head * width,
                    at_k = sample * s->keys * ldk + head * width;
    const real *v = k + at_k + ldy;
    real *dv = dk + at_k + ldy;
    real *keys_turned = scratch, *values_turned = keys_turned + panels_size(width, keys),
         *q_rows = values_turned + panels_size(width, keys),
         *k_rows = q_rows + panels_size(length, width),
         *dy_rows = k_rows + panels_size(keys, width), *p = dy_rows + panels_size(length, width),
         *dp = p + QUERIES * PITCH, *dot = dp + QUERIES * PITCH;
    q += at_q;
    dq += at_q;
    k += at_k;
    dk += at_k;
    dy += at;
    log_sums += (sample * s->heads + head) * s->length;
    zero_rows(s->seen ? 0 : length, s->length, width, dq, ldq);
    zero_rows(s->seen ? 0 : keys, s->keys, width, dk, ldk);
    zero_rows(s->seen ? 0 : keys, s->keys, width, dv, ldk);
    NAME(attention_pack_turned)(keys, width, k, ldk, keys_turned);
    NAME(attention_pack_turned)(keys, width, v, ldk, values_turned);
    NAME(attention_pack)(length, width, q, ldq, q_rows);
    NAME(attention_pack)(keys, width, k, ldk, k_rows);
    NAME(attention_pack)(length, width, dy, ldy, dy_rows);
    row_dots(s, length, dy, y + at, dot);
    for (ptrdiff_t j = 0; j < keys; j += KEYS) {
        const struct block *block = blocks->at + j / KEYS;
        for (ptrdiff_t i = 0; i < length; i += QUERIES, block += ceil_div(keys, KEYS)) {
            if (block->keys == 0) continue;
            NAME(attention_scores)(block, keys, width, q + i * ldq, ldq, keys_turned, p);
            NAME(attention_scores)(block, keys, width, dy + i * ldy, ldy, values_turned, dp);
            if (s->bias || s->slopes) NAME(attention_add_bias)(s, head, block, p);
            differentiate(s, sample, head, block, log_sums + i, dot + i, p, dp, dbias);
            const int add = s->seen || i > 0; /* to what earlier queries gave */
            NAME(attention_outer)(block, length, width, p, dy_rows, dv + j * ldk, ldk, add);
            NAME(attention_outer)(block, length, width, dp, q_rows, dk + j * ldk, ldk, add);
            NAME(attention_values)(block, keys, width, dp, k_rows, dq + i * ldq, ldq,
                                   s->seen || j > 0);
        }
    }
}
