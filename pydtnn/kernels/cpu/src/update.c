/* The optimizers' updates: one pass over flat arrays, bound by memory.
 *
 * SGD with momentum reads w, g, v and writes w, v: 5 accesses an element, Adam 7. The loops (Lion's
 * excepted) are plain C over arrays that do not overlap, which every compiler turns into whole
 * vectors, square roots and divisions included; everything is computed in the real type. Parts of
 * PART elements go to the threads. A gradient that is clipped is scaled BLOCK by BLOCK in L1, not
 * in memory; the product is rounded to the real type before the rule uses it.
 */
#include <math.h>
#include <stdlib.h>

#include "doubles.h"
#include "parts.h"
#include "update.h"

#if REAL_FLOAT
#define SQRT sqrtf
#else
#define SQRT sqrt
#endif

static void sgd_part(real *restrict w, const real *restrict g, ptrdiff_t n, real lr, real decay) {
    for (ptrdiff_t i = 0; i < n; i++) w[i] -= lr * (g[i] + decay * w[i]);
}

static void momentum_part(real *restrict w, const real *restrict g, real *restrict v, ptrdiff_t n,
                          real lr, real decay, real momentum) {
    for (ptrdiff_t i = 0; i < n; i++) {
        v[i] = momentum * v[i] + (g[i] + decay * w[i]);
        w[i] -= lr * v[i];
    }
}

static void nesterov_part(real *restrict w, const real *restrict g, real *restrict v, ptrdiff_t n,
                          real lr, real decay, real momentum) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const real d = g[i] + decay * w[i];
        v[i] = momentum * v[i] + d;
        w[i] -= lr * (d + momentum * v[i]);
    }
}

static void rmsprop_part(real *restrict w, const real *restrict g, real *restrict square,
                         ptrdiff_t n, real lr, real decay, real rho, real rest, real epsilon) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const real d = g[i] + decay * w[i];
        square[i] = rho * square[i] + rest * d * d;
        w[i] -= lr * d / (SQRT(square[i]) + epsilon);
    }
}

static void adagrad_part(real *restrict w, const real *restrict g, real *restrict square,
                         ptrdiff_t n, real lr, real decay, real initial, real epsilon) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const real d = g[i] + decay * w[i];
        square[i] += d * d;
        w[i] -= lr * d / (SQRT(square[i] + initial) + epsilon);
    }
}

struct lion {
    real lr, shrink, beta1, rest1, beta2, rest2;
};

/* Compilers do not turn the comparisons of the sign into vectors, as they could raise exceptions. */
INLINE vec lion_step(vec w, vec g, vec *m, struct lion o) {
    const vec c = o.beta1 * *m + o.rest1 * g;
    /* c itself if it is 0 or NaN */
    const vec sign = vselect(c > 0, vset(1), vselect(c < 0, vset(-1), c));
    *m = o.beta2 * *m + o.rest2 * g;
    return o.shrink * w - o.lr * sign;
}

static void lion_part(real *restrict w, const real *restrict g, real *restrict m, ptrdiff_t n,
                      struct lion o) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    for (ptrdiff_t i = 0; i < whole; i += LANES) {
        vec mean = vload(m + i);
        vstore(w + i, lion_step(vload(w + i), vload(g + i), &mean, o));
        vstore(m + i, mean);
    }
    vec mean = vload_part(m + whole, tail);
    const vec last = lion_step(vload_part(w + whole, tail), vload_part(g + whole, tail), &mean, o);
    vstore_part(w + whole, last, tail);
    vstore_part(m + whole, mean, tail);
}

struct moments {
    real decay, beta1, rest1, beta2, rest2, inv_root, epsilon; /* rest = 1 - beta, rounded once */
};

static void adam_part(real *restrict w, const real *restrict g, real *restrict m, real *restrict v,
                      ptrdiff_t n, struct moments o, real shrink, real rate) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const real shrunk = shrink * w[i], d = g[i] + o.decay * w[i];
        m[i] = o.beta1 * m[i] + o.rest1 * d;
        v[i] = o.beta2 * v[i] + o.rest2 * d * d;
        w[i] = shrunk - rate * m[i] / (SQRT(v[i]) * o.inv_root + o.epsilon);
    }
}

static void nadam_part(real *restrict w, const real *restrict g, real *restrict m, real *restrict v,
                       ptrdiff_t n, struct moments o, real lr, real ahead, real now) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const real d = g[i] + o.decay * w[i];
        m[i] = o.beta1 * m[i] + o.rest1 * d;
        v[i] = o.beta2 * v[i] + o.rest2 * d * d;
        w[i] -= lr * (ahead * m[i] + now * d) / (SQRT(v[i]) * o.inv_root + o.epsilon);
    }
}

static double squared_norm_part(const real *x, ptrdiff_t n) {
    struct doubles sum[4] = {0}; /* four chains of additions hide their latency */
    ptrdiff_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        for (int k = 0; k < 4; k++) add_squares(&sum[k], vload(x + i + k * LANES));
    }
    for (; i < n; i += LANES) add_squares(&sum[0], vload_part(x + i, min_of(LANES, n - i)));
    return (sum_doubles(sum[0]) + sum_doubles(sum[1])) +
           (sum_doubles(sum[2]) + sum_doubles(sum[3]));
}

static void scale_part(real *x, ptrdiff_t n, real factor) {
    for (ptrdiff_t i = 0; i < n; i++) x[i] *= factor;
}

#define FOR_FLAT(...)                                                         \
    FOR_PARTS(p, parts_of(n, PART), n, threads, const ptrdiff_t i = p * PART, \
              k = part_length(n, PART, p);                                    \
              __VA_ARGS__)

enum { BLOCK = 1024 };

/* g, or its product with a factor in `buffer` */
static const real *scaled(const real *g, ptrdiff_t n, real factor, real *buffer) {
    if (factor == 1) return g;
    for (ptrdiff_t i = 0; i < n; i++) buffer[i] = g[i] * factor;
    return buffer;
}

/* The same with BLOCKs of the gradient d = factor g. */
#define FOR_SCALED(factor, ...)                                                    \
    FOR_PARTS(p, parts_of(n, PART), n, threads, real buffer[BLOCK];                \
              const ptrdiff_t end = p * PART + part_length(n, PART, p);            \
              for (ptrdiff_t i = p * PART; i < end; i += BLOCK) {                  \
                  const ptrdiff_t k = min_of(BLOCK, end - i);                      \
                  const real *d = scaled(g + i, k, factor, buffer);                \
                  __VA_ARGS__;                                                     \
              })

static void sgd(void *w_, const void *g_, void *velocity, ptrdiff_t n, double lr, double decay,
                double momentum, int nesterov, double factor, int threads) {
    real *w = w_, *v = velocity;
    const real *g = g_;
    const real rate = (real)lr, l2 = (real)decay, mu = (real)momentum;
    if (!v) {
        FOR_SCALED((real)factor, sgd_part(w + i, d, k, rate, l2));
    } else if (nesterov) {
        FOR_SCALED((real)factor, nesterov_part(w + i, d, v + i, k, rate, l2, mu));
    } else {
        FOR_SCALED((real)factor, momentum_part(w + i, d, v + i, k, rate, l2, mu));
    }
}

static void rmsprop(void *w_, const void *g_, void *square, ptrdiff_t n, double lr, double decay,
                    double rho, double epsilon, int threads) {
    real *w = w_, *s = square;
    const real *g = g_;
    FOR_FLAT(rmsprop_part(w + i, g + i, s + i, k, (real)lr, (real)decay, (real)rho, (real)(1 - rho),
                          (real)epsilon));
}

static void adagrad(void *w_, const void *g_, void *square, ptrdiff_t n, double lr, double decay,
                    double initial, double epsilon, int threads) {
    real *w = w_, *s = square;
    const real *g = g_;
    FOR_FLAT(adagrad_part(w + i, g + i, s + i, k, (real)lr, (real)decay, (real)initial,
                          (real)epsilon));
}

static void lion(void *w_, const void *g_, void *m_, ptrdiff_t n, double lr, double shrink,
                 double beta1, double beta2, int threads) {
    real *w = w_, *m = m_;
    const real *g = g_;
    const struct lion o = {
        .lr = (real)lr,
        .shrink = (real)shrink,
        .beta1 = (real)beta1,
        .rest1 = (real)(1 - beta1),
        .beta2 = (real)beta2,
        .rest2 = (real)(1 - beta2),
    };
    FOR_FLAT(lion_part(w + i, g + i, m + i, k, o));
}

static struct moments moments_of(double decay, double beta1, double beta2, double inv_root,
                                 double epsilon) {
    return (struct moments){
        .decay = (real)decay,
        .beta1 = (real)beta1,
        .rest1 = (real)(1 - beta1),
        .beta2 = (real)beta2,
        .rest2 = (real)(1 - beta2),
        .inv_root = (real)inv_root,
        .epsilon = (real)epsilon,
    };
}

static void adam(void *w_, const void *g_, void *m_, void *v_, ptrdiff_t n, double rate,
                 double decay, double shrink, double beta1, double beta2, double inv_root,
                 double epsilon, double factor, int threads) {
    real *w = w_, *m = m_, *v = v_;
    const real *g = g_;
    const struct moments o = moments_of(decay, beta1, beta2, inv_root, epsilon);
    FOR_SCALED((real)factor,
               adam_part(w + i, d, m + i, v + i, k, o, (real)shrink, (real)rate));
}

static void nadam(void *w_, const void *g_, void *m_, void *v_, ptrdiff_t n, double lr,
                  double decay, double beta1, double beta2, double inv_root, double epsilon,
                  double ahead, double now, int threads) {
    real *w = w_, *m = m_, *v = v_;
    const real *g = g_;
    const struct moments o = moments_of(decay, beta1, beta2, inv_root, epsilon);
    FOR_FLAT(nadam_part(w + i, g + i, m + i, v + i, k, o, (real)lr, (real)ahead, (real)now));
}

static int squared_norm(const void *x_, ptrdiff_t n, double *norm, int threads) {
    const real *x = x_;
    const ptrdiff_t parts = parts_of(n, PART);
    double *sums = malloc(((size_t)parts + 1) * sizeof *sums);
    if (!sums) return -1;
    FOR_FLAT(sums[p] = squared_norm_part(x + i, k));
    *norm = 0;
    for (ptrdiff_t p = 0; p < parts; p++) *norm += sums[p];
    free(sums);
    return 0;
}

static void scale(void *x_, ptrdiff_t n, double factor, int threads) {
    real *x = x_;
    FOR_FLAT(scale_part(x + i, k, (real)factor));
}

const struct update_kernels NAME(update_kernels) = {
    .sgd = sgd,
    .rmsprop = rmsprop,
    .adagrad = adagrad,
    .lion = lion,
    .adam = adam,
    .nadam = nadam,
    .squared_norm = squared_norm,
    .scale = scale,
};
