/* 5 A tile of registers: ROWS rows and two vectors of columns are summed at a time.
   Two vectors of b serve ROWS rows: 2 loads and ROWS broadcasts for 2 ROWS multiplications, and 2
   ROWS independent sums keep both units busy. Rows of b are n floats apart, though, so that each
   load is of another page for large n. */
#include "vectors.h"

static void edge(const float *a, const float *b, float *c, int rows, int columns, int n, int k) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += a[i * k + l] * b[l * n + j];
            c[i * n + j] = sum;
        }
}

static void tile(const float *a, const float *b, float *c, int n, int k) {
    vec sums[ROWS][2] = {0};
    for (int l = 0; l < k; l++) {
        vec left = load(b + l * n), right = load(b + l * n + V);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            sums[i][0] += a[i * k + l] * left;
            sums[i][1] += a[i * k + l] * right;
        }
    }
    for (int i = 0; i < ROWS; i++) {
        store(c + i * n, sums[i][0]);
        store(c + i * n + V, sums[i][1]);
    }
}

void product(const float *a, const float *b, float *c, int m, int n, int k) {
    int rows = m - m % ROWS, columns = n - n % (2 * V);
    for (int i = 0; i < rows; i += ROWS)
        for (int j = 0; j < columns; j += 2 * V) tile(a + i * k, b + j, c + i * n + j, n, k);
    edge(a, b + columns, c + columns, rows, n - columns, n, k);
    edge(a + rows * k, b, c + rows * n, m - rows, n, n, k);
}
