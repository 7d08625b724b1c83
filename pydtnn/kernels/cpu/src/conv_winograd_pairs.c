/* The products of Winograd's convolution for factors that are pairs of bfloat16: the same blocks,
 * with an instruction that multiplies pairs, twice as many products in the same time. */
#include "amx.h"
#include "conv_winograd_parts.h"
#include "stored.h"

#if HAS_AMX
typedef int they_are_in_conv_winograd_amx; /* an empty source is no C */
#elif HAS_DOTS
#define PAIRS
#include "conv_winograd_multiply.c"
#else
void NAME(winograd_multiply_pairs)(const struct product *product, const real *a, const real *u,
                                   real *c) {
    NAME(winograd_multiply)(product, a, u, c);
}
void NAME(winograd_outer_pairs)(const struct product *product, const real *a, const real *b,
                                real *c) {
    NAME(winograd_outer)(product, a, b, c);
}
#endif
