/* The optimizers' rules for one parameter, as in kernels/reference/update.py.
 *
 * w is the parameter, g its gradient, the others are state; R is float or double. What depends on
 * the step, but not on the parameter, is computed once (update.cu).
 */
#pragma once

#include "element.cuh"

template <class R> struct SGD {
    R lr, decay, momentum;
    bool nesterov;

    SHARED void step(R &w, R g) const { w -= lr * (g + decay * w); }
    SHARED void step(R &w, R g, R &velocity) const {
        g += decay * w;
        velocity = momentum * velocity + g;
        w -= lr * (nesterov ? g + momentum * velocity : velocity);
    }
};

template <class R> struct RMSprop {
    R lr, decay, rho, epsilon;

    SHARED void step(R &w, R g, R &square) const {
        g += decay * w;
        square = rho * square + (1 - rho) * g * g;
        w -= lr * g / (sqrt(square) + epsilon);
    }
};

/* Running means of the gradient and its square, without their biases: 1 - beta given, since R may
   have lost its digits. */
template <class R> struct Moments {
    R beta1, rest1, beta2, rest2;

    SHARED void step(R g, R &m, R &v) const {
        m = beta1 * m + rest1 * g;
        v = beta2 * v + rest2 * g * g;
    }
};

/* rate = lr / (1 - beta1^step), inv_root = (1 - beta2^step)^-1/2; shrink = 1 - lr decay and no
   decay where it is decoupled (AdamW). */
template <class R> struct Adam {
    Moments<R> moments;
    R rate, decay, shrink, inv_root, epsilon;

    SHARED void step(R &w, R g, R &m, R &v) const {
        w *= shrink;
        g += decay * w;
        moments.step(g, m, v);
        w -= rate * m / (sqrt(v) * inv_root + epsilon);
    }
};

/* ahead = mu_next / (1 - mu_product mu_next), now = (1 - mu) / (1 - mu_product). */
template <class R> struct Nadam {
    Moments<R> moments;
    R lr, decay, inv_root, epsilon, ahead, now;

    SHARED void step(R &w, R g, R &m, R &v) const {
        g += decay * w;
        moments.step(g, m, v);
        w -= lr * (ahead * m + now * g) / (sqrt(v) * inv_root + epsilon);
    }
};
