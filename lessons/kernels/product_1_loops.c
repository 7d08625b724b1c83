/* 1 The definition: c[i][j] is the sum over l of a[i][l] b[l][j].
   The inner loop reads b with a stride of n floats: each element comes from another cache line, of
   which 15 of 16 floats are fetched for nothing, and the sum is a chain of dependent additions. */
void product(const float *a, const float *b, float *c, int m, int n, int k) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += a[i * k + l] * b[l * n + j];
            c[i * n + j] = sum;
        }
}
