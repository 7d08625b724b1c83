"""Thin wrapper of src/fused.c: picks the variant and passes raw pointers, without the GIL."""

cimport numpy as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, optional, output
from pydtnn.kernels.cpu.deferred cimport (
    SUMS_GATE, SUMS_NONE, fill_gate, fill_map, sink, source,
)

import ml_dtypes
import numpy as np

cnp.import_array()

cdef int BFLOAT16 = np.dtype(ml_dtypes.bfloat16).num

cdef extern from "fused.h":
    struct fused_kernels:
        int (*evaluate)(const source *source, ptrdiff_t rows, ptrdiff_t channels, void *out,
                        int threads) nogil
        int (*gate)(const void *dy, const sink *sink, ptrdiff_t rows, ptrdiff_t channels,
                    double *sums, int threads) nogil
    const fused_kernels *fused_select(int isa, int itemsize)


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
