/* Kernels that draw random numbers; see random.c. */
#ifndef PYDTNN_RANDOM_H
#define PYDTNN_RANDOM_H

#include <stdint.h>

#include "dispatch.h"

struct random_kernels {
    /* out = x * factor where the element's word is at least `threshold`, else 0; x is (rows,
       count) */
    void (*dropout)(const void *x, ptrdiff_t rows, ptrdiff_t count, const int64_t *samples,
                    uint32_t seed, uint32_t stream, uint32_t epoch, uint32_t threshold,
                    double factor, void *out, int threads);
};

DECLARE_STORED_FAMILY(random)

#endif
