/* Convolutions over NHWC images: the table of kernels. Every direction and algorithm is a walk over
 * blocks (conv_walk.c). Forward and backward of data are gathers (conv_gather.c), backward of
 * filters is a sum over pixels (conv_filter.c); depthwise convolutions have a walk for all
 * directions (conv_depthwise.c). Blocks are defined in conv_block.c. Winograd's algorithms have
 * separate blocks (conv_winograd.c). Volumes are convolved as planes (conv_depth.c). */
#include "conv_depth.h"
#include "conv_parts.h"
#include "conv_winograd_parts.h"

/* The output tile of Winograd's algorithms, which support no groups and no dilation, and filters of
 * 3x3 and 5x5 with a stride of 1, or 3, 5 or 7 in a row or column, or 3x3, 5x5 and 7x7 with a
 * stride of 2 (`POLYPHASE`). */
static struct tile tile_of(const struct conv_shape *s, int algorithm) {
    const int kernel = (int)larger(s->kernel[0], s->kernel[1]), outputs = kernel == 7 ? 3 : 4;
    if (algorithm == POLYPHASE) return (struct tile){outputs, outputs, (kernel + 1) / 2, 1};
    struct tile tile = {4, 4, 3, kernel == 5 ? 2 : 1};
    if (algorithm == WINOGRAD5) tile = (struct tile){5, 5, 4, 2};
    if (algorithm == WINOGRAD2 || algorithm == WINOGRAD24) tile.rows = 2;
    if (algorithm == WINOGRAD2) tile.columns = 2;
    if (s->kernel[0] == 1) tile.rows = 1;
    if (s->kernel[1] == 1) tile.columns = 1;
    return tile;
}

static int make_gather(struct walk *walk, const struct conv_shape *s, int algorithm,
                       enum gather gather, const struct source *x, const real *w, const real *b,
                       const struct sink *y, double *sums, int threads) {
    if (algorithm == DIRECT) return NAME(gather_walk)(walk, s, gather, x, w, b, y, sums, threads);
    return NAME(winograd_gather_walk)(walk, s, gather, tile_of(s, algorithm), x, w, b, y, sums,
                                      threads);
}

static int make_filter(struct walk *walk, const struct conv_shape *s, int algorithm,
                       const struct source *x, const struct source *dy, void *dw, int accumulate,
                       int threads) {
    if (algorithm == DIRECT) return NAME(filter_walk)(walk, s, x, dy, dw, accumulate, threads);
    return NAME(winograd_filter_walk)(walk, s, tile_of(s, algorithm), x, dy, dw, accumulate,
                                      threads);
}

static int run_forward(const struct conv_shape *s, int algorithm, const struct source *x,
                       const real *w, const void *b, const struct sink *y, double *sums,
                       int threads) {
    if (is_depthwise(s)) {
        const struct depthwise_task task = {
            .gather = GATHER_INPUT, .in = x, .w = w, .b = b, .out = y, .sums = sums};
        return NAME(depthwise_run)(s, &task, threads);
    }
    struct walk walk;
    if (make_gather(&walk, s, algorithm, GATHER_INPUT, x, w, b, y, sums, threads)) return -1;
    return NAME(walk_run)(&walk, threads);
}

static int run_backward_data(const struct conv_shape *s, int algorithm, const struct source *dy,
                             const real *w, const struct sink *dx, double *sums, int threads) {
    if (is_depthwise(s)) {
        const struct depthwise_task task = {
            .gather = GATHER_GRADIENT, .in = dy, .w = w, .out = dx, .sums = sums};
        return NAME(depthwise_run)(s, &task, threads);
    }
    struct walk walk;
    if (make_gather(&walk, s, algorithm, GATHER_GRADIENT, dy, w, NULL, dx, sums, threads))
        return -1;
    return NAME(walk_run)(&walk, threads);
}

static int backward_filter(const struct conv_shape *s, int algorithm, const struct source *x,
                           const struct source *dy, void *dw, int accumulate, int threads) {
    if (is_depthwise(s)) {
        const struct depthwise_task task = {
            .gather = GATHER_GRADIENT, .in = dy, .x = x, .dw = dw, .accumulate = accumulate};
        return NAME(depthwise_run)(s, &task, threads);
    }
    struct walk walk;
    if (make_filter(&walk, s, algorithm, x, dy, dw, accumulate, threads)) return -1;
    return NAME(walk_run)(&walk, threads);
}

static int run_backward(const struct conv_shape *s, int data_algorithm, int filter_algorithm,
                        const struct source *x, const struct source *dy, const real *w,
                        const struct sink *dx, double *sums, void *dw, int accumulate,
                        int threads) {
    if (is_depthwise(s)) {
        const struct depthwise_task task = {.gather = GATHER_GRADIENT,
                                            .in = dy,
                                            .w = w,
                                            .out = dx,
                                            .sums = sums,
                                            .x = x,
                                            .dw = dw,
                                            .accumulate = accumulate};
        return NAME(depthwise_run)(s, &task, threads);
    }
    struct walk data, filter;
    if (make_gather(&data, s, data_algorithm, GATHER_GRADIENT, dy, w, NULL, dx, sums, threads))
        return -1;
    if (make_filter(&filter, s, filter_algorithm, x, dy, dw, accumulate, threads)) {
        data.close(&data, -1);
        return -1;
    }
    if (NAME(walks_fit)(&data, &filter)) {
        if (data_algorithm == filter_algorithm && data_algorithm != DIRECT)
            NAME(winograd_borrow)(&filter, &data);
        if (data_algorithm == DIRECT && filter_algorithm == DIRECT)
            NAME(filter_borrow)(&filter, &data);
        return NAME(walk_run_both)(&data, &filter, threads);
    }
    int status = NAME(walk_run)(&filter, threads);
    return NAME(walk_run)(&data, threads) || status ? -1 : 0;
}

/* Filters as kernels read them: the array itself, or a copy with real elements in `memory`. */
static const real *read_filters(const struct conv_shape *s, const void *w, real **memory) {
#if STORED_BF16
    const ptrdiff_t n = s->filters * s->kernel[0] * s->kernel[1] * (s->channels / s->groups);
    const struct source source = plain_source(w);
    *memory = NAME(scratch_new)(n);
    if (*memory) NAME(source_rows)(&source, 0, 1, n, *memory);
    return *memory;
#else
    (void)s;
    *memory = NULL;
    return w;
#endif
}

static int forward(const struct conv_shape *s, int algorithm, const struct source *x, const void *w,
                   const void *b, const struct sink *y, double *sums, int threads) {
    real *memory;
    const real *filters = read_filters(s, w, &memory);
    if (!filters) return -1;
    const int status = run_forward(s, algorithm, x, filters, b, y, sums, threads);
    free(memory);
    return status;
}

static int backward_data(const struct conv_shape *s, int algorithm, const struct source *dy,
                         const void *w, const struct sink *dx, double *sums, int threads) {
    real *memory;
    const real *filters = read_filters(s, w, &memory);
    if (!filters) return -1;
    const int status = run_backward_data(s, algorithm, dy, filters, dx, sums, threads);
    free(memory);
    return status;
}

static int backward(const struct conv_shape *s, int data_algorithm, int filter_algorithm,
                    const struct source *x, const struct source *dy, const void *w,
                    const struct sink *dx, double *sums, void *dw, int accumulate, int threads) {
    real *memory;
    const real *filters = read_filters(s, w, &memory);
    if (!filters) return -1;
    const int status = run_backward(s, data_algorithm, filter_algorithm, x, dy, filters, dx, sums,
                                    dw, accumulate, threads);
    free(memory);
    return status;
}

const struct conv_kernels NAME(conv_kernels) = {.forward = forward,
                                                .backward_data = backward_data,
                                                .backward_filter = backward_filter,
                                                .backward = backward,
                                                .unfold = NAME(unfold),
                                                .fold = NAME(fold)};
