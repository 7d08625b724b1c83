/* Losses: value and gradient in one pass.
 *
 * A row of logits stays in L1 between its maximum, its exponentials (kept in `out`) and its
 * gradient, so that memory is read and written once, and `out` may be the logits. Each row's loss
 * is a double; rows (or, where outputs are independent, parts of PART elements) are summed to
 * separate doubles and these in order, so that the bytes do not depend on the threads.
 */
#include <math.h>
#include <stdlib.h>

#include "doubles.h"
#include "loss.h"
#include "parts.h"
#include "rows.h"

static double cross_entropy_row(const real *x, int64_t target, ptrdiff_t n, double smoothing,
                                double scale, real *out) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    const real shift = row_max(x, n);
    const double score = (double)x[target] - (double)shift;
    struct doubles total = {0};
    if (smoothing > 0) {
        for (ptrdiff_t j = 0; j < whole; j += LANES) add_doubles(&total, vload(x + j) - shift);
        add_doubles(&total, vload_or(x + whole, tail, vset(shift)) - shift);
    }
    vec last;
    const real sum = row_exp(x, n, shift, out, &last);
    const double log_sum = log((double)sum);
    double loss = (1 - smoothing) * (log_sum - score);
    const vec factor = vset((real)(scale / sum)), all = vset((real)(smoothing / n * scale));
    const vec own = vset((real)((1 - smoothing) * scale));
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        const vec q = all + vselect(vlanes(j) == (ireal)target, own, vzero());
        vstore(out + j, vload(out + j) * factor - q);
    }
    const vec q = all + vselect(vlanes(whole) == (ireal)target, own, vzero());
    vstore_part(out + whole, last * factor - q, tail);
    if (smoothing > 0) loss += smoothing * (log_sum - sum_doubles(total) / (double)n);
    return loss;
}

/* q_j = w_j ((1 - s) [j = target] + s / n); out = scale (p sum q - q). `all` is the sum of all
   weights. A class with q = 0 has no loss, also where its logit is -infinity. */
static double weighted_row(const real *x, int64_t target, const real *w, double all, ptrdiff_t n,
                           double smoothing, double scale, real *out) {
    const ptrdiff_t tail = n % LANES, whole = n - tail;
    const real shift = row_max(x, n);
    const double score = (double)x[target] - (double)shift;
    struct doubles total = {0};
    for (ptrdiff_t j = 0; smoothing > 0 && j < n; j += LANES) {
        const ptrdiff_t lanes = min_of(LANES, n - j);
        const vec weight = vload_part(w + j, lanes);
        const vec term = weight * (vload_or(x + j, lanes, vset(shift)) - shift);
        add_doubles(&total, vselect(weight > 0, term, vzero()));
    }
    vec last;
    const real sum = row_exp(x, n, shift, out, &last);
    const double log_sum = log((double)sum), own = (1 - smoothing) * (double)w[target];
    const double each = smoothing / (double)n;
    double loss = own > 0 ? own * (log_sum - score) : 0;
    const vec factor = vset((real)(scale * (own + each * all) / sum));
    const vec one = vset((real)(own * scale)), every = vset((real)(each * scale));
    for (ptrdiff_t j = 0; j < whole; j += LANES) {
        const vec q = every * vload(w + j) + vselect(vlanes(j) == (ireal)target, one, vzero());
        vstore(out + j, vload(out + j) * factor - q);
    }
    const vec q =
        every * vload_part(w + whole, tail) + vselect(vlanes(whole) == (ireal)target, one, vzero());
    vstore_part(out + whole, last * factor - q, tail);
    if (smoothing > 0) loss += each * (all * log_sum - sum_doubles(total));
    return loss;
}

/* out = scale for each class but the target whose margin 1 + y - y_t is violated, and minus
   their sum for the target */
static double hinge_row(const real *y, int64_t target, ptrdiff_t n, double scale, real *out) {
    const vec own = vset(y[target]);
    struct doubles loss = {0};
    ivec violated = {0};
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        const ptrdiff_t lanes = min_of(LANES, n - j);
        const vec margin = 1 + vload_part(y + j, lanes) - own;
        const ivec other = (vlanes(j) != (ireal)target) & (vlanes(j) < (ireal)n);
        const ivec active = other & (margin > 0);
        add_doubles(&loss, vselect(other, vmax(vzero(), margin), vzero()));
        violated -= active;
        vstore_part(out + j, vselect(active, vset((real)scale), vzero()), lanes);
    }
    out[target] = -(real)scale * vsum(__builtin_convertvector(violated, vec));
    return sum_doubles(loss);
}

/* -- losses of independent outputs: value and derivative of each */

INLINE vec binary_cross_entropy(vec x, vec t, vec *slope) {
    const vec e = vexp(-vabs(x));
    *slope = vselect(x >= 0, vset(1), e) / (1 + e) - t;
    return vmax(vzero(), x) - x * t + vlog1p(e);
}

INLINE vec squared_error(vec y, vec t, vec *slope) {
    const vec d = y - t;
    *slope = 2 * d;
    return d * d;
}

INLINE vec absolute_error(vec y, vec t, vec *slope) {
    const vec d = y - t;
    /* d itself where it is 0 or NaN */
    *slope = vselect(d > 0, vset(1), vselect(d < 0, vset(-1), d));
    return vabs(d);
}

typedef double part_loss(const real *y, const real *t, ptrdiff_t n, real scale, real *out);

#define MAP_LOSS(f)                                                                            \
    static double f##_part(const real *y, const real *t, ptrdiff_t n, real scale, real *out) { \
        struct doubles sum = {0};                                                              \
        vec slope;                                                                             \
        ptrdiff_t i = 0;                                                                       \
        for (; i + LANES <= n; i += LANES) {                                                   \
            add_doubles(&sum, f(vload(y + i), vload(t + i), &slope));                          \
            vstore(out + i, slope * scale);                                                    \
        }                                                                                      \
        if (i < n) {                                                                           \
            const vec value = f(vload_part(y + i, n - i), vload_part(t + i, n - i), &slope);   \
            add_doubles(&sum, vselect(vlanes(i) < (ireal)n, value, vzero()));                  \
            vstore_part(out + i, slope * scale, n - i);                                        \
        }                                                                                      \
        return sum_doubles(sum);                                                               \
    }

MAP_LOSS(binary_cross_entropy)
MAP_LOSS(squared_error)
MAP_LOSS(absolute_error)

static part_loss *const part_losses[] = {
    [BINARY_CROSS_ENTROPY] = binary_cross_entropy_part,
    [SQUARED_ERROR] = squared_error_part,
    [ABSOLUTE_ERROR] = absolute_error_part,
};

/* -- all rows, all parts */

static double add_up(const double *losses, ptrdiff_t n) {
    double total = 0;
    for (ptrdiff_t i = 0; i < n; i++) total += losses[i];
    return total;
}

static int cross_entropy(const void *logits, const int64_t *target, ptrdiff_t rows, ptrdiff_t n,
                         double smoothing, double scale, void *out_, double *loss, int threads) {
    const real *x = logits;
    real *out = out_;
    double *losses = malloc(((size_t)rows + 1) * sizeof *losses);
    if (!losses) return -1;
    FOR_PARTS(i, rows, rows * n, threads, const ptrdiff_t at = i * n;
              losses[i] = cross_entropy_row(x + at, target[i], n, smoothing, scale, out + at));
    *loss = add_up(losses, rows);
    free(losses);
    return 0;
}

static double ignored_row(ptrdiff_t n, real *out) {
    for (ptrdiff_t j = 0; j < n; j++) out[j] = 0;
    return 0;
}

static int weighted_cross_entropy(const void *logits, const int64_t *target, const void *weights,
                                  int64_t ignored, ptrdiff_t rows, ptrdiff_t n, double smoothing,
                                  double scale, void *out_, double *loss, int threads) {
    const real *x = logits, *w = weights;
    real *out = out_;
    double *losses = malloc(((size_t)rows + 1) * sizeof *losses), all = 0;
    if (!losses) return -1;
    for (ptrdiff_t j = 0; w && j < n; j++) all += (double)w[j];
    FOR_PARTS(i, rows, rows * n, threads, const ptrdiff_t at = i * n; losses[i] =
              target[i] == ignored ? ignored_row(n, out + at)
              : w ? weighted_row(x + at, target[i], w, all, n, smoothing, scale, out + at)
                  : cross_entropy_row(x + at, target[i], n, smoothing, scale, out + at));
    *loss = add_up(losses, rows);
    free(losses);
    return 0;
}

static int hinge(const void *y_, const int64_t *target, ptrdiff_t rows, ptrdiff_t n, double scale,
                 void *out_, double *loss, int threads) {
    const real *y = y_;
    real *out = out_;
    double *losses = malloc(((size_t)rows + 1) * sizeof *losses);
    if (!losses) return -1;
    FOR_PARTS(i, rows, rows * n, threads,
              losses[i] = hinge_row(y + i * n, target[i], n, scale, out + i * n));
    *loss = add_up(losses, rows);
    free(losses);
    return 0;
}

static int elementwise(int kind, const void *y_, const void *target_, ptrdiff_t n, double scale,
                       void *out_, double *loss, int threads) {
    const real *y = y_, *target = target_;
    real *out = out_;
    const ptrdiff_t parts = parts_of(n, PART);
    double *losses = malloc(((size_t)parts + 1) * sizeof *losses);
    if (!losses) return -1;
    FOR_PARTS(p, parts, n, threads,
              losses[p] = part_losses[kind](y + p * PART, target + p * PART,
                                            part_length(n, PART, p), (real)scale, out + p * PART));
    *loss = add_up(losses, parts);
    free(losses);
    return 0;
}

const struct loss_kernels NAME(loss_kernels) = {
    .cross_entropy = cross_entropy,
    .weighted_cross_entropy = weighted_cross_entropy,
    .hinge = hinge,
    .elementwise = elementwise,
};
