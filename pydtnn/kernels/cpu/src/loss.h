/* Losses and their gradients; see loss.c. Kernels with parts return 0, or -1 when there is no
   memory for their sums. */
#ifndef PYDTNN_LOSS_H
#define PYDTNN_LOSS_H

#include <stdint.h>

#include "dispatch.h"

enum loss { BINARY_CROSS_ENTROPY, SQUARED_ERROR, ABSOLUTE_ERROR };

struct loss_kernels {
    int (*cross_entropy)(const void *logits, const int64_t *target, ptrdiff_t rows,
                         ptrdiff_t classes, double smoothing, double scale, void *out, double *loss,
                         int threads);
    /* weights of the classes may be NULL; rows whose target is `ignored` have no loss */
    int (*weighted_cross_entropy)(const void *logits, const int64_t *target, const void *weights,
                                  int64_t ignored, ptrdiff_t rows, ptrdiff_t classes,
                                  double smoothing, double scale, void *out, double *loss,
                                  int threads);
    int (*hinge)(const void *y, const int64_t *target, ptrdiff_t rows, ptrdiff_t classes,
                 double scale, void *out, double *loss, int threads);
    int (*elementwise)(int kind, const void *y, const void *target, ptrdiff_t n, double scale,
                       void *out, double *loss, int threads);
};

DECLARE_FAMILY(loss)

/* No class: what `ignored` is if every target is a class. */
#define NOTHING_IGNORED (-1)

/* The first row with a target that is neither a class nor ignored, or -1. */
static inline __attribute__((unused)) ptrdiff_t first_wrong_target(const int64_t *target,
                                                                   ptrdiff_t rows,
                                                                   ptrdiff_t classes, int ignores,
                                                                   int64_t ignored) {
    for (ptrdiff_t i = 0; i < rows; i++) {
        if (ignores && target[i] == ignored) continue;
        if ((uint64_t)target[i] >= (uint64_t)classes) return i;
    }
    return -1;
}

#endif
