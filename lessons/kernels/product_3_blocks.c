/* 3 Blocks: a piece of b that fits the cache is used for all rows before the next one is read.
   Rung 2 streams all of b from memory for each row of c. A block of 64 x 256 floats is 64 KiB. It
   pays once b is larger than the cache of the second level. */
#include "vectors.h"

void product(const float *a, const float *b, float *c, int m, int n, int k) {
    memset(c, 0, sizeof(float) * m * n);
    for (int l0 = 0; l0 < k; l0 += 64)
        for (int j0 = 0; j0 < n; j0 += 256)
            for (int i = 0; i < m; i++)
                for (int l = l0; l < least(l0 + 64, k); l++)
                    for (int j = j0; j < least(j0 + 256, n); j++)
                        c[i * n + j] += a[i * k + l] * b[l * n + j];
}
