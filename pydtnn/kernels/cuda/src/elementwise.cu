/* Activations, sums of arrays, and softmax over rows. */
#include "activations.cuh"
#include "flat.cuh"
#include "team.cuh"

/* Two vectors in flight hide the latency of memory at full occupancy; a function of many
   instructions has little to wait for. */
enum { FLIGHT = 2 };

template <class Function, class T, int N>
DEVICE void forward(const T *x, double alpha, T *out, index_t n) {
    const T *const in[] = {x};
    map_elements<T, N, FLIGHT>(in, out, n, [=](const real<T>(&v)[1]) {
        return Function::template forward<real<T>>(v[0], (real<T>)alpha);
    });
}

template <class Function, class T, int N>
DEVICE void backward(const T *dy, const T *z, double alpha, T *out, index_t n) {
    const T *const in[] = {dy, z};
    map_elements<T, N, FLIGHT>(in, out, n, [=](const real<T>(&v)[2]) {
        return Function::template backward<real<T>>(v[0], v[1], (real<T>)alpha);
    });
}

template <class T, int N> DEVICE void add(const T *a, const T *b, T *out, index_t n) {
    const T *const in[] = {a, b};
    map_elements<T, N, FLIGHT>(in, out, n, [](const real<T>(&v)[2]) { return v[0] + v[1]; });
}

/* Three passes over a row, of which the caches serve the last two. */
template <class T, int SIZE>
DEVICE void softmax_forward(const T *x, T *out, index_t rows, index_t columns) {
    typedef real<T> R;
    const Team<SIZE> team;
    const bool real_team = team.index < rows;
    const T *row = x + (real_team ? team.index : 0) * columns;
    R top = widen(row[0]), sum = 0;
    for (index_t j = team.lane; j < columns; j += SIZE) {
        const R v = widen(row[j]);
        top = top >= v || top != top ? top : v;
    }
    top = team.maximum(top);
    for (index_t j = team.lane; j < columns; j += SIZE) sum += exp_of(widen(row[j]) - top);
    sum = team.sum(sum);
    if (!real_team) return;
    T *to = out + team.index * columns;
    for (index_t j = team.lane; j < columns; j += SIZE) {
        to[j] = Narrow<T>::of(exp_of(widen(row[j]) - top) / sum);
    }
}

template <class T, int SIZE>
DEVICE void softmax_backward(const T *dy, const T *y, T *out, index_t rows, index_t columns) {
    typedef real<T> R;
    const Team<SIZE> team;
    const bool real_team = team.index < rows;
    const index_t first = (real_team ? team.index : 0) * columns;
    R sum = 0;
    for (index_t j = first + team.lane; j < first + columns; j += SIZE) {
        sum += widen(dy[j]) * widen(y[j]);
    }
    sum = team.sum(sum);
    if (!real_team) return;
    for (index_t j = first + team.lane; j < first + columns; j += SIZE) {
        out[j] = Narrow<T>::of(widen(y[j]) * (widen(dy[j]) - sum));
    }
}

#define ACTIVATION_KERNELS(T, NAME, FUNCTION, WIDTH, N)                                            \
    KERNEL(NAME##_forward_##WIDTH##_##T)(const T *x, double alpha, T *out, index_t n) {            \
        forward<FUNCTION, T, N>(x, alpha, out, n);                                                 \
    }                                                                                              \
    KERNEL(NAME##_backward_##WIDTH##_##T)                                                          \
    (const T *dy, const T *z, double alpha, T *out, index_t n) {                                   \
        backward<FUNCTION, T, N>(dy, z, alpha, out, n);                                            \
    }

#define WIDTHS(T, WIDTH, N)                                                                        \
    ACTIVATION_KERNELS(T, relu, relu, WIDTH, N)                                                    \
    ACTIVATION_KERNELS(T, relu6, relu6, WIDTH, N)                                                  \
    ACTIVATION_KERNELS(T, leaky_relu, leaky_relu, WIDTH, N)                                        \
    ACTIVATION_KERNELS(T, elu, elu, WIDTH, N)                                                      \
    ACTIVATION_KERNELS(T, sigmoid, sigmoid, WIDTH, N)                                              \
    ACTIVATION_KERNELS(T, tanh, tanh_, WIDTH, N)                                                   \
    ACTIVATION_KERNELS(T, arctan, arctan, WIDTH, N)                                                \
    ACTIVATION_KERNELS(T, log, log_, WIDTH, N)                                                     \
    ACTIVATION_KERNELS(T, gelu, gelu, WIDTH, N)                                                    \
    ACTIVATION_KERNELS(T, silu, silu, WIDTH, N)                                                    \
    KERNEL(add_##WIDTH##_##T)(const T *a, const T *b, T *out, index_t n) {                         \
        add<T, N>(a, b, out, n);                                                                   \
    }

#define TEAMS(T, NAME, SIZE)                                                                       \
    KERNEL(softmax_forward_##NAME##_##T)(const T *x, T *out, index_t rows, index_t columns) {      \
        softmax_forward<T, SIZE>(x, out, rows, columns);                                           \
    }                                                                                              \
    KERNEL(softmax_backward_##NAME##_##T)                                                          \
    (const T *dy, const T *y, T *out, index_t rows, index_t columns) {                             \
        softmax_backward<T, SIZE>(dy, y, out, rows, columns);                                      \
    }

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, Width<T>::FLAT)                                                                \
    WIDTHS(T, single, 1)                                                                           \
    TEAMS(T, warp, WARP)                                                                           \
    TEAMS(T, block, THREADS)

ELEMENTS(DEFINE)
