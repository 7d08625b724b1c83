"""Thin wrapper of src/recurrent.c: picks the variant and passes raw pointers, without the GIL."""

from libc.stdint cimport int64_t

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, optional, output, team

cnp.import_array()

cdef extern from "recurrent.h":
    enum cell:
        CELL_LSTM, CELL_GRU
    struct recurrent_shape:
        ptrdiff_t batch
        ptrdiff_t length
        ptrdiff_t features
        int reverse
        const int64_t *lengths
    struct recurrent_kernels:
        int (*forward)(cell kind, const recurrent_shape *shape, void *gates, const void *u,
                       const void *b, const void *h0, const void *c0, void *y, void *kept,
                       int threads) nogil
        int (*backward)(cell kind, const recurrent_shape *shape, const void *dy,
                        const void *gates, const void *y, const void *kept, const void *u,
                        const void *h0, const void *c0, void *dgates, void *dproducts, void *dh0,
                        void *dc0, int threads) nogil
    const recurrent_kernels *recurrent_select(int isa, int itemsize)

LSTM, GRU = CELL_LSTM, CELL_GRU


cdef recurrent_shape shape_of(y, bint reverse, lengths) except *:
    """The shape of outputs (N, T, H); lengths are int64 (N,) or None."""
    cdef recurrent_shape s
    s.batch, s.length, s.features, s.reverse = y.shape[0], y.shape[1], y.shape[2], reverse
    s.lengths = <const int64_t *>optional(lengths, sizeof(int64_t), s.batch)
    return s


cdef inline double operations(const recurrent_shape *s, int gates) noexcept:
    """Multiply-adds of an eighth of a step: threads wait for each other twice in each."""
    return <double>gates * s.batch * s.features * s.features / 8


cdef class RecurrentKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type.

    G is the number of gates: 4 of an LSTM, 3 of a GRU. h0 and c0 (N, H) may be None.
    """

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if recurrent_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def forward(self, int kind, gates, u, b, h0, c0, out, kept, bint reverse, lengths,
                int threads):
        """gates (N, T, G H), out and kept (N, T, H), from the terms of the input in gates, u (G H,
        H) and b (G H,)."""
        cdef recurrent_shape s = shape_of(out, reverse, lengths)
        cdef int size = itemsize(out), count = 4 if kind == CELL_LSTM else 3, status
        cdef ptrdiff_t state = s.batch * s.features, steps = s.batch * s.length
        cdef void *gates_ = output(gates, size, steps * count * s.features)
        cdef const void *u_ = data(u, size, count * s.features * s.features)
        cdef const void *b_ = data(b, size, count * s.features)
        cdef const void *h0_ = optional(h0, size, state)
        cdef const void *c0_ = optional(c0, size, state)
        cdef void *out_ = output(out, size, steps * s.features)
        cdef void *kept_ = output(kept, size, steps * s.features)
        cdef const recurrent_kernels *kernels = recurrent_select(self.isa, size)
        threads = team(operations(&s, count), threads)
        with nogil:
            status = kernels.forward(<cell>kind, &s, gates_, u_, b_, h0_, c0_, out_, kept_,
                                     threads)
        if status != 0:
            raise MemoryError("recurrent.forward: no memory for a packed operand.")

    def backward(self, int kind, dy, gates, y, kept, u, h0, c0, out, products, dh0, dc0,
                 bint reverse, lengths, int threads):
        """out (N, T, G H), and products of a GRU, from dy (N, T, H) and the results of forward; dh0
        and dc0 (N, H) unless they are None."""
        cdef recurrent_shape s = shape_of(dy, reverse, lengths)
        cdef int size = itemsize(dy), count = 4 if kind == CELL_LSTM else 3, status
        cdef ptrdiff_t state = s.batch * s.features, steps = s.batch * s.length
        cdef const void *dy_ = data(dy, size, steps * s.features)
        cdef const void *gates_ = data(gates, size, steps * count * s.features)
        cdef const void *y_ = data(y, size, steps * s.features)
        cdef const void *kept_ = data(kept, size, steps * s.features)
        cdef const void *u_ = data(u, size, count * s.features * s.features)
        cdef const void *h0_ = optional(h0, size, state)
        cdef const void *c0_ = optional(c0, size, state)
        cdef void *out_ = output(out, size, steps * count * s.features)
        cdef void *products_ = NULL
        cdef void *dh0_ = NULL
        cdef void *dc0_ = NULL
        if kind == CELL_GRU:
            products_ = output(products, size, steps * count * s.features)
        if dh0 is not None:
            dh0_ = output(dh0, size, state)
            if kind == CELL_LSTM:
                dc0_ = output(dc0, size, state)
        cdef const recurrent_kernels *kernels = recurrent_select(self.isa, size)
        threads = team(operations(&s, count), threads)
        with nogil:
            status = kernels.backward(<cell>kind, &s, dy_, gates_, y_, kept_, u_, h0_, c0_, out_,
                                      products_, dh0_, dc0_, threads)
        if status != 0:
            raise MemoryError("recurrent.backward: no memory for a packed operand.")
