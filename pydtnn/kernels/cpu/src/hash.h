/* XXH64 with seed 0 (Y. Collet, "xxHash fast digest algorithm", version 0.1.1).
 *
 * Four sums of 8-byte words are independent of each other: per 32 bytes there are eight
 * multiplications, of which one starts per cycle, so that the limit is 4 bytes per cycle, about
 * 12 GB/s at 3 GHz. That is the bandwidth with which one core reads memory; arrays in a cache would
 * be hashed faster with vectors, which nothing here needs.
 */

#ifndef HASH_H
#define HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static const uint64_t P1 = 0x9E3779B185EBCA87u, P2 = 0xC2B2AE3D27D4EB4Fu,
                      P3 = 0x165667B19E3779F9u, P4 = 0x85EBCA77C2B2AE63u,
                      P5 = 0x27D4EB2F165667C5u;

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t word_at(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline uint32_t half_at(const unsigned char *p)
{
    uint32_t half;
    memcpy(&half, p, sizeof half);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    half = __builtin_bswap32(half);
#endif
    return half;
}

static inline uint64_t add_word(uint64_t sum, uint64_t word)
{
    return rotate(sum + word * P2, 31) * P1;
}

static inline uint64_t merge(uint64_t value, uint64_t sum)
{
    return (value ^ add_word(0, sum)) * P1 + P4;
}

/* The hash of bytes that are given in several parts. */
typedef struct {
    uint64_t sums[4], size;
    unsigned char rest[32]; /* the last size % 32 bytes, which are in no sum yet */
} Hash;

static void hash_begin(Hash *hash)
{
    *hash = (Hash){.sums = {P1 + P2, P2, 0, 0 - P1}};
}

/* The number of blocks is counted: compilers then order the multiplications better than in a loop
 * that compares pointers, and it runs at the limit of the multiplier. */
static void hash_blocks(Hash *hash, const unsigned char *p, size_t blocks)
{
    uint64_t a = hash->sums[0], b = hash->sums[1], c = hash->sums[2], d = hash->sums[3];
    for (size_t i = 0; i < blocks; i++, p += 32) {
        a = add_word(a, word_at(p));
        b = add_word(b, word_at(p + 8));
        c = add_word(c, word_at(p + 16));
        d = add_word(d, word_at(p + 24));
    }
    hash->sums[0] = a, hash->sums[1] = b, hash->sums[2] = c, hash->sums[3] = d;
}

static void hash_add(Hash *hash, const void *data, size_t size)
{
    const unsigned char *p = data;
    size_t held = hash->size % 32, wanted = 32 - held;
    hash->size += size;
    if (held) {
        size_t part = size < wanted ? size : wanted;
        memcpy(hash->rest + held, p, part);
        if (part < wanted)
            return;
        hash_blocks(hash, hash->rest, 1);
        p += part, size -= part;
    }
    hash_blocks(hash, p, size / 32);
    if (size % 32)
        memcpy(hash->rest, p + size / 32 * 32, size % 32);
}

static uint64_t hash_end(const Hash *hash)
{
    const unsigned char *p = hash->rest, *end = p + hash->size % 32;
    uint64_t value = P5;
    if (hash->size >= 32) {
        uint64_t a = hash->sums[0], b = hash->sums[1], c = hash->sums[2], d = hash->sums[3];
        value = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        value = merge(merge(merge(merge(value, a), b), c), d);
    }
    value += hash->size;
    for (; end - p >= 8; p += 8)
        value = rotate(value ^ add_word(0, word_at(p)), 27) * P1 + P4;
    if (end - p >= 4) {
        value = rotate(value ^ half_at(p) * P1, 23) * P2 + P3;
        p += 4;
    }
    for (; p < end; p++)
        value = rotate(value ^ *p * P5, 11) * P1;
    value = (value ^ value >> 33) * P2;
    value = (value ^ value >> 29) * P3;
    return value ^ value >> 32;
}

#endif
