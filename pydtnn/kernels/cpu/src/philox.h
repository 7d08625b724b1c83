/* Philox4x32-10 (Salmon et al., SC 2011): the same bits as kernels/reference/random.py.
 *
 * Each 64-bit lane holds one 32-bit word in its low half, as required by the widening
 * multiplication; the next round uses its high half and then discards it. A vector of W =
 * VECTOR_BYTES / 8 counters gives 4 W words in ten rounds of two multiplications, two shifts and
 * two three-way xors: about two instructions a word, half the speed of memory. Included after
 * simd.h.
 */
#ifndef PYDTNN_PHILOX_H
#define PYDTNN_PHILOX_H

#include <string.h>

#include "simd.h"

enum { WIDTH = VECTOR_BYTES / 8, ROUNDS = 10 };

typedef uint64_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t lane_words __attribute__((vector_size(LANES * sizeof(uint32_t))));
#if REAL_FLOAT
typedef uint32_t unsigned_vec __attribute__((vector_size(VECTOR_BYTES)));
#else
typedef uint64_t unsigned_vec __attribute__((vector_size(VECTOR_BYTES)));
#endif

#if VECTOR_BYTES == 64
#define X86(operation) _mm512_##operation
typedef __m512i integers;
#elif VECTOR_BYTES == 32
#define X86(operation) _mm256_##operation
typedef __m256i integers;
#elif defined(__SSE2__)
#include <emmintrin.h>
#define X86(operation) _mm_##operation
typedef __m128i integers;
#endif

#ifdef X86
INLINE words multiply(words a, words b) { return (words)X86(mul_epu32)((integers)a, (integers)b); }
/* lanes 0, 2, ... of a and b in turn */
INLINE words even(words a, words b) { return (words)X86(unpacklo_epi64)((integers)a, (integers)b); }
INLINE words odd(words a, words b) { return (words)X86(unpackhi_epi64)((integers)a, (integers)b); }
#else
INLINE words multiply(words a, words b) { return (a & 0xffffffff) * (b & 0xffffffff); }
INLINE words even(words a, words b) { return (words){a[0], b[0]}; }
INLINE words odd(words a, words b) { return (words){a[1], b[1]}; }
#endif

struct draw {
    uint32_t seed, stream, epoch, threshold;
};

/* The 4 WIDTH words of blocks first, first + 1, ... of one sample. Even lanes hold the first half
 * of the blocks and odd lanes the second, so that the words come out in order.
 */
INLINE void philox(struct draw draw, uint64_t sample, uint64_t first, uint32_t *out) {
    static const uint64_t order[] = {
        0, WIDTH / 2, 1, WIDTH / 2 + 1, 2, WIDTH / 2 + 2, 3, WIDTH / 2 + 3,
    };
    const words none = {0}, low = none + 0xffffffff, m0 = none + 0xD2511F53, m1 = none + 0xCD9E8D57;
    words c0, c1 = none + (sample & 0xffffffff), c2 = none + (sample >> 32), c3 = none + draw.epoch;
    memcpy(&c0, order, sizeof c0);
    c0 += first;
    uint32_t k0 = draw.seed, k1 = draw.stream;
    for (int round = 0; round < ROUNDS; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const words p0 = multiply(c0, m0), p1 = multiply(c2, m1);
        c0 = (p1 >> 32) ^ c1 ^ (none + k0);
        c2 = (p0 >> 32) ^ c3 ^ (none + k1);
        c1 = p1;
        c3 = p0;
    }
    const words start = (c0 & low) | c1 << 32, end = (c2 & low) | c3 << 32;
    const words block[] = {even(start, end), odd(start, end)};
    memcpy(out, block, sizeof block);
}

/* Which of LANES words are at least the threshold. */
INLINE ivec at_least(const uint32_t *word, uint32_t threshold) {
    lane_words w;
    memcpy(&w, word, sizeof w);
    return (ivec)(__builtin_convertvector(w, unsigned_vec) >= (unsigned_vec){0} + threshold);
}

#endif
