/* Products of matrices of pairs of bfloat16 by the tile registers of AMX.
 *
 * Eight registers have up to 16 rows of 64 bytes; their shapes are set by a configuration, which
 * also clears them. One instruction adds to a register of 16 x 16 floats the product of 16 x 16
 * pairs with 16 x 16 pairs: 8192 multiply-adds in 16 cycles, 16 times as many per cycle as one
 * vdpbf16ps. A block of C is 2 x 2 registers, which hide the latency of 52 cycles.
 *
 *   struct amx_shape              rows and columns of the block, pairs per step
 *   amx_begin(shape)              configure; amx_end() when all blocks are done
 *   amx_clear(shape), amx_load    the block: zeros, or from memory; a stride of 0 repeats one row
 *   amx_multiply(shape, a, b)     C += A B over `depth` pairs; rows of A and B are strides apart
 *   amx_store(shape, c)
 *
 * With EMULATED_AMX the instructions are functions with the same effect, also of what is outside
 * the configured shape, for tests on processors without AMX. Not measured: no processor with AMX
 * was at hand.
 *
 * Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18
 * ("Programming with Intel Advanced Matrix Extensions").
 */
#ifndef PYDTNN_AMX_H
#define PYDTNN_AMX_H

#include "gemm.h"

#if STORED_BF16 && (defined(__AMX_BF16__) || defined(EMULATED_AMX))
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

#if HAS_AMX
enum { AMX_SIDE = 16, AMX_BLOCK = 2 * AMX_SIDE };

/* The operand of LDTILECFG. */
struct amx_configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
};

#ifdef EMULATED_AMX
void NAME(emulated_configure)(const struct amx_configuration *configuration);
void NAME(emulated_zero)(int to);
void NAME(emulated_load)(int to, const void *from, ptrdiff_t stride);
void NAME(emulated_store)(int from, void *to, ptrdiff_t stride);
void NAME(emulated_dot)(int sum, int a, int b);
#define AMX_CONFIGURE(c) NAME(emulated_configure)(c)
#define AMX_RELEASE() NAME(emulated_configure)(&(struct amx_configuration){0})
#define AMX_ZERO(to) NAME(emulated_zero)(to)
#define AMX_LOAD(to, p, stride) NAME(emulated_load)(to, p, stride)
#define AMX_STORE(from, p, stride) NAME(emulated_store)(from, p, stride)
#define AMX_DOT(sum, a, b) NAME(emulated_dot)(sum, a, b)
#else
/* gcc's intrinsics do not tell the compiler which memory they read and write. */
#define AMX_WITH_MEMORY(operation)           \
    do {                                     \
        __asm__ volatile("" : : : "memory"); \
        operation;                           \
        __asm__ volatile("" : : : "memory"); \
    } while (0)
#define AMX_CONFIGURE(c) AMX_WITH_MEMORY(_tile_loadconfig(c))
#define AMX_RELEASE() _tile_release()
#define AMX_ZERO(to) _tile_zero(to)
#define AMX_LOAD(to, p, stride) AMX_WITH_MEMORY(_tile_loadd(to, p, (size_t)(stride)))
#define AMX_STORE(from, p, stride) AMX_WITH_MEMORY(_tile_stored(from, p, (size_t)(stride)))
#define AMX_DOT(sum, a, b) _tile_dpbf16ps(sum, a, b)
#endif

/* Rows and columns of the first and the second register along each side of a block of C, and pairs
 * that are summed in a step. */
struct amx_shape {
    ptrdiff_t rows[2], columns[2], depth;
};

INLINE struct amx_shape amx_shape(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth) {
    return (struct amx_shape){{smaller(rows, AMX_SIDE), larger(rows - AMX_SIDE, 0)},
                              {smaller(columns, AMX_SIDE), larger(columns - AMX_SIDE, 0)},
                              larger(smaller(depth, AMX_SIDE), 1)};
}

/* Registers: 0 to 3 are C, row by row; 4 and 5 A; 6 and 7 B. */
INLINE void amx_begin(const struct amx_shape *s) {
    struct amx_configuration c = {.palette = 1};
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) {
            const int used = s->rows[i] > 0 && s->columns[j] > 0;
            c.rows[2 * i + j] = (uint8_t)(used ? s->rows[i] : 0);
            c.bytes[2 * i + j] = (uint16_t)(used ? 4 * s->columns[j] : 0);
        }
        c.rows[4 + i] = (uint8_t)s->rows[i];
        c.bytes[4 + i] = (uint16_t)(s->rows[i] ? 4 * s->depth : 0);
        c.rows[6 + i] = (uint8_t)(s->columns[i] ? s->depth : 0);
        c.bytes[6 + i] = (uint16_t)(4 * s->columns[i]);
    }
    AMX_CONFIGURE(&c);
}
INLINE void amx_end(void) { AMX_RELEASE(); }

/* Operation (register, row of registers, column of registers) for the registers of C in use. */
#define AMX_EACH(s, operation)                                   \
    do {                                                         \
        operation(0, 0, 0);                                      \
        if ((s)->columns[1]) operation(1, 0, 1);                 \
        if ((s)->rows[1]) operation(2, 1, 0);                    \
        if ((s)->rows[1] && (s)->columns[1]) operation(3, 1, 1); \
    } while (0)

INLINE void amx_clear(const struct amx_shape *s) {
#define CLEAR(number, i, j) AMX_ZERO(number)
    AMX_EACH(s, CLEAR);
#undef CLEAR
}

/* Strides are in elements. */
INLINE void amx_load(const struct amx_shape *s, const real *c, ptrdiff_t stride) {
#define LOAD(number, i, j) AMX_LOAD(number, c + AMX_SIDE * ((i) * stride + (j)), 4 * stride)
    AMX_EACH(s, LOAD);
#undef LOAD
}

INLINE void amx_store(const struct amx_shape *s, real *c, ptrdiff_t stride) {
#define STORE(number, i, j) AMX_STORE(number, c + AMX_SIDE * ((i) * stride + (j)), 4 * stride)
    AMX_EACH(s, STORE);
#undef STORE
}

INLINE void amx_multiply(const struct amx_shape *s, const real *a, ptrdiff_t lda, const real *b,
                         ptrdiff_t ldb) {
    AMX_LOAD(4, a, 4 * lda);
    AMX_LOAD(6, b, 4 * ldb);
    AMX_DOT(0, 4, 6);
    if (s->columns[1]) {
        AMX_LOAD(7, b + AMX_SIDE, 4 * ldb);
        AMX_DOT(1, 4, 7);
    }
    if (!s->rows[1]) return;
    AMX_LOAD(5, a + AMX_SIDE * lda, 4 * lda);
    AMX_DOT(2, 5, 6);
    if (s->columns[1]) AMX_DOT(3, 5, 7);
}
#endif

#endif
