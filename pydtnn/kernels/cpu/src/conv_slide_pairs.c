/* The gather of conv_slide.c for pairs of bfloat16. */
#include "conv_parts.h"
#include "stored.h"

#if HAS_DOTS
#define PAIRS
#include "conv_slide.c"
#else
void NAME(slide_gather_pairs)(const struct slide *task, ptrdiff_t taps, const real *x, real *y) {
    NAME(slide_gather)(task, taps, x, y);
}
#endif
