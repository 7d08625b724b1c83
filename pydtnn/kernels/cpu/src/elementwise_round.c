/* Rounding to formats of fewer bits, with the bits of kernels/reference/elementwise.py.
 *
 * Memory-bound: a load, about fifteen operations and a store per vector. With E the exponent of x,
 * but at least that of the smallest normal number, the result is a multiple of the unit 2^(E - m).
 * |x| / unit is exact, below 2^(m + 1), and rounded to an integer by adding and subtracting 2^23.
 * Formats with the exponents of float32 round its bits as an integer, since their units may be
 * subnormal. A format's exponents are shifted by `peaks`, of which an earlier pass finds the largest
 * elements (`largest`), or x is multiplied by the reciprocals of scales, and the result by scales. At
 * random: up if the part behind the point, in units of 2^-24, is above a word of philox.h of 24 bits;
 * words go through a buffer in L1. The Hadamard transform keeps 16 rows of a vector in registers.
 */
#include "elementwise_round.h"

#if REAL_FLOAT && !STORED_BF16

#include "lanes.h"
#include "parts.h"
#include "philox.h"

enum { PIECE = 1024, MANTISSA = 23, BIAS = 127, MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000 };
enum { HADAMARD = 16 };

INLINE ivec larger(ivec a, ivec b) {
    const ivec first = a > b;
    return (first & a) | (~first & b);
}

/* -- the largest elements */

INLINE ivec larger_of(ivec most, vec x) { return larger(most, (ivec)x & MAGNITUDE); }

/* The bits of finite numbers; those of others become the largest */
INLINE ivec finite_bits(ivec bits) {
    const ivec most = (ivec){0} + (INFINITE - 1), above = bits > most;
    return (above & most) | (~above & bits);
}

/* of `rows` rows of n columns */
static int32_t largest_of(const real *x, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t columns) {
    ivec most = {0};
    for (; rows > 0; rows--, x += columns) {
        ptrdiff_t j = 0;
        for (; j + LANES <= n; j += LANES) most = larger_of(most, vload(x + j));
        if (j < n) most = larger_of(most, vload_part(x + j, n - j));
    }
    most = finite_bits(most);
    int32_t greatest = 0;
    for (int i = 0; i < LANES; i++) greatest = most[i] > greatest ? most[i] : greatest;
    return greatest;
}

INLINE void largest_down(const real *x, ptrdiff_t rows, ptrdiff_t columns, int32_t *out,
                         ptrdiff_t j, ptrdiff_t lanes) {
    ivec most = {0};
    for (ptrdiff_t i = 0; i < rows; i++) most = larger_of(most, load(x + i * columns + j, lanes));
    store((real *)out + j, (vec)finite_bits(most), lanes);
}

void NAME(largest)(const void *x_, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t high,
                   ptrdiff_t block, int32_t *out, int threads) {
    const real *x = x_;
    if (block == 1) { /* vectors along the columns */
        FOR_PARTS(
            p, parts_of(rows, high), rows * columns, threads, const real *own = x + p * high * columns;
            FOR_CHANNELS(columns, largest_down, own, part_length(rows, high, p), columns,
                         out + p * columns));
        return;
    }
    const ptrdiff_t blocks = parts_of(columns, block);
    FOR_PARTS(p, parts_of(rows, high) * blocks, rows * columns, threads,
              const ptrdiff_t row = p / blocks * high, b = p % blocks;
              out[p] = largest_of(x + row * columns + b * block, min_of(high, rows - row),
                                  part_length(columns, block, b), columns));
}

/* -- rounding */

/* Lanes whose numbers with 24 bits behind the point are above the words are rounded up. */
INLINE ivec words_of(const uint32_t *word) {
    lane_words w;
    memcpy(&w, word, sizeof w);
    return (ivec)(w >> 8);
}

/* What one peak, or one in each lane, gives */
struct peak {
    ivec base, limit; /* the lowest exponent; the bits of the largest number */
    vec scale, inverse;
};

INLINE struct peak peak_of(ivec exponent, struct round_format f) {
    if (f.scaled || f.lowest == 1 - BIAS) {
        const ivec limit = (ivec){0} + (f.top | (f.highest + BIAS) << MANTISSA);
        const vec scale = (vec)exponent, none = vzero();
        return (struct peak){(ivec){0} + f.lowest, limit, scale,
                             f.scaled ? vselect(scale > none, 1 / scale, none) : none};
    }
    const ivec least = (ivec){0} + (f.mantissa - BIAS + 1);
    const ivec base = larger(exponent + (f.lowest - f.highest), least);
    return (struct peak){base, f.top | (base + (f.highest - f.lowest + BIAS)) << MANTISSA, {0}, {0}};
}

/* `wide`: whether the format has the exponents of float32 */
INLINE vec rounded(vec given, struct peak peak, struct round_format f, int wide, int scaled,
                   const uint32_t *word) {
    const vec x = scaled ? given * peak.inverse : given;
    const ivec magnitude = (ivec)x & MAGNITUDE, sign = (ivec)x ^ magnitude;
    ivec result;
    if (wide) {
        const int drop = MANTISSA - f.mantissa, mask = (1 << drop) - 1;
        const ivec low = magnitude & mask, even = magnitude >> drop & 1;
        result = word ? (magnitude - low) + (((low << (24 - drop)) > words_of(word)) & (mask + 1))
                      : (magnitude + (mask >> 1) + even) & ~mask;
    } else {
        const ivec exponent = larger((magnitude >> MANTISSA) - BIAS, peak.base) - f.mantissa;
        const vec unit = (vec)((BIAS + exponent) << MANTISSA);
        const vec q = (vec)magnitude * (vec)((BIAS - exponent) << MANTISSA);
        vec whole;
        if (word) {
            const ivec below = __builtin_convertvector(q, ivec);
            const vec part = (q - __builtin_convertvector(below, vec)) * 0x1p24f;
            const ivec up = part > __builtin_convertvector(words_of(word), vec);
            whole = __builtin_convertvector(below - up, vec);
        } else {
            whole = (q + 0x1p23f) - 0x1p23f;
        }
        result = (ivec)(whole * unit);
    }
    const vec finite = vmin((vec)result, (vec)peak.limit); /* positive */
    const vec y = (vec)((ivec)finite | sign);
    return vselect(((ivec)given & MAGNITUDE) >= INFINITE, given, scaled ? y * peak.scale : y);
}

/* n elements with one peak, or, if it is NULL, one each */
INLINE void round_run(const real *x, ptrdiff_t n, struct round_format f, int wide,
                      int scaled, const int32_t *peak, const int32_t *each, const uint32_t *word, real *out) {
    struct peak own = peak_of((ivec){0} + (peak ? *peak : 0), f);
    ptrdiff_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        if (each) own = peak_of((ivec)vload((const real *)each + i), f);
        vstore(out + i, rounded(vload(x + i), own, f, wide, scaled, word ? word + i : NULL));
    }
    if (i < n) {
        if (each) own = peak_of((ivec)vload_part((const real *)each + i, n - i), f);
        const vec y = rounded(vload_part(x + i, n - i), own, f, wide, scaled, word ? word + i : NULL);
        vstore_part(out + i, y, n - i);
    }
}

/* n elements of a row, from column `first`, of which word 0 is the first element's */
INLINE void round_runs(const real *x, ptrdiff_t first, ptrdiff_t n, struct round_format f,
                       int wide, int scaled, const int32_t *peaks, const uint32_t *word, real *out) {
    if (!f.many) {
        round_run(x, n, f, wide, scaled, peaks, NULL, word, out);
    } else if (f.block == 1) {
        round_run(x, n, f, wide, scaled, NULL, peaks + first, word, out);
    } else {
        for (ptrdiff_t j = 0, stop; j < n; j = stop) {
            const ptrdiff_t block = (first + j) / f.block;
            stop = min_of(n, (block + 1) * f.block - first);
            round_run(x + j, stop - j, f, wide, scaled, peaks + block, NULL, word ? word + j : NULL,
                      out + j);
        }
    }
}

static void round_piece(const real *x, ptrdiff_t first, ptrdiff_t n, struct round_format f,
                        const int32_t *peaks, const uint32_t *word, real *out) {
    const int wide = f.lowest == 1 - BIAS;
    if (wide && word) {
        round_runs(x, first, n, f, 1, 0, peaks, word, out);
    } else if (wide) {
        round_runs(x, first, n, f, 1, 0, peaks, NULL, out);
    } else if (f.scaled && word) {
        round_runs(x, first, n, f, 0, 1, peaks, word, out);
    } else if (f.scaled) {
        round_runs(x, first, n, f, 0, 1, peaks, NULL, out);
    } else if (word) {
        round_runs(x, first, n, f, 0, 0, peaks, word, out);
    } else {
        round_runs(x, first, n, f, 0, 0, peaks, NULL, out);
    }
}

static void round_rows(const real *x, ptrdiff_t row, ptrdiff_t stop, ptrdiff_t first, ptrdiff_t n,
                       ptrdiff_t columns, struct round_format f, const int32_t *peaks,
                       const struct round_noise *noise, real *out) {
    uint32_t word[PIECE + 4 * WIDTH + LANES];
    for (; row < stop; row++) {
        ptrdiff_t skip = 0;
        if (noise) {
            const struct draw draw = {noise->seed, noise->stream, noise->epoch, 0};
            const ptrdiff_t start = row % noise->rows * columns + first;
            skip = start % 4;
            for (ptrdiff_t i = 0; i < n + skip; i += 4 * WIDTH) {
                philox(draw, (uint64_t)noise->samples[row / noise->rows],
                       (uint64_t)(start / 4 + i / 4), word + i);
            }
        }
        const ptrdiff_t at = row * columns + first;
        const int32_t *own = peaks + row / f.high * f.per_row;
        round_piece(x + at, first, n, f, own, noise ? word + skip : NULL, out + at);
    }
}

void NAME(round_elements)(const void *x_, ptrdiff_t rows, ptrdiff_t columns, struct round_format f,
                          const int32_t *peaks, const struct round_noise *noise, void *out_,
                          int threads) {
    const real *x = x_;
    real *out = out_;
    if (!f.many && !f.per_row && !noise) { /* rows do not matter */
        columns *= rows;
        rows = 1;
    }
    const ptrdiff_t pieces = parts_of(columns, PIECE);
    const ptrdiff_t group = columns < PIECE ? PIECE / columns : 1; /* rows of a part */
    FOR_PARTS(p, parts_of(rows, group) * pieces, rows * columns, threads,
              const ptrdiff_t row = p / pieces * group, piece = p % pieces;
              round_rows(x, row, min_of(rows, row + group), piece * PIECE,
                         part_length(columns, PIECE, piece), columns, f, peaks, noise, out));
}

/* -- the Hadamard transform */

INLINE void hadamard_column(const real *x, ptrdiff_t columns, const real *signs, int inverse,
                            real *out, ptrdiff_t j, ptrdiff_t lanes) {
    vec v[HADAMARD];
    for (int i = 0; i < HADAMARD; i++) {
        const vec own = load(x + i * columns + j, lanes);
        v[i] = inverse ? own : own * signs[i];
    }
    for (int half = 1; half < HADAMARD; half *= 2) {
        for (int i = 0; i < HADAMARD; i++) {
            if (i & half) continue;
            const vec a = v[i], b = v[i + half];
            v[i] = a + b;
            v[i + half] = a - b;
        }
    }
    for (int i = 0; i < HADAMARD; i++) {
        const vec y = v[i] * 0.25f;
        store(out + i * columns + j, inverse ? y * signs[i] : y, lanes);
    }
}

void NAME(hadamard)(const void *x_, ptrdiff_t groups, ptrdiff_t columns, const void *signs,
                    int inverse, void *out_, int threads) {
    const real *x = x_;
    real *out = out_;
    const ptrdiff_t each = HADAMARD * columns;
    FOR_PARTS(p, groups, groups * each, threads,
              FOR_CHANNELS(columns, hadamard_column, x + p * each, columns, signs, inverse,
                           out + p * each));
}

#endif
