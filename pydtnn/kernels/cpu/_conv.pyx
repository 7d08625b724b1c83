"""Thin wrapper of src/conv.c: picks the variant and passes raw pointers, without the GIL."""

cimport numpy as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, optional, output, team

cnp.import_array()

cdef extern from "conv.h":
    struct conv_shape:
        ptrdiff_t batch
        ptrdiff_t size[2]
        ptrdiff_t channels
        ptrdiff_t output[2]
        ptrdiff_t filters
        ptrdiff_t kernel[2]
        ptrdiff_t stride[2]
        ptrdiff_t padding[2]
        ptrdiff_t dilation[2]
        ptrdiff_t groups
    struct conv_kernels:
        int (*forward)(const conv_shape *shape, const void *x, const void *w, const void *b,
                       void *y, int threads) nogil
        int (*backward_data)(const conv_shape *shape, const void *dy, const void *w, void *dx,
                             int threads) nogil
        int (*backward_filter)(const conv_shape *shape, const void *x, const void *dy, void *dw,
                               int accumulate, int threads) nogil
    const conv_kernels *conv_select(int isa, int itemsize)


cdef class Shape:
    """A `ConvGeometry` of one or two axes as the C kernels see it; one axis is a single row."""

    cdef conv_shape c

    def __cinit__(self, geometry):
        self.c.channels, self.c.filters = geometry.channels, geometry.filters
        self.c.groups = geometry.groups
        axes = len(geometry.size)
        if axes not in (1, 2):
            raise ValueError(f"the compiled convolutions have one or two axes, not {axes}.")
        self.c.size[0] = self.c.output[0] = self.c.kernel[0] = 1
        self.c.stride[0] = self.c.dilation[0] = 1
        cdef int d, i
        positions = geometry.output
        for i in range(axes):
            d = 2 - axes + i
            self.c.size[d], self.c.output[d] = geometry.size[i], positions[i]
            self.c.kernel[d], self.c.stride[d] = geometry.kernel[i], geometry.stride[i]
            self.c.dilation[d] = geometry.dilation[i]
            self.c.padding[d] = geometry.padding[i][0]


cdef inline Py_ssize_t inputs(const conv_shape *c) noexcept:
    return c.batch * c.size[0] * c.size[1] * c.channels


cdef inline Py_ssize_t outputs(const conv_shape *c) noexcept:
    return c.batch * c.output[0] * c.output[1] * c.filters


cdef inline Py_ssize_t weights(const conv_shape *c) noexcept:
    return c.filters * c.kernel[0] * c.kernel[1] * (c.channels // c.groups)


cdef inline double operations(const conv_shape *c) noexcept:
    return <double>c.batch * c.output[0] * c.output[1] * weights(c)


cdef class ConvKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if conv_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def forward(self, x, w, b, Shape shape, out, int threads):
        """out (N, OH, OW, O) = x (N, H, W, C) * w (O, kh, kw, C / groups), plus b (O,) or None."""
        cdef conv_shape c = shape.c
        c.batch = x.shape[0]
        cdef int size = itemsize(out), status
        cdef const void *x_ = data(x, size, inputs(&c))
        cdef const void *w_ = data(w, size, weights(&c))
        cdef const void *b_ = optional(b, size, c.filters)
        cdef void *out_ = output(out, size, outputs(&c))
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        threads = team(operations(&c), threads)
        with nogil:
            status = kernels.forward(&c, x_, w_, b_, out_, threads)
        if status != 0:
            raise MemoryError("conv.forward: no memory for packed filters and blocks.")

    def backward_data(self, dy, w, Shape shape, out, int threads):
        """out (N, H, W, C) = gradient of the input, from dy (N, OH, OW, O)."""
        cdef conv_shape c = shape.c
        c.batch = dy.shape[0]
        cdef int size = itemsize(out), status
        cdef const void *dy_ = data(dy, size, outputs(&c))
        cdef const void *w_ = data(w, size, weights(&c))
        cdef void *out_ = output(out, size, inputs(&c))
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        threads = team(operations(&c), threads)
        with nogil:
            status = kernels.backward_data(&c, dy_, w_, out_, threads)
        if status != 0:
            raise MemoryError("conv.backward_data: no memory for packed filters and blocks.")

    def backward_filter(self, x, dy, Shape shape, out, bint accumulate, int threads):
        """out (O, kh, kw, C / groups) = [out +] gradient of the filters."""
        cdef conv_shape c = shape.c
        c.batch = x.shape[0]
        cdef int size = itemsize(out), status
        cdef const void *x_ = data(x, size, inputs(&c))
        cdef const void *dy_ = data(dy, size, outputs(&c))
        cdef void *out_ = output(out, size, weights(&c))
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        threads = team(operations(&c), threads)
        with nogil:
            status = kernels.backward_filter(&c, x_, dy_, out_, accumulate, threads)
        if status != 0:
            raise MemoryError("conv.backward_filter: no memory for blocks and partial sums.")
