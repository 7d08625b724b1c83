/* Rounding to formats of fewer bits, with the bits of kernels/reference/elementwise.py.
 *
 * Memory-bound: a load, about fifteen operations and a store per vector. With E the exponent of x,
 * but at least that of the smallest normal number, the result is a multiple of the unit 2^(E - m).
 * |x| / unit is exact, below 2^(m + 1), and rounded to an integer by adding and subtracting 2^23.
 * Formats with the exponents of float32 round its bits as an integer, since their units may be
 * subnormal. A format's exponents are shifted by those of the largest elements, which an earlier
 * pass (`exponents`) finds. At random: up if the part behind the point, in units of 2^-24, is above
 * a word of philox.h of 24 bits; words go through a buffer in L1.
 */
#include "elementwise_round.h"

#if REAL_FLOAT && !STORED_BF16

#include "lanes.h"
#include "parts.h"
#include "philox.h"

enum { PIECE = 1024, MANTISSA = 23, BIAS = 127, MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000 };

INLINE ivec larger(ivec a, ivec b) {
    const ivec first = a > b;
    return (first & a) | (~first & b);
}

/* -- the exponents of the largest elements */

static int32_t exponent_of(const real *x, ptrdiff_t n) {
    ivec most = {0};
    ptrdiff_t j = 0;
    for (; j + LANES <= n; j += LANES) most = larger(most, (ivec)vload(x + j) & MAGNITUDE);
    if (j < n) most = larger(most, (ivec)vload_part(x + j, n - j) & MAGNITUDE);
    int32_t greatest = 0;
    for (int i = 0; i < LANES; i++) greatest = most[i] > greatest ? most[i] : greatest;
    const int32_t exponent = (greatest >> MANTISSA) - BIAS;
    return exponent < BIAS ? exponent : BIAS;
}

void NAME(exponents)(const void *x_, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t block,
                     int32_t *out, int threads) {
    const real *x = x_;
    const ptrdiff_t blocks = parts_of(columns, block);
    FOR_PARTS(p, rows * blocks, rows * columns, threads, const ptrdiff_t row = p / blocks,
              b = p % blocks;
              out[p] = exponent_of(x + row * columns + b * block, part_length(columns, block, b)));
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
};

INLINE struct peak peak_of(ivec exponent, struct round_format f) {
    if (f.lowest == 1 - BIAS) {
        const ivec base = (ivec){0} + f.lowest;
        return (struct peak){base, (ivec){0} + (f.top | (f.highest + BIAS) << MANTISSA)};
    }
    const ivec least = (ivec){0} + (f.mantissa - BIAS + 1);
    const ivec base = larger(exponent + (f.lowest - f.highest), least);
    return (struct peak){base, f.top | (base + (f.highest - f.lowest + BIAS)) << MANTISSA};
}

/* `wide`: whether the format has the exponents of float32 */
INLINE vec rounded(vec x, struct peak peak, struct round_format f, int wide,
                   const uint32_t *word) {
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
    return vselect(magnitude >= INFINITE, x, (vec)((ivec)finite | sign));
}

/* n elements with one peak, or, if it is NULL, one each */
INLINE void round_run(const real *x, ptrdiff_t n, struct round_format f, int wide,
                      const int32_t *peak, const int32_t *each, const uint32_t *word, real *out) {
    struct peak own = peak_of((ivec){0} + (peak ? *peak : 0), f);
    ptrdiff_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        if (each) own = peak_of((ivec)vload((const real *)each + i), f);
        vstore(out + i, rounded(vload(x + i), own, f, wide, word ? word + i : NULL));
    }
    if (i < n) {
        if (each) own = peak_of((ivec)vload_part((const real *)each + i, n - i), f);
        const vec y = rounded(vload_part(x + i, n - i), own, f, wide, word ? word + i : NULL);
        vstore_part(out + i, y, n - i);
    }
}

/* n elements of a row, from column `first`, of which word 0 is the first element's */
INLINE void round_runs(const real *x, ptrdiff_t first, ptrdiff_t n, struct round_format f,
                       int wide, const int32_t *peaks, const uint32_t *word, real *out) {
    if (!f.many) {
        round_run(x, n, f, wide, peaks, NULL, word, out);
    } else if (f.block == 1) {
        round_run(x, n, f, wide, NULL, peaks + first, word, out);
    } else {
        for (ptrdiff_t j = 0, stop; j < n; j = stop) {
            const ptrdiff_t block = (first + j) / f.block;
            stop = min_of(n, (block + 1) * f.block - first);
            round_run(x + j, stop - j, f, wide, peaks + block, NULL, word ? word + j : NULL,
                      out + j);
        }
    }
}

static void round_piece(const real *x, ptrdiff_t first, ptrdiff_t n, struct round_format f,
                        const int32_t *peaks, const uint32_t *word, real *out) {
    const int wide = f.lowest == 1 - BIAS;
    if (wide && word) {
        round_runs(x, first, n, f, 1, peaks, word, out);
    } else if (wide) {
        round_runs(x, first, n, f, 1, peaks, NULL, out);
    } else if (word) {
        round_runs(x, first, n, f, 0, peaks, word, out);
    } else {
        round_runs(x, first, n, f, 0, peaks, NULL, out);
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
        const int32_t *own = peaks + row * f.per_row;
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

#endif
