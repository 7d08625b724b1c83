/* The products of linear.c for matrices of pairs of bfloat16, along the index that is summed. */
#include "linear_parts.h"
#include "stored.h"

#if HAS_DOTS
#define PAIRS
#include "linear.c"
#endif
