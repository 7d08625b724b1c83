"""Thin wrapper of src/linear.c: picks the variant and passes raw pointers, without the GIL."""

from libc.stdint cimport int64_t

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, optional, output, real_size, team

cnp.import_array()

cdef extern from "linear.h":
    struct linear_shape:
        ptrdiff_t batch
        ptrdiff_t inputs
        ptrdiff_t outputs
    struct linear_kernels:
        int (*forward)(const linear_shape *shape, const void *x, const void *w, const void *b,
                       void *y, int threads) nogil
        int (*backward_data)(const linear_shape *shape, const void *dy, const void *w, void *dx,
                             int threads) nogil
        int (*backward_filter)(const linear_shape *shape, const void *x, const void *dy, void *dw,
                               int accumulate, int threads) nogil
        int (*backward_bias)(const void *dy, ptrdiff_t rows, ptrdiff_t columns, void *out,
                             int accumulate, int threads) nogil
        int (*add_rows)(const void *dy, const int64_t *chosen, ptrdiff_t rows, void *out,
                        ptrdiff_t count, ptrdiff_t columns, int accumulate, int threads) nogil
    const linear_kernels *linear_select(int isa, int itemsize)


cdef inline double operations(const linear_shape *s) noexcept:
    return <double>s.batch * s.inputs * s.outputs


cdef class LinearKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if linear_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def forward(self, x, w, b, out, int threads):
        """out (N, O) = x (N, I) w (O, I)', plus b (O,) or None."""
        cdef linear_shape s
        s.batch, s.inputs, s.outputs = x.shape[0], x.shape[1], w.shape[0]
        cdef int size = itemsize(out), status
        cdef const void *x_ = data(x, size, s.batch * s.inputs)
        cdef const void *w_ = data(w, size, s.outputs * s.inputs)
        cdef const void *b_ = optional(b, real_size(size), s.outputs)
        cdef void *out_ = output(out, size, s.batch * s.outputs)
        cdef const linear_kernels *kernels = linear_select(self.isa, size)
        threads = team(operations(&s), threads)
        with nogil:
            status = kernels.forward(&s, x_, w_, b_, out_, threads)
        if status != 0:
            raise MemoryError("linear.forward: no memory for a packed operand.")

    def backward_data(self, dy, w, out, int threads):
        """out (N, I) = dy (N, O) w (O, I)."""
        cdef linear_shape s
        s.batch, s.inputs, s.outputs = dy.shape[0], w.shape[1], w.shape[0]
        cdef int size = itemsize(out), status
        cdef const void *dy_ = data(dy, size, s.batch * s.outputs)
        cdef const void *w_ = data(w, size, s.outputs * s.inputs)
        cdef void *out_ = output(out, size, s.batch * s.inputs)
        cdef const linear_kernels *kernels = linear_select(self.isa, size)
        threads = team(operations(&s), threads)
        with nogil:
            status = kernels.backward_data(&s, dy_, w_, out_, threads)
        if status != 0:
            raise MemoryError("linear.backward_data: no memory for a packed operand.")

    def backward_filter(self, x, dy, out, bint accumulate, int threads):
        """out (O, I) = [out +] dy (N, O)' x (N, I)."""
        cdef linear_shape s
        s.batch, s.inputs, s.outputs = x.shape[0], x.shape[1], dy.shape[1]
        cdef int size = itemsize(dy), status
        cdef const void *x_ = data(x, size, s.batch * s.inputs)
        cdef const void *dy_ = data(dy, size, s.batch * s.outputs)
        cdef void *out_ = output(out, real_size(size), s.outputs * s.inputs)
        cdef const linear_kernels *kernels = linear_select(self.isa, size)
        threads = team(operations(&s), threads)
        with nogil:
            status = kernels.backward_filter(&s, x_, dy_, out_, accumulate, threads)
        if status != 0:
            raise MemoryError("linear.backward_filter: no memory for a packed operand.")

    def backward_bias(self, dy, out, bint accumulate, int threads):
        """out (C,) = [out +] sums of the columns of dy (..., C)."""
        cdef ptrdiff_t columns = out.shape[0], rows = dy.size // max(columns, 1)
        cdef int size = itemsize(dy), status
        cdef const void *dy_ = data(dy, size, rows * columns)
        cdef void *out_ = output(out, real_size(size), columns)
        cdef const linear_kernels *kernels = linear_select(self.isa, size)
        threads = team(8 * rows * columns, threads)  # bound by memory, not by arithmetic
        with nogil:
            status = kernels.backward_bias(dy_, rows, columns, out_, accumulate, threads)
        if status != 0:
            raise MemoryError("linear.backward_bias: no memory for partial sums.")

    def add_rows(self, dy, chosen, out, bint accumulate, int threads):
        """out (K, C)[chosen[n]] = [out +] rows of dy (N, C), of which chosen has int64 (N,)."""
        cdef ptrdiff_t rows = dy.shape[0], count = out.shape[0], columns = out.shape[1]
        cdef int size = itemsize(dy)
        cdef const int64_t *chosen_ = <const int64_t *>data(chosen, sizeof(int64_t), rows)
        cdef const void *dy_ = data(dy, size, rows * columns)
        cdef void *out_ = output(out, real_size(size), count * columns)
        cdef const linear_kernels *kernels = linear_select(self.isa, size)
        cdef ptrdiff_t i
        for i in range(rows):
            if not 0 <= chosen_[i] < count:
                raise IndexError(f"add_rows: rows must be in 0..{count - 1}, got {chosen_[i]}.")
        threads = team(8.0 * rows * columns, threads)  # bound by memory, not by arithmetic
        with nogil:
            kernels.add_rows(dy_, chosen_, rows, out_, count, columns, accumulate, threads)
