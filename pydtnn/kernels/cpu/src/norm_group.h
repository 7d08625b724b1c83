/* The kernels of norm_group.c, for the table in norm.c; parameters in norm.h. */
#ifndef PYDTNN_NORM_GROUP_H
#define PYDTNN_NORM_GROUP_H

#include <stddef.h>

#include "simd.h"

int NAME(group_forward)(const void *x, ptrdiff_t batch, ptrdiff_t positions, ptrdiff_t channels,
                        ptrdiff_t groups, const void *gamma, const void *beta, double epsilon,
                        void *out, double *mean, double *inv_std, int threads);
int NAME(group_backward)(const void *x, const void *dy, ptrdiff_t batch, ptrdiff_t positions,
                         ptrdiff_t channels, ptrdiff_t groups, const void *gamma,
                         const double *mean, const double *inv_std, void *out, void *dgamma,
                         void *dbeta, int accumulate, int threads);

#endif
