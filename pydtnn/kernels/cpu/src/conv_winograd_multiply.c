/* The products of Winograd's convolution: one small matrix product per matrix of the transform.
 *
 *   winograd_multiply   tiles x inputs times inputs x outputs, packed in panels: forward, data
 *   winograd_outer      outputs x tiles times tiles x inputs, as they come: gradients of filters
 *
 * As in gemm.c an element of A is broadcast and multiplied with 2 (or 1) vectors of B, and a block
 * of C stays in registers; but here the sums are short (as many as channels or tiles, 16 to 64) and
 * there are 36 products per group, so blocks are smaller and nothing is looked up. For 16, 32 and
 * 64 channels, and for 8, which are 16 in pairs, the strides of A's rows and the length of the sums
 * are constants. AVX-512 8x2 and 16x1, with 16 registers 6x2 and 12x1: 10 loads for 16
 * multiply-adds, and 17 for 16.
 *
 * Expected fraction of the peak from L1: 0.97 for two vectors, 0.88 for one, which is bound by the
 * loads and by the ends of its short sums; with matrices in L2 0.92 and 0.7.
 *
 * conv_winograd_pairs.c compiles this file again for products of pairs of bfloat16.
 */
#include "conv_winograd_parts.h"
#include "products.h"

/* Steps of the sum without a branch. Blocks of one vector serve 16 outputs, often of 16 inputs, and
 * a misprediction at the end of so short a sum would cost a tenth of the time. */
#ifdef PAIRS
enum { MOST_ROWS = 16, STEPS_1 = 8, STEPS = 4 };
#else
enum { MOST_ROWS = 16, STEPS_1 = 16, STEPS = 4 };
#endif

/* One step of the sum: vectors of B, one broadcast per row of A. */
#define MULTIPLY_ADD(b, element)                                         \
    do {                                                                 \
        vec w[2];                                                        \
        UNROLL                                                           \
        for (int j = 0; j < vectors; j++) w[j] = vload((b) + j * LANES); \
        UNROLL                                                           \
        for (int i = 0; i < rows; i++) {                                 \
            const vec x = broadcast(&(element));                         \
            UNROLL                                                       \
            for (int j = 0; j < vectors; j++)                            \
                sum[i][j] = add_product(sum[i][j], x, w[j]);             \
        }                                                                \
    } while (0)

/* A block of C: rows of A are lda apart; rows of B are packed. */
INLINE void multiply_block(const int rows, const int vectors, ptrdiff_t depth, const real *a,
                           ptrdiff_t lda, const real *b, real *c, ptrdiff_t ldc, int accumulate) {
    const int steps = vectors == 1 ? STEPS_1 : STEPS;
    vec sum[MOST_ROWS][2];
    const real *row[(MOST_ROWS + 2) / 3];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = vzero();
    }
    UNROLL
    for (int i = 0; i < (rows + 2) / 3; i++) row[i] = a + 3 * i * lda;
    const ptrdiff_t whole = depth - depth % steps;
    ptrdiff_t k = 0;
    for (; k < whole; k += steps) {
        UNROLL
        for (int u = 0; u < steps; u++) {
            MULTIPLY_ADD(b + u * vectors * LANES, row[i / 3][i % 3 * lda + k + u]);
        }
        b += steps * vectors * LANES;
    }
    for (; k < depth; k++) {
        MULTIPLY_ADD(b, row[i / 3][i % 3 * lda + k]);
        b += vectors * LANES;
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) {
            real *p = c + j * LANES;
            vstore(p, accumulate ? vload(p) + sum[i][j] : sum[i][j]);
        }
        c += ldc;
    }
}

/* A block of C: both operands have the summed index outside. */
INLINE void outer_block(const int rows, const int vectors, ptrdiff_t depth, const real *a,
                        ptrdiff_t lda, const real *b, ptrdiff_t ldb, real *c, ptrdiff_t ldc,
                        int accumulate) {
    vec sum[MOST_ROWS][2];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = vzero();
    }
    const ptrdiff_t whole = depth - depth % STEPS;
    ptrdiff_t k = 0;
    for (; k < whole; k += STEPS) {
        UNROLL
        for (int u = 0; u < STEPS; u++) {
            MULTIPLY_ADD(b, a[i]);
            a += lda;
            b += ldb;
        }
    }
    for (; k < depth; k++) {
        MULTIPLY_ADD(b, a[i]);
        a += lda;
        b += ldb;
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++) {
            real *p = c + j * LANES;
            vstore(p, accumulate ? vload(p) + sum[i][j] : sum[i][j]);
        }
        c += ldc;
    }
}

/* Blocks of all sizes, and the rows of C cut into them, largest first. The largest have variants
 * whose strides, and number of products, are constants, for matrices of as many channels. */
#define MULTIPLY(name, n, vectors, depth, lda)                                                  \
    NOINLINE void multiply_##name(const struct product *t, const real *a, const real *b,        \
                                  real *c) {                                                    \
        multiply_block(n, vectors, depth, a, lda, b, c, t->ldc, t->accumulate);                 \
    }
#define OUTER(name, n, vectors, lda, ldc)                                                         \
    NOINLINE void outer_##name(const struct product *t, const real *a, const real *b, real *c) { \
        outer_block(n, vectors, t->depth, a, lda, b, ldc, c, ldc, t->accumulate);                \
    }
#define BLOCK(n, vectors)                                 \
    MULTIPLY(n##x##vectors, n, vectors, t->depth, t->lda) \
    OUTER(n##x##vectors, n, vectors, t->lda, t->ldc)
#define BLOCK_OF(width, n, vectors)                              \
    MULTIPLY(n##x##vectors##_of_##width, n, vectors, width, width) \
    OUTER(n##x##vectors##_of_##width, n, vectors, width, width)
#define ROWS(block, n, step) \
    for (; i + n <= t->rows; i += n) block(t, a + i * step, b, c + i * t->ldc);
#define PANEL(kind, vectors, step, r0, r1, r2, r3, r4)                                        \
    static void kind##_panel_##vectors(const struct product *t, const real *a, const real *b, \
                                       real *c) {                                             \
        ptrdiff_t i = 0;                                                                      \
        switch (width_of_##kind(t)) {                                                         \
        case 8: ROWS(kind##_##r0##x##vectors##_of_8, r0, step) break;                         \
        case 16: ROWS(kind##_##r0##x##vectors##_of_16, r0, step) break;                       \
        case 32: ROWS(kind##_##r0##x##vectors##_of_32, r0, step) break;                       \
        case 64: ROWS(kind##_##r0##x##vectors##_of_64, r0, step) break;                       \
        }                                                                                     \
        ROWS(kind##_##r0##x##vectors, r0, step)                                               \
        ROWS(kind##_##r1##x##vectors, r1, step)                                               \
        ROWS(kind##_##r2##x##vectors, r2, step)                                               \
        ROWS(kind##_##r3##x##vectors, r3, step)                                               \
        ROWS(kind##_##r4##x##vectors, r4, step)                                               \
    }
#define PANELS(vectors, r0, r1, r2, r3, r4)              \
    BLOCK_OF(8, r0, vectors)                             \
    BLOCK_OF(16, r0, vectors)                            \
    BLOCK_OF(32, r0, vectors)                            \
    BLOCK_OF(64, r0, vectors)                            \
    BLOCK(r0, vectors)                                   \
    BLOCK(r1, vectors)                                   \
    BLOCK(r2, vectors)                                   \
    BLOCK(r3, vectors)                                   \
    BLOCK(r4, vectors)                                   \
    PANEL(multiply, vectors, t->lda, r0, r1, r2, r3, r4) \
    PANEL(outer, vectors, 1, r0, r1, r2, r3, r4)

/* The width of matrices whose strides are equal; 0 otherwise. */
INLINE ptrdiff_t width_of_multiply(const struct product *t) {
    return t->lda == t->depth ? t->depth : 0;
}
INLINE ptrdiff_t width_of_outer(const struct product *t) { return t->lda == t->ldc ? t->lda : 0; }

#if VECTOR_BYTES == 64
PANELS(1, 16, 8, 4, 2, 1)
PANELS(2, 8, 6, 4, 2, 1)
#else
PANELS(1, 12, 8, 4, 2, 1)
PANELS(2, 6, 4, 3, 2, 1)
#endif

void PRODUCTS(winograd_multiply)(const struct product *t, const real *a, const real *u, real *c) {
    ptrdiff_t j = 0;
    for (; j + LANES < t->columns; j += 2 * LANES) {
        multiply_panel_2(t, a, u + j * t->in + t->first * 2 * LANES, c + j);
    }
    if (j < t->columns) multiply_panel_1(t, a, u + j * t->in + t->first * LANES, c + j);
}

void PRODUCTS(winograd_outer)(const struct product *t, const real *a, const real *b, real *c) {
    ptrdiff_t j = 0;
    for (; j + LANES < t->columns; j += 2 * LANES) outer_panel_2(t, a, b + j, c + j);
    if (j < t->columns) outer_panel_1(t, a, b + j, c + j);
}
