/* Activations, sums of arrays, and softmax over rows. */
#include "activations.cuh"
#include "flat.cuh"
#include "runs.cuh"
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

/* Three passes over a row, of which registers and caches serve the last two (runs.cuh). A team
   without a row reads none: `out` may be an input, where another team writes. */
template <class T, int N, int SIZE>
DEVICE void softmax_forward(const T *x, T *out, index_t rows, index_t columns) {
    typedef real<T> R;
    const Team<SIZE> team;
    const bool real_team = team.index < rows;
    const index_t first = (real_team ? team.index : 0) * columns;
    Runs<T, N, SIZE, 1> row(team.lane, (int)columns, real_team, 0);
    row.from[0] = x + first;
    row.hold();
    R top = -(R)__int_as_float(0x7f800000), sum = 0;
    row.each([&](int, int, const R(&v)[1][N]) {
#pragma unroll
        for (int n = 0; n < N; n++) top = top >= v[0][n] || top != top ? top : v[0][n];
    });
    top = team.maximum(top);
    row.each([&](int, int, const R(&v)[1][N]) {
#pragma unroll
        for (int n = 0; n < N; n++) sum += exp_of(v[0][n] - top);
    });
    const R share = 1 / team.sum(sum);
    if (!real_team) return;
    row.each([&](int at, int, const R(&v)[1][N]) {
        R y[N];
#pragma unroll
        for (int n = 0; n < N; n++) y[n] = exp_of(v[0][n] - top) * share;
        store<N>(y, out + first + at);
    });
}

template <class T, int N, int SIZE>
DEVICE void softmax_backward(const T *dy, const T *y, T *out, index_t rows, index_t columns) {
    typedef real<T> R;
    const Team<SIZE> team;
    const bool real_team = team.index < rows;
    const index_t first = (real_team ? team.index : 0) * columns;
    Runs<T, N, SIZE, 2> row(team.lane, (int)columns, real_team, 0);
    row.from[0] = dy + first;
    row.from[1] = y + first;
    row.hold();
    R sum = 0;
    row.each([&](int, int, const R(&v)[2][N]) {
#pragma unroll
        for (int n = 0; n < N; n++) sum += v[0][n] * v[1][n];
    });
    sum = team.sum(sum);
    if (!real_team) return;
    row.each([&](int at, int, const R(&v)[2][N]) {
        R dx[N];
#pragma unroll
        for (int n = 0; n < N; n++) dx[n] = v[1][n] * (v[0][n] - sum);
        store<N>(dx, out + first + at);
    });
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

#define TEAMS(T, NAME, SIZE, WIDTH, N)                                                             \
    KERNEL_OF(2, softmax_forward_##NAME##_##WIDTH##_##T)                                           \
    (const T *x, T *out, index_t rows, index_t columns) {                                          \
        softmax_forward<T, N, SIZE>(x, out, rows, columns);                                        \
    }                                                                                              \
    KERNEL_OF(2, softmax_backward_##NAME##_##WIDTH##_##T)                                          \
    (const T *dy, const T *y, T *out, index_t rows, index_t columns) {                             \
        softmax_backward<T, N, SIZE>(dy, y, out, rows, columns);                                   \
    }

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, Width<T>::FLAT)                                                                \
    WIDTHS(T, single, 1)                                                                           \
    TEAMS(T, warp, WARP, wide, Width<T>::FLAT)                                                     \
    TEAMS(T, block, THREADS, wide, Width<T>::FLAT)                                                 \
    TEAMS(T, warp, WARP, single, 1)                                                                \
    TEAMS(T, block, THREADS, single, 1)

ELEMENTS(DEFINE)
