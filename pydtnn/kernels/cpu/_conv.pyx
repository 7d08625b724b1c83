"""Thin wrappers of src/conv.c and src/fused.c: pick the variant, pass pointers, without the GIL.

Convolutions use the templates of fused kernels, which are therefore linked once, with theirs.
"""

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, optional, output, real_size, team
from pydtnn.kernels.cpu.deferred cimport (
    SUMS_GATE, SUMS_MOMENTS, SUMS_NONE, fill_gate, fill_map, fill_source, sink, source,
)

import ml_dtypes
import numpy as np

cnp.import_array()

cdef int BFLOAT16 = np.dtype(ml_dtypes.bfloat16).num

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
    struct depth_shape:
        ptrdiff_t size, output, taps, stride, padding, dilation, rows, units, channels
    enum algorithm:
        DIRECT, WINOGRAD4, WINOGRAD2, WINOGRAD24, POLYPHASE, WINOGRAD5
    struct conv_kernels:
        int (*forward)(const conv_shape *shape, int algorithm, const source *x, const void *w,
                       const void *b, const sink *y, double *sums, int threads) nogil
        int (*backward_data)(const conv_shape *shape, int algorithm, const source *dy,
                             const void *w, const sink *dx, double *sums, int threads) nogil
        int (*backward_filter)(const conv_shape *shape, int algorithm, const source *x,
                               const source *dy, void *dw, int accumulate, int threads) nogil
        int (*backward)(const conv_shape *shape, int data_algorithm, int filter_algorithm,
                        const source *x, const source *dy, const void *w, const sink *dx,
                        double *sums, void *dw, int accumulate, int threads) nogil
        void (*unfold)(const depth_shape *shape, const void *x, ptrdiff_t first, ptrdiff_t planes,
                       void *out, int threads) nogil
        void (*fold)(const depth_shape *shape, const void *x, ptrdiff_t first, ptrdiff_t planes,
                     void *out, int threads) nogil
    const conv_kernels *conv_select(int isa, int itemsize)

cdef extern from "fused.h":
    struct fused_kernels:
        int (*evaluate)(const source *source, ptrdiff_t rows, ptrdiff_t channels, void *out,
                        int threads) nogil
        int (*gate)(const void *dy, const sink *sink, ptrdiff_t rows, ptrdiff_t channels,
                    double *sums, int threads) nogil
    const fused_kernels *fused_select(int isa, int itemsize)

NUMBERS = {
    "direct": DIRECT,
    "winograd4": WINOGRAD4,
    "winograd2": WINOGRAD2,
    "winograd24": WINOGRAD24,
    "polyphase": POLYPHASE,
    "winograd5": WINOGRAD5,
}
"""The algorithms by name."""


cdef class Shape:
    """C form of a `ConvGeometry` of one or two axes; one axis is a single row."""

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


cdef class Depth:
    """C form of the depth of a `ConvGeometry` of three axes."""

    cdef depth_shape c

    def __cinit__(self, geometry):
        if len(geometry.size) != 3:
            raise ValueError(f"volumes have three axes, not {len(geometry.size)}.")
        self.c.size, self.c.output = geometry.size[0], geometry.output[0]
        self.c.taps, self.c.stride = geometry.kernel[0], geometry.stride[0]
        self.c.padding, self.c.dilation = geometry.padding[0][0], geometry.dilation[0]
        self.c.rows, self.c.units = geometry.size[1], geometry.size[2] * geometry.groups
        self.c.channels = geometry.channels // geometry.groups


cdef inline Py_ssize_t elements_of(const depth_shape *c, Py_ssize_t depths) noexcept:
    return depths * c.rows * c.units * c.channels


cdef Py_ssize_t within(const depth_shape *c, Py_ssize_t batch, Py_ssize_t first,
                       Py_ssize_t planes) except -1:
    """Return the number of planes, which must be those of the volumes."""
    if first < 0 or first + planes > batch * c.output:
        raise ValueError(
            f"volumes: expected planes of 0..{batch * c.output}, got {first}..{first + planes}.")
    return planes


cdef inline Py_ssize_t inputs(const conv_shape *c) noexcept:
    return c.batch * c.size[0] * c.size[1] * c.channels


cdef inline Py_ssize_t outputs(const conv_shape *c) noexcept:
    return c.batch * c.output[0] * c.output[1] * c.filters


cdef inline Py_ssize_t weights(const conv_shape *c) noexcept:
    return c.filters * c.kernel[0] * c.kernel[1] * (c.channels // c.groups)


cdef inline double operations(const conv_shape *c) noexcept:
    return <double>c.batch * c.output[0] * c.output[1] * weights(c)


cdef inline bint overlaps(const source *s, const void *out, Py_ssize_t size, Py_ssize_t bytes):
    """Return whether a source of `size` bytes overlaps the `bytes` bytes at `out`."""
    cdef int k
    cdef const char *x
    for k in range(s.terms):
        x = <const char *>s.term[k].x
        if x < <const char *>out + bytes and <const char *>out < x + size:
            return True
    return False


cdef int refuse_overlap(str who, const source *s, Py_ssize_t size, const sink *out,
                        Py_ssize_t bytes) except -1:
    """Raise ValueError if the output overlaps its input, which is still read after writes."""
    if size > 0 and bytes > 0 and overlaps(s, out.y, size, bytes):
        raise ValueError(f"conv.{who} overlap in memory; give the output an array of its own.")
    return 0


cdef double *fill_gated(sink *s, source *gate_, object out, object add, object gate, object sums,
                        int size, Py_ssize_t elements, Py_ssize_t channels) except? NULL:
    """Set the sink of a gradient; return the destination of its sums, or NULL."""
    s.y, s.add = output(out, size, elements), optional(add, size, elements)
    s.gate, s.relu, s.sums = NULL, 0, SUMS_NONE
    if gate is None:
        return NULL
    fill_gate(gate_, gate, size, elements, channels)
    s.gate = gate_
    if sums is None:
        return NULL
    s.sums = SUMS_GATE
    return <double *>output(sums, sizeof(double), (1 + gate_.terms) * channels)


cdef object array_of(object value):
    """An array of the type of a value, which may be deferred."""
    return value if isinstance(value, cnp.ndarray) else value.terms[0][0]


cdef class ConvKernels:
    """The kernels of one instruction set.

    Methods take arrays of one real type for which `ready` is true; x and dy may be deferred.
    """

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if conv_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def forward(self, x, w, b, Shape shape, int algorithm, out, bint relu, store, sums,
                int threads):
        """out (N, OH, OW, O) = x (N, H, W, C) * w (O, kh, kw, C / groups), plus b (O,) or None.

        `store` receives the values of a deferred x and must not overlap its terms; `sums`
        (1 + 2 O,) the count and moments of out. Both may be None.
        """
        cdef conv_shape c = shape.c
        c.batch = out.shape[0]
        cdef int size = itemsize(out), status
        cdef source x_
        cdef sink y_
        cdef double *sums_ = NULL
        if store is None:
            fill_source(&x_, x, size, inputs(&c), c.channels)
        else:
            fill_map(&x_, x, size, inputs(&c), c.channels)
            x_.store = output(store, size, inputs(&c))
        cdef const void *w_ = data(w, size, weights(&c))
        cdef const void *b_ = optional(b, real_size(size), c.filters)
        y_.y = output(out, size, outputs(&c))
        y_.add, y_.gate, y_.relu, y_.sums = NULL, NULL, relu, SUMS_NONE
        refuse_overlap("forward: out and x", &x_, inputs(&c) * size, &y_, outputs(&c) * size)
        if sums is not None:
            sums_ = <double *>output(sums, sizeof(double), 1 + 2 * c.filters)
            sums_[0] = c.batch * c.output[0] * c.output[1]
            sums_ += 1
            y_.sums = SUMS_MOMENTS
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        threads = team(operations(&c), threads)
        with nogil:
            status = kernels.forward(&c, algorithm, &x_, w_, b_, &y_, sums_, threads)
        if status != 0:
            raise MemoryError("conv.forward: no memory for packed filters and blocks.")

    def backward_data(self, dy, w, Shape shape, int algorithm, out, add, gate, sums, int threads):
        """out (N, H, W, C) = gradient of the input, from dy (N, OH, OW, O), plus add or None.

        Then as `Fused.gate`, for a deferred `gate` or None and `sums` (1 + terms, C) or None.
        """
        cdef conv_shape c = shape.c
        c.batch = out.shape[0]
        cdef int size = itemsize(out), status
        cdef source dy_, gate_
        cdef sink dx_
        fill_source(&dy_, dy, size, outputs(&c), c.filters)
        cdef const void *w_ = data(w, size, weights(&c))
        cdef double *sums_ = fill_gated(&dx_, &gate_, out, add, gate, sums, size, inputs(&c),
                                        c.channels)
        refuse_overlap("backward_data: out and dy", &dy_, outputs(&c) * size, &dx_,
                       inputs(&c) * size)
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        threads = team(operations(&c), threads)
        with nogil:
            status = kernels.backward_data(&c, algorithm, &dy_, w_, &dx_, sums_, threads)
        if status != 0:
            raise MemoryError("conv.backward_data: no memory for packed filters and blocks.")

    def backward_filter(self, x, dy, Shape shape, int algorithm, out, bint accumulate, int threads):
        """out (O, kh, kw, C / groups) = [out +] gradient of the filters."""
        cdef conv_shape c = shape.c
        c.batch = len(x)
        cdef int size = itemsize(array_of(x)), status
        cdef source x_, dy_
        fill_source(&x_, x, size, inputs(&c), c.channels)
        fill_source(&dy_, dy, size, outputs(&c), c.filters)
        cdef void *out_ = output(out, real_size(size), weights(&c))
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        threads = team(operations(&c), threads)
        with nogil:
            status = kernels.backward_filter(&c, algorithm, &x_, &dy_, out_, accumulate, threads)
        if status != 0:
            raise MemoryError("conv.backward_filter: no memory for blocks and partial sums.")

    def backward(self, x, dy, w, Shape shape, int data_algorithm, int filter_algorithm, dx, dw,
                 bint accumulate, add, gate, sums, int threads):
        """Both gradients: dx as backward_data, dw as backward_filter. dx may overlap x."""
        cdef conv_shape c = shape.c
        c.batch = dx.shape[0]
        cdef int size = itemsize(dx), status
        cdef source x_, dy_, gate_
        cdef sink dx_
        fill_source(&x_, x, size, inputs(&c), c.channels)
        fill_source(&dy_, dy, size, outputs(&c), c.filters)
        cdef const void *w_ = data(w, size, weights(&c))
        cdef void *dw_ = output(dw, real_size(size), weights(&c))
        cdef double *sums_ = fill_gated(&dx_, &gate_, dx, add, gate, sums, size, inputs(&c),
                                        c.channels)
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        cdef Py_ssize_t n = inputs(&c) * size
        refuse_overlap("backward: dx and dy", &dy_, outputs(&c) * size, &dx_, n)
        cdef bint apart = overlaps(&x_, dx_.y, n, n)
        threads = team(operations(&c), threads)
        with nogil:
            if apart:
                status = kernels.backward_filter(&c, filter_algorithm, &x_, &dy_, dw_, accumulate,
                                                 threads)
                if status == 0:
                    status = kernels.backward_data(&c, data_algorithm, &dy_, w_, &dx_, sums_,
                                                   threads)
            else:
                status = kernels.backward(&c, data_algorithm, filter_algorithm, &x_, &dy_, w_,
                                          &dx_, sums_, dw_, accumulate, threads)
        if status != 0:
            raise MemoryError("conv.backward: no memory for blocks and partial sums.")

    def unfold(self, x, Depth depth, Py_ssize_t first, out, int threads):
        """out (planes, H, W, kd C) = what planes first, first + 1, ... read of x (N, D, H, W, C).

        Planes (N OD) are counted over all volumes. The taps of a group are neighbours.
        """
        cdef depth_shape c = depth.c
        cdef int size = itemsize(out)
        cdef Py_ssize_t planes = within(&c, len(x), first, len(out))
        cdef const void *x_ = data(x, size, elements_of(&c, len(x) * c.size))
        cdef void *out_ = output(out, size, elements_of(&c, planes * c.taps))
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        with nogil:
            kernels.unfold(&c, x_, first, planes, out_, threads)

    def fold(self, planes, Depth depth, Py_ssize_t first, out, int threads):
        """out (N, D, H, W, C) = out + planes (planes, H, W, kd C), the transpose of `unfold`."""
        cdef depth_shape c = depth.c
        cdef int size = itemsize(out)
        cdef Py_ssize_t n = within(&c, len(out), first, len(planes))
        cdef const void *planes_ = data(planes, size, elements_of(&c, n * c.taps))
        cdef void *out_ = output(out, size, elements_of(&c, len(out) * c.size))
        cdef const conv_kernels *kernels = conv_select(self.isa, size)
        with nogil:
            kernels.fold(&c, planes_, first, n, out_, threads)


cdef inline bint is_ready(object array, int kind) except -1:
    return array is None or (
        cnp.PyArray_TYPE(<cnp.ndarray?>array) == kind
        and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array)
    )


cdef inline int real_kind(int kind) noexcept:
    """Type of coefficients and gradients of parameters beside arrays of a type."""
    return cnp.NPY_FLOAT if kind == BFLOAT16 else kind


cdef bint are_ready(int kind, tuple values) except -1:
    cdef int real = real_kind(kind)
    cdef tuple term
    if kind != cnp.NPY_FLOAT and kind != cnp.NPY_DOUBLE and kind != BFLOAT16:
        return False
    for value in values:
        if value is None or isinstance(value, cnp.ndarray):
            if not is_ready(value, kind):
                return False
            continue
        if not is_ready(value.shift, real) or not is_ready(value.array, kind):
            return False
        for item in value.terms:
            term = <tuple>item  # a named one
            if not (is_ready(term[0], kind) and is_ready(term[1], real)
                    and is_ready(term[2], real)):
                return False
    return True


def ready(out, *values) -> bool:
    """Return whether the kernels support these values without a copy.

    Values are arrays, `Deferred` arrays or None, of the type of `out`, native and contiguous;
    `out` must be writeable. Coefficients of bfloat16 arrays are float32.
    """
    return cnp.PyArray_ISCARRAY(<cnp.ndarray?>out) and are_ready(
        cnp.PyArray_TYPE(<cnp.ndarray>out), values)


def ready_beside(out, value, *values) -> bool:
    """Return the same for an `out` that is the gradient of parameters, float32 beside bfloat16."""
    cdef int kind = cnp.PyArray_TYPE(
        <cnp.ndarray?>(value if isinstance(value, cnp.ndarray) else value.terms[0][0]))
    return (
        cnp.PyArray_ISCARRAY(<cnp.ndarray?>out)
        and cnp.PyArray_TYPE(<cnp.ndarray>out) == real_kind(kind)
        and are_ready(kind, (value, *values))
    )


cdef class FusedKernels:
    """The kernels of one instruction set; methods take arrays for which `ready` is true."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if fused_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def evaluate(self, value, cnp.ndarray out, int threads):
        """out (..., C) = the values of a deferred array."""
        cdef int size = itemsize(out)
        cdef ptrdiff_t channels = out.shape[out.ndim - 1], n = cnp.PyArray_SIZE(out)
        cdef ptrdiff_t rows = n // max(channels, 1)
        cdef source source_
        fill_map(&source_, value, size, n, channels)
        cdef void *out_ = output(out, size, n)
        cdef const fused_kernels *kernels = fused_select(self.isa, size)
        with nogil:
            kernels.evaluate(&source_, rows, channels, out_, threads)

    def gate(self, dy, value, cnp.ndarray out, sums, add, int threads):
        """out (..., C) = dy + add where `value` is positive; sums (1 + terms, C) or None."""
        cdef int size = itemsize(out), status
        cdef ptrdiff_t channels = out.shape[out.ndim - 1], n = cnp.PyArray_SIZE(out)
        cdef ptrdiff_t rows = n // max(channels, 1)
        cdef source gate_
        cdef sink sink_
        fill_gate(&gate_, value, size, n, channels)
        sink_.y, sink_.gate, sink_.relu = output(out, size, n), &gate_, 0
        sink_.add = optional(add, size, n)
        sink_.sums = SUMS_NONE if sums is None else SUMS_GATE
        cdef const void *dy_ = data(dy, size, n)
        cdef double *sums_ = NULL
        if sums is not None:
            sums_ = <double *>output(sums, sizeof(double), (1 + gate_.terms) * channels)
        cdef const fused_kernels *kernels = fused_select(self.isa, size)
        with nogil:
            status = kernels.gate(dy_, &sink_, rows, channels, sums_, threads)
        if status != 0:
            raise MemoryError("fused.gate: no memory for partial sums.")
