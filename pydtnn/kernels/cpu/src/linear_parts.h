/* The column sum, in a file of its own; linear.c puts it into the table. */
#ifndef PYDTNN_LINEAR_PARTS_H
#define PYDTNN_LINEAR_PARTS_H

#include "linear.h"
#include "simd.h"

int NAME(linear_bias)(const real *dy, ptrdiff_t rows, ptrdiff_t columns, real *out, int accumulate,
                      int threads);

#endif
