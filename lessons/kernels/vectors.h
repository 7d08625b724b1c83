/* Vectors of V floats, in registers of 64 bytes with AVX-512, of 32 with AVX, of 16 otherwise.
   ROWS x 2 vectors of sums leave some registers for the operands: 28 of 32, or 12 of 16. */
#pragma once
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { V = 16, ROWS = 14, WIDE = 4 };
#elif defined __AVX__
enum { V = 8, ROWS = 6, WIDE = 2 };
#else
enum { V = 4, ROWS = 6, WIDE = 2 };
#endif
enum { OUTPUTS = 6 }; /* of convolutions, with WIDE vectors of channels: each has its own pointer */

typedef float vec __attribute__((vector_size(4 * V), aligned(4))); /* may begin at any float */

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline int least(int a, int b) { return a < b ? a : b; }

/* Memory that begins with a cache line: a vector of 64 bytes elsewhere lies in two, and takes twice
   the time to load or store. */
static inline float *lines(long floats) { return aligned_alloc(64, (4 * floats + 63) / 64 * 64); }
