/* Activations, sums and softmax; see elementwise.c. `out` may be the first array of each. */
#ifndef PYDTNN_ELEMENTWISE_H
#define PYDTNN_ELEMENTWISE_H

#include <stdint.h>

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

/* A format; of float32 arrays (rows, columns) the exponents of blocks, or their scales, `peaks` */
struct round_format {
    int mantissa, lowest, highest; /* bits; exponents of the smallest and largest normal numbers */
    int32_t top;                   /* bits of the mantissa, as float32, of the largest number */
    int many;                      /* whether a row has a peak for each `block` columns, or one */
    int scaled;                    /* whether peaks are float32 scales, instead of exponents */
    ptrdiff_t high, block;         /* rows and columns of a block */
    ptrdiff_t per_row; /* peaks from `high` rows to the next; 0 if all rows have the same */
};

/* The random words of each element: `rows` rows belong to a sample */
struct round_noise {
    uint32_t seed, stream, epoch;
    const int64_t *samples;
    ptrdiff_t rows;
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
    /* of float32 only, else NULL */
    void (*largest)(const void *x, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t high,
                    ptrdiff_t block, int32_t *out, int threads);
    void (*hadamard)(const void *x, ptrdiff_t groups, ptrdiff_t columns, const void *signs,
                     int inverse, void *out, int threads);
    void (*round)(const void *x, ptrdiff_t rows, ptrdiff_t columns, struct round_format f,
                  const int32_t *peaks, const struct round_noise *noise, void *out, int threads);
};

DECLARE_STORED_FAMILY(elementwise)

#endif
