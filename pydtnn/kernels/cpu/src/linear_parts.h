/* Kernels in separate files, which linear.c adds to the table. */
#ifndef PYDTNN_LINEAR_PARTS_H
#define PYDTNN_LINEAR_PARTS_H

#include "linear.h"
#include "simd.h"
#include "stored.h"

/* Products of matrices with real elements. */
int NAME(linear_forward)(const struct linear_shape *s, const void *x, const void *w, const void *b,
                         void *y, int threads);
int NAME(linear_backward_data)(const struct linear_shape *s, const void *dy, const void *w,
                               void *dx, int threads);
int NAME(linear_backward_filter)(const struct linear_shape *s, const void *x, const void *dy,
                                 void *dw, int accumulate, int threads);

#if HAS_DOTS
/* The same of pairs of bfloat16 in the place of reals: of x and w along the inputs, in backward of
 * data of dy and w along the outputs, in backward of filters of dy and x along the batch. These are
 * counted in pairs; results are reals. */
int NAME(linear_forward_pairs)(const struct linear_shape *s, const void *x, const void *w,
                               const void *b, void *y, int threads);
int NAME(linear_backward_data_pairs)(const struct linear_shape *s, const void *dy, const void *w,
                                     void *dx, int threads);
int NAME(linear_backward_filter_pairs)(const struct linear_shape *s, const void *x, const void *dy,
                                       void *dw, int accumulate, int threads);
#endif

/* The same of stored elements; only gradients of weights, and biases, are real; see
 * linear_stored.c. */
int NAME(stored_forward)(const struct linear_shape *s, const void *x, const void *w, const void *b,
                         void *y, int threads);
int NAME(stored_backward_data)(const struct linear_shape *s, const void *dy, const void *w,
                               void *dx, int threads);
int NAME(stored_backward_filter)(const struct linear_shape *s, const void *x, const void *dy,
                                 void *dw, int accumulate, int threads);

int NAME(linear_bias)(const stored *dy, ptrdiff_t rows, ptrdiff_t columns, real *out,
                      int accumulate, int threads);

int NAME(linear_add_rows)(const stored *dy, const int64_t *chosen, ptrdiff_t rows, real *out,
                          ptrdiff_t count, ptrdiff_t columns, int accumulate, int threads);

enum { FEW = 4 }; /* samples: fewer are computed by linear_few.c */

void NAME(few_forward)(const struct linear_shape *s, const real *x, const real *w, const real *b,
                       real *y, int threads);
void NAME(few_backward_data)(const struct linear_shape *s, const real *dy, const real *w, real *dx,
                             int threads);
void NAME(few_backward_filter)(const struct linear_shape *s, const real *x, const real *dy,
                               real *dw, int accumulate, int threads);

#endif
