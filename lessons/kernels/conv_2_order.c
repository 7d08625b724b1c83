/* 2 Another order: the inner loop goes along the output's channels.
   An element of x meets a row of o filters, contiguous in memory as are the outputs: the compiler
   uses vectors. Outputs are loaded and stored 9 c times each. */
#include "frame.h"

void conv(const float *images, const float *f, float *y, int n, int h, int w, int c, int o) {
    float *x = framed(images, n, h, w, c);
    for (int s = 0; s < n; s++)
        for (int p = 0; p < h; p++)
            for (int q = 0; q < w; q++) {
                float *out = y + ((s * h + p) * w + q) * o;
                for (int r = 0; r < o; r++) out[r] = 0;
                for (int i = 0; i < 3; i++)
                    for (int j = 0; j < 3; j++)
                        for (int l = 0; l < c; l++) {
                            float e = x[((s * (h + 2) + p + i) * (w + 2) + q + j) * c + l];
                            const float *at = f + ((i * 3 + j) * c + l) * o;
                            for (int r = 0; r < o; r++) out[r] += e * at[r];
                        }
            }
    free(x);
}
