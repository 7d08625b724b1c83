/* Philox4x32-10 (Salmon et al., SC 2011): the same bits as kernels/reference/random.py. */
#pragma once

#include "element.cuh"

struct Words {
    unsigned at[4];
};

/* Words 4 block ... 4 block + 3 of a sample. */
SHARED Words philox(unsigned block, unsigned long long sample, unsigned epoch, unsigned seed,
                    unsigned stream) {
    unsigned c0 = block, c1 = (unsigned)sample, c2 = (unsigned)(sample >> 32), c3 = epoch;
    for (int round = 0; round < 10; round++) {
        const unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = (unsigned)(p1 >> 32) ^ c1 ^ seed;
        c2 = (unsigned)(p0 >> 32) ^ c3 ^ stream;
        c1 = (unsigned)p1;
        c3 = (unsigned)p0;
        seed += 0x9E3779B9u;
        stream += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}
