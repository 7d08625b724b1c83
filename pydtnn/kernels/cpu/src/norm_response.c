/* Local response normalisation: each element divided by a power of the mean square of the channels
 * around it, y = x d^-beta with d = k + alpha / size (sum of x^2 over the window).
 *
 * A row of channels is in L1. Its squares are written with zeros around them into a scratch, so
 * that a window is a few unaligned loads, without a branch; backward does the same with
 * dy x d^(-beta - 1), whose sums run over the mirrored window. Bound by the logarithm and the
 * exponential of the power, about 25 operations each for a vector; d is computed again in backward
 * rather than stored. Rows are independent; parts of them have a scratch each.
 */
#include <stdlib.h>

#include "functions.h"
#include "lanes.h"
#include "norm_response.h"
#include "parts.h"

struct response {
    ptrdiff_t channels, before, after; /* the window of channel c: c - before .. c + after */
    real scale, beta, k;               /* scale: alpha / size */
};

static struct response response_of(ptrdiff_t channels, ptrdiff_t size, double alpha, double beta,
                                   double k) {
    return (struct response){.channels = channels,
                             .before = size / 2,
                             .after = (size - 1) / 2,
                             .scale = (real)(alpha / (double)size),
                             .beta = (real)beta,
                             .k = (real)k};
}

/* Elements of a scratch: a row with zeros around it, and a vector that loads may reach. */
static ptrdiff_t scratch_length(const struct response *r) {
    return r->channels + r->before + r->after + LANES;
}

/* Sum of `count` neighbours of a row, from the one at p on. */
INLINE vec window(const real *p, ptrdiff_t count) {
    vec sum = vload(p);
    for (ptrdiff_t i = 1; i < count; i++) sum += vload(p + i);
    return sum;
}

INLINE vec vpower(vec x, vec exponent) { return vexp(exponent * vlog(x)); }

INLINE void square(const real *x, real *out, ptrdiff_t c, ptrdiff_t lanes) {
    const vec v = load(x + c, lanes);
    store(out + c, v * v, lanes);
}

/* d of a vector of channels, from squares whose first is that of channel 0. */
INLINE vec divisor(const struct response *r, const real *squares, ptrdiff_t c) {
    return r->k + r->scale * window(squares + c - r->before, r->before + r->after + 1);
}

INLINE void respond(const real *x, const struct response *r, const real *squares, real *out,
                    ptrdiff_t c, ptrdiff_t lanes) {
    store(out + c, load(x + c, lanes) * vpower(divisor(r, squares, c), vset(-r->beta)), lanes);
}

/* shares = dy x d^(-beta - 1), out = dy d^-beta */
INLINE void share(const real *x, const real *dy, const struct response *r, const real *squares,
                  real *shares, real *out, ptrdiff_t c, ptrdiff_t lanes) {
    const vec d = divisor(r, squares, c);
    const vec scaled = load(dy + c, lanes) * vpower(d, vset(-r->beta));
    store(shares + c, scaled * load(x + c, lanes) / d, lanes);
    store(out + c, scaled, lanes);
}

INLINE void subtract(const real *x, const struct response *r, const real *shares, real *out,
                     ptrdiff_t c, ptrdiff_t lanes) {
    const vec sum = window(shares + c - r->after, r->before + r->after + 1);
    const vec factor = 2 * r->scale * r->beta * load(x + c, lanes);
    store(out + c, load(out + c, lanes) - factor * sum, lanes);
}

static void forward_rows(const real *x, const struct response *r, ptrdiff_t rows, real *scratch,
                         real *out) {
    const ptrdiff_t n = r->channels;
    real *squares = scratch + r->before;
    for (ptrdiff_t row = 0; row < rows; row++, x += n, out += n) {
        FOR_CHANNELS(n, square, x, squares);
        FOR_CHANNELS(n, respond, x, r, squares, out);
    }
}

static void backward_rows(const real *x, const real *dy, const struct response *r, ptrdiff_t rows,
                          real *scratch, real *out) {
    const ptrdiff_t n = r->channels;
    real *squares = scratch + r->before, *shares = scratch + scratch_length(r) + r->after;
    for (ptrdiff_t row = 0; row < rows; row++, x += n, dy += n, out += n) {
        FOR_CHANNELS(n, square, x, squares);
        FOR_CHANNELS(n, share, x, dy, r, squares, shares, out);
        FOR_CHANNELS(n, subtract, x, r, shares, out);
    }
}

/* Rows of a part, and their number, which depend only on the shape. */
struct parts {
    ptrdiff_t rows, count;
};

enum { MOST_PARTS = 64 };

static struct parts parts_for(ptrdiff_t rows, ptrdiff_t channels) {
    const ptrdiff_t least = parts_of(PART, channels ? channels : 1);
    const ptrdiff_t even = parts_of(rows, MOST_PARTS);
    const ptrdiff_t size = even > least ? even : least;
    return (struct parts){size, parts_of(rows, size)};
}

static real *scratch_create(const struct response *r, struct parts parts, ptrdiff_t arrays) {
    return calloc((size_t)(parts.count * arrays * scratch_length(r) + 1), sizeof(real));
}

int NAME(response_forward)(const void *x_, ptrdiff_t rows, ptrdiff_t channels, ptrdiff_t size,
                           double alpha, double beta, double k, void *out_, int threads) {
    const real *x = x_;
    real *out = out_;
    const struct response r = response_of(channels, size, alpha, beta, k);
    const struct parts parts = parts_for(rows, channels);
    const ptrdiff_t length = scratch_length(&r), step = parts.rows * channels;
    real *scratch = scratch_create(&r, parts, 1);
    if (!scratch) return -1;
    FOR_PARTS(p, parts.count, rows * channels, threads,
              forward_rows(x + p * step, &r, part_length(rows, parts.rows, p),
                           scratch + p * length, out + p * step));
    free(scratch);
    return 0;
}

int NAME(response_backward)(const void *x_, const void *dy_, ptrdiff_t rows, ptrdiff_t channels,
                            ptrdiff_t size, double alpha, double beta, double k, void *out_,
                            int threads) {
    const real *x = x_, *dy = dy_;
    real *out = out_;
    const struct response r = response_of(channels, size, alpha, beta, k);
    const struct parts parts = parts_for(rows, channels);
    const ptrdiff_t length = 2 * scratch_length(&r), step = parts.rows * channels;
    real *scratch = scratch_create(&r, parts, 2);
    if (!scratch) return -1;
    FOR_PARTS(p, parts.count, rows * channels, threads,
              backward_rows(x + p * step, dy + p * step, &r, part_length(rows, parts.rows, p),
                            scratch + p * length, out + p * step));
    free(scratch);
    return 0;
}
