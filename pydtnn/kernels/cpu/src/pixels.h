/* Images of uint8 that are resized, and turned into float32.
 *
 * `pixels_resize` has the results of Pillow's bilinear filter: rows first, then columns, each with
 * weights of 22 bits after the point and results rounded to uint8. A filter reads outside of the
 * box, where the image goes on. Two rows at a time are widened to vectors of a pixel of each, in L1
 * (8 int32, 4 per pixel, whatever the channels), of which each result takes a multiply-add per tap;
 * finished rows are kept in a ring of as many as the filter of a column has taps. 400 x 400 pixels
 * to 224 x 224 take a multiply-add of 8 lanes 180,000 times along rows and 75,000 times along
 * columns, 0.1 ms; Pillow's scalar code takes ten times as long.
 *
 * `pixels_look_up` reads a table of 256 numbers per channel, so that its results do not depend on
 * how the compiler contracts a product and a sum.
 */

#ifndef PIXELS_H
#define PIXELS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define PIXELS_VARIANTS __attribute__((target_clones("avx2", "default")))
#else
#define PIXELS_VARIANTS
#endif

enum { POINT = 22, HALF = 1 << (POINT - 1), PIXEL_BYTES = 4, ROWS = 4, PART = 32 };

typedef int32_t pixel_pair __attribute__((vector_size(8 * sizeof(int32_t))));
typedef int32_t pixel_one __attribute__((vector_size(4 * sizeof(int32_t))));

/* Filters along an axis: result i is the sum of `count[i]` pixels from `first[i]` on, times
   weights[i * most]. */
struct filters {
    ptrdiff_t most, begin, end;  // taps, and the range of all pixels that are read
    ptrdiff_t *first, *count;
    int32_t *weights;
};

static void filters_free(struct filters *f) {
    free(f->first);
    free(f->count);
    free(f->weights);
}

/* The filters that reduce, or enlarge, `size` of `extent` pixels from `start` on to `out`. Products
   are volatile so that no sum is contracted with them. */
static int filters_create(struct filters *f, ptrdiff_t extent, ptrdiff_t start, ptrdiff_t size,
                          ptrdiff_t out) {
    const double scale = (double)size / (double)out, radius = scale < 1 ? 1 : scale;
    f->most = 2 * (ptrdiff_t)radius + 3;
    f->first = malloc(out * sizeof *f->first);
    f->count = malloc(out * sizeof *f->count);
    f->weights = malloc(out * f->most * sizeof *f->weights);
    double *w = malloc(f->most * sizeof *w);
    if (f->first == NULL || f->count == NULL || f->weights == NULL || w == NULL) {
        free(w);
        return -1;
    }
    const double inverse = 1 / radius;
    f->begin = extent, f->end = 0;
    for (ptrdiff_t i = 0; i < out; i++) {
        const volatile double distance = ((double)i + 0.5) * scale;
        const double center = (double)start + distance;
        ptrdiff_t low = (ptrdiff_t)(center - radius + 0.5);
        ptrdiff_t high = (ptrdiff_t)(center + radius + 0.5);
        if (center - radius + 0.5 < 0) low = 0;
        if (high > extent) high = extent;
        double sum = 0;
        for (ptrdiff_t k = 0; k < high - low; k++) {
            const volatile double x = ((double)(k + low) - center + 0.5) * inverse;
            const double there = fabs(x);
            w[k] = there < 1 ? 1 - there : 0;
            sum += w[k];
        }
        for (ptrdiff_t k = 0; k < high - low; k++) {
            const double weight = sum == 0 ? w[k] : w[k] / sum;
            f->weights[i * f->most + k] = (int32_t)(0.5 + weight * (1 << POINT));
        }
        f->first[i] = low, f->count[i] = high - low;
        if (low < f->begin) f->begin = low;
        if (high > f->end) f->end = high;
    }
    free(w);
    return 0;
}

/* Four bytes as numbers. */
static inline __attribute__((always_inline)) pixel_one from_bytes(uint32_t bytes) {
#ifdef __SSE2__
    const __m128i zero = _mm_setzero_si128();
    const __m128i shorts = _mm_unpacklo_epi8(_mm_cvtsi32_si128((int)bytes), zero);
    return (pixel_one)_mm_unpacklo_epi16(shorts, zero);
#else
    return (pixel_one){bytes & 255, bytes >> 8 & 255, bytes >> 16 & 255, bytes >> 24};
#endif
}

/* The bytes of two pixels, of numbers that are not negative; more than 255 is 255. */
static inline __attribute__((always_inline)) uint64_t to_bytes(const pixel_one *two) {
#ifdef __SSE2__
    const __m128i shorts = _mm_packs_epi32((__m128i)two[0], (__m128i)two[1]);
    return (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi16(shorts, shorts));
#else
    uint64_t bytes = 0;
    for (int lane = 0; lane < 8; lane++) {
        const int32_t value = two[lane / 4][lane % 4];
        bytes |= (uint64_t)(value > 255 ? 255 : value) << 8 * lane;
    }
    return bytes;
#endif
}

/* Filter rows of pixels to rows of `out` pixels, which have room for 4 bytes more. `wide` has room
   for the pixels that are read. */
static inline __attribute__((always_inline)) void filter_rows(
    const uint8_t *const from[ROWS], const struct filters *f, ptrdiff_t out, ptrdiff_t channels,
    pixel_one *restrict wide, uint8_t *const to[ROWS]) {
    const ptrdiff_t read = f->end - f->begin;
    for (ptrdiff_t x = 0; x < read; x++) {
        const ptrdiff_t at = (f->begin + x) * channels;
        if (x * channels + PIXEL_BYTES <= read * channels) {  // and some of the next pixel, in
            for (int r = 0; r < ROWS; r++) {  // lanes of which nothing is kept
                uint32_t bytes;
                memcpy(&bytes, from[r] + at, sizeof bytes);
                wide[ROWS * x + r] = from_bytes(bytes);
            }
        } else {
            for (int r = 0; r < ROWS; r++) {
                uint32_t bytes = 0;
                memcpy(&bytes, from[r] + at, (size_t)channels);
                wide[ROWS * x + r] = from_bytes(bytes);
            }
        }
    }
    for (ptrdiff_t i = 0; i < out; i++) {
        const int32_t *weights = f->weights + i * f->most;
        const pixel_one *pixels = wide + ROWS * (f->first[i] - f->begin);
        pixel_pair sums[ROWS / 2];
        for (int r = 0; r < ROWS / 2; r++) sums[r] = (pixel_pair){0} + HALF;
        for (const int32_t *end = weights + f->count[i]; weights < end; weights++, pixels += ROWS) {
            for (int r = 0; r < ROWS / 2; r++) {
                sums[r] += ((const pixel_pair *)pixels)[r] * *weights;
            }
        }
        for (int r = 0; r < ROWS / 2; r++) {
            sums[r] >>= POINT;
            pixel_one two[2];
            memcpy(two, &sums[r], sizeof two);
            const uint64_t bytes = to_bytes(two);
            const uint32_t upper = (uint32_t)bytes, lower = (uint32_t)(bytes >> 32);
            memcpy(to[2 * r] + i * channels, &upper, sizeof upper);  // the next pixel overwrites
            memcpy(to[2 * r + 1] + i * channels, &lower, sizeof lower);  // what is too much
        }
    }
}

PIXELS_VARIANTS
static void filter_image(const uint8_t *image, const struct filters *across,
                         const struct filters *down, ptrdiff_t stride, ptrdiff_t channels,
                         ptrdiff_t height, ptrdiff_t width, pixel_one *wide, uint8_t *ring,
                         ptrdiff_t rows, ptrdiff_t apart, uint8_t *restrict out) {
    const ptrdiff_t row = width * channels;
    ptrdiff_t next = down->begin;  // the row that is filtered next
    for (ptrdiff_t y = 0; y < height; y++) {
        const ptrdiff_t first = down->first[y], count = down->count[y];
        for (; next < first + count; next += ROWS) {
            const uint8_t *from[ROWS];
            uint8_t *to[ROWS];
            for (int r = 0; r < ROWS; r++) {
                const ptrdiff_t last = down->end - 1, own = next + r < last ? next + r : last;
                from[r] = image + own * stride;
                to[r] = ring + (next + r) % rows * apart;
            }
            if (channels == 3) {
                filter_rows(from, across, width, 3, wide, to);
            } else {
                filter_rows(from, across, width, channels, wide, to);
            }
        }
        for (ptrdiff_t j = 0; j < row; j += PART) {
            int32_t sums[PART];
            uint8_t part[PART];
            for (int i = 0; i < PART; i++) sums[i] = HALF;
            for (ptrdiff_t k = 0; k < count; k++) {
                const uint8_t *from = ring + (first + k) % rows * apart + j;
                const int32_t weight = down->weights[y * down->most + k];
                __asm__ volatile("");  // GCC joins the loops of two rows otherwise, without vectors
                for (int i = 0; i < PART; i++) sums[i] += weight * from[i];
            }
            for (int i = 0; i < PART; i++) {
                const int32_t value = sums[i] >> POINT;
                part[i] = (uint8_t)(value > 255 ? 255 : value);
            }
            memcpy(out + y * row + j, part, row - j < PART ? row - j : PART);
        }
    }
}

/* Resize the box `across` x `down` pixels from (top, left) on of an image of at most 4 channels to
   height x width; return -1 without memory. */
static int pixels_resize(const uint8_t *image, ptrdiff_t image_height, ptrdiff_t image_width,
                         ptrdiff_t channels, ptrdiff_t top, ptrdiff_t left, ptrdiff_t box_height,
                         ptrdiff_t box_width, ptrdiff_t height, ptrdiff_t width, uint8_t *out) {
    struct filters across = {0}, down = {0};
    int status = -1;
    pixel_one *wide = NULL;
    uint8_t *ring = NULL;
    if (filters_create(&across, image_width, left, box_width, width) == 0
        && filters_create(&down, image_height, top, box_height, height) == 0) {
        const ptrdiff_t rows = down.most + ROWS;
        const ptrdiff_t apart = (width * channels + PIXEL_BYTES) / PART * PART + PART;
        const size_t read = across.end - across.begin;
        if (posix_memalign((void **)&wide, sizeof(pixel_pair), read * ROWS * sizeof *wide)) wide = NULL;
        ring = calloc(rows, apart);
        if (wide != NULL && ring != NULL) {
            filter_image(image, &across, &down, image_width * channels, channels, height, width,
                         wide, ring, rows, apart, out);
            status = 0;
        }
    }
    free(wide);
    free(ring);
    filters_free(&across);
    filters_free(&down);
    return status;
}

/* out[i, c] = table[c, x[i, c]], of n pixels with any number of channels. */
static void pixels_look_up(const uint8_t *restrict x, ptrdiff_t n, ptrdiff_t channels,
                           const float *restrict table, float *restrict out) {
    if (channels == 3) {
        for (ptrdiff_t i = 0; i < 3 * n; i += 3) {
            out[i] = table[x[i]];
            out[i + 1] = table[256 + x[i + 1]];
            out[i + 2] = table[512 + x[i + 2]];
        }
        return;
    }
    for (ptrdiff_t i = 0; i < n; i++) {
        for (ptrdiff_t c = 0; c < channels; c++) {
            out[i * channels + c] = table[256 * c + x[i * channels + c]];
        }
    }
}

#endif
