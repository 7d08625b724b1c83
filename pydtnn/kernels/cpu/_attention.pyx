"""Thin wrapper of src/attention.c: picks the variant and passes raw pointers, without the GIL."""

from libc.stdint cimport int64_t, uint32_t

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, optional, output, team

cnp.import_array()

cdef extern from "attention.h":
    struct attention_shape:
        ptrdiff_t batch
        ptrdiff_t length
        ptrdiff_t keys
        ptrdiff_t heads
        ptrdiff_t width
        ptrdiff_t ldq
        ptrdiff_t ldk
        ptrdiff_t query
        ptrdiff_t key
        ptrdiff_t whole
        const int64_t *seen
        ptrdiff_t seen_stride
        double scale
        const void *bias
        const double *slopes
        const int64_t *samples
        uint32_t seed
        uint32_t stream
        uint32_t epoch
        uint32_t threshold
        ptrdiff_t first_head
        double factor
    struct attention_kernels:
        int (*forward)(const attention_shape *shape, const void *q, const void *k, void *y,
                       void *log_sums, int threads) nogil
        int (*backward)(const attention_shape *shape, const void *dy, const void *q,
                        const void *k, const void *y, const void *log_sums, void *dq, void *dk,
                        void *dbias, int threads) nogil
    const attention_kernels *attention_select(int isa, int itemsize)


cdef attention_shape shape_of(q, kv, ptrdiff_t heads, at, seen, scale, bias, slopes,
                              dropout) except *:
    """The shape of q (N, T1, D) and kv (N, T2, 2 D), or of q (N, T, 3 D) with keys and values if kv
    is None, which are at (query, key, length). seen is int64 (1 or N, T1, 2), bias (heads, T1, T2)
    and slopes float64 (heads,), or None; dropout is (samples, seed, stream, epoch, threshold,
    factor, first_head) or None, with samples of int64."""
    cdef attention_shape s
    s.batch, s.length, s.heads, s.ldq = q.shape[0], q.shape[1], heads, q.shape[2]
    if kv is None:
        s.keys, s.ldk, s.width = s.length, s.ldq, s.ldq // (3 * heads)
    else:
        s.keys, s.ldk, s.width = kv.shape[1], kv.shape[2], s.ldq // heads
    s.query, s.key, s.whole = at or (0, 0, max(s.length, s.keys))
    s.scale = s.width ** -0.5 if scale is None else scale
    cdef ptrdiff_t samples_seen = 0 if seen is None else len(seen)
    s.seen = <const int64_t *>optional(seen, sizeof(int64_t), samples_seen * s.length * 2)
    s.seen_stride = 2 * s.length if samples_seen > 1 else 0
    cdef ptrdiff_t i
    for i in range(samples_seen * s.length * 2):
        if not 0 <= s.seen[i] <= s.keys:
            raise ValueError(f"attention: keys must be in 0..{s.keys}, got {s.seen[i]}")
    s.bias = optional(bias, 0 if bias is None else itemsize(bias), s.heads * s.length * s.keys)
    s.slopes = <const double *>optional(slopes, sizeof(double), s.heads)
    samples, s.seed, s.stream, s.epoch, s.threshold, s.factor, s.first_head = dropout or (
        None, 0, 0, 0, 0, 1.0, 0)
    s.samples = <const int64_t *>optional(samples, sizeof(int64_t), s.batch)
    return s


cdef inline double operations(const attention_shape *s) noexcept:
    return 2.0 * s.batch * s.heads * s.length * s.keys * s.width


cdef class AttentionKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if attention_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def forward(self, q, kv, ptrdiff_t heads, at, seen, scale, bias, slopes, dropout, out,
                log_sums, int threads):
        """out (N, T1, D) and log_sums (N, heads, T1) of the arrays of `shape_of`."""
        cdef attention_shape s = shape_of(q, kv, heads, at, seen, scale, bias, slopes,
                                          dropout)
        cdef ptrdiff_t rows = s.batch * s.length, features = s.heads * s.width
        cdef int size = itemsize(out), status
        cdef const char *q_ = <const char *>data(q, size, rows * s.ldq)
        cdef const void *k_ = q_ + features * size
        if kv is not None:
            k_ = data(kv, size, s.batch * s.keys * 2 * features)
        cdef void *out_ = output(out, size, rows * features)
        cdef void *log_sums_ = output(log_sums, size, rows * s.heads)
        cdef const attention_kernels *kernels = attention_select(self.isa, size)
        threads = team(operations(&s), threads)
        with nogil:
            status = kernels.forward(&s, q_, k_, out_, log_sums_, threads)
        if status != 0:
            raise MemoryError("attention.forward: no memory for packed operands.")

    def backward(self, dy, q, kv, y, log_sums, ptrdiff_t heads, at, seen, scale, bias, slopes,
                 dropout, out, out_kv, out_bias, int threads):
        """out, out_kv and out_bias, the gradients of q, kv and bias, from dy and the results of
        forward."""
        cdef attention_shape s = shape_of(q, kv, heads, at, seen, scale, bias, slopes,
                                          dropout)
        cdef ptrdiff_t rows = s.batch * s.length, features = s.heads * s.width
        cdef int size = itemsize(out), status
        cdef const void *dy_ = data(dy, size, rows * features)
        cdef const char *q_ = <const char *>data(q, size, rows * s.ldq)
        cdef char *dq_ = <char *>output(out, size, rows * s.ldq)
        cdef const void *k_ = q_ + features * size
        cdef void *dk_ = dq_ + features * size
        if kv is not None:
            k_ = data(kv, size, s.batch * s.keys * 2 * features)
            dk_ = output(out_kv, size, s.batch * s.keys * 2 * features)
        cdef void *dbias_ = NULL
        if out_bias is not None:
            dbias_ = output(out_bias, size, s.heads * s.length * s.keys)
        cdef const void *y_ = data(y, size, rows * features)
        cdef const void *log_sums_ = data(log_sums, size, rows * s.heads)
        cdef const attention_kernels *kernels = attention_select(self.isa, size)
        threads = team(operations(&s), threads)
        with nogil:
            status = kernels.backward(&s, dy_, q_, k_, y_, log_sums_, dq_, dk_, dbias_,
                                      threads)
        if status != 0:
            raise MemoryError("attention.backward: no memory for packed operands.")
