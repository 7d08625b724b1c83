/* Activations, sums and softmax; see elementwise.c. `out` may be the first array of each. */
#ifndef PYDTNN_ELEMENTWISE_H
#define PYDTNN_ELEMENTWISE_H

#include "dispatch.h"

enum activation {
    RELU,
    RELU6,
    LEAKY_RELU,
    ELU,
    SIGMOID,
    TANH,
    ARCTAN,
    LOG,
    GELU,
    GELU_EXACT,
    SILU
};

struct elementwise_kernels {
    void (*forward)(int activation, const void *x, ptrdiff_t n, double alpha, void *out,
                    int threads);
    void (*backward)(int activation, const void *dy, const void *z, ptrdiff_t n, double alpha,
                     void *out, int threads);
    void (*add)(const void *a, const void *b, ptrdiff_t n, void *out, int threads);
    /* between arrays of stored and of real elements; accumulate: add to out */
    void (*widen)(const void *x, ptrdiff_t n, int accumulate, void *out, int threads);
    void (*narrow)(const void *x, ptrdiff_t n, void *out, int threads);
    /* of real elements */
    void (*softmax_forward)(const void *x, ptrdiff_t rows, ptrdiff_t classes, void *out,
                            int threads);
    void (*softmax_backward)(const void *dy, const void *y, ptrdiff_t rows, ptrdiff_t classes,
                             void *out, int threads);
};

DECLARE_STORED_FAMILY(elementwise)

#endif
