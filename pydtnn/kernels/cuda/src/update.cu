/* Updates of flat parameters in place: one pass over parameters, gradients and state.
 *
 * All arrays are float32 or all are float64. What changes from step to step comes from device
 * memory, so that a captured CUDA graph stays right; the first thread of each block makes of it, in
 * double, what the rule needs, while the loads of all threads are under way. A thread takes one
 * vector of each array: four arrays of 16 bytes are enough to hide the latency of memory. Where
 * `go` is 0 nothing is written.
 */
#include "columns.cuh"
#include "flat.cuh"
#include "rules.cuh"

/* rule.step(w, g, slots...) for all elements, with rule = make(); SLOTS arrays of state. */
template <int N, int SLOTS, class R, class Make>
DEVICE void update(R *w, const R *g, R *slot0, R *slot1, index_t n, const double *go, Make make) {
    R *const slots[] = {slot0, slot1};
    const index_t vectors = n / N, vector = (index_t)blockIdx.x * THREADS + thread_number();
    R value[N], gradient[N], state[SLOTS + 1][N]; /* one to spare: there are no empty arrays */
    if (vector < vectors) {
        load<N>(w + vector * N, value);
        load<N>(g + vector * N, gradient);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) load<N>(slots[s] + vector * N, state[s]);
    }
    __shared__ decltype(make()) rule;
    if (thread_number() == 0) rule = make();
    const bool write = *go != 0;
    __syncthreads();
    if (!write) return;
    const auto step = [&](R &value, R gradient, R &first, R &second) {
        if constexpr (SLOTS == 0) rule.step(value, gradient);
        if constexpr (SLOTS == 1) rule.step(value, gradient, first);
        if constexpr (SLOTS == 2) rule.step(value, gradient, first, second);
    };
    if (vector < vectors) {
#pragma unroll
        for (int i = 0; i < N; i++) step(value[i], gradient[i], state[0][i], state[SLOTS - 1 > 0][i]);
        store<N>(value, w + vector * N);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) store<N>(state[s], slots[s] + vector * N);
    }
    /* the last elements, too few for a vector */
    const index_t rest = vectors * N + thread_number();
    if (N > 1 && blockIdx.x == 0 && rest < n) {
        step(w[rest], g[rest], slots[0][rest], slots[SLOTS - 1 > 0][rest]);
    }
}

template <class R> DEVICE Moments<R> moments_of(double beta1, double beta2) {
    return {(R)beta1, (R)(1 - beta1), (R)beta2, (R)(1 - beta2)};
}

template <int N, class R>
DEVICE void sgd(R *w, const R *g, R *velocity, index_t n, Number lr, Number decay, double momentum,
                index_t nesterov, const double *go) {
    const auto make = [&]() -> SGD<R> {
        return {(R)lr.get(), (R)decay.get(), (R)momentum, nesterov != 0};
    };
    if (velocity) {
        update<N, 1>(w, g, velocity, (R *)nullptr, n, go, make);
    } else {
        update<N, 0>(w, g, (R *)nullptr, (R *)nullptr, n, go, make);
    }
}

template <int N, class R>
DEVICE void rmsprop(R *w, const R *g, R *square, index_t n, Number lr, double decay, double rho,
                    double epsilon, const double *go) {
    update<N, 1>(w, g, square, (R *)nullptr, n, go, [&]() -> RMSprop<R> {
        return {(R)lr.get(), (R)decay, (R)rho, (R)epsilon};
    });
}

template <int N, class R>
DEVICE void adam(R *w, const R *g, R *m, R *v, index_t n, Number lr, double decay, Number step,
                 double beta1, double beta2, double epsilon, index_t decoupled, const double *go) {
    update<N, 2>(w, g, m, v, n, go, [&]() -> Adam<R> {
        const double rate = lr.get() / (1 - pow(beta1, step.get()));
        const double inv_root = rsqrt(1 - pow(beta2, step.get()));
        const double shrink = decoupled ? 1 - lr.get() * decay : 1;
        return {moments_of<R>(beta1, beta2), (R)rate, (R)(decoupled ? 0 : decay),
                (R)shrink, (R)inv_root, (R)epsilon};
    });
}

template <int N, class R>
DEVICE void nadam(R *w, const R *g, R *m, R *v, index_t n, Number lr, double decay, Number step,
                  double beta1, double beta2, double epsilon, Number mu, Number mu_next,
                  Number mu_product, const double *go) {
    update<N, 2>(w, g, m, v, n, go, [&]() -> Nadam<R> {
        const double next = mu_next.get(), product = mu_product.get();
        const double inv_root = rsqrt(1 - pow(beta2, step.get()));
        return {moments_of<R>(beta1, beta2), (R)lr.get(), (R)decay, (R)inv_root, (R)epsilon,
                (R)(next / (1 - product * next)), (R)((1 - mu.get()) / (1 - product))};
    });
}

template <int N, class R> DEVICE void scale(R *x, Number factor, index_t n) {
    const R by = (R)factor.get();
    const R *const in[] = {x};
    map_elements<R, N, 2>(in, x, n, [=](const R(&v)[1]) { return v[0] * by; });
}

/* x / scale, and `go` cleared where that is not finite: by whoever finds it, always to 0. */
template <int N, class R>
DEVICE void unscale(R *x, const double *scale, double *go, index_t n) {
    const R by = (R)*scale;
    const R *const in[] = {x};
    bool finite_here = true;
    map_elements<R, N, 2>(in, x, n, [by, &finite_here](const R(&v)[1]) {
        const R y = v[0] / by;
        finite_here = finite_here && y - y == 0;
        return y;
    });
    if (!finite_here) clear(go);
}

/* The block is a column (1, THREADS) and the grid limited, as its sums are to be few. */
template <int N, class R>
DEVICE void squared_norm(const R *x, double *out, index_t n, double *partial, unsigned *arrived) {
    enum { FLIGHT = 4 };
    const index_t stride = (index_t)gridDim.x * THREADS, vectors = n / N;
    index_t i = (index_t)blockIdx.x * THREADS + thread_number();
    double total = 0;
    const auto add = [&](const auto &v) {
#pragma unroll
        for (auto e : v) total += (double)e * e;
    };
    for (; i + (FLIGHT - 1) * stride < vectors; i += FLIGHT * stride) {
        R v[FLIGHT][N];
#pragma unroll
        for (int f = 0; f < FLIGHT; f++) load<N>(x + (i + f * stride) * N, v[f]);
#pragma unroll
        for (int f = 0; f < FLIGHT; f++) add(v[f]);
    }
    for (; i < vectors; i += stride) {
        R v[N];
        load<N>(x + i * N, v);
        add(v);
    }
    const index_t rest = vectors * N + (index_t)blockIdx.x * THREADS + thread_number();
    if (rest < n) total += (double)widen(x[rest]) * widen(x[rest]);
    finish_total(total, 1, out, partial, arrived);
}

#define NUMBER(name) double name, const double *name##_at
#define OF(name)                                                                                   \
    Number { name, name##_at }

#define WIDTHS(R, WIDTH, N)                                                                        \
    KERNEL(sgd_##WIDTH##_##R)                                                                      \
    (R *w, const R *g, R *velocity, index_t n, NUMBER(lr), NUMBER(decay), double momentum,         \
     index_t nesterov, const double *go) {                                                         \
        sgd<N>(w, g, velocity, n, OF(lr), OF(decay), momentum, nesterov, go);                      \
    }                                                                                              \
    KERNEL(rmsprop_##WIDTH##_##R)                                                                  \
    (R *w, const R *g, R *square, index_t n, NUMBER(lr), double decay, double rho,                 \
     double epsilon, const double *go) {                                                           \
        rmsprop<N>(w, g, square, n, OF(lr), decay, rho, epsilon, go);                              \
    }                                                                                              \
    KERNEL(adam_##WIDTH##_##R)                                                                     \
    (R *w, const R *g, R *m, R *v, index_t n, NUMBER(lr), double decay, NUMBER(step),              \
     double beta1, double beta2, double epsilon, index_t decoupled, const double *go) {            \
        adam<N>(w, g, m, v, n, OF(lr), decay, OF(step), beta1, beta2, epsilon, decoupled, go);     \
    }                                                                                              \
    KERNEL(nadam_##WIDTH##_##R)                                                                    \
    (R *w, const R *g, R *m, R *v, index_t n, NUMBER(lr), double decay, NUMBER(step),              \
     double beta1, double beta2, double epsilon, NUMBER(mu), NUMBER(mu_next),                      \
     NUMBER(mu_product), const double *go) {                                                       \
        nadam<N>(w, g, m, v, n, OF(lr), decay, OF(step), beta1, beta2, epsilon, OF(mu),            \
                 OF(mu_next), OF(mu_product), go);                                                 \
    }                                                                                              \
    KERNEL(scale_##WIDTH##_##R)(R *x, NUMBER(factor), index_t n) { scale<N>(x, OF(factor), n); }   \
    KERNEL(unscale_##WIDTH##_##R)(R *x, const double *scale, double *go, index_t n) {              \
        unscale<N>(x, scale, go, n);                                                               \
    }                                                                                              \
    KERNEL(squared_norm_##WIDTH##_##R)                                                             \
    (const R *x, double *out, index_t n, double *partial, unsigned *arrived) {                     \
        squared_norm<N>(x, out, n, partial, arrived);                                              \
    }

#define DEFINE(R)                                                                                  \
    WIDTHS(R, wide, Width<R>::FLAT)                                                                \
    WIDTHS(R, single, 1)

REALS(DEFINE)
