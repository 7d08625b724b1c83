/* Updates of flat parameters in place: one pass over parameters, gradients and state.
 *
 * Parameters and state are float32 or float64; gradients may be of 16 bits beside float32. What
 * changes from step to step comes from device memory, so that a captured CUDA graph stays right;
 * the first thread of each block makes of it, in double, what the rule needs.
 */
#include "columns.cuh"
#include "flat.cuh"
#include "rules.cuh"

/* Call make() in one thread and give its result to all of the block. */
template <class Rule, class Make> DEVICE const Rule &shared_rule(Make make) {
    __shared__ Rule rule;
    if (thread_number() == 0) rule = make();
    __syncthreads();
    return rule;
}

/* rule.step(w, g, slots...) for all elements; SLOTS arrays of state. */
template <int N, int SLOTS, class T, class Rule>
DEVICE void update(real<T> *w, const T *g, real<T> *slot0, real<T> *slot1, index_t n,
                   const Rule &rule) {
    typedef real<T> R;
    for_elements<N, 1>(n, [&](index_t first, auto width, auto, index_t) {
        constexpr int M = width.value;
        R value[M], gradient[M], state[SLOTS + 1][M]; /* one to spare: there are no empty arrays */
        R *const slots[] = {slot0, slot1};
        load<M>(w + first, value);
        load<M>(g + first, gradient);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) load<M>(slots[s] + first, state[s]);
#pragma unroll
        for (int i = 0; i < M; i++) {
            if constexpr (SLOTS == 0) rule.step(value[i], gradient[i]);
            if constexpr (SLOTS == 1) rule.step(value[i], gradient[i], state[0][i]);
            if constexpr (SLOTS == 2) rule.step(value[i], gradient[i], state[0][i], state[1][i]);
        }
        store<M>(value, w + first);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) store<M>(state[s], slots[s] + first);
    });
}

template <class R> DEVICE Moments<R> moments_of(double beta1, double beta2) {
    return {(R)beta1, (R)(1 - beta1), (R)beta2, (R)(1 - beta2)};
}

template <int N, class T>
DEVICE void sgd(real<T> *w, const T *g, real<T> *velocity, index_t n, Number lr, double decay,
                double momentum, index_t nesterov) {
    typedef real<T> R;
    const SGD<R> rule = {(R)lr.get(), (R)decay, (R)momentum, nesterov != 0};
    if (velocity) {
        update<N, 1>(w, g, velocity, (R *)nullptr, n, rule);
    } else {
        update<N, 0>(w, g, (R *)nullptr, (R *)nullptr, n, rule);
    }
}

template <int N, class T>
DEVICE void rmsprop(real<T> *w, const T *g, real<T> *square, index_t n, Number lr, double decay,
                    double rho, double epsilon) {
    typedef real<T> R;
    const RMSprop<R> rule = {(R)lr.get(), (R)decay, (R)rho, (R)epsilon};
    update<N, 1>(w, g, square, (R *)nullptr, n, rule);
}

template <int N, class T>
DEVICE void adam(real<T> *w, const T *g, real<T> *m, real<T> *v, index_t n, Number lr, double decay,
                 Number step, double beta1, double beta2, double epsilon, index_t decoupled) {
    typedef real<T> R;
    const Adam<R> &rule = shared_rule<Adam<R>>([&]() -> Adam<R> {
        const double rate = lr.get() / (1 - pow(beta1, step.get()));
        const double inv_root = rsqrt(1 - pow(beta2, step.get()));
        const double shrink = decoupled ? 1 - lr.get() * decay : 1;
        return {moments_of<R>(beta1, beta2), (R)rate, (R)(decoupled ? 0 : decay),
                (R)shrink, (R)inv_root, (R)epsilon};
    });
    update<N, 2>(w, g, m, v, n, rule);
}

template <int N, class T>
DEVICE void nadam(real<T> *w, const T *g, real<T> *m, real<T> *v, index_t n, Number lr,
                  double decay, Number step, double beta1, double beta2, double epsilon, Number mu,
                  Number mu_next, Number mu_product) {
    typedef real<T> R;
    const Nadam<R> &rule = shared_rule<Nadam<R>>([&]() -> Nadam<R> {
        const double next = mu_next.get(), product = mu_product.get();
        const double inv_root = rsqrt(1 - pow(beta2, step.get()));
        return {moments_of<R>(beta1, beta2), (R)lr.get(), (R)decay, (R)inv_root, (R)epsilon,
                (R)(next / (1 - product * next)), (R)((1 - mu.get()) / (1 - product))};
    });
    update<N, 2>(w, g, m, v, n, rule);
}

template <int N, class T> DEVICE void scale(T *x, Number factor, index_t n) {
    const real<T> by = (real<T>)factor.get();
    const T *const in[] = {x};
    map_elements<T, N, 2>(in, x, n, [=](const real<T>(&v)[1]) { return v[0] * by; });
}

/* The block is a column (1, THREADS) and the grid limited, as its sums are to be few. */
template <int N, class T>
DEVICE void squared_norm(const T *x, double *out, index_t n, double *partial, unsigned *arrived) {
    enum { FLIGHT = 4 };
    const index_t stride = (index_t)gridDim.x * THREADS, vectors = n / N;
    index_t i = (index_t)blockIdx.x * THREADS + thread_number();
    double total = 0;
    const auto add = [&](const auto &v) {
#pragma unroll
        for (auto e : v) total += (double)e * e;
    };
    for (; i + (FLIGHT - 1) * stride < vectors; i += FLIGHT * stride) {
        real<T> v[FLIGHT][N];
#pragma unroll
        for (int f = 0; f < FLIGHT; f++) load<N>(x + (i + f * stride) * N, v[f]);
#pragma unroll
        for (int f = 0; f < FLIGHT; f++) add(v[f]);
    }
    for (; i < vectors; i += stride) {
        real<T> v[N];
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

#define RULES(T, WIDTH, N)                                                                         \
    KERNEL(sgd_##WIDTH##_##T)                                                                      \
    (real<T> *w, const T *g, real<T> *velocity, index_t n, NUMBER(lr), double decay,               \
     double momentum, index_t nesterov) {                                                          \
        sgd<N>(w, g, velocity, n, OF(lr), decay, momentum, nesterov);                              \
    }                                                                                              \
    KERNEL(rmsprop_##WIDTH##_##T)                                                                  \
    (real<T> *w, const T *g, real<T> *square, index_t n, NUMBER(lr), double decay, double rho,     \
     double epsilon) {                                                                             \
        rmsprop<N>(w, g, square, n, OF(lr), decay, rho, epsilon);                                  \
    }                                                                                              \
    KERNEL(adam_##WIDTH##_##T)                                                                     \
    (real<T> *w, const T *g, real<T> *m, real<T> *v, index_t n, NUMBER(lr), double decay,          \
     NUMBER(step), double beta1, double beta2, double epsilon, index_t decoupled) {                \
        adam<N>(w, g, m, v, n, OF(lr), decay, OF(step), beta1, beta2, epsilon, decoupled);         \
    }                                                                                              \
    KERNEL(nadam_##WIDTH##_##T)                                                                    \
    (real<T> *w, const T *g, real<T> *m, real<T> *v, index_t n, NUMBER(lr), double decay,          \
     NUMBER(step), double beta1, double beta2, double epsilon, NUMBER(mu), NUMBER(mu_next),        \
     NUMBER(mu_product)) {                                                                         \
        nadam<N>(w, g, m, v, n, OF(lr), decay, OF(step), beta1, beta2, epsilon, OF(mu),            \
                 OF(mu_next), OF(mu_product));                                                     \
    }

#define ARRAYS(T, WIDTH, N)                                                                        \
    KERNEL(scale_##WIDTH##_##T)(T *x, NUMBER(factor), index_t n) { scale<N>(x, OF(factor), n); }   \
    KERNEL(squared_norm_##WIDTH##_##T)                                                             \
    (const T *x, double *out, index_t n, double *partial, unsigned *arrived) {                     \
        squared_norm<N>(x, out, n, partial, arrived);                                              \
    }

#define DEFINE(T)                                                                                  \
    RULES(T, wide, Width<real<T>>::FLAT)                                                           \
    RULES(T, single, 1)                                                                            \
    ARRAYS(T, wide, Width<T>::FLAT)                                                                \
    ARRAYS(T, single, 1)

ELEMENTS(DEFINE)
