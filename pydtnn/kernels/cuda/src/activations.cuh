/* Activations and their derivatives times dy, as in kernels/reference/elementwise.py.
 *
 * z is the output where the derivative can be told from it, otherwise the input. NaN comes out as
 * NaN. Overloads for float and double, so that no float becomes double on the way.
 */
#pragma once

#include "element.cuh"

SHARED float exp_of(float x) { return expf(x); }
SHARED double exp_of(double x) { return exp(x); }
SHARED float expm1_of(float x) { return expm1f(x); }
SHARED double expm1_of(double x) { return expm1(x); }
SHARED float log_of(float x) { return logf(x); }
SHARED double log_of(double x) { return log(x); }
SHARED float log1p_of(float x) { return log1pf(x); }
SHARED double log1p_of(double x) { return log1p(x); }
SHARED float tanh_of(float x) { return tanhf(x); }
SHARED double tanh_of(double x) { return tanh(x); }
SHARED float atan_of(float x) { return atanf(x); }
SHARED double atan_of(double x) { return atan(x); }

/* Of e^x and e^-x the one that cannot overflow. */
template <class R> SHARED R sigmoid_of(R x) {
    const R e = exp_of(x < 0 ? x : -x);
    return (x < 0 ? e : 1) / (1 + e);
}

/* a sigmoid(x): the exponential itself may be subnormal, and a large multiple of it not. */
template <class R> SHARED R times_sigmoid(R a, R x) {
    const R root = exp_of((x < 0 ? x : -x) / 2), sum = 1 + root * root;
    return x < 0 ? a * root / sum * root : a / sum;
}
template <class R> SHARED R at_least(R x, R low) { return x < low ? low : x; }
template <class R> SHARED R within(R x, R far) { return x > far ? far : at_least(x, -far); }

/* GELU is x sigmoid(u) (Hendrycks and Gimpel 2016, section 2, where it is written with tanh). */
template <class R> SHARED R gelu_argument(R x) {
    return (R)1.5957691216057308 * (x + (R)0.044715 * x * x * x);
}
template <class R> SHARED R gelu_of(R x) { return times_sigmoid(x, gelu_argument(x)); }
template <class R> SHARED R gelu_slope(R dy, R x) {
    const R u = gelu_argument(x), du = (R)1.5957691216057308 * (1 + 3 * (R)0.044715 * x * x);
    return times_sigmoid(dy * (1 + x * (1 - sigmoid_of(u)) * du), u);
}
template <class R> SHARED R silu_slope(R dy, R x) {
    return times_sigmoid(dy * (1 + x * (1 - sigmoid_of(x))), x);
}

#define ACTIVATION(name, value, derivative)                                                        \
    struct name {                                                                                  \
        template <class R> static SHARED R forward(R x, R alpha) { return value; }                 \
        template <class R> static SHARED R backward(R dy, R z, R alpha) { return derivative; }     \
    };

ACTIVATION(relu, x < 0 ? 0 : x, z <= 0 ? 0 : dy) /* where z is NaN, dy passes */
ACTIVATION(relu6, x < 0 ? 0 : x > 6 ? 6 : x, z <= 0 || z >= 6 ? 0 : dy)
ACTIVATION(leaky_relu, x > 0 ? x : alpha * x, z > 0 ? dy : alpha * dy)
ACTIVATION(elu, x > 0 ? x : alpha * expm1_of(x), z > 0 ? dy : dy * (z + alpha))
ACTIVATION(sigmoid, sigmoid_of(x), dy * z * (1 - z))
ACTIVATION(tanh_, tanh_of(x), dy * (1 - z * z))
ACTIVATION(arctan, atan_of(x), dy / (1 + z * z))
ACTIVATION(log_, log_of(x), dy / z)
/* Further from 0 than these, the results are 0 or x. */
ACTIVATION(gelu, gelu_of(at_least(x, (R)-30)), gelu_slope(dy, within(z, (R)30)))
ACTIVATION(silu, times_sigmoid(at_least(x, (R)-1000), x), silu_slope(dy, within(z, (R)1000)))
