/* Normalisation; see norm.c, norm_group.c and norm_response.c. All return 0, or -1 when
   there is no scratch memory. */
#ifndef PYDTNN_NORM_H
#define PYDTNN_NORM_H

#include "dispatch.h"

struct norm_kernels {
    /* out: count, sum x, sum x^2 */
    int (*statistics)(const void *x, ptrdiff_t rows, ptrdiff_t channels, double *out,
                      int accumulate, int threads);
    /* out: sum dy, sum dy xhat */
    int (*backward_statistics)(const void *x, const void *dy, ptrdiff_t rows, ptrdiff_t channels,
                               const double *mean, const double *inv_std, double *out,
                               int accumulate, int threads);
    int (*normalize)(const void *x, ptrdiff_t rows, ptrdiff_t channels, const double *scale,
                     const double *shift, void *out, int threads);
    int (*backward_normalize)(const void *x, const void *dy, ptrdiff_t rows, ptrdiff_t channels,
                              const double *a, const double *b, const double *c, void *out,
                              int threads);
    int (*group_forward)(const void *x, ptrdiff_t batch, ptrdiff_t positions, ptrdiff_t channels,
                         ptrdiff_t groups, const void *gamma, const void *beta, double epsilon,
                         void *out, double *mean, double *inv_std, int threads);
    int (*group_backward)(const void *x, const void *dy, ptrdiff_t batch, ptrdiff_t positions,
                          ptrdiff_t channels, ptrdiff_t groups, const void *gamma,
                          const double *mean, const double *inv_std, void *out, void *dgamma,
                          void *dbeta, int accumulate, int threads);
    /* each element over a power of the mean square of `size` channels around it */
    int (*response_forward)(const void *x, ptrdiff_t rows, ptrdiff_t channels, ptrdiff_t size,
                            double alpha, double beta, double k, void *out, int threads);
    int (*response_backward)(const void *x, const void *dy, ptrdiff_t rows, ptrdiff_t channels,
                             ptrdiff_t size, double alpha, double beta, double k, void *out,
                             int threads);
};

DECLARE_STORED_FAMILY(norm)

#endif
