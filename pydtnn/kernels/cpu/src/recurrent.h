/* Kernels of recurrent layers; see recurrent.c. Both return 0, or -1 if memory is short. */
#ifndef PYDTNN_RECURRENT_H
#define PYDTNN_RECURRENT_H

#include <stdint.h>

#include "dispatch.h"

enum cell { CELL_LSTM, CELL_GRU };

/* Arrays are (batch, length, features), those of gates have as many features for each gate. Of a
 * sample, only the first `lengths` steps exist: states, outputs and gradients of the others are
 * 0. */
struct recurrent_shape {
    ptrdiff_t batch, length, features;
    int reverse;
    const int64_t *lengths; /* (batch,), or NULL */
};

/* gates   in: terms of the input, with their biases; out: the gates. i, f, g, o of an LSTM, r, z, n
 *         of a GRU
 * u, b    (gates features, features), (gates features,)
 * h0, c0  (batch, features), the states before the first step; NULL for zeros
 * kept    cells of an LSTM, terms of the state in n of a GRU
 *
 * Backward: dgates are gradients of the terms of the input. Those of the terms of the state are the
 * same for an LSTM; a GRU writes them to dproducts. */
struct recurrent_kernels {
    int (*forward)(enum cell cell, const struct recurrent_shape *shape, void *gates, const void *u,
                   const void *b, const void *h0, const void *c0, void *y, void *kept,
                   int threads);
    int (*backward)(enum cell cell, const struct recurrent_shape *shape, const void *dy,
                    const void *gates, const void *y, const void *kept, const void *u,
                    const void *h0, const void *c0, void *dgates, void *dproducts, void *dh0,
                    void *dc0, int threads);
};

DECLARE_FAMILY(recurrent)

#endif
