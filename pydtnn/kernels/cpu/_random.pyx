"""Thin wrapper of src/random.c: picks the variant and passes raw pointers, without the GIL."""

from libc.stdint cimport int64_t, uint32_t

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, output

cnp.import_array()

cdef extern from "random.h":
    struct random_kernels:
        void (*dropout)(const void *x, ptrdiff_t rows, ptrdiff_t count, const int64_t *samples,
                        uint32_t seed, uint32_t stream, uint32_t epoch, uint32_t threshold,
                        double factor, void *out, int threads) nogil
    const random_kernels *random_select(int isa, int itemsize)


cdef class RandomKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type.

    `samples` are int64.
    """

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if random_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def dropout(self, x, samples, uint32_t seed, uint32_t stream, uint32_t epoch,
                uint32_t threshold, double factor, out, int threads):
        """out = x factor where the word of the element is at least threshold, else 0."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out), rows = out.shape[0], count = n // max(rows, 1)
        cdef const void *x_ = data(x, size, n)
        cdef void *out_ = output(out, size, n)
        cdef const int64_t *samples_ = <const int64_t *>data(samples, sizeof(int64_t), rows)
        cdef const random_kernels *kernels = random_select(self.isa, size)
        with nogil:
            kernels.dropout(
                x_, rows, count, samples_, seed, stream, epoch, threshold, factor, out_, threads
            )
