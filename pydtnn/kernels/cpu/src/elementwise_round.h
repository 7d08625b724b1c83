/* Rounding to formats of fewer bits; see elementwise_round.c. For arrays of float32. */
#ifndef PYDTNN_ELEMENTWISE_ROUND_H
#define PYDTNN_ELEMENTWISE_ROUND_H

#include "elementwise.h"
#include "simd.h"

void NAME(largest)(const void *x, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t high,
                   ptrdiff_t block, int32_t *out, int threads);
void NAME(hadamard)(const void *x, ptrdiff_t groups, ptrdiff_t columns, const void *signs,
                    int inverse, void *out, int threads);
void NAME(round_elements)(const void *x, ptrdiff_t rows, ptrdiff_t columns, struct round_format f,
                          const int32_t *peaks, const struct round_noise *noise, void *out,
                          int threads);

#endif
