"""Thin wrapper of src/pool.c: picks the variant and passes raw pointers, without the GIL."""

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, output

cnp.import_array()

cdef extern from "pool.h":
    struct pool_axis:
        ptrdiff_t size, output, kernel, stride, before
    struct pool_shape:
        ptrdiff_t batch, channels
        pool_axis depths, rows, columns
        int count_padding
    struct pool_kernels:
        int (*max_forward)(const void *x, const pool_shape *shape, void *out, void *index,
                           int index_bytes, int threads) nogil
        int (*max_backward)(const void *dy, const void *index, int index_bytes,
                            const pool_shape *shape, void *out, int threads) nogil
        int (*average_forward)(const void *x, const pool_shape *shape, void *out,
                               int threads) nogil
        int (*average_backward)(const void *dy, const pool_shape *shape, void *out,
                                int threads) nogil
    const pool_kernels *pool_select(int isa, int itemsize)


cdef pool_axis axis_of(geometry, int axis, ptrdiff_t size, ptrdiff_t positions):
    """Return one axis of a geometry; None means adaptive windows, which have kernel 0."""
    cdef pool_axis a
    a.size, a.output, a.kernel, a.stride, a.before = size, positions, 0, 1, 0
    if geometry is not None:
        a.kernel, a.stride = geometry.kernel[axis], geometry.stride[axis]
        a.before = geometry.padding[axis][0]
    return a


cdef pool_shape shape_of(cnp.ndarray x, cnp.ndarray y, geometry, bint count_padding):
    """Return the shapes of x (N, L, C), (N, H, W, C) or (N, D, H, W, C), the input, and y."""
    cdef pool_shape shape
    cdef int axes = x.ndim - 2
    shape.batch, shape.channels, shape.count_padding = x.shape[0], x.shape[axes + 1], count_padding
    shape.depths = shape.rows = pool_axis(1, 1, 1, 1, 0)
    if axes == 3:
        shape.depths = axis_of(geometry, 0, x.shape[1], y.shape[1])
    if axes > 1:
        shape.rows = axis_of(geometry, axes - 2, x.shape[axes - 1], y.shape[axes - 1])
    shape.columns = axis_of(geometry, axes - 1, x.shape[axes], y.shape[axes])
    return shape


cdef ptrdiff_t outputs(pool_shape *shape):
    cdef ptrdiff_t positions = shape.depths.output * shape.rows.output * shape.columns.output
    return shape.batch * positions * shape.channels


cdef int check(int status) except -1:
    if status != 0:
        raise MemoryError("pool: no memory for the tables of windows.")
    return 0


cdef class PoolKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type.

    Signals are (N, L, C), images (N, H, W, C), volumes (N, D, H, W, C); `index` is uint8 or int32.
    """

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if pool_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def max_forward(self, x, geometry, out, index, int threads):
        """out = maxima of the windows; index = tap of each maximum."""
        cdef int size = itemsize(x)
        cdef pool_shape shape = shape_of(x, out, geometry, False)
        cdef const void *x_ = data(x, size, cnp.PyArray_SIZE(x))
        cdef void *out_ = output(out, size, outputs(&shape))
        cdef int bytes = cnp.PyArray_ITEMSIZE(index)
        cdef void *index_ = output(index, bytes, outputs(&shape))
        cdef const pool_kernels *kernels = pool_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.max_forward(x_, &shape, out_, index_, bytes, threads)
        check(status)

    def max_backward(self, dy, index, geometry, out, int threads):
        """out = gradients, each at the input that was the maximum."""
        cdef int size = itemsize(dy)
        cdef pool_shape shape = shape_of(out, dy, geometry, False)
        cdef const void *dy_ = data(dy, size, outputs(&shape))
        cdef int bytes = cnp.PyArray_ITEMSIZE(index)
        cdef const void *index_ = data(index, bytes, outputs(&shape))
        cdef void *out_ = output(out, size, cnp.PyArray_SIZE(out))
        cdef const pool_kernels *kernels = pool_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.max_backward(dy_, index_, bytes, &shape, out_, threads)
        check(status)

    def average_forward(self, x, geometry, out, bint count_padding, int threads):
        """out = means of the windows; of adaptive ones where geometry is None."""
        cdef int size = itemsize(x)
        cdef pool_shape shape = shape_of(x, out, geometry, count_padding)
        cdef const void *x_ = data(x, size, cnp.PyArray_SIZE(x))
        cdef void *out_ = output(out, size, outputs(&shape))
        cdef const pool_kernels *kernels = pool_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.average_forward(x_, &shape, out_, threads)
        check(status)

    def average_backward(self, dy, geometry, out, bint count_padding, int threads):
        """out = gradients, shared equally by the inputs of each window."""
        cdef int size = itemsize(dy)
        cdef pool_shape shape = shape_of(out, dy, geometry, count_padding)
        cdef const void *dy_ = data(dy, size, outputs(&shape))
        cdef void *out_ = output(out, size, cnp.PyArray_SIZE(out))
        cdef const pool_kernels *kernels = pool_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.average_backward(dy_, &shape, out_, threads)
        check(status)
