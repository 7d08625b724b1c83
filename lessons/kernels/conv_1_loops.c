/* 1 The definition: an output is the sum over 3 x 3 positions and all channels of the input.
   images (n, h, w, c), x with a frame of zeros (n, h + 2, w + 2, c), f (3, 3, c, o), y (n, h, w,
   o). Filters are read with a stride of o floats, and the sum is one chain. */
#include "frame.h"

void conv(const float *images, const float *f, float *y, int n, int h, int w, int c, int o) {
    float *x = framed(images, n, h, w, c);
    for (int s = 0; s < n; s++)
        for (int p = 0; p < h; p++)
            for (int q = 0; q < w; q++)
                for (int r = 0; r < o; r++) {
                    float sum = 0;
                    for (int i = 0; i < 3; i++)
                        for (int j = 0; j < 3; j++)
                            for (int l = 0; l < c; l++)
                                sum += x[((s * (h + 2) + p + i) * (w + 2) + q + j) * c + l] *
                                       f[((i * 3 + j) * c + l) * o + r];
                    y[((s * h + p) * w + q) * o + r] = sum;
                }
    free(x);
}
