/* The steps of recurrent layers: a product with the matrix of the state, then the gates.
 *
 * The terms of the input of all steps are one product, computed before by linear.c, as are the
 * gradients of both matrices afterwards. What remains is a chain: of each step, the product of the
 * states (batch, features) with u, packed once per pass, and the gates. Units are cut into slices
 * of a panel of gemm_rows. A slice computes the products of all its gates for all samples into a
 * tile that stays in L1 or L2, and from it the gates, the state and the output of its units, so that
 * arrays of all steps are read and written once.
 *
 * Threads share the slices, and wait for each other after every step; each reads its own part of u,
 * which stays in its L2. Every element is one sum, in an order that does not depend on the slices.
 * States (forward) and gradients of terms (backward) of a step are copied to rows that are close
 * together: rows of one step in an array of all lie a power of two apart, in few sets of the caches.
 *
 * Expected: the rate of gemm_rows, less the exponentials, 5 per unit of an LSTM and 3 of a GRU: 0.7
 * of the peak with 256 units and 32 samples. With one sample it is bound by reading u.
 *
 * Sources: Hochreiter and Schmidhuber, "Long short-term memory", 1997; Cho et al., "Learning phrase
 * representations using RNN encoder-decoder", 2014. The products outside of the chain: Appleyard
 * et al., "Optimizing performance of recurrent neural networks on GPUs", 2016.
 */
#include <stdlib.h>

#include "functions.h"
#include "gemm.h"
#include "lanes.h"
#include "recurrent.h"

enum { DEPTH = 512 };

/* A pass over all steps. */
struct pass {
    const struct recurrent_shape *s;
    ptrdiff_t gates, slices;
    ptrdiff_t panels, depth; /* of a slice; length of the rows that are multiplied */
    const real *packed;      /* panel after panel, slice by slice */
    const real *start;       /* of each panel, or NULL */
    ptrdiff_t *offset;       /* of the rows of samples: those multiplied, then those of a tile */
    real *rows[2];           /* multiplied in this step, and in the next */
    real *memory;
    /* see recurrent.h; `first` and `gradient` are those of the state that an element of is kept */
    real *gates_, *y, *kept, *dgates, *dproducts, *carried;
    const real *dy, *first;
};

/* One sample of a step, from the first unit of a slice on. */
struct place {
    ptrdiff_t features;
    int exists;
    const real *product; /* gates are ROWS_COLUMNS apart here, and `features` below */
    real *gates, *y, *kept, *row;
    const real *before; /* the state of the step before, or NULL */
    const real *dy;
    real *dgates, *dproducts, *carried;
};

INLINE ptrdiff_t length_of(ptrdiff_t first, const struct recurrent_shape *s) {
    return smaller(s->features - first, ROWS_COLUMNS);
}

/* -- forward of a vector of units */

/* i, f, o = sigmoid, g = tanh; c = f c' + i g; h = o tanh(c) */
INLINE vec lstm_forward(const struct place *at, vec before, ptrdiff_t j, ptrdiff_t lanes) {
    real *a = at->gates + j;
    const real *p = at->product + j;
    const ptrdiff_t next = at->features;
    const vec i = vsigmoid(load(a, lanes) + vload(p));
    const vec f = vsigmoid(load(a + next, lanes) + vload(p + ROWS_COLUMNS));
    const vec g = vtanh(load(a + 2 * next, lanes) + vload(p + 2 * ROWS_COLUMNS));
    const vec o = vsigmoid(load(a + 3 * next, lanes) + vload(p + 3 * ROWS_COLUMNS));
    const vec c = f * before + i * g;
    store(a, i, lanes);
    store(a + next, f, lanes);
    store(a + 2 * next, g, lanes);
    store(a + 3 * next, o, lanes);
    store(at->kept + j, at->exists ? c : vzero(), lanes);
    return o * vtanh(c);
}

/* r, z = sigmoid; n = tanh(a + r q), q the product; h = (1 - z) n + z h' */
INLINE vec gru_forward(const struct place *at, vec before, ptrdiff_t j, ptrdiff_t lanes) {
    real *a = at->gates + j;
    const real *p = at->product + j;
    const ptrdiff_t next = at->features;
    const vec r = vsigmoid(load(a, lanes) + vload(p));
    const vec z = vsigmoid(load(a + next, lanes) + vload(p + ROWS_COLUMNS));
    const vec q = vload(p + 2 * ROWS_COLUMNS), n = vtanh(load(a + 2 * next, lanes) + r * q);
    store(a, r, lanes);
    store(a + next, z, lanes);
    store(a + 2 * next, n, lanes);
    store(at->kept + j, q, lanes);
    return n + z * (before - n);
}

INLINE void forward_units(const enum cell cell, const struct place *at, ptrdiff_t j,
                          ptrdiff_t lanes) {
    const vec before = at->before ? load(at->before + j, lanes) : vzero();
    vec h = cell == CELL_LSTM ? lstm_forward(at, before, j, lanes)
                              : gru_forward(at, before, j, lanes);
    if (!at->exists) h = vzero();
    store(at->y + j, h, lanes);
    store(at->row + j, h, lanes);
}

/* -- backward of a vector of units, from the gradient of h. What is carried from the step after,
   and to that before, is the gradient of c for an LSTM, and for a GRU that of h besides the
   product. */

/* do = dh tanh(c), dc += dh o (1 - tanh(c)^2), di = dc g, df = dc c', dg = dc i, dc' = dc f */
INLINE vec lstm_backward(const struct place *at, vec dh, vec carried, vec before, ptrdiff_t j,
                         ptrdiff_t lanes, vec *d) {
    const real *a = at->gates + j;
    const ptrdiff_t next = at->features;
    const vec i = load(a, lanes), f = load(a + next, lanes), g = load(a + 2 * next, lanes),
              o = load(a + 3 * next, lanes), t = vtanh(load(at->kept + j, lanes));
    const vec dc = carried + dh * o * (1 - t * t);
    d[0] = dc * g * (i * (1 - i));
    d[1] = dc * before * (f * (1 - f));
    d[2] = dc * i * (1 - g * g);
    d[3] = dh * t * (o * (1 - o));
    return dc * f;
}

/* dn = dh (1 - z), dz = dh (h' - n), dh' = dh z; dr = q da and dq = r da for n = tanh(a + r q) */
INLINE vec gru_backward(const struct place *at, vec dh, vec carried, vec before, ptrdiff_t j,
                        ptrdiff_t lanes, vec *d) {
    const real *a = at->gates + j;
    const ptrdiff_t next = at->features;
    const vec r = load(a, lanes), z = load(a + next, lanes), n = load(a + 2 * next, lanes),
              q = load(at->kept + j, lanes);
    dh += carried;
    d[2] = dh * (1 - z) * (1 - n * n);
    d[0] = d[2] * q * (r * (1 - r));
    d[1] = dh * (before - n) * (z * (1 - z));
    d[3] = d[2] * r;
    return dh * z;
}

INLINE void backward_units(const enum cell cell, const struct place *at, ptrdiff_t j,
                           ptrdiff_t lanes) {
    const int gates = cell == CELL_LSTM ? 4 : 3;
    const vec before = at->before ? load(at->before + j, lanes) : vzero();
    const vec dh = load(at->dy + j, lanes) + vload(at->product + j),
              carried = load(at->carried + j, lanes);
    vec d[4];
    vec rest = cell == CELL_LSTM ? lstm_backward(at, dh, carried, before, j, lanes, d)
                                 : gru_backward(at, dh, carried, before, j, lanes, d);
    if (!at->exists) {
        rest = vzero();
        UNROLL
        for (int gate = 0; gate < 4; gate++) d[gate] = vzero();
    }
    store(at->carried + j, rest, lanes);
    UNROLL
    for (int gate = 0; gate < gates; gate++) {
        const ptrdiff_t k = gate * at->features + j;
        const vec product = d[cell == CELL_GRU && gate == 2 ? 3 : gate];
        store(at->dgates + k, d[gate], lanes);
        store(at->row + k, product, lanes);
        if (cell == CELL_GRU) store(at->dproducts + k, product, lanes);
    }
}

/* -- steps */

/* Products of the rows of the step before with the panels of a slice, into a tile; without these
   rows what products start with. */
static void multiply(const struct pass *p, ptrdiff_t slice, const real *rows, real *tile) {
    const ptrdiff_t none = 0, columns = length_of(slice * ROWS_COLUMNS, p->s);
    const ptrdiff_t ldb = vectors_of(columns) * LANES, depth = rows ? p->depth : 0;
    for (ptrdiff_t panel = 0; panel < p->panels; panel++) {
        const ptrdiff_t number = slice * p->panels + panel;
        for (ptrdiff_t k = 0; k < larger(depth, 1); k += DEPTH) {
            struct gemm_rows task = {
                .a = rows + k,
                .a_offset = p->offset,
                .segment = &none,
                .b_row = &none,
                .segments = 1,
                .length = smaller(depth - k, DEPTH),
                .b = p->packed + number * p->depth * ROWS_COLUMNS + k * ldb,
                .ldb = ldb,
                .c = tile + panel * ROWS_COLUMNS,
                .c_offset = p->offset + p->s->batch,
                .columns = columns,
                .start = k == 0 && p->start ? p->start + number * ROWS_COLUMNS : NULL,
                .accumulate = k > 0};
            NAME(gemm_rows)(p->s->batch, &task);
        }
    }
}

/* Gates of a slice, at time t; `row` receives what the next step multiplies. */
INLINE void slice_step(const enum cell cell, const int backward, const struct pass *p,
                       ptrdiff_t slice, ptrdiff_t t, const real *tile, real *row) {
    const struct recurrent_shape *s = p->s;
    const ptrdiff_t first = slice * ROWS_COLUMNS, columns = length_of(first, s),
                    features = s->features, other = s->reverse ? t + 1 : t - 1;
    const real *states = cell == CELL_LSTM ? p->kept : p->y;
    for (ptrdiff_t n = 0; n < s->batch; n++) {
        const ptrdiff_t at = (n * s->length + t) * features + first,
                        gates = (n * s->length + t) * p->gates * features + first,
                        before = (n * s->length + other) * features + first;
        struct place place = {.features = features,
                              .exists = !s->lengths || t < s->lengths[n],
                              .product = tile + n * p->panels * ROWS_COLUMNS,
                              .gates = p->gates_ + gates,
                              .y = p->y + at,
                              .kept = p->kept + at,
                              .row = row + p->offset[n] + first};
        if (0 <= other && other < s->length) {
            place.before = states + before;
        } else if (p->first) {
            place.before = p->first + n * features + first;
        }
        if (backward) {
            place.dy = p->dy + at;
            place.dgates = p->dgates + gates;
            place.dproducts = p->dproducts + gates;
            place.carried = p->carried + n * features + first;
            FOR_CHANNELS(columns, backward_units, cell, &place);
        } else {
            FOR_CHANNELS(columns, forward_units, cell, &place);
        }
    }
}

#define STEP(cell, backward)                                                                  \
    static void step_##cell##_##backward(const struct pass *p, ptrdiff_t slice, ptrdiff_t t,  \
                                         const real *tile, real *row) {                       \
        slice_step(cell, backward, p, slice, t, tile, row);                                   \
    }
STEP(CELL_LSTM, 0)
STEP(CELL_LSTM, 1)
STEP(CELL_GRU, 0)
STEP(CELL_GRU, 1)
static void (*const steps[][2])(const struct pass *, ptrdiff_t, ptrdiff_t, const real *, real *) = {
    [CELL_LSTM] = {step_CELL_LSTM_0, step_CELL_LSTM_1},
    [CELL_GRU] = {step_CELL_GRU_0, step_CELL_GRU_1}};

/* Add the product of the last step to the gradient of the first state. */
static void add_tile(const struct pass *p, ptrdiff_t slice, const real *tile, real *dh0) {
    const ptrdiff_t first = slice * ROWS_COLUMNS, columns = length_of(first, p->s);
    for (ptrdiff_t n = 0; n < p->s->batch; n++) {
        for (ptrdiff_t j = 0; j < columns; j++)
            dh0[n * p->s->features + first + j] += tile[n * ROWS_COLUMNS + j];
    }
}

/* All steps; with `dh0`, of backward, also the gradient of the state before the first. `given` are
   the rows of the step before the first, or NULL. */
static int run(const struct pass *p, enum cell cell, int backward, const real *given, real *dh0,
               int threads) {
    const struct recurrent_shape *s = p->s;
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        real *tile = NAME(scratch_new)(larger(s->batch, 1) * p->panels * ROWS_COLUMNS);
        if (!tile) {
#pragma omp atomic write
            status = -1;
        }
        const real *rows = given;
        for (ptrdiff_t i = 0; i < s->length; i++) {
            const ptrdiff_t t = s->reverse == backward ? i : s->length - 1 - i;
            real *next = p->rows[i % 2];
#pragma omp for schedule(static)
            for (ptrdiff_t slice = 0; slice < p->slices; slice++) {
                if (!tile) continue;
                multiply(p, slice, rows, tile);
                steps[cell][backward](p, slice, t, tile, next);
            }
            rows = next;
        }
#pragma omp for schedule(static) nowait
        for (ptrdiff_t slice = 0; slice < p->slices; slice++) {
            if (!tile || !dh0 || !rows) continue;
            multiply(p, slice, rows, tile);
            add_tile(p, slice, tile, dh0);
        }
        free(tile);
    }
    return status;
}

/* Allocate what a pass needs besides tiles; rows that are multiplied have a vector behind them, so
   that they are not a power of two apart. */
static int prepare(struct pass *p, enum cell cell, int backward) {
    const ptrdiff_t batch = p->s->batch, features = p->s->features;
    p->gates = cell == CELL_LSTM ? 4 : 3;
    p->panels = backward ? 1 : p->gates;
    p->depth = backward ? p->gates * features : features;
    p->slices = ceil_div(features, ROWS_COLUMNS);
    const ptrdiff_t stride = vectors_of(p->depth) * LANES + LANES,
                    panels = p->slices * p->panels * ROWS_COLUMNS;
    real *memory = NAME(scratch_new)(panels * (p->depth + !backward) + 2 * batch * stride +
                                     backward * batch * features);
    p->offset = aligned_alloc(64, (size_t)(2 * batch + 1) * sizeof *p->offset);
    p->memory = memory;
    if (!memory || !p->offset) return -1;
    for (ptrdiff_t n = 0; n < batch; n++) {
        p->offset[n] = n * stride;
        p->offset[batch + n] = n * p->panels * ROWS_COLUMNS;
    }
    p->packed = memory;
    p->rows[0] = memory + panels * p->depth;
    p->rows[1] = p->rows[0] + batch * stride;
    p->carried = p->rows[1] + batch * stride;
    return 0;
}

/* Pack u, in backward as it lies and in forward turned, with its biases behind the rows. */
static void pack(struct pass *p, int backward, const real *u, const real *b) {
    const ptrdiff_t features = p->s->features;
    real *packed = p->memory, *start = p->carried;
    for (ptrdiff_t slice = 0; slice < p->slices; slice++) {
        const ptrdiff_t first = slice * ROWS_COLUMNS, columns = length_of(first, p->s);
        for (ptrdiff_t panel = 0; panel < p->panels; panel++) {
            const ptrdiff_t number = slice * p->panels + panel, row = panel * features + first;
            NAME(gemm_pack)(p->depth, columns, backward ? u + first : u + row * features,
                            backward ? features : 1, backward ? 1 : features,
                            packed + number * p->depth * ROWS_COLUMNS);
            for (ptrdiff_t j = 0; !backward && j < ROWS_COLUMNS; j++)
                start[number * ROWS_COLUMNS + j] = j < columns ? b[row + j] : 0;
        }
    }
    p->start = backward ? NULL : start;
}

static void finish(struct pass *p) {
    free(p->memory);
    free(p->offset);
}

static int forward(enum cell cell, const struct recurrent_shape *s, void *gates, const void *u,
                   const void *b, const void *h0, const void *c0, void *y, void *kept,
                   int threads) {
    struct pass p = {
        .s = s, .gates_ = gates, .y = y, .kept = kept, .first = cell == CELL_LSTM ? c0 : h0};
    int status = prepare(&p, cell, 0);
    if (status == 0) {
        pack(&p, 0, u, b);
        for (ptrdiff_t n = 0; h0 && n < s->batch; n++) /* the second is written in the second step */
            memcpy(p.rows[1] + p.offset[n], (const real *)h0 + n * s->features,
                   (size_t)s->features * sizeof(real));
        status = run(&p, cell, 0, h0 ? p.rows[1] : NULL, NULL, threads);
    }
    finish(&p);
    return status;
}

static int backward(enum cell cell, const struct recurrent_shape *s, const void *dy,
                    const void *gates, const void *y, const void *kept, const void *u,
                    const void *h0, const void *c0, void *dgates, void *dproducts, void *dh0,
                    void *dc0, int threads) {
    struct pass p = {.s = s,
                     .gates_ = (real *)gates, /* which backward only reads, as y and kept */
                     .y = (real *)y,
                     .kept = (real *)kept,
                     .first = cell == CELL_LSTM ? c0 : h0,
                     .dy = dy,
                     .dgates = dgates,
                     .dproducts = cell == CELL_LSTM ? dgates : dproducts};
    const size_t bytes = (size_t)(s->batch * s->features) * sizeof(real);
    int status = prepare(&p, cell, 1);
    if (status == 0) {
        pack(&p, 1, u, NULL);
        memset(p.carried, 0, bytes);
        if (dh0) memset(dh0, 0, bytes);
        status = run(&p, cell, 1, NULL, dh0, threads);
        const real *carried = p.carried;
        if (dh0 && cell == CELL_LSTM) memcpy(dc0, carried, bytes);
        for (ptrdiff_t i = 0; dh0 && cell == CELL_GRU && i < s->batch * s->features; i++)
            ((real *)dh0)[i] += carried[i];
    }
    finish(&p);
    return status;
}

const struct recurrent_kernels NAME(recurrent_kernels) = {.forward = forward,
                                                          .backward = backward};
