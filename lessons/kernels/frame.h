/* Images with a frame of zeros, so that filters at the edge need no conditions. */
#pragma once
#include "vectors.h"

/* Copy an image (h, w, c) into (h + 2, w + 2, wide) where zeros are already. */
static inline void frame(const float *x, float *to, int h, int w, int c, int wide) {
    for (int p = 0; p < h; p++) {
        float *row = to + ((p + 1L) * (w + 2) + 1) * wide;
        if (wide == c) memcpy(row, x + (long)p * w * c, sizeof(float) * w * c);
        else
            for (int q = 0; q < w; q++)
                memcpy(row + q * wide, x + ((long)p * w + q) * c, sizeof(float) * c);
    }
}

/* All images (n, h, w, c) to (n, h + 2, w + 2, c), to be freed. */
static inline float *framed(const float *x, int n, int h, int w, int c) {
    long image = (h + 2L) * (w + 2) * c;
    float *to = lines(n * image);
    memset(to, 0, sizeof(float) * n * image);
    for (int s = 0; s < n; s++) frame(x + (long)s * h * w * c, to + s * image, h, w, c, c);
    return to;
}
