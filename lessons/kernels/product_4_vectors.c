/* 4 Sums stay in registers: two vectors of a row of c are summed over all l, then stored once.
   A multiplication and addition needs one load of b now, not two loads and a store. The two chains
   of additions are too few to hide their latency of four cycles on two units, and b is read with a
   stride of n floats, so that alone this can be slower than rung 3: it is what rung 5 builds on. */
#include "vectors.h"

void product(const float *a, const float *b, float *c, int m, int n, int k) {
    int whole = n - n % (2 * V);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < whole; j += 2 * V) {
            vec left = {0}, right = {0};
            for (int l = 0; l < k; l++) {
                left += a[i * k + l] * load(b + l * n + j);
                right += a[i * k + l] * load(b + l * n + j + V);
            }
            store(c + i * n + j, left);
            store(c + i * n + j + V, right);
        }
        for (int j = whole; j < n; j++) { /* the columns that are left */
            float sum = 0;
            for (int l = 0; l < k; l++) sum += a[i * k + l] * b[l * n + j];
            c[i * n + j] = sum;
        }
    }
}
