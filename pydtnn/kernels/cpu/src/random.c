/* Dropout: words of philox.h go through a buffer in L1, from where they are compared, LANES at a
 * time. */
#include "lanes.h"
#include "parts.h"
#include "philox.h"
#include "random.h"
#include "stored.h"

enum { WORDS = 1024 };

static void dropout_part(const stored *x, ptrdiff_t n, struct draw draw, uint64_t sample,
                         uint64_t block, real factor, stored *out) {
    uint32_t word[WORDS];
    for (ptrdiff_t i = 0; i < n; i += 4 * WIDTH) {
        philox(draw, sample, block + (uint64_t)i / 4, word + i);
    }
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        const ptrdiff_t lanes = min_of(LANES, n - i);
        const vec kept = load_stored(x + i, lanes) * factor;
        store_stored(out + i, vselect(at_least(word + i, draw.threshold), kept, vzero()), lanes);
    }
}

static void dropout(const void *x_, ptrdiff_t rows, ptrdiff_t count, const int64_t *samples,
                    uint32_t seed, uint32_t stream, uint32_t epoch, uint32_t threshold,
                    double factor, void *out_, int threads) {
    const stored *x = x_;
    stored *out = out_;
    const struct draw draw = {seed, stream, epoch, threshold};
    const ptrdiff_t pieces = parts_of(count, WORDS);
    FOR_PARTS(p, rows * pieces, rows * count, threads, const ptrdiff_t row = p / pieces,
              first = p % pieces * WORDS;
              dropout_part(x + row * count + first, min_of(WORDS, count - first), draw,
                           (uint64_t)samples[row], (uint64_t)first / 4, (real)factor,
                           out + row * count + first));
}

const struct random_kernels NAME(random_kernels) = {.dropout = dropout};
