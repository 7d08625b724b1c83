/* The first lanes of vectors, for rows with a length that is not a multiple of LANES. */
#ifndef PYDTNN_LANES_H
#define PYDTNN_LANES_H

#include "simd.h"
#include "stored.h"

/* `lanes` elements; with a constant LANES, as in the loops over whole vectors, there is no mask. */
INLINE vec load(const real *p, ptrdiff_t lanes) {
    return lanes == LANES ? vload(p) : vload_part(p, lanes);
}
INLINE void store(real *p, vec v, ptrdiff_t lanes) {
    lanes == LANES ? vstore(p, v) : vstore_part(p, v, lanes);
}

INLINE vec load_stored(const stored *p, ptrdiff_t lanes) {
    return lanes == LANES ? sload(p) : sload_part(p, lanes);
}
INLINE void store_stored(stored *p, vec v, ptrdiff_t lanes) {
    lanes == LANES ? sstore(p, v) : sstore_part(p, v, lanes);
}

/* Numbers of the lanes: first, first + 1, ... */
INLINE ivec vlanes(ptrdiff_t first) {
    static const ireal number[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ivec lanes;
    memcpy(&lanes, number, sizeof lanes);
    return lanes + (ireal)first;
}

/* The first n elements at p, and `other` in the lanes behind them. */
INLINE vec vload_or(const real *p, ptrdiff_t n, vec other) {
    return vselect(vlanes(0) < (ireal)n, vload_part(p, n), other);
}

/* f(..., offset, lanes) for each vector of the channels: whole ones with a constant, without
   masks */
#define FOR_CHANNELS(channels, f, ...)                                           \
    do {                                                                         \
        ptrdiff_t c_ = 0;                                                        \
        for (; c_ + LANES <= (channels); c_ += LANES) f(__VA_ARGS__, c_, LANES); \
        if (c_ < (channels)) f(__VA_ARGS__, c_, (channels) - c_);                \
    } while (0)

/* Between n stored elements and as many reals. */
#if STORED_BF16
INLINE void read_vector(const stored *src, real *dst, ptrdiff_t i, ptrdiff_t lanes) {
    store(dst + i, load_stored(src + i, lanes), lanes);
}
INLINE void write_vector(const real *src, stored *dst, ptrdiff_t i, ptrdiff_t lanes) {
    store_stored(dst + i, load(src + i, lanes), lanes);
}
INLINE void read_row(const stored *src, ptrdiff_t n, real *dst) {
    FOR_CHANNELS(n, read_vector, src, dst);
}
INLINE void write_row(const real *src, ptrdiff_t n, stored *dst) {
    FOR_CHANNELS(n, write_vector, src, dst);
}
#else
INLINE void read_row(const stored *src, ptrdiff_t n, real *dst) {
    memcpy(dst, src, (size_t)n * sizeof *dst);
}
INLINE void write_row(const real *src, ptrdiff_t n, stored *dst) { read_row(src, n, dst); }
#endif

#endif
