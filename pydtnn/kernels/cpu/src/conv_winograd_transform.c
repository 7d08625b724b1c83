/* The transforms of Winograd's tiles.
 *
 *   for each tile of a group
 *     for each phase and vector of channels    36 (or 16) vectors in registers
 *
 * Lanes are channels, so a transform is 12 (or 8) one-dimensional ones on vectors and no lane ever
 * moves: 144 operations for 36 loads and stores in F(4x4, 3x3). Matrices are `stride` elements
 * apart. gcc would address 36 of them by as many offsets, which do not fit in its registers: with
 * KEEP two pointers and a stride serve a row of matrices, then the next. Channels are computed in
 * whole vectors, and tiles of inputs with an output less as if they had all: what a canvas has
 * behind the last is read and never used. How far, is computed by `reach_of`.
 *
 * On Emerald Rapids a tile and vector of floats takes 28 ns forth and 19 back from L1, of 18 and 15
 * that the arithmetic needs, and 37 and 24 where the matrices come from L2.
 */
#include <assert.h>

#include "conv_winograd_parts.h"
#include "conv_winograd_points.h"
#include "stored.h"

/* Where a tile lies in its block, and the row of tiles of its kind that it is in. */
struct place {
    enum kind kind;
    ptrdiff_t image, row, column;
    struct range rows, columns;
};

INLINE struct place place_of(const struct tiling *t, const struct tile_block *block,
                             ptrdiff_t number) {
    struct place p = {.kind = 0};
    for (; p.kind < KINDS; p.kind++) {
        p.rows = rows_of(t, block, p.kind);
        p.columns = columns_of(t, p.kind);
        const ptrdiff_t per_image = p.rows.count * p.columns.count;
        if (number < block->images * per_image) {
            p.image = number / per_image;
            p.row = p.rows.first + number % per_image / p.columns.count;
            p.column = p.columns.first + number % per_image % p.columns.count;
            break;
        }
        number -= block->images * per_image;
    }
    return p;
}

/* The next row of tiles, which begins with number `next`, if that is before `end`. */
INLINE void next_row(const struct tiling *t, const struct tile_block *block, struct place *p,
                     ptrdiff_t next, ptrdiff_t end) {
    if (next >= end) return;
    p->column = p->columns.first;
    if (++p->row < p->rows.first + p->rows.count) return;
    p->row = p->rows.first;
    if (++p->image < block->images) return;
    *p = place_of(t, block, next);
}

/* For the tiles of a group, row by row: tile number `i` of it, `tiles` from `at` on in this row. */
#define FOR_ROWS(t, block, group, at, i, tiles)                                                 \
    struct place at = place_of(t, block, (group)->begin);                                       \
    const ptrdiff_t begin = (group)->begin, count = (group)->count;                             \
    for (ptrdiff_t i = 0, tiles;                                                                \
         i < count &&                                                                           \
         (tiles = smaller(at.columns.first + at.columns.count - at.column, count - i), 1);      \
         i += tiles, next_row(t, block, &at, begin + i, begin + count))

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

/* Which transform: of inputs, or of gradients of outputs. */
enum of { INPUT, GRADIENT };

/* From as many rows and columns as the tile has points, or outputs, to all matrices. Gradients of
 * outputs that a tile of this kind lacks are 0. */
INLINE void forth_tile(const int rows, const int columns, const int taps, const enum of of,
                       const enum form form, const enum kind kind, struct pitch by,
                       ptrdiff_t channels, const real *d, real *v) {
    const int line_only = rows == 1; /* there is no second pass */
    const int down = line_only ? 1 : points_of(rows, taps), across = points_of(columns, taps);
    const int height = of == INPUT ? down : rows, width = of == INPUT ? across : columns;
    const int high = height - fewer_rows(kind), wide = width - fewer_columns(kind);
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
            if (i < high) load_line(wide, p, pixel, x);
            UNROLL
            for (int j = 0; j < width; j++) {
                if (i >= high || j >= wide) x[j] = vzero();
            }
            if (of == INPUT) {
                input_points(across, x, 1, half + i * across);
            } else {
                gradient_points(across, columns, x, 1, half + i * across);
            }
            p += by.row;
            KEEP(p);
        }
        UNROLL
        for (int j = 0; j < across; j++) {
            if (line_only) {
                line[0] = half[j];
            } else if (of == INPUT) {
                input_points(down, half + j, across, line);
            } else {
                gradient_points(down, rows, half + j, across, line);
            }
            put_line(down, form, line, q, step);
            q += by.matrix;
            KEEP(q);
        }
    }
}

/* y of one tile, of which `high` x `wide` are inside the image; `whole`: all of it, and whole
 * vectors. */
INLINE void back_tile(const int rows, const int columns, const int taps, const int whole,
                      struct pitch by, ptrdiff_t channels, const real *m, const real *bias,
                      ptrdiff_t high, ptrdiff_t wide, real *y) {
    const int line_only = rows == 1;
    const int down = line_only ? 1 : points_of(rows, taps), across = points_of(columns, taps);
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
            output_points(across, columns, x, 1, half + i * columns);
            p += across * by.matrix;
            KEEP(p);
        }
        UNROLL
        for (int j = 0; j < columns; j++) {
            line[0] = half[j];
            if (!line_only) output_points(down, rows, half + j, columns, line);
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

/* Where a tile of a canvas begins; how far tiles of a row are apart. */
INLINE const real *at_place(const struct tiling *t, const struct canvas *c,
                            const struct place *at, const real *d) {
    return d + at->image * c->image + start_of(t, 0, c->phases, at->row) * c->row +
           start_of(t, 1, c->phases, at->column) * c->pixel;
}
INLINE ptrdiff_t apart(const struct place *at, const int columns, int phases) {
    return phases * (columns - fewer_columns(at->kind));
}

/* Lines that lie upright are computed as a row, whose pixels are as far apart as rows. */
INLINE int is_upright(const struct tiling *t) { return t->tile.columns == 1; }
INLINE enum kind kind_of_line(enum kind kind) {
    return fewer_rows(kind) || fewer_columns(kind) ? FEWER_COLUMNS : FULL;
}

/* Check that a canvas ends behind what the transform of a tile of `high` x `wide` pixels reads. */
INLINE void check_reach(const struct canvas *c, const real *d, const real *tile, ptrdiff_t high,
                        ptrdiff_t wide) {
    assert(tile - d + reach_of(c, high, wide) <= c->elements);
    (void)c, (void)d, (void)tile, (void)high, (void)wide;
}

INLINE void forth_tiles(const int rows, const int columns, const int taps, const enum of of,
                        const enum factors factors, const struct tiling *t,
                        const struct tile_block *block, const struct tile_group *group,
                        const struct canvas *canvas, const real *d, ptrdiff_t channels, real *v) {
    const int upright = rows == 1 && is_upright(t);
    const int parts = of == INPUT ? t->tile.parts : 1, all = rows == 1 ? parts : parts * parts;
    const ptrdiff_t next = upright ? canvas->row : canvas->pixel;
    const struct pitch by = pitch_of(canvas->row, next, group->stride);
#define FORTH_TILE(form, kind) \
    forth_tile(rows, columns, taps, of, form, kind, by, channels, from, q)
    FOR_ROWS(t, block, group, at, i, tiles) {
        const real *p = at_place(t, canvas, &at, d);
        const ptrdiff_t step = (upright ? 1 : apart(&at, columns, 1)) * canvas->pixel;
        const enum kind kind = rows == 1 ? kind_of_line(at.kind) : at.kind;
        const int whole = of == INPUT;
        const int down = whole ? reach_along(t->tile, 0) - 1 : -fewer_rows(at.kind);
        const int across = whole ? reach_along(t->tile, 1) - 1 : -fewer_columns(at.kind);
        check_reach(canvas, d, p + (tiles - 1) * step, t->tile.rows + down,
                    t->tile.columns + across);
        for (ptrdiff_t k = i * all; k < (i + tiles) * all; k++) {
            const ptrdiff_t j = k / all, part = k % all;
            const real *from = p + (j - i) * step +
                               taps * (part / parts * canvas->row + part % parts * next);
            real *q = v + (factors == PAIRED_TILES ? j / 2 : j) * group->width + part * channels;
            if (factors == PAIRED_INPUTS) {
                FORTH_TILE(HALVES, FULL);
            } else if (factors == PAIRED_TILES && j % 2 == 0) {
                FORTH_TILE(FIRST, FULL);
            } else if (factors == PAIRED_TILES) {
                FORTH_TILE(SECOND, FULL);
            } else if (of == INPUT || kind == FULL) {
                FORTH_TILE(REALS, FULL);
            } else if (rows == 1 || kind == FEWER_COLUMNS) {
                FORTH_TILE(REALS, FEWER_COLUMNS);
            } else if (kind == FEWER_ROWS) {
                FORTH_TILE(REALS, FEWER_ROWS);
            } else {
                FORTH_TILE(REALS, FEWER_BOTH);
            }
        }
    }
#undef FORTH_TILE
}

/* Inputs of 2 x 2 phases. A vector that ends in the next phase, or in the next tile, is written
 * before what belongs there. The phases of a row are one if all channels are there. */
INLINE void forth_phases(const int rows, const int taps, const struct tiling *t,
                         const struct tile_block *block, const struct tile_group *group,
                         const struct canvas *canvas, const real *d, ptrdiff_t channels, real *v) {
    const struct pitch by = pitch_of(2 * canvas->row, 2 * canvas->pixel, group->stride);
    const ptrdiff_t merged = channels == canvas->pixel ? 2 * channels : channels;
    FOR_ROWS(t, block, group, at, i, tiles) {
        const real *tile = at_place(t, canvas, &at, d);
        const ptrdiff_t step = apart(&at, rows, 2) * canvas->pixel;
        const int points = points_of(rows, taps);
        check_reach(canvas, d, tile + (tiles - 1) * step, points, points);
        for (ptrdiff_t j = i; j < i + tiles; j++, tile += step) {
            const real *p = tile;
            real *q = v + j * group->width;
            for (int row = 0; row < 2; row++, p += canvas->row) {
                for (ptrdiff_t c = 0; c < 2 * channels; c += merged, q += merged) {
                    forth_tile(rows, rows, taps, INPUT, REALS, FULL, by, merged,
                               c ? p + canvas->pixel : p, q);
                }
            }
        }
    }
}

INLINE void back_tiles(const int rows, const int columns, const int taps, const int phases,
                       const int vectors, const struct tiling *t, const struct tile_block *block,
                       const struct tile_group *group, ptrdiff_t channels, const real *m,
                       const real *bias, real *y, ptrdiff_t pixel) {
    const ptrdiff_t row = t->output[1] * pixel, top = start_of(t, 0, phases, block->row);
    const ptrdiff_t end = start_of(t, 0, phases, block->row + block->rows);
    const ptrdiff_t image = (smaller(end, t->output[0]) - top) * row;
    const int upright = rows == 1 && is_upright(t);
    const struct pitch by =
        pitch_of(phases * row, upright ? row : phases * pixel, group->stride);
    const ptrdiff_t section = group->width / (phases * phases);
    FOR_ROWS(t, block, group, at, i, tiles) {
        const ptrdiff_t down = start_of(t, 0, phases, block->row + at.row);
        const ptrdiff_t step = upright ? 1 : apart(&at, columns, phases);
        const enum kind kind = rows == 1 ? kind_of_line(at.kind) : at.kind;
        ptrdiff_t right = start_of(t, 1, phases, at.column);
        real *q = y + at.image * image + (down - top) * row + right * pixel;
        for (ptrdiff_t j = i; j < i + tiles; j++, right += step, q += step * pixel) {
            const real *p = m + j * group->width;
            for (int k = 0; k < phases * phases; k++, p += section) {
                const int below = k / phases, beside = k % phases;
                ptrdiff_t high = ceil_div(t->output[0] - down - below, phases);
                ptrdiff_t wide = ceil_div(t->output[1] - right - beside, phases);
                if (upright) {
                    wide = high;
                    high = 1;
                }
                real *to = q + below * row + beside * pixel;
                if (vectors && kind == FULL && high >= rows && wide >= columns) {
                    back_tile(rows, columns, taps, 1, by, channels, p, bias, rows, columns, to);
                } else {
                    back_tile(rows, columns, taps, 0, by, channels, p, bias,
                              smaller(high, rows - fewer_rows(kind)),
                              smaller(wide, columns - fewer_columns(kind)), to);
                }
            }
        }
    }
}

/* One function per size of tile and transform. */
#define ARGUMENTS \
    const struct tiling *t, const struct tile_block *block, const struct tile_group *group
#define FORTH(name, rows, columns, taps, of, factors)                                           \
    NOINLINE void name(ARGUMENTS, const struct canvas *canvas, const real *d,                   \
                       ptrdiff_t channels, real *v) {                                           \
        forth_tiles(rows, columns, taps, of, factors, t, block, group, canvas, d, channels, v); \
    }
#define FORTH_BOTH(rows, columns, taps)                                         \
    FORTH(input_##rows##x##columns##_##taps, rows, columns, taps, INPUT, SINGLE) \
    FORTH(gradient_##rows##x##columns##_##taps, rows, columns, taps, GRADIENT, SINGLE)
#define FORTH_PAIRS(rows, columns)                                                      \
    FORTH(input_##rows##x##columns##_by_inputs, rows, columns, 3, INPUT, PAIRED_INPUTS) \
    FORTH(input_##rows##x##columns##_by_tiles, rows, columns, 3, INPUT, PAIRED_TILES)   \
    FORTH(gradient_##rows##x##columns##_by_tiles, rows, columns, 3, GRADIENT, PAIRED_TILES)
#define FORTH_PHASES(rows, taps)                                                             \
    NOINLINE void input_phases_##rows##_##taps(ARGUMENTS, const struct canvas *canvas,       \
                                               const real *d, ptrdiff_t channels, real *v) { \
        forth_phases(rows, taps, t, block, group, canvas, d, channels, v);                   \
    }
#define BACK(name, rows, columns, taps, phases)                                                \
    NOINLINE void name(ARGUMENTS, ptrdiff_t channels, const real *m, const real *bias, real *y, \
                       ptrdiff_t pixel) {                                                      \
        back_tiles(rows, columns, taps, phases, channels % LANES == 0, t, block, group,        \
                   channels, m, bias, y, pixel);                                               \
    }
#define ALL(rows, columns, taps)    \
    FORTH_BOTH(rows, columns, taps) \
    BACK(output_##rows##x##columns##_##taps, rows, columns, taps, 1)
#define ALL_PHASES(rows, taps) \
    FORTH_PHASES(rows, taps)   \
    BACK(output_phases_##rows##_##taps, rows, rows, taps, 2)
ALL(2, 2, 3)
ALL(4, 4, 3)
ALL(4, 4, 2)
ALL(3, 3, 4)
ALL(1, 4, 3)
ALL(1, 5, 4)
ALL_PHASES(4, 3)
ALL_PHASES(4, 2)
ALL_PHASES(3, 4)

/* Of functions for all sizes that for this one. */
#if HAS_DOTS
ALL(2, 4, 3)
FORTH_PAIRS(2, 2)
FORTH_PAIRS(2, 4)
#define OF_PAIRS(tile, name, suffix) \
    ((tile).columns == 2 ? name##_2x2##suffix : name##_2x4##suffix)
#define OF_TWO(tile, name) OF_PAIRS(tile, name, _3)
#else
#define OF_TWO(tile, name) name##_2x2_3
#endif
#define OF_LINE(tile, name) ((tile).taps == 3 ? name##_1x4_3 : name##_1x5_4)
#define OF_SIZE(tile, name)                   \
    (is_line(tile)      ? OF_LINE(tile, name) \
     : (tile).taps == 2   ? name##_4x4_2        \
     : (tile).taps == 4 ? name##_3x3_4        \
     : (tile).rows == 4 ? name##_4x4_3        \
                        : OF_TWO(tile, name))
#define OF_TAPS(tile, name) \
    ((tile).taps == 2 ? name##_4_2 : (tile).taps == 3 ? name##_4_3 : name##_3_4)

void NAME(winograd_input)(ARGUMENTS, const struct canvas *canvas, const real *d, ptrdiff_t channels,
                          real *v) {
    if (canvas->phases == 2) {
        OF_TAPS(t->tile, input_phases)(t, block, group, canvas, d, channels, v);
        return;
    }
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
    if (t->phases == 2) {
        OF_TAPS(t->tile, output_phases)(t, block, group, channels, m, bias, y, pixel);
    } else {
        OF_SIZE(t->tile, output)(t, block, group, channels, m, bias, y, pixel);
    }
}
