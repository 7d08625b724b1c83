/* Kernels in separate files, which linear.c adds to the table. */
#ifndef PYDTNN_LINEAR_PARTS_H
#define PYDTNN_LINEAR_PARTS_H

#include "linear.h"
#include "simd.h"

int NAME(linear_bias)(const real *dy, ptrdiff_t rows, ptrdiff_t columns, real *out, int accumulate,
                      int threads);

int NAME(linear_add_rows)(const real *dy, const int64_t *chosen, ptrdiff_t rows, real *out,
                          ptrdiff_t count, ptrdiff_t columns, int accumulate, int threads);

enum { FEW = 4 }; /* samples: fewer are computed by linear_few.c */

void NAME(few_forward)(const struct linear_shape *s, const real *x, const real *w, const real *b,
                       real *y, int threads);
void NAME(few_backward_data)(const struct linear_shape *s, const real *dy, const real *w, real *dx,
                             int threads);
void NAME(few_backward_filter)(const struct linear_shape *s, const real *x, const real *dy,
                               real *dw, int accumulate, int threads);

#endif
