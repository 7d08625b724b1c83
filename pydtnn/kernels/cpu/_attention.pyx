"""Thin wrapper of src/attention.c: picks the variant and passes raw pointers, without the GIL."""

from libc.stdint cimport int64_t, uint32_t

cimport numpy as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, optional, output, team

cnp.import_array()

cdef extern from "attention.h":
    struct attention_shape:
        ptrdiff_t batch
        ptrdiff_t length
        ptrdiff_t heads
        ptrdiff_t width
        int causal
        const int64_t *lengths
        const int64_t *samples
        uint32_t seed
        uint32_t stream
        uint32_t epoch
        uint32_t threshold
        ptrdiff_t first_head
        double factor
    struct attention_kernels:
        int (*forward)(const attention_shape *shape, const void *qkv, void *y, void *log_sums,
                       int threads) nogil
        int (*backward)(const attention_shape *shape, const void *dy, const void *qkv,
                        const void *y, const void *log_sums, void *dqkv, int threads) nogil
    const attention_kernels *attention_select(int isa, int itemsize)


cdef attention_shape shape_of(qkv, ptrdiff_t heads, bint causal, lengths, dropout) except *:
    """The shape of (N, T, 3 D) arrays; lengths are int64 or None, dropout (samples, seed, stream,
    epoch, threshold, factor, first_head) or None, with samples of int64."""
    cdef attention_shape s
    s.batch, s.length, s.heads = qkv.shape[0], qkv.shape[1], heads
    s.width = qkv.shape[2] // (3 * heads)
    s.causal = causal
    s.lengths = <const int64_t *>optional(lengths, sizeof(int64_t), s.batch)
    samples, s.seed, s.stream, s.epoch, s.threshold, s.factor, s.first_head = dropout or (
        None, 0, 0, 0, 0, 1.0, 0)
    s.samples = <const int64_t *>optional(samples, sizeof(int64_t), s.batch)
    return s


cdef inline double operations(const attention_shape *s) noexcept:
    return 2.0 * s.batch * s.heads * s.length * s.length * s.width


cdef class AttentionKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if attention_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def forward(self, qkv, ptrdiff_t heads, bint causal, lengths, dropout, out, log_sums,
                int threads):
        """out (N, T, D) and log_sums (N, heads, T) of qkv (N, T, 3 D)."""
        cdef attention_shape s = shape_of(qkv, heads, causal, lengths, dropout)
        cdef ptrdiff_t rows = s.batch * s.length, features = s.heads * s.width
        cdef int size = itemsize(out), status
        cdef const void *qkv_ = data(qkv, size, 3 * rows * features)
        cdef void *out_ = output(out, size, rows * features)
        cdef void *log_sums_ = output(log_sums, size, rows * s.heads)
        cdef const attention_kernels *kernels = attention_select(self.isa, size)
        threads = team(operations(&s), threads)
        with nogil:
            status = kernels.forward(&s, qkv_, out_, log_sums_, threads)
        if status != 0:
            raise MemoryError("attention.forward: no memory for packed operands.")

    def backward(self, dy, qkv, y, log_sums, ptrdiff_t heads, bint causal, lengths,
                 dropout, out, int threads):
        """out (N, T, 3 D), the gradient of qkv, from dy and the results of forward."""
        cdef attention_shape s = shape_of(qkv, heads, causal, lengths, dropout)
        cdef ptrdiff_t rows = s.batch * s.length, features = s.heads * s.width
        cdef int size = itemsize(out), status
        cdef const void *dy_ = data(dy, size, rows * features)
        cdef const void *qkv_ = data(qkv, size, 3 * rows * features)
        cdef const void *y_ = data(y, size, rows * features)
        cdef const void *log_sums_ = data(log_sums, size, rows * s.heads)
        cdef void *out_ = output(out, size, 3 * rows * features)
        cdef const attention_kernels *kernels = attention_select(self.isa, size)
        threads = team(operations(&s), threads)
        with nogil:
            status = kernels.backward(&s, dy_, qkv_, y_, log_sums_, out_, threads)
        if status != 0:
            raise MemoryError("attention.backward: no memory for packed operands.")
