/* The matrix kernels of gemm.c for pairs of bfloat16, by tile registers.
 *
 * Blocks of 32 x 32 of C. Registers read rows of A where they lie if these are equally far apart;
 * otherwise, at the end of a sum, and where the summed index is outside, which turns A, 16 columns
 * of A are first copied to L1, with zeros behind the last. C is stored in place if its rows are
 * equally far apart and nothing is added.
 */
#include "amx.h"

#if HAS_AMX
/* Copies of 16 steps of A and of B, and of a block of C. */
struct block {
    real a[AMX_BLOCK * AMX_SIDE], b[AMX_SIDE * AMX_BLOCK], c[AMX_BLOCK * AMX_BLOCK];
};

/* Whether n offsets are `*stride` apart. */
static int equidistant(const ptrdiff_t *offset, ptrdiff_t n, ptrdiff_t *stride) {
    *stride = n > 1 ? offset[1] - offset[0] : 0;
    for (ptrdiff_t i = 2; i < n; i++) {
        if (offset[i] - offset[i - 1] != *stride) return 0;
    }
    return 1;
}

/* The last n < depth rows of B, and zeros. */
static const real *end_of_b(const struct amx_shape *s, const real *b, ptrdiff_t ldb, ptrdiff_t n,
                            real *copy) {
    const ptrdiff_t columns = s->columns[0] + s->columns[1];
    memset(copy, 0, (size_t)(s->depth * AMX_BLOCK) * sizeof *copy);
    for (ptrdiff_t k = 0; k < n; k++) {
        memcpy(copy + k * AMX_BLOCK, b + k * ldb, (size_t)columns * sizeof *copy);
    }
    return copy;
}

/* C += A B for n <= depth pairs; rows of A lie at a + offset[i], `lda` apart or, if it is negative,
 * anywhere. */
static void multiply(const struct amx_shape *s, const real *a, const ptrdiff_t *offset,
                     ptrdiff_t lda, const real *b, ptrdiff_t ldb, ptrdiff_t n,
                     struct block *block) {
    const ptrdiff_t rows = s->rows[0] + s->rows[1];
    if (n < s->depth) {
        b = end_of_b(s, b, ldb, n, block->b);
        ldb = AMX_BLOCK;
    }
    if (n == s->depth && lda >= 0) {
        amx_multiply(s, a + offset[0], lda, b, ldb);
        return;
    }
    for (ptrdiff_t i = 0; i < rows; i++) {
        vstore_part(block->a + i * AMX_SIDE, vload_part(a + offset[i], n), s->depth);
    }
    amx_multiply(s, block->a, AMX_SIDE, b, ldb);
}

/* Add a block that lies in `from` to rows of C, or write it there. */
static void write_rows(const real *from, ptrdiff_t rows, ptrdiff_t columns, int accumulate, real *c,
                       const ptrdiff_t *offset) {
    for (ptrdiff_t i = 0; i < rows; i++, from += AMX_BLOCK) {
        for (ptrdiff_t j = 0; j < columns; j += LANES) {
            const ptrdiff_t n = smaller(columns - j, LANES);
            real *to = c + offset[i] + j;
            const vec v = vload_part(from + j, n);
            vstore_part(to, accumulate ? vload_part(to, n) + v : v, n);
        }
    }
}

static void rows_block(const struct gemm_rows *t, ptrdiff_t first, ptrdiff_t rows) {
    const struct amx_shape s = amx_shape(rows, t->columns, t->length);
    const ptrdiff_t *in = t->a_offset + first, *out = t->c_offset + first;
    struct block block __attribute__((aligned(64)));
    ptrdiff_t lda, ldc;
    if (!equidistant(in, rows, &lda)) lda = -1;
    const int straight = equidistant(out, rows, &ldc) && ldc >= 0 && !t->accumulate;
    amx_begin(&s);
    if (t->start) {
        amx_load(&s, t->start, 0);
    } else {
        amx_clear(&s);
    }
    for (ptrdiff_t i = 0; i < t->segments; i++) {
        for (ptrdiff_t k = 0; k < t->length; k += s.depth) {
            multiply(&s, t->a + t->segment[i] + k, in, lda, t->b + (t->b_row[i] + k) * t->ldb,
                     t->ldb, smaller(t->length - k, s.depth), &block);
        }
    }
    if (straight) {
        amx_store(&s, t->c + out[0], ldc);
        return;
    }
    amx_store(&s, block.c, AMX_BLOCK);
    write_rows(block.c, rows, t->columns, t->accumulate, t->c, out);
}

void NAME(gemm_rows_pairs)(ptrdiff_t rows, const struct gemm_rows *task) {
    for (ptrdiff_t i = 0; i < rows; i += AMX_BLOCK) {
        rows_block(task, i, smaller(rows - i, AMX_BLOCK));
    }
    amx_end();
}

static void outer_block(const struct gemm_outer *t, ptrdiff_t first, ptrdiff_t rows,
                        ptrdiff_t column, ptrdiff_t columns) {
    const struct amx_shape s = amx_shape(rows, columns, t->length);
    struct block block __attribute__((aligned(64)));
    ptrdiff_t in[AMX_BLOCK], out[AMX_BLOCK];
    real *turned = block.c; /* until C is stored */
    for (ptrdiff_t i = 0; i < rows; i++) {
        in[i] = i * AMX_SIDE;
        out[i] = (first + i) * t->ldc;
    }
    amx_begin(&s);
    amx_clear(&s);
    for (ptrdiff_t i = 0; i < t->segments; i++) {
        const real *a = t->a + t->a_offset[i] + first, *b = t->b + t->b_offset[i] + column;
        for (ptrdiff_t k = 0; k < t->length; k += s.depth) {
            const ptrdiff_t n = smaller(t->length - k, s.depth);
            NAME(gemm_transpose)(n, rows, a + k * t->lda, t->lda, turned, AMX_SIDE);
            multiply(&s, turned, in, AMX_SIDE, b + k * t->ldb, t->ldb, n, &block);
        }
    }
    amx_store(&s, block.c, AMX_BLOCK);
    write_rows(block.c, rows, columns, t->accumulate, t->c + column, out);
}

void NAME(gemm_outer_pairs)(ptrdiff_t rows, const struct gemm_outer *task) {
    for (ptrdiff_t i = 0; i < rows; i += AMX_BLOCK) {
        for (ptrdiff_t j = 0; j < task->columns; j += AMX_BLOCK) {
            outer_block(task, i, smaller(rows - i, AMX_BLOCK), j,
                        smaller(task->columns - j, AMX_BLOCK));
        }
    }
    amx_end();
}
#else
typedef int there_are_no_tile_registers; /* an empty source is no C */
#endif
