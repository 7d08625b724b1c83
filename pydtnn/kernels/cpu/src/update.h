/* Updates of flat parameters; see update.c. */
#ifndef PYDTNN_UPDATE_H
#define PYDTNN_UPDATE_H

#include "dispatch.h"

struct update_kernels {
    /* velocity may be NULL; factor: of g, here and in adam */
    void (*sgd)(void *w, const void *g, void *velocity, ptrdiff_t n, double lr, double decay,
                double momentum, int nesterov, double factor, int threads);
    void (*rmsprop)(void *w, const void *g, void *square, ptrdiff_t n, double lr, double decay,
                    double rho, double epsilon, int threads);
    void (*adagrad)(void *w, const void *g, void *square, ptrdiff_t n, double lr, double decay,
                    double initial, double epsilon, int threads);
    /* shrink: factor of w before the step */
    void (*lion)(void *w, const void *g, void *m, ptrdiff_t n, double lr, double shrink,
                 double beta1, double beta2, int threads);
    /* shrink: factor of w before the step; inv_root: 1 / sqrt(1 - beta2^t) */
    void (*adam)(void *w, const void *g, void *m, void *v, ptrdiff_t n, double rate, double decay,
                 double shrink, double beta1, double beta2, double inv_root, double epsilon,
                 double factor, int threads);
    /* ahead, now: factors of m and of g in the step */
    void (*nadam)(void *w, const void *g, void *m, void *v, ptrdiff_t n, double lr, double decay,
                  double beta1, double beta2, double inv_root, double epsilon, double ahead,
                  double now, int threads);
    /* returns 0, or -1 when there is no memory for partial sums */
    int (*squared_norm)(const void *x, ptrdiff_t n, double *norm, int threads);
    void (*scale)(void *x, ptrdiff_t n, double factor, int threads);
};

DECLARE_FAMILY(update)

#endif
