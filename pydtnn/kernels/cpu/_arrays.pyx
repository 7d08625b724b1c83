"""Checks whether the compiled kernels support arrays; fast, as every kernel call runs them."""

from pydtnn.utils cimport ndarray as cnp

import ml_dtypes
import numpy as np

cnp.import_array()


cdef int BFLOAT16 = np.dtype(ml_dtypes.bfloat16).num


cdef inline bint is_native(object array, int kind) except -1:
    cdef cnp.ndarray a = <cnp.ndarray?>array
    return cnp.PyArray_TYPE(a) == kind and cnp.PyArray_ISNOTSWAPPED(a)


cdef bint all_native(int kind, out, tuple inputs) except -1:
    if not cnp.PyArray_ISCARRAY(<cnp.ndarray>out):
        return False
    for array in inputs:
        if array is not None and not is_native(array, kind):
            return False
    return True


def native(out, *inputs) -> bool:
    """Return whether kernels of float32 and float64 support these arrays.

    All must be float32 or all float64, and the output contiguous. Inputs may be None.
    """
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>out)
    if kind != cnp.NPY_FLOAT and kind != cnp.NPY_DOUBLE:
        return False
    return all_native(kind, out, inputs)


def supported(out, *inputs) -> bool:
    """Return whether kernels that also have a variant for bfloat16 support these arrays."""
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>out)
    if kind != cnp.NPY_FLOAT and kind != cnp.NPY_DOUBLE and kind != BFLOAT16:
        return False
    return all_native(kind, out, inputs)


def beside(array, *parameters) -> bool:
    """Return whether parameters have the type that they have beside an array.

    That is its own, float32 beside bfloat16. They may be None.
    """
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>array)
    if kind == BFLOAT16:
        kind = cnp.NPY_FLOAT
    for parameter in parameters:
        if parameter is not None and not is_native(parameter, kind):
            return False
    return True


def gradient(out, array, *others) -> bool:
    """Return whether kernels support these arrays, and `out` for a gradient of parameters."""
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>array)
    if kind != cnp.NPY_FLOAT and kind != cnp.NPY_DOUBLE and kind != BFLOAT16:
        return False
    if not (beside(array, out) and cnp.PyArray_ISCARRAY(<cnp.ndarray>out)):
        return False
    for other in (array, *others):
        if not is_native(other, kind):
            return False
    return True


def contiguous(array):
    """Return `array` itself if it is C-contiguous, else a contiguous copy."""
    if cnp.PyArray_ISCARRAY_RO(<cnp.ndarray?>array):
        return array
    return np.require(array, requirements="CA")


def share_memory(cnp.ndarray one, cnp.ndarray other) -> bool:
    """Return whether two contiguous arrays overlap in memory."""
    cdef const char *first = <const char *>cnp.PyArray_DATA(one)
    cdef const char *second = <const char *>cnp.PyArray_DATA(other)
    return first < second + cnp.PyArray_NBYTES(other) and second < first + cnp.PyArray_NBYTES(one)
