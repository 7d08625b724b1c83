/* Convolutions over NHWC images: the table of kernels. Forward and backward of data are gathers
 * (conv_gather.c), backward of filters is a sum over pixels (conv_filter.c), depthwise kernels are
 * in conv_depthwise.c; conv_block.c says how all of them walk. */
#include "conv_parts.h"

static int forward(const struct conv_shape *s, const void *x, const void *w, const void *b, void *y,
                   int threads) {
    return NAME(conv_gather)(s, GATHER_INPUT, x, w, b, y, threads);
}

static int backward_data(const struct conv_shape *s, const void *dy, const void *w, void *dx,
                         int threads) {
    return NAME(conv_gather)(s, GATHER_GRADIENT, dy, w, NULL, dx, threads);
}

static int backward_filter(const struct conv_shape *s, const void *x, const void *dy, void *dw,
                           int accumulate, int threads) {
    return NAME(conv_filter)(s, x, dy, dw, accumulate, threads);
}

const struct conv_kernels NAME(conv_kernels) = {
    .forward = forward, .backward_data = backward_data, .backward_filter = backward_filter};
