/* Local response normalisation; see norm_response.c. Returns 0, or -1 when there is no scratch
   memory. `out` of backward may be dy. */
#ifndef PYDTNN_NORM_RESPONSE_H
#define PYDTNN_NORM_RESPONSE_H

#include "simd.h"

int NAME(response_forward)(const void *x, ptrdiff_t rows, ptrdiff_t channels, ptrdiff_t size,
                           double alpha, double beta, double k, void *out, int threads);
int NAME(response_backward)(const void *x, const void *dy, ptrdiff_t rows, ptrdiff_t channels,
                            ptrdiff_t size, double alpha, double beta, double k, void *out,
                            int threads);

#endif
