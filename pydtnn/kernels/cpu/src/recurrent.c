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
 * What a step computes is copied, row by row, from memory in which rows follow each other to the
 * arrays of all steps: there rows of one step are often a power of two apart, in few sets of the
 * caches, and a load waits for an earlier store to an address that is equal modulo 4 KiB.
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

enum { DEPTH = 512, GAP = 192 / sizeof(real) }; /* between rows, which are not 4 KiB apart then */
enum { AHEAD = 4 }; /* samples whose rows are fetched, which no prefetcher finds: other pages */

/* A pass over all steps. */
struct pass {
    const struct recurrent_shape *s;
    enum cell cell;
    int backward;
    ptrdiff_t gates, slices;
    ptrdiff_t panels, depth; /* of a slice; length of the rows that are multiplied */
    const real *packed;      /* panel after panel, slice by slice */
    const real *start;       /* of each panel, or NULL */
    ptrdiff_t *offset;       /* of the rows of samples: those multiplied, then those of a tile */
    real *memory;
    /* arrays of all steps, see recurrent.h */
    const real *dy, *first; /* the latter: of the state that `before` has */
    real *all_gates, *y, *kept, *dgates, *dproducts;
    /* rows of a step, `wide` apart for all gates and `narrow` for a state */
    ptrdiff_t wide, narrow;
    real *a[2];                 /* gates; in backward gradients of terms, in two steps in turns */
    real *h[2];                 /* states, in two steps in turns */
    real *c, *q, *zeros, *last; /* of lstm_begin; gru_finish and gru_backward; backward */
};

/* A sample in a step, from the first unit of a slice on. */
struct place {
    ptrdiff_t next; /* distance of gates in `a`; those of `product` are ROWS_COLUMNS apart */
    int exists;
    const real *product;
    const real *terms; /* of the input; in backward, gates */
    real *a, *h, *c, *q, *last;
    const real *kept, *before, *dy;
};

/* sigmoid(x) to 3 ulp; where its exponential would overflow, of a smaller one */
INLINE vec logistic(vec x) {
    const real far = sizeof(real) == 4 ? 87 : 708;
    ivec n;
    const vec e = 1 + vexp_reduced(vmin(vset(far), vmax(vset(-far), -x)), &n);
    return 1 / (1 + e * vpower2(n));
}

INLINE ptrdiff_t length_of(ptrdiff_t first, const struct recurrent_shape *s) {
    return smaller(s->features - first, ROWS_COLUMNS);
}

/* -- forward of a vector of units, in two parts: a processor has only the instructions of a few
   functions in flight, so that those that wait for results of others are left to a second sweep */

/* i, f, o = sigmoid, g = tanh; c = f c' + i g */
INLINE void lstm_begin(const struct place *at, ptrdiff_t j, ptrdiff_t lanes) {
    const real *x = at->terms + j, *p = at->product + j;
    real *a = at->a + j, *c = at->c + j;
    const ptrdiff_t next = at->next;
    const vec i = logistic(load(x, lanes) + vload(p));
    const vec f = logistic(load(x + next, lanes) + vload(p + ROWS_COLUMNS));
    const vec g = vtanh(load(x + 2 * next, lanes) + vload(p + 2 * ROWS_COLUMNS));
    store(a, i, lanes);
    store(a + next, f, lanes);
    store(a + 2 * next, g, lanes);
    store(a + 3 * next, logistic(load(x + 3 * next, lanes) + vload(p + 3 * ROWS_COLUMNS)), lanes);
    store(c, at->exists ? f * load(c, lanes) + i * g : vzero(), lanes);
}

/* h = o tanh(c) */
INLINE vec lstm_finish(const struct place *at, ptrdiff_t j, ptrdiff_t lanes) {
    return load(at->a + 3 * at->next + j, lanes) * vtanh(load(at->c + j, lanes));
}

/* r, z = sigmoid */
INLINE void gru_begin(const struct place *at, ptrdiff_t j, ptrdiff_t lanes) {
    const real *x = at->terms + j, *p = at->product + j;
    real *a = at->a + j;
    const ptrdiff_t next = at->next;
    store(a, logistic(load(x, lanes) + vload(p)), lanes);
    store(a + next, logistic(load(x + next, lanes) + vload(p + ROWS_COLUMNS)), lanes);
}

/* n = tanh(a + r q), q the product; h = (1 - z) n + z h' */
INLINE vec gru_finish(const struct place *at, ptrdiff_t j, ptrdiff_t lanes) {
    real *a = at->a + j;
    const vec q = vload(at->product + 2 * ROWS_COLUMNS + j), r = load(a, lanes),
              z = load(a + at->next, lanes), before = load(at->before + j, lanes);
    const vec n = vtanh(load(at->terms + 2 * at->next + j, lanes) + r * q);
    store(a + 2 * at->next, n, lanes);
    store(at->q + j, q, lanes);
    return n + z * (before - n);
}

INLINE void begin_units(const enum cell cell, const struct place *at, ptrdiff_t j,
                        ptrdiff_t lanes) {
    if (cell == CELL_LSTM) {
        lstm_begin(at, j, lanes);
    } else {
        gru_begin(at, j, lanes);
    }
}

INLINE void finish_units(const enum cell cell, const struct place *at, ptrdiff_t j,
                         ptrdiff_t lanes) {
    const vec h = cell == CELL_LSTM ? lstm_finish(at, j, lanes) : gru_finish(at, j, lanes);
    store(at->h + j, at->exists ? h : vzero(), lanes);
}

/* -- backward of a vector of units, from the gradient of h. What comes in `last` from the step
   after, and is left there for that before, is the gradient of c for an LSTM, and for a GRU that of
   h besides the product. */

/* do = dh tanh(c), dc += dh o (1 - tanh(c)^2), di = dc g, df = dc c', dg = dc i, dc' = dc f */
INLINE vec lstm_backward(const struct place *at, vec dh, vec last, ptrdiff_t j, ptrdiff_t lanes,
                         vec *d) {
    const real *a = at->terms + j;
    const ptrdiff_t next = at->next;
    const vec i = load(a, lanes), f = load(a + next, lanes), g = load(a + 2 * next, lanes),
              o = load(a + 3 * next, lanes), t = vtanh(load(at->kept + j, lanes)),
              before = load(at->before + j, lanes);
    const vec dc = last + dh * o * (1 - t * t);
    d[0] = dc * g * (i * (1 - i));
    d[1] = dc * before * (f * (1 - f));
    d[2] = dc * i * (1 - g * g);
    d[3] = dh * t * (o * (1 - o));
    return dc * f;
}

/* dn = dh (1 - z), dz = dh (h' - n), dh' = dh z; dr = q da and dq = r da for n = tanh(a + r q) */
INLINE vec gru_backward(const struct place *at, vec dh, vec last, ptrdiff_t j, ptrdiff_t lanes,
                        vec *d) {
    const real *a = at->terms + j;
    const ptrdiff_t next = at->next;
    const vec r = load(a, lanes), z = load(a + next, lanes), n = load(a + 2 * next, lanes),
              q = load(at->kept + j, lanes), before = load(at->before + j, lanes);
    dh += last;
    const vec da = dh * (1 - z) * (1 - n * n);
    d[0] = da * q * (r * (1 - r));
    d[1] = dh * (before - n) * (z * (1 - z));
    d[2] = da * r;
    store(at->q + j, at->exists ? da : vzero(), lanes);
    return dh * z;
}

INLINE void backward_units(const enum cell cell, const struct place *at, ptrdiff_t j,
                           ptrdiff_t lanes) {
    const int gates = cell == CELL_LSTM ? 4 : 3;
    const vec dh = load(at->dy + j, lanes) + vload(at->product + j),
              last = load(at->last + j, lanes);
    vec d[4];
    const vec rest = cell == CELL_LSTM ? lstm_backward(at, dh, last, j, lanes, d)
                                       : gru_backward(at, dh, last, j, lanes, d);
    store(at->last + j, at->exists ? rest : vzero(), lanes);
    UNROLL
    for (int gate = 0; gate < gates; gate++)
        store(at->a + gate * at->next + j, at->exists ? d[gate] : vzero(), lanes);
}

/* -- steps */

/* Products of rows with the panels of a slice, into a tile; without rows what products start
   with. */
static void multiply(const struct pass *p, ptrdiff_t slice, const real *rows, real *tile) {
    const ptrdiff_t none = 0, columns = length_of(slice * ROWS_COLUMNS, p->s);
    const ptrdiff_t ldb = vectors_of(columns) * LANES, depth = rows ? p->depth : 0;
    for (ptrdiff_t panel = 0; panel < p->panels; panel++) {
        const ptrdiff_t number = slice * p->panels + panel;
        for (ptrdiff_t k = 0; k < larger(depth, 1); k += DEPTH) {
            struct gemm_rows task = {
                .a = rows ? rows + k : NULL,
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

INLINE void fetch(const real *p) {
    for (ptrdiff_t j = 0; j < ROWS_COLUMNS; j += 64 / (ptrdiff_t)sizeof(real))
        __builtin_prefetch(p + j);
}

/* Gates of a slice in step i, at time t. */
INLINE void slice_step(const enum cell cell, const int backward, const struct pass *p,
                       ptrdiff_t slice, ptrdiff_t i, ptrdiff_t t, const real *tile) {
    const struct recurrent_shape *s = p->s;
    const ptrdiff_t units = s->features, first = slice * ROWS_COLUMNS,
                    columns = length_of(first, s), other = s->reverse ? t + 1 : t - 1;
    const int inside = 0 <= other && other < s->length;
    for (int sweep = 0; sweep < 2 - backward; sweep++) {
        for (ptrdiff_t n = 0; n < s->batch; n++) {
            const ptrdiff_t state = n * p->narrow + first, at = (n * s->length + t) * units + first,
                            gates = (n * s->length + t) * p->gates * units + first;
            struct place place = {.next = units,
                                  .exists = !s->lengths || t < s->lengths[n],
                                  .product = tile + n * p->panels * ROWS_COLUMNS,
                                  .terms = p->all_gates + gates,
                                  .a = p->a[backward ? i % 2 : 0] + n * p->wide + first,
                                  .h = p->h[i % 2] + state,
                                  .c = p->c + state,
                                  .q = p->q + state,
                                  .last = p->last + state,
                                  .before = p->h[1 - i % 2] + state};
            const int ahead = n + AHEAD < s->batch;
            if (ahead && sweep == 0) {
                for (ptrdiff_t gate = 0; gate < p->gates; gate++)
                    fetch(place.terms + (AHEAD * s->length * p->gates + gate) * units);
            }
            if (backward) {
                place.kept = p->kept + at;
                place.dy = p->dy + at;
                place.before = p->first ? p->first + n * units + first : p->zeros + state;
                if (inside) {
                    const real *states = cell == CELL_LSTM ? p->kept : p->y;
                    place.before = states + at + (other - t) * units;
                }
                if (ahead) {
                    const ptrdiff_t further = AHEAD * s->length * units;
                    fetch(place.kept + further);
                    fetch(place.dy + further);
                    if (inside) fetch(place.before + further);
                }
                FOR_CHANNELS(columns, backward_units, cell, &place);
            } else if (sweep == 0) {
                FOR_CHANNELS(columns, begin_units, cell, &place);
            } else {
                FOR_CHANNELS(columns, finish_units, cell, &place);
            }
        }
    }
}

#define STEP(cell, backward)                                                                 \
    static void step_##cell##_##backward(const struct pass *p, ptrdiff_t slice, ptrdiff_t i, \
                                         ptrdiff_t t, const real *tile) {                    \
        slice_step(cell, backward, p, slice, i, t, tile);                                    \
    }
STEP(CELL_LSTM, 0)
STEP(CELL_LSTM, 1)
STEP(CELL_GRU, 0)
STEP(CELL_GRU, 1)
static void (*const steps[][2])(const struct pass *, ptrdiff_t, ptrdiff_t, ptrdiff_t,
                                const real *) = {
    [CELL_LSTM] = {step_CELL_LSTM_0, step_CELL_LSTM_1},
    [CELL_GRU] = {step_CELL_GRU_0, step_CELL_GRU_1}};

INLINE void copy(real *dst, const real *src, ptrdiff_t n) {
    memcpy(dst, src, (size_t)n * sizeof *dst);
}

/* Copy a sample's results of step i, at time t, to the arrays of all steps. */
static void give(const struct pass *p, ptrdiff_t n, ptrdiff_t i, ptrdiff_t t) {
    const ptrdiff_t units = p->s->features, at = (n * p->s->length + t) * units;
    const real *a = p->a[p->backward ? i % 2 : 0] + n * p->wide, *q = p->q + n * p->narrow;
    if (!p->backward) {
        copy(p->all_gates + p->gates * at, a, p->gates * units);
        copy(p->y + at, p->h[i % 2] + n * p->narrow, units);
        copy(p->kept + at, p->cell == CELL_LSTM ? p->c + n * p->narrow : q, units);
    } else if (p->cell == CELL_LSTM) {
        copy(p->dgates + p->gates * at, a, p->gates * units);
    } else {
        copy(p->dproducts + p->gates * at, a, p->gates * units);
        copy(p->dgates + p->gates * at, a, 2 * units);
        copy(p->dgates + p->gates * at + 2 * units, q, units);
    }
}

/* Add the product of the last step to the gradient of the first state. */
static void add_tile(const struct pass *p, ptrdiff_t slice, const real *tile, real *dh0) {
    const ptrdiff_t first = slice * ROWS_COLUMNS, columns = length_of(first, p->s);
    for (ptrdiff_t n = 0; n < p->s->batch; n++) {
        for (ptrdiff_t j = 0; j < columns; j++)
            dh0[n * p->s->features + first + j] += tile[n * ROWS_COLUMNS + j];
    }
}

/* All steps; with `dh0`, of backward, also the gradient of the state before the first. */
static int run(const struct pass *p, int begins, real *dh0, int threads) {
    const struct recurrent_shape *s = p->s;
    const ptrdiff_t length = s->length;
    int status = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        real *tile = NAME(scratch_new)(larger(s->batch, 1) * p->panels * ROWS_COLUMNS);
        if (!tile) {
#pragma omp atomic write
            status = -1;
        }
        for (ptrdiff_t i = 0; i <= length; i++) { /* the last only copies results */
            const int up = s->reverse == p->backward;
            const ptrdiff_t t = up ? i : length - 1 - i;
            real *const *rows = p->backward ? p->a : p->h;
#pragma omp for schedule(static)
            for (ptrdiff_t n = 0; n < s->batch; n++) {
                if (i > 0) give(p, n, i - 1, up ? t - 1 : t + 1);
            }
#pragma omp for schedule(static)
            for (ptrdiff_t slice = 0; slice < p->slices; slice++) {
                if (!tile || (i == length && !dh0)) continue;
                multiply(p, slice, i > 0 || begins ? rows[1 - i % 2] : NULL, tile);
                if (i < length) {
                    steps[p->cell][p->backward](p, slice, i, t, tile);
                } else {
                    add_tile(p, slice, tile, dh0);
                }
            }
        }
        free(tile);
    }
    return status;
}

/* Allocate what a pass needs besides tiles. */
static int prepare(struct pass *p) {
    const ptrdiff_t batch = p->s->batch, features = p->s->features;
    p->gates = p->cell == CELL_LSTM ? 4 : 3;
    p->panels = p->backward ? 1 : p->gates;
    p->depth = p->backward ? p->gates * features : features;
    p->slices = ceil_div(features, ROWS_COLUMNS);
    p->wide = vectors_of(p->gates * features) * LANES + GAP;
    p->narrow = vectors_of(features) * LANES + GAP;
    const ptrdiff_t panels = p->slices * p->panels * ROWS_COLUMNS;
    p->memory = NAME(scratch_new)(panels * (p->depth + 1) + batch * (2 * p->wide + 6 * p->narrow));
    p->offset = aligned_alloc(64, (size_t)(2 * batch + 1) * sizeof *p->offset);
    if (!p->memory || !p->offset) return -1;
    for (ptrdiff_t n = 0; n < batch; n++) {
        p->offset[n] = n * (p->backward ? p->wide : p->narrow);
        p->offset[batch + n] = n * p->panels * ROWS_COLUMNS;
    }
    real *free_memory = p->memory + panels * (p->depth + 1);
    real **const states[] = {&p->h[0], &p->h[1], &p->c, &p->q, &p->zeros, &p->last};
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++, free_memory += batch * p->narrow)
        *states[i] = free_memory;
    p->a[0] = free_memory;
    p->a[1] = free_memory + batch * p->wide;
    return 0;
}

/* Pack u, in backward as it lies and in forward turned, with its biases behind. */
static void pack(struct pass *p, const real *u, const real *b) {
    const ptrdiff_t features = p->s->features;
    real *start = p->memory + p->slices * p->panels * ROWS_COLUMNS * p->depth;
    p->packed = p->memory;
    p->start = b ? start : NULL;
    for (ptrdiff_t slice = 0; slice < p->slices; slice++) {
        const ptrdiff_t first = slice * ROWS_COLUMNS, columns = length_of(first, p->s);
        for (ptrdiff_t panel = 0; panel < p->panels; panel++) {
            const ptrdiff_t number = slice * p->panels + panel, row = panel * features + first;
            NAME(gemm_pack)(p->depth, columns, p->backward ? u + first : u + row * features,
                            p->backward ? features : 1, p->backward ? 1 : features,
                            p->memory + number * p->depth * ROWS_COLUMNS);
            for (ptrdiff_t j = 0; b && j < ROWS_COLUMNS; j++)
                start[number * ROWS_COLUMNS + j] = j < columns ? b[row + j] : 0;
        }
    }
}

/* Copy states (batch, features) into rows, zeros without them. */
static void spread(const struct pass *p, const real *states, real *rows) {
    const ptrdiff_t units = p->s->features;
    for (ptrdiff_t n = 0; n < p->s->batch; n++) {
        if (states) {
            copy(rows + n * p->narrow, states + n * units, units);
        } else {
            memset(rows + n * p->narrow, 0, (size_t)units * sizeof(real));
        }
    }
}

static void finish(struct pass *p) {
    free(p->memory);
    free(p->offset);
}

static int forward(enum cell cell, const struct recurrent_shape *s, void *gates, const void *u,
                   const void *b, const void *h0, const void *c0, void *y, void *kept,
                   int threads) {
    struct pass p = {.s = s, .cell = cell, .all_gates = gates, .y = y, .kept = kept};
    int status = prepare(&p);
    if (status == 0) {
        pack(&p, u, b);
        spread(&p, h0, p.h[1]); /* which the first step reads */
        spread(&p, c0, p.c);
        status = run(&p, h0 != NULL, NULL, threads);
    }
    finish(&p);
    return status;
}

static int backward(enum cell cell, const struct recurrent_shape *s, const void *dy,
                    const void *gates, const void *y, const void *kept, const void *u,
                    const void *h0, const void *c0, void *dgates, void *dproducts, void *dh0,
                    void *dc0, int threads) {
    struct pass p = {.s = s,
                     .cell = cell,
                     .backward = 1,
                     .dy = dy,
                     .first = cell == CELL_LSTM ? c0 : h0,
                     .all_gates = (real *)gates, /* which backward only reads, as y and kept */
                     .y = (real *)y,
                     .kept = (real *)kept,
                     .dgates = dgates,
                     .dproducts = dproducts};
    int status = prepare(&p);
    if (status == 0) {
        pack(&p, u, NULL);
        spread(&p, NULL, p.last);
        spread(&p, NULL, p.zeros);
        if (dh0) memset(dh0, 0, (size_t)(s->batch * s->features) * sizeof(real));
        status = run(&p, 0, dh0, threads);
        real *left = cell == CELL_LSTM ? dc0 : dh0; /* which gets what the first step has left */
        for (ptrdiff_t i = 0; dh0 && i < s->batch * s->features; i++) {
            const real last = p.last[i / s->features * p.narrow + i % s->features];
            left[i] = cell == CELL_LSTM ? last : left[i] + last;
        }
    }
    finish(&p);
    return status;
}

const struct recurrent_kernels NAME(recurrent_kernels) = {.forward = forward,
                                                          .backward = backward};
