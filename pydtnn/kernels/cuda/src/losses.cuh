/* Losses of one prediction and target of equal shape, and their slopes, as in
 * kernels/reference/loss.py.
 */
#pragma once

#include "activations.cuh"

struct binary_cross_entropy {
    template <class R> static SHARED R value(R x, R t) {
        return (x > 0 ? x : 0) - x * t + log1p_of(exp_of(x < 0 ? x : -x));
    }
    template <class R> static SHARED R slope(R x, R t) { return sigmoid_of(x) - t; }
};
struct squared_error {
    template <class R> static SHARED R value(R y, R t) { return (y - t) * (y - t); }
    template <class R> static SHARED R slope(R y, R t) { return 2 * (y - t); }
};
struct absolute_error {
    template <class R> static SHARED R value(R y, R t) { return y < t ? t - y : y - t; }
    template <class R> static SHARED R slope(R y, R t) {
        return y > t ? 1 : y < t ? -1 : y - t; /* 0, or NaN */
    }
};
