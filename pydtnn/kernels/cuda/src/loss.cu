/* Losses: the gradient of each prediction, and the sum of all losses in double.
 *
 * Losses of classes take a team of threads per row. The grid is limited, so that the sums of the
 * blocks, which meet in global memory (columns.cuh), are few; teams and threads go on to the next
 * rows in a stride that the shape fixes. A target that is no class reads nothing and makes the loss
 * and its row's gradient NaN: a kernel cannot raise an error.
 */
#include "activations.cuh"
#include "columns.cuh"
#include "losses.cuh"
#include "team.cuh"

template <class R> DEVICE R not_a_number() { return (R)__int_as_float(0x7fc00000); }

template <class T, int SIZE>
DEVICE void cross_entropy(const T *x, const index_t *target, double smoothing, Number factor,
                          T *out, double *loss, index_t rows,
                          index_t classes, double *partial, unsigned *arrived) {
    typedef real<T> R;
    const Team<SIZE> team;
    const R scale = (R)factor.get();
    const R share = (R)(smoothing / classes), own = (R)(1 - smoothing);
    double total = 0;
    for (index_t i = team.index; i < rows; i += team.count) {
        const T *row = x + i * classes;
        const index_t t = target[i];
        const bool wrong = t < 0 || t >= classes;
        R top = widen(row[0]), sum = 0;
        for (index_t j = team.lane; j < classes; j += SIZE) {
            const R v = widen(row[j]);
            top = top >= v || top != top ? top : v;
        }
        top = team.maximum(top);
        for (index_t j = team.lane; j < classes; j += SIZE) sum += exp_of(widen(row[j]) - top);
        const R log_sum = log_of(team.sum(sum));
        for (index_t j = team.lane; j < classes; j += SIZE) {
            const R log_p = widen(row[j]) - top - log_sum;
            const R gradient = exp_of(log_p) - share - (j == t ? own : 0);
            out[i * classes + j] = Narrow<T>::of(wrong ? not_a_number<R>() : gradient * scale);
            if (j == t) total -= (double)own * log_p;
            if (smoothing > 0) total -= (double)share * log_p; /* otherwise it may be -infinity */
        }
        if (wrong) total = not_a_number<double>();
    }
    finish_total(total, 1, loss, partial, arrived);
}

/* sum_{k != t} max(0, 1 + y_k - y_t) */
template <class T, int SIZE>
DEVICE void hinge(const T *y, const index_t *target, Number factor,
                  T *out, double *loss, index_t rows, index_t classes, double *partial,
                  unsigned *arrived) {
    typedef real<T> R;
    const Team<SIZE> team;
    const R scale = (R)factor.get();
    double total = 0;
    for (index_t i = team.index; i < rows; i += team.count) {
        const T *row = y + i * classes;
        const index_t t = target[i];
        const bool wrong = t < 0 || t >= classes;
        const R of_target = wrong ? not_a_number<R>() : widen(row[t]);
        int positive = 0;
        for (index_t j = team.lane; j < classes; j += SIZE) {
            if (j == t) continue;
            const R margin = 1 + widen(row[j]) - of_target;
            positive += margin > 0;
            total += margin < 0 ? 0 : margin; /* NaN stays NaN */
            out[i * classes + j] = Narrow<T>::of(wrong ? margin : margin > 0 ? scale : 0);
        }
        positive = team.sum(positive);
        if (team.lane == 0 && !wrong) out[i * classes + t] = Narrow<T>::of(-positive * scale);
    }
    finish_total(total, 1, loss, partial, arrived);
}

/* Losses of predictions and targets of equal shape, mean over a sample's outputs. */
template <class Kind, class T>
DEVICE void dense(const T *y, const T *target, double outputs, Number factor,
                  T *out, double *loss, index_t n, double *partial,
                  unsigned *arrived) {
    typedef real<T> R;
    const R scale = (R)(factor.get() / outputs);
    double total = 0;
    for (index_t i = (index_t)blockIdx.x * THREADS + thread_number(); i < n;
         i += (index_t)gridDim.x * THREADS) {
        const R given = widen(y[i]), wanted = widen(target[i]);
        total += Kind::template value<R>(given, wanted);
        out[i] = Narrow<T>::of(Kind::template slope<R>(given, wanted) * scale);
    }
    finish_total(total, 1 / outputs, loss, partial, arrived);
}

#define TEAMS(T, NAME, SIZE)                                                                       \
    KERNEL(cross_entropy_##NAME##_##T)                                                             \
    (const T *x, const index_t *target, double smoothing, double scale_value,                      \
     const double *scale_at, T *out, double *loss, index_t rows, index_t classes, double *partial, \
     unsigned *arrived) {                                                                          \
        cross_entropy<T, SIZE>(x, target, smoothing, Number{scale_value, scale_at}, out, loss,     \
                               rows, classes, partial, arrived);                                   \
    }                                                                                              \
    KERNEL(hinge_##NAME##_##T)                                                                     \
    (const T *y, const index_t *target, double scale_value, const double *scale_at, T *out,        \
     double *loss, index_t rows, index_t classes, double *partial, unsigned *arrived) {            \
        hinge<T, SIZE>(y, target, Number{scale_value, scale_at}, out, loss, rows, classes, partial,\
                       arrived);                                                                   \
    }

#define DENSE(T, KIND)                                                                             \
    KERNEL(KIND##_##T)                                                                             \
    (const T *y, const T *target, double outputs, double scale_value, const double *scale_at,      \
     T *out, double *loss, index_t n, double *partial, unsigned *arrived) {                        \
        dense<KIND, T>(y, target, outputs, Number{scale_value, scale_at}, out, loss, n,            \
                       partial, arrived);                                                          \
    }

#define DEFINE(T)                                                                                  \
    TEAMS(T, warp, WARP)                                                                           \
    TEAMS(T, block, THREADS)                                                                       \
    DENSE(T, binary_cross_entropy)                                                                 \
    DENSE(T, squared_error)                                                                        \
    DENSE(T, absolute_error)

ELEMENTS(DEFINE)
