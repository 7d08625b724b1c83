/* Losses: the gradient of each prediction, and the sum of all losses in double.
 *
 * Losses of classes take a team of threads per row, which the registers hold (runs.cuh). The grid is
 * limited, so that the sums of the blocks, which meet in global memory (columns.cuh), are few; teams
 * and threads go on to the next rows in a stride that the shape fixes. A target that is no class
 * reads nothing and makes the loss and its row's gradient NaN: a kernel cannot raise an error.
 */
#include "activations.cuh"
#include "columns.cuh"
#include "losses.cuh"
#include "runs.cuh"
#include "team.cuh"

template <class R> DEVICE R not_a_number() { return (R)__int_as_float(0x7fc00000); }

template <class T, int N, int SIZE>
DEVICE void cross_entropy(const T *x, const index_t *target, double smoothing, Number factor,
                          T *out, double *loss, index_t rows, index_t classes, double *partial,
                          unsigned *arrived) {
    typedef real<T> R;
    const Team<SIZE> team;
    const R scale = (R)factor.get();
    const R share = (R)(smoothing / classes), own = (R)(1 - smoothing);
    Runs<T, N, SIZE, 1> row(team.lane, (int)classes, 1, 0);
    double total = 0;
    for (index_t i = team.index; i < rows; i += team.count) {
        const bool wrong = target[i] < 0 || target[i] >= classes;
        const int t = wrong ? -1 : (int)target[i];
        row.from[0] = x + i * classes;
        row.hold();
        R top = widen(x[i * classes]), sum = 0;
        row.each([&](int, int, const R(&v)[1][N]) {
#pragma unroll
            for (int n = 0; n < N; n++) top = top >= v[0][n] || top != top ? top : v[0][n];
        });
        top = team.maximum(top);
        row.each([&](int, int, const R(&v)[1][N]) {
#pragma unroll
            for (int n = 0; n < N; n++) sum += exp_of(v[0][n] - top);
        });
        const R log_sum = log_of(team.sum(sum));
        row.each([&](int at, int column, const R(&v)[1][N]) {
            R gradient[N], of_vector = 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const R log_p = v[0][n] - top - log_sum;
                const bool is_target = column + n == t;
                gradient[n] = (exp_of(log_p) - share - (is_target ? own : 0)) * scale;
                if (wrong) gradient[n] = not_a_number<R>();
                if (is_target) total -= (double)own * log_p;
                of_vector += log_p;
            }
            store<N>(gradient, out + i * classes + at);
            if (smoothing > 0) total -= (double)share * of_vector; /* else it may be -infinity */
        });
        if (wrong) total = not_a_number<double>();
    }
    finish_total(total, 1, loss, partial, arrived);
}

/* sum_{k != t} max(0, 1 + y_k - y_t) */
template <class T, int N, int SIZE>
DEVICE void hinge(const T *y, const index_t *target, Number factor, T *out, double *loss,
                  index_t rows, index_t classes, double *partial, unsigned *arrived) {
    typedef real<T> R;
    const Team<SIZE> team;
    const R scale = (R)factor.get();
    Runs<T, N, SIZE, 1> row(team.lane, (int)classes, 1, 0);
    double total = 0;
    for (index_t i = team.index; i < rows; i += team.count) {
        const bool wrong = target[i] < 0 || target[i] >= classes;
        const int t = wrong ? -1 : (int)target[i];
        row.from[0] = y + i * classes;
        row.hold();
        const R of_target = wrong ? not_a_number<R>() : widen(y[i * classes + t]);
        int positive = 0;
        row.each([&](int, int column, const R(&v)[1][N]) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                positive += column + n != t && 1 + v[0][n] - of_target > 0;
            }
        });
        positive = team.sum(positive);
        row.each([&](int at, int column, const R(&v)[1][N]) {
            R gradient[N], of_vector = 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const R margin = 1 + v[0][n] - of_target;
                const bool is_target = column + n == t;
                of_vector += is_target || margin < 0 ? 0 : margin; /* NaN stays NaN */
                gradient[n] = wrong ? margin : is_target ? -positive * scale
                                           : margin > 0  ? scale
                                                         : 0;
            }
            total += of_vector;
            store<N>(gradient, out + i * classes + at);
        });
    }
    finish_total(total, 1, loss, partial, arrived);
}

/* Losses of predictions and targets of equal shape, mean over a sample's outputs. */
template <class Kind, class T, int N>
DEVICE void dense(const T *y, const T *target, double outputs, Number factor, T *out, double *loss,
                  index_t n, double *partial, unsigned *arrived) {
    typedef real<T> R;
    enum { FLIGHT = 2 };
    const R scale = (R)(factor.get() / outputs);
    const index_t vectors = n / N, stride = (index_t)gridDim.x * THREADS;
    const index_t first = (index_t)blockIdx.x * THREADS + thread_number();
    double total = 0;
    const auto take = [&](index_t at, auto width, const auto &given, const auto &wanted) {
        constexpr int M = width.value;
        R slopes[M], of_vector = 0;
#pragma unroll
        for (int m = 0; m < M; m++) {
            const R a = widen(given.at[m]), b = widen(wanted.at[m]);
            of_vector += Kind::template value<R>(a, b);
            slopes[m] = Kind::template slope<R>(a, b) * scale;
        }
        total += of_vector;
        store<M>(slopes, out + at);
    };
    index_t v = first;
    for (; v + (FLIGHT - 1) * stride < vectors; v += FLIGHT * stride) {
        Pack<T, N> given[FLIGHT], wanted[FLIGHT];
#pragma unroll
        for (int f = 0; f < FLIGHT; f++) {
            given[f] = fetch<N>(y + (v + f * stride) * N);
            wanted[f] = fetch<N>(target + (v + f * stride) * N);
        }
#pragma unroll
        for (int f = 0; f < FLIGHT; f++) {
            take((v + f * stride) * N, Count<N>(), given[f], wanted[f]);
        }
    }
    if (v < vectors) take(v * N, Count<N>(), fetch<N>(y + v * N), fetch<N>(target + v * N));
    const index_t rest = vectors * N + first;
    if (N > 1 && rest < n) take(rest, Count<1>(), fetch<1>(y + rest), fetch<1>(target + rest));
    finish_total(total, 1 / outputs, loss, partial, arrived);
}

#define TEAMS(T, NAME, SIZE, WIDTH, N)                                                             \
    KERNEL_OF(2, cross_entropy_##NAME##_##WIDTH##_##T)                                             \
    (const T *x, const index_t *target, double smoothing, double scale_value,                      \
     const double *scale_at, T *out, double *loss, index_t rows, index_t classes, double *partial, \
     unsigned *arrived) {                                                                          \
        cross_entropy<T, N, SIZE>(x, target, smoothing, Number{scale_value, scale_at}, out, loss,  \
                                  rows, classes, partial, arrived);                                \
    }

/* rows of scores are short: a warp has all */
#define HINGE(T, WIDTH, N)                                                                         \
    KERNEL_OF(2, hinge_warp_##WIDTH##_##T)                                                         \
    (const T *y, const index_t *target, double scale_value, const double *scale_at, T *out,        \
     double *loss, index_t rows, index_t classes, double *partial, unsigned *arrived) {            \
        hinge<T, N, WARP>(y, target, Number{scale_value, scale_at}, out, loss, rows, classes,      \
                          partial, arrived);                                                       \
    }

#define DENSE(T, KIND, WIDTH, N)                                                                   \
    KERNEL_OF(3, KIND##_##WIDTH##_##T)                                                             \
    (const T *y, const T *target, double outputs, double scale_value, const double *scale_at,      \
     T *out, double *loss, index_t n, double *partial, unsigned *arrived) {                        \
        dense<KIND, T, N>(y, target, outputs, Number{scale_value, scale_at}, out, loss, n,         \
                          partial, arrived);                                                       \
    }

#define WIDTHS(T, WIDTH, N)                                                                        \
    TEAMS(T, warp, WARP, WIDTH, N)                                                                 \
    TEAMS(T, block, THREADS, WIDTH, N)                                                             \
    HINGE(T, WIDTH, N)                                                                             \
    DENSE(T, binary_cross_entropy, WIDTH, N)                                                       \
    DENSE(T, squared_error, WIDTH, N)                                                              \
    DENSE(T, absolute_error, WIDTH, N)

#define DEFINE(T)                                                                                  \
    WIDTHS(T, wide, Width<T>::FLAT)                                                                \
    WIDTHS(T, single, 1)

ELEMENTS(DEFINE)
