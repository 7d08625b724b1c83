/* 2 Another order: the inner loop goes along rows of b and c.
   All accesses are contiguous, the additions are independent, and the compiler can use vectors. But
   each multiplication loads an element of b and loads and stores one of c. */
void product(const float *a, const float *b, float *c, int m, int n, int k) {
    for (int i = 0; i < m * n; i++) c[i] = 0;
    for (int i = 0; i < m; i++)
        for (int l = 0; l < k; l++)
            for (int j = 0; j < n; j++) c[i * n + j] += a[i * k + l] * b[l * n + j];
}
