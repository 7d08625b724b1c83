/* Sums of what ranks send each other; see sum.c. */
#ifndef PYDTNN_SUM_H
#define PYDTNN_SUM_H

#include "dispatch.h"

typedef void addition(void *into, const void *other, ptrdiff_t n);

struct sum_kernels {
    addition *add_real;
    addition *add_half, *add_bfloat; /* they add in float: in its variants, elsewhere NULL */
};

DECLARE_FAMILY(sum)

#endif
