/* The roof: multiplications and additions of registers only, in 2 ROWS independent chains. */
#include "vectors.h"

float peak(long rounds) {
    vec sums[2 * ROWS], x = {0}, total = {0};
    x += 1.0001f;
    for (int t = 0; t < 2 * ROWS; t++) sums[t] = x * (float)t; /* equal chains would be computed once */
    for (long i = 0; i < rounds; i++) {
#pragma GCC unroll 32
        for (int t = 0; t < 2 * ROWS; t++) sums[t] = sums[t] * x + x;
    }
    for (int t = 0; t < 2 * ROWS; t++) total += sums[t];
    float sum = 0;
    for (int t = 0; t < V; t++) sum += total[t];
    return sum;
}

int flops(void) { return 2 * 2 * ROWS * V; } /* of a round */
