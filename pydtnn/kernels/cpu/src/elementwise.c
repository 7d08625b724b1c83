/* Activations, sums of arrays, and softmax.
 *
 * One pass, one vector at a time, over parts that fit in L1: bound by memory for the ReLUs and the
 * sum (one or two loads and a store per vector), by a dozen multiplications per vector for those
 * with an exponential. Each activation is two functions of vectors; MAP makes the loops. Every load
 * of an element comes before its store, so `out` may be an input.
 */
#include "elementwise.h"
#include "elementwise_round.h"
#include "functions.h"
#include "parts.h"
#include "rows.h"
#include "stored.h"

/* every activation takes alpha, most have no use for it */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* forward: y from x; backward: dx from dy and z, which is y or x as in the reference */
INLINE vec relu_forward(vec x, vec alpha) { return vmax(vzero(), x); } /* in this order NaN stays */
INLINE vec relu_backward(vec dy, vec y, vec alpha) { return vselect(y <= 0, vzero(), dy); }

INLINE vec relu6_forward(vec x, vec alpha) { return vmin(vset(6), vmax(vzero(), x)); }
INLINE vec relu6_backward(vec dy, vec y, vec alpha) {
    return vselect((y <= 0) | (y >= 6), vzero(), dy);
}

INLINE vec leaky_relu_forward(vec x, vec alpha) { return vselect(x > 0, x, alpha * x); }
INLINE vec leaky_relu_backward(vec dy, vec y, vec alpha) { return vselect(y > 0, dy, alpha * dy); }

INLINE vec elu_forward(vec x, vec alpha) {
    return vselect(x > 0, x, alpha * vexpm1(vmin(vzero(), x)));
}
INLINE vec elu_backward(vec dy, vec y, vec alpha) { return vselect(y > 0, dy, dy * (y + alpha)); }

INLINE vec sigmoid_forward(vec x, vec alpha) { return vsigmoid(x); }
INLINE vec sigmoid_backward(vec dy, vec y, vec alpha) { return dy * y * (1 - y); }

INLINE vec tanh_forward(vec x, vec alpha) { return vtanh(x); }
INLINE vec tanh_backward(vec dy, vec y, vec alpha) { return dy * (1 - y * y); }

INLINE vec arctan_forward(vec x, vec alpha) { return varctan(x); }
INLINE vec arctan_backward(vec dy, vec x, vec alpha) { return dy / (1 + x * x); }

INLINE vec log_forward(vec x, vec alpha) { return vlog(x); }
INLINE vec log_backward(vec dy, vec x, vec alpha) { return dy / x; }

/* (1 + tanh u) / 2 = sigmoid(2 u), which does not cancel for negative u */
#define GELU_SLOPE ((real)1.5957691216057308) /* 2 sqrt(2 / pi) */
#define GELU_CUBE ((real)0.044715)
#define GELU_FAR 30 /* further from 0 the result is 0 or x */

/* Where nothing is subnormal or infinite, one power of 2 and one division do. Other elements are
 * rare: a vector with one of them is computed in both ways, so that no element depends on others. */
#define FAR __attribute__((noinline, cold))
#define IF_FAR(x, limit, far, near)                             \
    do {                                                        \
        if (__builtin_expect(vall_within(x, limit), 1)) return near; \
        return vselect(vabs(x) <= (limit), near, far);          \
    } while (0)
INLINE vec gelu_argument(vec x) { return GELU_SLOPE * (x + GELU_CUBE * x * x * x); }
static FAR vec gelu_far(vec x) {
    const vec near = vmax(vset(-GELU_FAR), x);
    return vsigmoid_times(near, gelu_argument(near));
}
static FAR vec gelu_far_gradient(vec dy, vec x) {
    const vec near = vmin(vset(GELU_FAR), vmax(vset(-GELU_FAR), x)), u = gelu_argument(near);
    const vec slope = GELU_SLOPE * (1 + 3 * GELU_CUBE * near * near);
    return vsigmoid_times(dy * (1 + near * (1 - vsigmoid(u)) * slope), u);
}

/* exp(-2 u), by which 1 / sigmoid(2 u) is larger than 1 */
INLINE vec gelu_power(vec x, vec square) {
    const real slope = (real)-2.302208198144325, cube = (real)-0.1029432395800235; /* / ln 2 */
    return vexp2_near(x * (slope + cube * square));
}
INLINE vec gelu_forward(vec x, vec alpha) {
    const vec y = x / (1 + gelu_power(x, x * x));
    IF_FAR(x, GELU_NEAR, gelu_far(x), y);
}
INLINE vec gelu_backward(vec dy, vec x, vec alpha) {
    const vec square = x * x, power = gelu_power(x, square), sigmoid = 1 / (1 + power);
    const vec slope = GELU_SLOPE + 3 * GELU_SLOPE * GELU_CUBE * square;
    const vec dx = dy * sigmoid * (1 + x * slope * (power * sigmoid));
    IF_FAR(x, GELU_NEAR, gelu_far_gradient(dy, x), dx);
}

static FAR vec gelu_exact_far(vec x) {
    const struct normal f = vnormal(x);
    const vec below = -f.t * f.quotient * f.e.most * f.e.rest;
    return vselect(x < 0, below, x * (1 - f.quotient * f.e.most * f.e.rest));
}
static FAR vec gelu_exact_far_gradient(vec dy, vec x) {
    const struct normal f = vnormal(x);
    const vec density = f.t * NORMAL_PEAK; /* times t, over the exponential */
    const vec below = dy * (f.quotient - density) * f.e.most * f.e.rest;
    return vselect(x < 0, below, dy * (1 + (density - f.quotient) * f.e.most * f.e.rest));
}

#define HALF_LOG2_E ((real)0.72134752044448170)
INLINE vec gelu_exact_forward(vec x, vec alpha) {
    const vec t = vabs(x), below = vnormal_quotient(t) * vexp2_near(-HALF_LOG2_E * t * t);
    const vec y = vmax(vzero(), x) - t * below;
    IF_FAR(x, NORMAL_NEAR, gelu_exact_far(x), y);
}
INLINE vec gelu_exact_backward(vec dy, vec x, vec alpha) {
    const vec t = vabs(x), power = vexp2_near(-HALF_LOG2_E * t * t);
    const vec above = (t * NORMAL_PEAK - vnormal_quotient(t)) * power; /* for x > 0, less 1 */
    const vec dx = dy * vselect(x < 0, -above, 1 + above);
    IF_FAR(x, NORMAL_NEAR, gelu_exact_far_gradient(dy, x), dx);
}

INLINE vec silu_forward(vec x, vec alpha) {
    const vec near = vmax(vset(LOWEST_EXP), x);
    return vsigmoid_times(near, near);
}
INLINE vec silu_backward(vec dy, vec x, vec alpha) {
    const vec near = vmin(vset(-LOWEST_EXP), vmax(vset(LOWEST_EXP), x));
    return vsigmoid_times(dy * (1 + near * (1 - vsigmoid(near))), near);
}

INLINE vec add_vectors(vec a, vec b, vec alpha) { return a + b; }

typedef void unary(const stored *x, ptrdiff_t n, real alpha, stored *out);
typedef void binary(const stored *x, const stored *z, ptrdiff_t n, real alpha, stored *out);

#define MAP_UNARY(f)                                                                      \
    static void f##_part(const stored *x, ptrdiff_t n, real alpha, stored *out) {         \
        ptrdiff_t i = 0;                                                                  \
        for (; i + LANES <= n; i += LANES) sstore(out + i, f(sload(x + i), vset(alpha))); \
        if (i < n) sstore_part(out + i, f(sload_part(x + i, n - i), vset(alpha)), n - i); \
    }
#define MAP_BINARY(f)                                                                        \
    static void f##_part(const stored *x, const stored *z, ptrdiff_t n, real alpha,        \
                         stored *out) {                                                    \
        ptrdiff_t i = 0;                                                                   \
        for (; i + LANES <= n; i += LANES) {                                               \
            sstore(out + i, f(sload(x + i), sload(z + i), vset(alpha)));                   \
        }                                                                                  \
        if (i < n) {                                                                       \
            const vec a = sload_part(x + i, n - i), b = sload_part(z + i, n - i);          \
            sstore_part(out + i, f(a, b, vset(alpha)), n - i);                             \
        }                                                                                  \
    }

#define FOR_ACTIVATIONS(DO)    \
    DO(RELU, relu)             \
    DO(RELU6, relu6)           \
    DO(LEAKY_RELU, leaky_relu) \
    DO(ELU, elu)               \
    DO(SIGMOID, sigmoid)       \
    DO(TANH, tanh)             \
    DO(ARCTAN, arctan)         \
    DO(LOG, log)               \
    DO(GELU, gelu)             \
    DO(GELU_EXACT, gelu_exact) \
    DO(SILU, silu)
#define MAP_BOTH(kind, f) MAP_UNARY(f##_forward) MAP_BINARY(f##_backward)
#define FORWARD_ENTRY(kind, f) [kind] = f##_forward_part,
#define BACKWARD_ENTRY(kind, f) [kind] = f##_backward_part,

FOR_ACTIVATIONS(MAP_BOTH)
MAP_BINARY(add_vectors)
static unary *const forward_parts[] = {FOR_ACTIVATIONS(FORWARD_ENTRY)};
static binary *const backward_parts[] = {FOR_ACTIVATIONS(BACKWARD_ENTRY)};

static void map_unary(unary *f, const stored *x, ptrdiff_t n, double alpha, stored *out,
                      int threads) {
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              f(x + p * PART, part_length(n, PART, p), (real)alpha, out + p * PART));
}

static void map_binary(binary *f, const stored *x, const stored *z, ptrdiff_t n, double alpha,
                       stored *out, int threads) {
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              f(x + p * PART, z + p * PART, part_length(n, PART, p), (real)alpha, out + p * PART));
}

static void forward(int activation, const void *x, ptrdiff_t n, double alpha, void *out,
                    int threads) {
    map_unary(forward_parts[activation], x, n, alpha, out, threads);
}

static void backward(int activation, const void *dy, const void *z, ptrdiff_t n, double alpha,
                     void *out, int threads) {
    map_binary(backward_parts[activation], dy, z, n, alpha, out, threads);
}

static void add(const void *a, const void *b, ptrdiff_t n, void *out, int threads) {
    map_binary(add_vectors_part, a, b, n, 0, out, threads);
}

/* -- conversions between stored and real elements */

INLINE void add_vector(const stored *x, real *out, ptrdiff_t i, ptrdiff_t lanes) {
    store(out + i, load(out + i, lanes) + load_stored(x + i, lanes), lanes);
}

static void widen_part(const stored *x, ptrdiff_t n, int accumulate, real *out) {
    if (accumulate) {
        FOR_CHANNELS(n, add_vector, x, out);
    } else {
        read_row(x, n, out);
    }
}

static void widen_elements(const void *x_, ptrdiff_t n, int accumulate, void *out_, int threads) {
    const stored *x = x_;
    real *out = out_;
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              widen_part(x + p * PART, part_length(n, PART, p), accumulate, out + p * PART));
}

static void narrow_elements(const void *x_, ptrdiff_t n, void *out_, int threads) {
    const real *x = x_;
    stored *out = out_;
    FOR_PARTS(p, parts_of(n, PART), n, threads,
              write_row(x + p * PART, part_length(n, PART, p), out + p * PART));
}

/* -- softmax: three passes over a row that is in L1 */

static void softmax_row(const real *x, ptrdiff_t n, real *out) {
    vec last;
    const vec scale = vset(1 / row_exp(x, n, row_max(x, n), out, &last));
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    for (ptrdiff_t j = 0; j < whole; j += LANES) vstore(out + j, vload(out + j) * scale);
    vstore_part(out + whole, last * scale, tail);
}

static void softmax_backward_row(const real *dy, const real *y, ptrdiff_t n, real *out) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    vec sum = vload_part(dy + whole, tail) * vload_part(y + whole, tail);
    for (ptrdiff_t j = 0; j < whole; j += LANES) sum += vload(dy + j) * vload(y + j);
    const vec dot = vset(vsum(sum));
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        vstore(out + j, vload(y + j) * (vload(dy + j) - dot));
    }
    const vec d = vload_part(dy + whole, tail) - dot;
    vstore_part(out + whole, vload_part(y + whole, tail) * d, tail);
}

static void softmax_forward(const void *x_, ptrdiff_t rows, ptrdiff_t classes, void *out_,
                            int threads) {
    const real *x = x_;
    real *out = out_;
    FOR_PARTS(i, rows, rows * classes, threads,
              softmax_row(x + i * classes, classes, out + i * classes));
}

static void softmax_backward(const void *dy_, const void *y_, ptrdiff_t rows, ptrdiff_t classes,
                             void *out_, int threads) {
    const real *dy = dy_, *y = y_;
    real *out = out_;
    FOR_PARTS(i, rows, rows * classes, threads,
              softmax_backward_row(dy + i * classes, y + i * classes, classes, out + i * classes));
}

const struct elementwise_kernels NAME(elementwise_kernels) = {
    .forward = forward,
    .backward = backward,
    .add = add,
    .widen = widen_elements,
    .narrow = narrow_elements,
    .softmax_forward = softmax_forward,
    .softmax_backward = softmax_backward,
#if REAL_FLOAT && !STORED_BF16
    .largest = NAME(largest),
    .hadamard = NAME(hadamard),
    .round = NAME(round_elements),
#endif
};
