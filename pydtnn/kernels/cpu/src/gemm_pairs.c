/* The matrix kernels of gemm.c for pairs of bfloat16: sums over half as many steps. */
#include "gemm.h"

#if HAS_DOTS
#define PAIRS
#include "gemm.c"
#endif
