/* The matrix kernels of gemm.c for pairs of bfloat16: sums over half as many steps. See
 * gemm_amx.c, too. */
#include "amx.h"
#include "stored.h"

#if HAS_AMX
typedef int they_are_in_gemm_amx; /* an empty source is no C */
#elif HAS_DOTS
#define PAIRS
#include "gemm.c"
#else
void NAME(gemm_rows_pairs)(ptrdiff_t rows, const struct gemm_rows *task) {
    NAME(gemm_rows)(rows, task);
}
void NAME(gemm_outer_pairs)(ptrdiff_t rows, const struct gemm_outer *task) {
    NAME(gemm_outer)(rows, task);
}
#endif
