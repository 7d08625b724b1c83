"""Thin wrapper of src/linear.c: picks the variant and passes raw pointers, without the GIL."""

cimport numpy as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, output

cnp.import_array()

cdef extern from "linear.h":
    struct linear_kernels:
        int (*backward_bias)(const void *dy, ptrdiff_t rows, ptrdiff_t columns, void *out, int accumulate, int threads) nogil
    const linear_kernels *linear_select(int isa, int itemsize)


cdef class LinearKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if linear_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def backward_bias(self, dy, out, bint accumulate, int threads):
        """out (C,) = [out +] column sums of dy (..., C)."""
        cdef int size = itemsize(dy)
        cdef ptrdiff_t columns = out.shape[0], rows = dy.size // max(columns, 1)
        cdef const void *dy_ = data(dy, size, rows * columns)
        cdef void *out_ = output(out, size, columns)
        cdef const linear_kernels *kernels = linear_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.backward_bias(dy_, rows, columns, out_, accumulate, threads)
        if status != 0:
            raise MemoryError("linear.backward_bias: no memory for partial sums.")
