/* 3 As a product: the 9 c elements that an output needs are copied to a row of a matrix (im2col).
   The product of (h w, 9 c) and (9 c, o) is that of the last rung of the other ladder. It is fast,
   but the copy has nine times the elements of the image, which are written to memory and read
   again. */
#include "frame.h"
#include "product_6_packed.c"

void conv(const float *images, const float *f, float *y, int n, int h, int w, int c, int o) {
    float *x = framed(images, n, h, w, c), *columns = lines(9L * h * w * c);
    for (int s = 0; s < n; s++) {
        float *to = columns;
        for (int p = 0; p < h; p++)
            for (int q = 0; q < w; q++)
                for (int i = 0; i < 3; i++, to += 3 * c) /* three neighbours are contiguous */
                    memcpy(to, x + ((s * (h + 2L) + p + i) * (w + 2) + q) * c,
                           sizeof(float) * 3 * c);
        product(columns, f, y + (long)s * h * w * o, h * w, o, 9 * c);
    }
    free(columns);
    free(x);
}
