"""Thin wrapper of src/elementwise.c: picks the variant and passes raw pointers, without the GIL."""

from libc.stdint cimport int32_t, int64_t, uint32_t

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, output, real_size

cnp.import_array()

cdef extern from "elementwise.h":
    enum activation:
        RELU, RELU6, LEAKY_RELU, ELU, SIGMOID, TANH, ARCTAN, LOG, GELU, GELU_EXACT, SILU
    struct round_format:
        int mantissa, lowest, highest
        int32_t top
        int many, scaled
        ptrdiff_t high, block, per_row
    struct round_noise:
        uint32_t seed, stream, epoch
        const int64_t *samples
        ptrdiff_t rows
    struct elementwise_kernels:
        void (*forward)(int activation, const void *x, ptrdiff_t n, double alpha, void *out,
                        int threads) nogil
        void (*backward)(int activation, const void *dy, const void *z, ptrdiff_t n, double alpha,
                         void *out, int threads) nogil
        void (*add)(const void *a, const void *b, ptrdiff_t n, void *out, int threads) nogil
        void (*widen)(const void *x, ptrdiff_t n, int accumulate, void *out, int threads) nogil
        void (*narrow)(const void *x, ptrdiff_t n, void *out, int threads) nogil
        void (*softmax_forward)(const void *x, ptrdiff_t rows, ptrdiff_t classes, void *out,
                                int threads) nogil
        void (*softmax_backward)(const void *dy, const void *y, ptrdiff_t rows, ptrdiff_t classes,
                                 void *out, int threads) nogil
        void (*largest)(const void *x, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t high,
                        ptrdiff_t block, int32_t *out, int threads) nogil
        void (*hadamard)(const void *x, ptrdiff_t groups, ptrdiff_t columns, const void *signs,
                         int inverse, void *out, int threads) nogil
        void (*round)(const void *x, ptrdiff_t rows, ptrdiff_t columns, round_format f,
                      const int32_t *peaks, const round_noise *noise, void *out,
                      int threads) nogil
    const elementwise_kernels *elementwise_select(int isa, int itemsize)

NUMBERS = {
    "relu": RELU,
    "relu6": RELU6,
    "leaky_relu": LEAKY_RELU,
    "elu": ELU,
    "sigmoid": SIGMOID,
    "tanh": TANH,
    "arctan": ARCTAN,
    "log": LOG,
    "gelu": GELU,
    "gelu_exact": GELU_EXACT,
    "silu": SILU,
}
"""The compiled activations, by the name they have in the reference."""


cdef class ElementwiseKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if elementwise_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def forward(self, int number, x, out, double alpha, int threads):
        """out = activation of x."""
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out)
        cdef const void *x_ = data(x, size, n)
        cdef void *out_ = output(out, size, n)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, size)
        with nogil:
            kernels.forward(number, x_, n, alpha, out_, threads)

    def backward(self, int number, dy, z, out, double alpha, int threads):
        """out = dy times the derivative at z."""
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out)
        cdef const void *dy_ = data(dy, size, n)
        cdef const void *z_ = data(z, size, n)
        cdef void *out_ = output(out, size, n)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, size)
        with nogil:
            kernels.backward(number, dy_, z_, n, alpha, out_, threads)

    def add(self, a, b, out, int threads):
        """out = a + b."""
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out)
        cdef const void *a_ = data(a, size, n)
        cdef const void *b_ = data(b, size, n)
        cdef void *out_ = output(out, size, n)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, size)
        with nogil:
            kernels.add(a_, b_, n, out_, threads)

    def widen(self, x, out, bint accumulate, int threads):
        """out = [out +] x, an array of bfloat16 into one of float32."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out)
        cdef const void *x_ = data(x, size, n)
        cdef void *out_ = output(out, real_size(size), n)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, size)
        with nogil:
            kernels.widen(x_, n, accumulate, out_, threads)

    def narrow(self, x, out, int threads):
        """out = x, an array of float32 into one of bfloat16, rounded to nearest even."""
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out)
        cdef const void *x_ = data(x, real_size(size), n)
        cdef void *out_ = output(out, size, n)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, size)
        with nogil:
            kernels.narrow(x_, n, out_, threads)

    def softmax_forward(self, x, out, int threads):
        """out = softmax of x over its last axis."""
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out), classes = out.shape[out.ndim - 1]
        cdef const void *x_ = data(x, size, n)
        cdef void *out_ = output(out, size, n)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, size)
        if n > 0:
            with nogil:
                kernels.softmax_forward(x_, n // classes, classes, out_, threads)

    def softmax_backward(self, dy, y, out, int threads):
        """out = y (dy - sum(dy y)) over the last axis."""
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out), classes = out.shape[out.ndim - 1]
        cdef const void *dy_ = data(dy, size, n)
        cdef const void *y_ = data(y, size, n)
        cdef void *out_ = output(out, size, n)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, size)
        if n > 0:
            with nogil:
                kernels.softmax_backward(dy_, y_, n // classes, classes, out_, threads)

    def largest(self, x, ptrdiff_t high, ptrdiff_t block, out, int threads):
        """out = bits of the largest elements of blocks of float32."""
        cdef ptrdiff_t rows = x.shape[0], columns = x.shape[1]
        cdef ptrdiff_t blocks = ((rows + high - 1) // high) * ((columns + block - 1) // block)
        cdef const void *x_ = data(x, 4, rows * columns)
        cdef int32_t *out_ = <int32_t *>output(out, 4, blocks)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, 4)
        with nogil:
            kernels.largest(x_, rows, columns, high, block, out_, threads)

    def hadamard(self, x, signs, bint inverse, out, int threads):
        """out = Hadamard transform of each 16 rows of float32."""
        cdef ptrdiff_t groups = x.shape[0] // 16, columns = x.shape[1]
        cdef const void *x_ = data(x, 4, 16 * groups * columns)
        cdef const void *signs_ = data(signs, 4, 16)
        cdef void *out_ = output(out, 4, 16 * groups * columns)
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, 4)
        with nogil:
            kernels.hadamard(x_, groups, columns, signs_, inverse, out_, threads)

    def round(self, x, form, peaks, ptrdiff_t high, ptrdiff_t block, noise, out, int threads):
        """out = x in a format, (mantissa, lowest, highest, top), to nearest or with noise."""
        cdef ptrdiff_t rows = x.shape[0], columns = x.shape[1]
        cdef ptrdiff_t per_row = peaks.shape[1] if peaks.shape[0] > 1 else 0
        cdef round_format f
        f.mantissa, f.lowest, f.highest, f.top = form
        f.many, f.scaled = peaks.shape[1] > 1, peaks.dtype.kind == "f"
        f.high, f.block, f.per_row = high, block, per_row
        cdef const void *x_ = data(x, 4, rows * columns)
        cdef const int32_t *peaks_ = <const int32_t *>data(
            peaks, 4, ((rows + high - 1) // high if peaks.shape[0] > 1 else 1) *
            ((columns + block - 1) // block if f.many else 1)
        )
        cdef void *out_ = output(out, 4, rows * columns)
        cdef round_noise words
        cdef const round_noise *words_ = NULL
        if noise is not None:
            words.seed, words.stream, words.epoch, samples = noise
            words.rows = rows // max(len(samples), 1)
            words.samples = <const int64_t *>data(samples, 8, len(samples))
            words_ = &words
        cdef const elementwise_kernels *kernels = elementwise_select(self.isa, 4)
        if rows * columns > 0:
            with nogil:
                kernels.round(x_, rows, columns, f, peaks_, words_, out_, threads)
