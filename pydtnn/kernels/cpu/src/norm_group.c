/* Layer and group norm: x (N, P, C), one mean and variance per sample and group of channels.
 *
 * A sample is read for its statistics and again, from cache, for the map that they define. With one
 * position and one group (layer norm; RMS norm without beta) it is a row, norm_row.h; otherwise the
 * sums per channel of channels.h are added up by groups, and the map has one coefficient per
 * channel. Samples are distributed over threads in parts of a size that depends only on the shape.
 * The gradients of gamma and beta are sums over samples: each part has its own, and after every WAVE
 * of parts these are added in order, so that scratch memory is bounded.
 */
#include <math.h>
#include <stdlib.h>

#include "norm_group.h"
#include "norm_row.h"
#include "stored.h"

enum { WAVE = 16, MAX_SAMPLES = 128 };

struct task {
    struct lines lines; /* of one sample */
    ptrdiff_t size, groups;
    int is_row, centred;
    const real *gamma, *beta;
    double epsilon;
};

static struct task task_of(ptrdiff_t positions, ptrdiff_t channels, ptrdiff_t groups,
                           const void *gamma, const void *beta, double epsilon) {
    return (struct task){
        .lines = lines_of(positions, channels),
        .size = positions * channels,
        .groups = groups,
        .is_row = positions == 1 && groups == 1,
        .gamma = gamma,
        .beta = beta,
        .epsilon = epsilon,
    };
}

/* Samples of a part: about SERIAL elements. */
static ptrdiff_t part_samples(const struct task *t) {
    const ptrdiff_t samples = t->size ? SERIAL / t->size : 1;
    return samples < 1 ? 1 : min_of(samples, MAX_SAMPLES);
}

/* Scratch memory of one part: two rows of sums and four tables, of columns, and two rows of
   gradients, of channels. */
struct scratch {
    double *gradients, *sums;
    real *tables;
};

static size_t scratch_doubles(const struct task *t) {
    return 2 * (size_t)t->lines.channels + 6 * (size_t)t->lines.columns;
}

static double *scratch_create(const struct task *t) {
    return malloc((WAVE * scratch_doubles(t) + 1) * sizeof(double));
}

static struct scratch scratch_of(const struct task *t, double *memory, ptrdiff_t part) {
    double *own = memory + (size_t)part * scratch_doubles(t), *sums = own + 2 * t->lines.channels;
    return (struct scratch){own, sums, (real *)(sums + 2 * t->lines.columns)};
}

static struct map map_of(const struct task *t, real *tables) {
    const ptrdiff_t n = t->lines.columns;
    for (int k = 0; k < 4; k++) fold_table(&t->lines, tables + k * n);
    return (struct map){tables, tables + n, tables + 2 * n, tables + 3 * n};
}

/* Mean and 1 / deviation of each group from sums about a pivot, which is in `mean`. */
static void group_moments(const struct task *t, const double *sums, double *mean,
                          double *inv_std) {
    const ptrdiff_t width = t->lines.channels / t->groups;
    const double count = (double)(t->size / t->groups);
    const double *total = sums, *square = sums + t->lines.columns;
    for (ptrdiff_t g = 0; g < t->groups; g++) {
        double sum = 0, squares = 0;
        for (ptrdiff_t j = g * width; j < (g + 1) * width; j++) {
            sum += total[j];
            squares += square[j];
        }
        const double offset = sum / count;
        mean[g] += offset;
        inv_std[g] = inverse_deviation(squares / count - offset * offset, t->epsilon);
    }
}

/* Sums about zero in double are exact enough for floats; doubles are read again, relative to the
   mean that these sums give. */
static void sample_moments(const struct task *t, const stored *x, struct scratch s, double *mean,
                           double *inv_std) {
    const struct lines *o = &t->lines;
    const ptrdiff_t width = o->channels / t->groups;
    moments(x, o->count, o->columns, s.sums);
    finish_moments(o, x, s.sums);
    for (ptrdiff_t g = 0; g < t->groups; g++) mean[g] = 0;
    group_moments(t, s.sums, mean, inv_std);
    if (REAL_FLOAT) return;
    real *pivot = s.tables;
    for (ptrdiff_t j = 0; j < o->channels; j++) pivot[j] = (real)mean[j / width];
    fold_table(o, pivot);
    deviations(x, pivot, o->count, o->columns, s.sums);
    finish_deviations(o, x, pivot, s.sums);
    group_moments(t, s.sums, mean, inv_std);
}

static void sample_forward(const struct task *t, const stored *x, struct scratch s, stored *out,
                           double *mean, double *inv_std) {
    const struct lines *o = &t->lines;
    const ptrdiff_t width = o->channels / t->groups;
    real *pivot = s.tables, *a = pivot + o->columns, *c = a + 2 * o->columns;
    sample_moments(t, x, s, mean, inv_std);
    for (ptrdiff_t g = 0; g < t->groups; g++) {
        for (ptrdiff_t j = g * width; j < (g + 1) * width; j++) {
            const double scale = inv_std[g] * (double)t->gamma[j];
            pivot[j] = (real)mean[g];
            a[j] = (real)scale;
            c[j] = (real)((double)t->beta[j] + ((double)pivot[j] - mean[g]) * scale);
        }
    }
    map_forward(x, map_of(t, s.tables), t->size, o->columns, out);
}

/* Adds to the gradients of gamma, then of beta. */
static void sample_backward(const struct task *t, const stored *x, const stored *dy,
                            const double *mean, const double *inv_std, struct scratch s,
                            stored *out) {
    const struct lines *o = &t->lines;
    const ptrdiff_t width = o->channels / t->groups;
    const double count = (double)(t->size / t->groups);
    double *total = s.sums, *product = s.sums + o->columns;
    real *pivot = s.tables, *a = pivot + o->columns, *b = a + o->columns, *c = b + o->columns;
    for (ptrdiff_t j = 0; j < o->channels; j++) pivot[j] = (real)mean[j / width];
    fold_table(o, pivot);
    products(x, dy, pivot, o->count, o->columns, s.sums);
    finish_products(o, x, dy, pivot, s.sums);
    for (ptrdiff_t g = 0; g < t->groups; g++) {
        const double r = inv_std[g], offset = (double)pivot[g * width] - mean[g];
        double mean_g = 0, mean_gx = 0;
        for (ptrdiff_t j = g * width; j < (g + 1) * width; j++) {
            const double dgamma = (product[j] + offset * total[j]) * r; /* sum dy xhat */
            s.gradients[j] += dgamma;
            s.gradients[o->channels + j] += total[j];
            mean_g += (double)t->gamma[j] * total[j] / count;
            mean_gx += (double)t->gamma[j] * dgamma / count;
        }
        for (ptrdiff_t j = g * width; j < (g + 1) * width; j++) {
            a[j] = (real)(r * (double)t->gamma[j]);
            b[j] = (real)(-r * r * mean_gx);
            c[j] = (real)(-r * mean_g - r * r * mean_gx * offset);
        }
    }
    map_backward(x, dy, map_of(t, s.tables), t->size, o->columns, out);
}

static void forward_part(const struct task *t, const stored *x, ptrdiff_t samples, struct scratch s,
                         stored *out, double *mean, double *inv_std) {
    for (ptrdiff_t i = 0; i < samples;
         i++, x += t->size, out += t->size, mean += t->groups, inv_std += t->groups) {
        if (t->is_row && t->beta) {
            row_forward(x, t->size, t->gamma, t->beta, 1, t->epsilon, out, mean, inv_std);
        } else if (t->is_row) {
            row_forward(x, t->size, t->gamma, 0, 0, t->epsilon, out, mean, inv_std);
        } else {
            sample_forward(t, x, s, out, mean, inv_std);
        }
    }
}

static void backward_part(const struct task *t, const stored *x, const stored *dy,
                          ptrdiff_t samples, const double *mean, const double *inv_std,
                          struct scratch s, stored *out) {
    const ptrdiff_t channels = t->lines.channels;
    real *row_gradients = s.tables; /* at most MAX_SAMPLES terms in the real type, then double */
    memset(s.gradients, 0, 2 * (size_t)channels * sizeof *s.gradients);
    if (t->is_row) memset(row_gradients, 0, 2 * (size_t)channels * sizeof *row_gradients);
    for (ptrdiff_t i = 0; i < samples; i++, x += t->size, dy += t->size, out += t->size) {
        if (t->is_row && t->centred) {
            row_backward(x, dy, t->size, t->gamma, 1, mean[i], inv_std[i], out, row_gradients,
                         row_gradients + channels);
        } else if (t->is_row) {
            row_backward(x, dy, t->size, t->gamma, 0, 0, inv_std[i], out, row_gradients,
                         row_gradients + channels);
        } else {
            sample_backward(t, x, dy, mean + i * t->groups, inv_std + i * t->groups, s, out);
        }
    }
    if (!t->is_row) return;
    for (ptrdiff_t j = 0; j < 2 * channels; j++) s.gradients[j] = (double)row_gradients[j];
}

int NAME(group_forward)(const void *x_, ptrdiff_t batch, ptrdiff_t positions, ptrdiff_t channels,
                        ptrdiff_t groups, const void *gamma, const void *beta, double epsilon,
                        void *out_, double *mean, double *inv_std, int threads) {
    const stored *x = x_;
    stored *out = out_;
    const struct task t = task_of(positions, channels, groups, gamma, beta, epsilon);
    const ptrdiff_t samples = part_samples(&t);
    double *memory = scratch_create(&t);
    if (!memory) return -1;
    for (ptrdiff_t first = 0; first < batch; first += WAVE * samples) {
        const ptrdiff_t wave = min_of(WAVE * samples, batch - first);
        FOR_PARTS(p, parts_of(wave, samples), wave * t.size, threads,
                  const ptrdiff_t i = first + p * samples;
                  forward_part(&t, x + i * t.size, part_length(wave, samples, p),
                               scratch_of(&t, memory, p), out + i * t.size, mean + i * groups,
                               inv_std + i * groups));
    }
    free(memory);
    return 0;
}

static void store_gradient(const double *value, ptrdiff_t n, int accumulate, real *out) {
    for (ptrdiff_t j = 0; j < n; j++)
        out[j] = (real)(accumulate ? (double)out[j] + value[j] : value[j]);
}

int NAME(group_backward)(const void *x_, const void *dy_, ptrdiff_t batch, ptrdiff_t positions,
                         ptrdiff_t channels, ptrdiff_t groups, const void *gamma,
                         const double *mean, const double *inv_std, void *out_, void *dgamma,
                         void *dbeta, int accumulate, int threads) {
    const stored *x = x_, *dy = dy_;
    stored *out = out_;
    struct task t = task_of(positions, channels, groups, gamma, 0, 0);
    t.centred = dbeta != 0;
    const ptrdiff_t samples = part_samples(&t);
    double *memory = scratch_create(&t), *total = calloc(2 * (size_t)channels + 1, sizeof *total);
    if (!memory || !total) {
        free(memory);
        free(total);
        return -1;
    }
    for (ptrdiff_t first = 0; first < batch; first += WAVE * samples) {
        const ptrdiff_t wave = min_of(WAVE * samples, batch - first),
                        parts = parts_of(wave, samples);
        FOR_PARTS(p, parts, wave * t.size, threads, const ptrdiff_t i = first + p * samples;
                  backward_part(&t, x + i * t.size, dy + i * t.size, part_length(wave, samples, p),
                                mean + i * groups, inv_std + i * groups, scratch_of(&t, memory, p),
                                out + i * t.size));
        for (ptrdiff_t p = 0; p < parts; p++) {
            const double *own = scratch_of(&t, memory, p).gradients;
            for (ptrdiff_t j = 0; j < 2 * channels; j++) total[j] += own[j];
        }
    }
    store_gradient(total, channels, accumulate, dgamma);
    if (dbeta) store_gradient(total + channels, channels, accumulate, dbeta);
    free(memory);
    free(total);
    return 0;
}
