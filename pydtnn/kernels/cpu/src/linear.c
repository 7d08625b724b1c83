/* Fully connected layers: three matrix products.
 *
 *   forward           y = x w' + b    rows of w, x' packed, y' turned; or rows of x, w' packed
 *   backward_data     dx = dy w       rows of dy, blocks of w packed
 *   backward_filter   dw = dy' x      gemm_outer, blocks of both packed, of dy as tiles read it
 *
 * C is cut into chunks, computed in parallel; inside one the summed index is cut into blocks of
 * DEPTH, so that float32 sums in blocks. A block of A of a chunk stays in L2, and what a tile needs
 * of it and of a panel of B in L1; so A is read once, and panels of B once per block, from L3. Only
 * where a chunk packs its part of B does it have at most COLUMNS. Every element of C is one sum, in
 * an order that does not depend on the chunks: their number and size can be chosen for an even
 * distribution over threads.
 *
 * In forward both operands lie with the summed index inside, so one must be turned while packing:
 * the smaller one, which for a batch of 64 is x; then lanes are samples. Operands are read in place
 * along their rows; blocks of those that are summed across rows, each on another page, are packed on
 * the way, row by row, into scratch memory of the thread. Expected: 0.8 of the peak from a batch of
 * 64 up; below a vector of samples it is bound by reading w, and linear_few.c handles a few samples.
 *
 * linear_pairs.c compiles this file again for pairs of bfloat16.
 */
#include <limits.h>
#include <stdlib.h>

#include "amx.h"
#include "gemm.h"
#include "linear_parts.h"
#include "products.h"

enum { ROWS_ROWS = VECTOR_BYTES == 64 ? 14 : 6 }; /* of gemm_rows: chunks are whole tiles */
enum { LEAST_ROWS = 16, MOST_ROWS = 336, COLUMNS = 8 * ROWS_COLUMNS, DEPTH = 512 };
enum { BLOCK = 256 * 1024 / sizeof(real) }; /* of A, which stays in L2 while panels of B follow */
/* Samples and columns of x that are packed at a time; with ROWS columns of dy they fit in L2. */
enum { FILTER_DEPTH = 256, ROWS = 108 };
enum { WIDE = 1536 / (sizeof(real) * OUTER_COLUMNS) * OUTER_COLUMNS };
/* Columns of dy that a tile of gemm_outer reads, and the distance between those of two tiles, which
 * are packed so that they fill L1 with nothing else. */
enum { TILE = OUTER_ROWS, TILE_SIZE = FILTER_DEPTH * TILE + LANES };
enum { FILTER_SCRATCH = FILTER_DEPTH * (WIDE + ROWS + LANES) + ROWS / TILE * LANES };
#if defined PAIRS && HAS_AMX
enum { LEAST_TILED = INT_MAX }; /* samples; gemm_amx.c has larger tiles */
#else
enum { LEAST_TILED = FILTER_DEPTH }; /* samples: for fewer, tiles take longer to pack */
#endif

/* C[i, j] = start[j] + sum over k of A[i lda + k] B[k, j]. B lies in packed panels, or as a matrix
 * with rows of ldb, of which each chunk packs its columns. */
struct product {
    ptrdiff_t rows, columns, depth;
    const real *a;
    ptrdiff_t lda;
    const real *b;
    ptrdiff_t ldb; /* 0: packed panels */
    real *c;
    ptrdiff_t ldc;
    const real *start; /* in whole vectors, or NULL */
};

/* How many pieces to cut `units` into that cross `others` pieces: at least `least`, and a few more
 * if every thread then has equally many. */
static ptrdiff_t pieces_for(ptrdiff_t units, ptrdiff_t least, ptrdiff_t others, int threads) {
    ptrdiff_t n = least;
    while (n < units && n * others % threads != 0) n++;
    return n * others % threads == 0 ? n : least;
}

/* Where piece i of n begins, or the one before ends, in elements: pieces are whole units of `unit`,
 * and equal but for one. */
static ptrdiff_t cut_at(ptrdiff_t elements, ptrdiff_t unit, ptrdiff_t n, ptrdiff_t i) {
    return smaller(ceil_div(elements, unit) * i / n * unit, elements);
}

/* Compute columns [begin, end) of rows [first, first + rows); scratch: DEPTH * COLUMNS. */
static void compute_chunk(const struct product *p, ptrdiff_t first, ptrdiff_t rows, ptrdiff_t begin,
                          ptrdiff_t end, real *scratch) {
    ptrdiff_t a_offset[MOST_ROWS], c_offset[MOST_ROWS], none = 0;
    for (ptrdiff_t i = 0; i < rows; i++) {
        a_offset[i] = (first + i) * p->lda;
        c_offset[i] = (first + i) * p->ldc;
    }
    for (ptrdiff_t k = 0; k < larger(p->depth, 1); k += DEPTH) {
        const ptrdiff_t depth = smaller(p->depth - k, DEPTH);
        if (p->ldb != 0) {
            NAME(gemm_pack_panels)(depth, end - begin, ROWS_COLUMNS, p->b + k * p->ldb + begin,
                                   p->ldb, depth * ROWS_COLUMNS, scratch);
        }
        for (ptrdiff_t j = begin; j < end; j += ROWS_COLUMNS) {
            const ptrdiff_t columns = smaller(end - j, ROWS_COLUMNS),
                            ldb = vectors_of(columns) * LANES;
            const real *packed = scratch + (j - begin) * depth;
            struct gemm_rows task = {.a = p->a + k,
                                     .a_offset = a_offset,
                                     .segment = &none,
                                     .b_row = &none,
                                     .segments = 1,
                                     .length = depth,
                                     .b = p->ldb ? packed : p->b + j * p->depth + k * ldb,
                                     .ldb = ldb,
                                     .c = p->c + j,
                                     .c_offset = c_offset,
                                     .columns = columns,
                                     .start = k == 0 && p->start ? p->start + j : NULL,
                                     .accumulate = k > 0};
            PRODUCTS(gemm_rows)(rows, &task);
        }
    }
}

/* Rows of A that stay in L2. */
static ptrdiff_t rows_of_block(ptrdiff_t depth) {
    return smaller(BLOCK / larger(smaller(depth, DEPTH), 1), MOST_ROWS);
}

static int compute(const struct product *p, int threads) {
    const ptrdiff_t panels = ceil_div(p->columns, ROWS_COLUMNS), tiles = p->rows / LEAST_ROWS;
    const ptrdiff_t block = rows_of_block(p->depth);
    ptrdiff_t down = ceil_div(p->rows, block), across = p->ldb ? ceil_div(p->columns, COLUMNS) : 1;
    if (p->ldb != 0) across = pieces_for(panels, across, down, threads); /* B is packed per row */
    down = pieces_for(tiles, down, across, threads);
    across = pieces_for(panels, across, down, threads);
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        real *scratch = NAME(scratch_new)(DEPTH * COLUMNS);
        if (!scratch) {
#pragma omp atomic write
            status = -1;
        }
#pragma omp for schedule(static) nowait
        for (ptrdiff_t i = 0; i < down * across; i++) {
            const ptrdiff_t r = i % down, c = i / down,
                            first = cut_at(p->rows, ROWS_ROWS, down, r),
                            end = cut_at(p->rows, ROWS_ROWS, down, r + 1);
            if (!scratch) continue;
            compute_chunk(p, first, end - first, cut_at(p->columns, ROWS_COLUMNS, across, c),
                          cut_at(p->columns, ROWS_COLUMNS, across, c + 1), scratch);
        }
        free(scratch);
    }
    return status;
}

/* Pack all of B, whose element (k, j) is at src[k + j stride], into panels. */
static void pack_turned(struct product *p, const real *src, ptrdiff_t stride, real *packed,
                        int threads) {
    p->b = packed;
    p->ldb = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (ptrdiff_t j = 0; j < p->columns; j += ROWS_COLUMNS) {
        NAME(gemm_pack)(p->depth, smaller(p->columns - j, ROWS_COLUMNS), src + j * stride, 1,
                        stride, packed + j * p->depth);
    }
}

/* Pack all of B, whose rows are `ldb` apart, into panels. */
static void pack_panels(struct product *p, real *packed, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int t = 0; t < threads; t++) {
        const ptrdiff_t j = cut_at(p->columns, ROWS_COLUMNS, threads, t),
                        end = cut_at(p->columns, ROWS_COLUMNS, threads, t + 1);
        NAME(gemm_pack_panels)(p->depth, end - j, ROWS_COLUMNS, p->b + j, p->ldb,
                               p->depth * ROWS_COLUMNS, packed + j * p->depth);
    }
    p->b = packed;
    p->ldb = 0;
}

/* y = c' + b, for c (outputs, batch) with rows of `width`. */
static void turn(const struct linear_shape *s, const real *c, ptrdiff_t width, const real *b,
                 real *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (ptrdiff_t j = 0; j < s->batch; j += LANES) {
        ptrdiff_t count = smaller(s->batch - j, LANES);
        NAME(gemm_transpose)(s->outputs, count, c + j, width, y + j * s->outputs, s->outputs);
        for (ptrdiff_t i = j; b && i < j + count; i++) {
            for (ptrdiff_t o = 0; o < s->outputs; o++) y[i * s->outputs + o] += b[o];
        }
    }
}

/* Forward with samples in the lanes: y' = w x'. */
static int forward_transposed(const struct linear_shape *s, const real *x, const real *w,
                              const real *b, real *y, int threads) {
    ptrdiff_t width = vectors_of(s->batch) * LANES;
    real *packed = NAME(scratch_new)(s->inputs * width + s->outputs * width);
    if (!packed) return -1;
    real *c = packed + s->inputs * width;
    struct product p = {.rows = s->outputs,
                        .columns = s->batch,
                        .depth = s->inputs,
                        .a = w,
                        .lda = s->inputs,
                        .c = c,
                        .ldc = width};
    pack_turned(&p, x, s->inputs, packed, threads);
    const int status = compute(&p, threads);
    turn(s, c, width, b, y, threads);
    free(packed);
    return status;
}

/* Forward with outputs in the lanes: y = x w'. */
static int forward_direct(const struct linear_shape *s, const real *x, const real *w, const real *b,
                          real *y, int threads) {
    ptrdiff_t width = vectors_of(s->outputs) * LANES;
    real *packed = NAME(scratch_new)((s->inputs + 1) * width), *start = packed + s->inputs * width;
    if (!packed) return -1;
    for (ptrdiff_t j = 0; j < width; j++) start[j] = b && j < s->outputs ? b[j] : 0;
    struct product p = {.rows = s->batch,
                        .columns = s->outputs,
                        .depth = s->inputs,
                        .a = x,
                        .lda = s->inputs,
                        .c = y,
                        .ldc = s->outputs,
                        .start = start};
    pack_turned(&p, w, s->inputs, packed, threads);
    const int status = compute(&p, threads);
    free(packed);
    return status;
}

int PRODUCTS(linear_forward)(const struct linear_shape *s, const void *x, const void *w,
                             const void *b, void *y, int threads) {
    if (s->batch < FEW) {
        NAME(few_forward)(s, x, w, b, y, threads);
        return 0;
    }
    /* Cost per input: products of whole vectors, and one for each element that is packed. */
    ptrdiff_t direct = s->batch * vectors_of(s->outputs) + s->outputs,
              turned = s->outputs * vectors_of(s->batch) + s->batch;
    return (direct <= turned ? forward_direct : forward_transposed)(s, x, w, b, y, threads);
}

int PRODUCTS(linear_backward_data)(const struct linear_shape *s, const void *dy, const void *w,
                                   void *dx, int threads) {
    if (s->batch < FEW) {
        NAME(few_backward_data)(s, dy, w, dx, threads);
        return 0;
    }
    struct product p = {.rows = s->batch,
                        .columns = s->inputs,
                        .depth = s->outputs,
                        .a = dy,
                        .lda = s->outputs,
                        .b = w,
                        .ldb = s->inputs,
                        .c = dx,
                        .ldc = s->inputs};
    if (s->batch <= 2 * rows_of_block(s->outputs)) return compute(&p, threads);
    /* so many rows would pack w again and again */
    real *packed = NAME(scratch_new)(s->outputs * vectors_of(s->inputs) * LANES);
    if (!packed) return -1;
    pack_panels(&p, packed, threads);
    const int status = compute(&p, threads);
    free(packed);
    return status;
}

/* Columns [begin, end) of rows [first, first + rows) of dw; scratch: FILTER_SCRATCH. */
static void filter_chunk(const struct linear_shape *s, const real *x, const real *dy, real *dw,
                         ptrdiff_t first, ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end,
                         int accumulate, real *scratch) {
    real *const x_packed = scratch, *const dy_packed = scratch + FILTER_DEPTH * WIDE;
    const ptrdiff_t none = 0, pieces = ceil_div(rows, ROWS);
    const int tiled = s->batch >= LEAST_TILED;
    const ptrdiff_t unit = tiled ? TILE : 1;
    for (ptrdiff_t k = 0; k < larger(s->batch, 1); k += FILTER_DEPTH) {
        const ptrdiff_t depth = smaller(s->batch - k, FILTER_DEPTH);
        NAME(gemm_pack_panels)(depth, end - begin, OUTER_COLUMNS, x + k * s->inputs + begin,
                               s->inputs, FILTER_DEPTH * OUTER_COLUMNS, x_packed);
        for (ptrdiff_t piece = 0; piece < pieces; piece++) {
            const ptrdiff_t top = first + cut_at(rows, unit, pieces, piece),
                            count = first + cut_at(rows, unit, pieces, piece + 1) - top,
                            tile = tiled ? TILE : larger(count, 1);
            const real *from = dy + k * s->outputs + top;
            if (tiled) {
                NAME(gemm_pack_tiles)(depth, count, TILE, from, s->outputs, TILE_SIZE, dy_packed);
            } else {
                NAME(gemm_pack)(depth, count, from, s->outputs, 1, dy_packed);
            }
            for (ptrdiff_t j = begin; j < end; j += OUTER_COLUMNS) {
                const ptrdiff_t columns = smaller(end - j, OUTER_COLUMNS);
                struct gemm_outer task = {.a = dy_packed,
                                          .a_offset = &none,
                                          .lda = tiled ? TILE : vectors_of(count) * LANES,
                                          .b = x_packed + (j - begin) * FILTER_DEPTH,
                                          .b_offset = &none,
                                          .ldb = vectors_of(columns) * LANES,
                                          .segments = 1,
                                          .length = depth,
                                          .c = dw + top * s->inputs + j,
                                          .ldc = s->inputs,
                                          .columns = columns,
                                          .accumulate = accumulate || k > 0};
                for (ptrdiff_t i = 0; i < count; i += tile) {
                    const ptrdiff_t height = smaller(count - i, tile);
                    /* rows of a tile of dw are far apart, and were last used a block of x ago */
                    for (ptrdiff_t row = 0; tiled && task.accumulate && row < height; row++)
                        __builtin_prefetch(task.c + row * s->inputs, 1);
                    PRODUCTS(gemm_outer)(height, &task);
                    task.a += TILE_SIZE;
                    task.c += tile * s->inputs;
                }
            }
        }
    }
}

int PRODUCTS(linear_backward_filter)(const struct linear_shape *s, const void *x, const void *dy,
                                     void *dw, int accumulate, int threads) {
    if (s->batch < FEW) {
        NAME(few_backward_filter)(s, x, dy, dw, accumulate, threads);
        return 0;
    }
    const ptrdiff_t panels = ceil_div(s->inputs, OUTER_COLUMNS), tiles = s->outputs / LEAST_ROWS;
    ptrdiff_t across = ceil_div(s->inputs, WIDE);
    const ptrdiff_t down = pieces_for(tiles, 1, across, threads);
    across = pieces_for(panels, across, down, threads);
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        real *scratch = NAME(scratch_new)(FILTER_SCRATCH);
        if (!scratch) {
#pragma omp atomic write
            status = -1;
        }
        /* chunks of a thread are neighbours in dw, as what it updates then will be */
#pragma omp for schedule(static) nowait
        for (ptrdiff_t i = 0; i < down * across; i++) {
            const ptrdiff_t r = i / across, c = i % across, first = cut_at(s->outputs, 1, down, r);
            if (!scratch) continue;
            filter_chunk(s, x, dy, dw, first, cut_at(s->outputs, 1, down, r + 1) - first,
                         cut_at(s->inputs, OUTER_COLUMNS, across, c),
                         cut_at(s->inputs, OUTER_COLUMNS, across, c + 1), accumulate, scratch);
        }
        free(scratch);
    }
    return status;
}

#ifndef PAIRS
static int backward_bias(const void *dy, ptrdiff_t rows, ptrdiff_t columns, void *out,
                         int accumulate, int threads) {
    return NAME(linear_bias)(dy, rows, columns, out, accumulate, threads);
}

static int add_rows(const void *dy, const int64_t *chosen, ptrdiff_t rows, void *out,
                    ptrdiff_t count, ptrdiff_t columns, int accumulate, int threads) {
    return NAME(linear_add_rows)(dy, chosen, rows, out, count, columns, accumulate, threads);
}

#if STORED_BF16
#define KERNEL(name) NAME(stored_##name)
#else
#define KERNEL(name) NAME(linear_##name)
#endif

const struct linear_kernels NAME(linear_kernels) = {.forward = KERNEL(forward),
                                                    .backward_data = KERNEL(backward_data),
                                                    .backward_filter = KERNEL(backward_filter),
                                                    .backward_bias = backward_bias,
                                                    .add_rows = add_rows};
#endif
