/* The transforms of Winograd's tiles.
 *
 *   for each tile of a group
 *     for each vector of channels    36 (or 16) vectors in registers
 *
 * Lanes are channels, so a transform is 12 (or 8) one-dimensional ones on vectors and no lane ever
 * moves: 144 operations for 36 loads and stores in F(4x4, 3x3). Matrices are `stride` elements
 * apart. gcc would address 36 of them by as many offsets, which do not fit in its registers: with
 * KEEP two pointers and a stride serve a row of matrices, then the next. Channels are computed in
 * whole vectors: what a canvas has behind the last is read and never used.
 *
 * On Emerald Rapids a tile and vector of floats takes 28 ns forth and 19 back from L1, of 18 and 15
 * that the arithmetic needs, and 37 and 24 where the matrices come from L2.
 */
#include "conv_winograd.h"
#include "conv_winograd_points.h"

/* Where a tile lies in its block. */
struct place {
    ptrdiff_t image, row, column;
};

INLINE struct place place_of(const struct tiling *t, const struct tile_block *block,
                             ptrdiff_t number) {
    const ptrdiff_t per_image = block->rows * t->tiles[1];
    return (struct place){number / per_image, number % per_image / t->tiles[1],
                          number % t->tiles[1]};
}

INLINE void advance(const struct tiling *t, const struct tile_block *block, struct place *p) {
    if (++p->column < t->tiles[1]) return;
    p->column = 0;
    if (++p->row < block->rows) return;
    p->row = 0;
    p->image++;
}

/* Vector number i of some that are `step` bytes apart, of which `odd` is the first. x86 scales an
 * index by 2, 4 and 8, so two pointers reach six vectors. */
#define PICK(even, odd, i, step) ((i) % 2 ? (odd) + ((i)-1) * (step) : (even) + (i) * (step))

INLINE void load_line(const int n, const char *p, ptrdiff_t step, vec *x) {
    const char *odd = p + step;
    KEEP(odd);
    UNROLL
    for (int i = 0; i < n; i++) x[i] = vload((const real *)PICK(p, odd, i, step));
}

INLINE void put_line(const int n, const enum form form, const vec *x, char *p, ptrdiff_t step) {
    char *odd = p + step;
    KEEP(odd);
    UNROLL
    for (int i = 0; i < n; i++) vput(form, (real *)PICK(p, odd, i, step), x[i]);
}

/* Strides in bytes. */
struct pitch {
    ptrdiff_t row, pixel, matrix;
};

INLINE struct pitch pitch_of(ptrdiff_t row, ptrdiff_t pixel, ptrdiff_t matrix) {
    const ptrdiff_t bytes = sizeof(real);
    return (struct pitch){row * bytes, pixel * bytes, matrix * bytes};
}

/* From two rows and columns more than the tile has, or as many for a gradient, to all matrices. */
INLINE void forth_tile(const int rows, const int columns, const int gradient, const enum form form,
                       struct pitch by, ptrdiff_t channels, const real *d, real *v) {
    const int down = rows + 2, across = columns + 2;
    const int height = gradient ? rows : down, width = gradient ? columns : across;
    const ptrdiff_t column = across * by.matrix;
    for (ptrdiff_t c = 0; c < channels; c += LANES) {
        vec x[MOST_POINTS], half[MOST_MATRICES], line[MOST_POINTS];
        const char *p = (const char *)(d + c);
        char *q = (char *)(v + (form == HALVES ? c / 2 : c));
        ptrdiff_t pixel = by.pixel, step = column;
        KEEP(pixel);
        KEEP(step);
        UNROLL
        for (int i = 0; i < height; i++) {
            load_line(width, p, pixel, x);
            if (gradient) {
                gradient_points(columns, x, 1, half + i * across);
            } else {
                input_points(columns, x, 1, half + i * across);
            }
            p += by.row;
            KEEP(p);
        }
        UNROLL
        for (int j = 0; j < across; j++) {
            if (gradient) {
                gradient_points(rows, half + j, across, line);
            } else {
                input_points(rows, half + j, across, line);
            }
            put_line(down, form, line, q, step);
            q += by.matrix;
            KEEP(q);
        }
    }
}

/* y of one tile, of which `high` x `wide` are inside the image; `whole`: all of it, and whole
 * vectors. */
INLINE void back_tile(const int rows, const int columns, const int whole, struct pitch by,
                      ptrdiff_t channels, const real *m, const real *bias, ptrdiff_t high,
                      ptrdiff_t wide, real *y) {
    const int down = rows + 2, across = columns + 2;
    for (ptrdiff_t c = 0; c < channels; c += LANES) {
        vec x[MOST_POINTS], half[MOST_MATRICES], line[MOST_POINTS];
        const vec start = bias ? vload(bias + c) : vzero();
        const ptrdiff_t lanes = smaller(channels - c, LANES);
        const char *p = (const char *)(m + c);
        char *q = (char *)(y + c);
        ptrdiff_t matrix = by.matrix, row = by.row;
        KEEP(matrix);
        KEEP(row);
        UNROLL
        for (int i = 0; i < down; i++) {
            load_line(across, p, matrix, x);
            output_points(columns, x, 1, half + i * columns);
            p += across * by.matrix;
            KEEP(p);
        }
        UNROLL
        for (int j = 0; j < columns; j++) {
            output_points(rows, half + j, columns, line);
            UNROLL
            for (int i = 0; i < rows; i++) line[i] += start;
            if (whole) {
                put_line(rows, REALS, line, q, row);
            } else if (j < wide) {
                UNROLL
                for (int i = 0; i < rows; i++) {
                    if (i < high) vstore_part((real *)(q + i * row), line[i], lanes);
                }
            }
            q += by.pixel;
            KEEP(q);
        }
    }
}

INLINE void forth_tiles(const int rows, const int columns, const int gradient,
                        const enum factors factors, const struct tiling *t, const struct tile_block *block,
                        const struct tile_group *group, const struct canvas *canvas, const real *d,
                        ptrdiff_t channels, real *v) {
    const struct pitch by = pitch_of(canvas->row, canvas->pixel, group->stride);
    struct place at = place_of(t, block, group->begin);
    for (ptrdiff_t i = 0; i < group->count; i++, advance(t, block, &at)) {
        const real *p = d + at.image * canvas->image +
                        at.row * rows * canvas->row + at.column * columns * canvas->pixel;
        real *q = v + (factors == PAIRED_TILES ? i / 2 : i) * group->width;
        if (factors == SINGLE) {
            forth_tile(rows, columns, gradient, REALS, by, channels, p, q);
        } else if (factors == PAIRED_INPUTS) {
            forth_tile(rows, columns, gradient, HALVES, by, channels, p, q);
        } else if (i % 2 == 0) {
            forth_tile(rows, columns, gradient, FIRST, by, channels, p, q);
        } else {
            forth_tile(rows, columns, gradient, SECOND, by, channels, p, q);
        }
    }
}

INLINE void back_tiles(const int rows, const int columns, const int vectors,
                       const struct tiling *t, const struct tile_block *block, const struct tile_group *group,
                       ptrdiff_t channels, const real *m, const real *bias, real *y,
                       ptrdiff_t pixel) {
    const ptrdiff_t row = t->output[1] * pixel, top = block->row * rows;
    const ptrdiff_t image = smaller(block->rows * rows, t->output[0] - top) * row;
    const struct pitch by = pitch_of(row, pixel, group->stride);
    struct place at = place_of(t, block, group->begin);
    for (ptrdiff_t i = 0; i < group->count; i++, advance(t, block, &at)) {
        const ptrdiff_t high = t->output[0] - top - at.row * rows;
        const ptrdiff_t wide = t->output[1] - at.column * columns;
        const real *p = m + i * group->width;
        real *q = y + at.image * image + at.row * rows * row + at.column * columns * pixel;
        if (vectors && high >= rows && wide >= columns) {
            back_tile(rows, columns, 1, by, channels, p, bias, rows, columns, q);
        } else {
            back_tile(rows, columns, 0, by, channels, p, bias, high, wide, q);
        }
    }
}

/* One function per size of tile and transform. */
#define ARGUMENTS \
    const struct tiling *t, const struct tile_block *block, const struct tile_group *group
#define FORTH(name, rows, columns, gradient, factors)                                           \
    NOINLINE void name(ARGUMENTS, const struct canvas *canvas, const real *d,                   \
                       ptrdiff_t channels, real *v) {                                           \
        forth_tiles(rows, columns, gradient, factors, t, block, group, canvas, d, channels, v); \
    }
#define FORTH_BOTH(rows, columns)                              \
    FORTH(input_##rows##x##columns, rows, columns, 0, SINGLE) \
    FORTH(gradient_##rows##x##columns, rows, columns, 1, SINGLE)
#define FORTH_PAIRS(rows, columns)                                               \
    FORTH(input_##rows##x##columns##_by_inputs, rows, columns, 0, PAIRED_INPUTS) \
    FORTH(input_##rows##x##columns##_by_tiles, rows, columns, 0, PAIRED_TILES)   \
    FORTH(gradient_##rows##x##columns##_by_tiles, rows, columns, 1, PAIRED_TILES)
#define BACK(rows, columns)                                                                     \
    NOINLINE void output_##rows##x##columns(ARGUMENTS, ptrdiff_t channels, const real *m,       \
                                            const real *bias, real *y, ptrdiff_t pixel) {       \
        back_tiles(rows, columns, channels % LANES == 0, t, block, group, channels, m, bias, y, \
                   pixel);                                                                      \
    }
FORTH_BOTH(2, 2)
FORTH_BOTH(4, 4)
BACK(2, 2)
BACK(4, 4)

/* Of functions for all sizes that for this one. */
#if HAS_DOTS
FORTH_BOTH(2, 4)
FORTH_PAIRS(2, 2)
FORTH_PAIRS(2, 4)
BACK(2, 4)
#define OF_PAIRS(tile, name, suffix) \
    ((tile).columns == 2 ? name##_2x2##suffix : name##_2x4##suffix)
#define OF_SIZE(tile, name) ((tile).rows == 4 ? name##_4x4 : OF_PAIRS(tile, name, ))
#else
#define OF_SIZE(tile, name) ((tile).rows == 4 ? name##_4x4 : name##_2x2)
#endif

void NAME(winograd_input)(ARGUMENTS, const struct canvas *canvas, const real *d, ptrdiff_t channels,
                          real *v) {
#if HAS_DOTS
    if (group->factors == PAIRED_INPUTS) {
        OF_PAIRS(t->tile, input, _by_inputs)(t, block, group, canvas, d, channels, v);
        return;
    }
    if (group->factors == PAIRED_TILES) {
        OF_PAIRS(t->tile, input, _by_tiles)(t, block, group, canvas, d, channels, v);
        return;
    }
#endif
    OF_SIZE(t->tile, input)(t, block, group, canvas, d, channels, v);
}

void NAME(winograd_gradient)(ARGUMENTS, const struct canvas *canvas, const real *g,
                             ptrdiff_t channels, real *z) {
#if HAS_DOTS
    if (group->factors == PAIRED_TILES) {
        OF_PAIRS(t->tile, gradient, _by_tiles)(t, block, group, canvas, g, channels, z);
        return;
    }
#endif
    OF_SIZE(t->tile, gradient)(t, block, group, canvas, g, channels, z);
}

void NAME(winograd_output)(ARGUMENTS, ptrdiff_t channels, const real *m, const real *bias, real *y,
                           ptrdiff_t pixel) {
    OF_SIZE(t->tile, output)(t, block, group, channels, m, bias, y, pixel);
}
