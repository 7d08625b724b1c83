"""Checks whether the compiled kernels support arrays; fast, as every kernel call runs them."""

cimport numpy as cnp

import numpy as np

cnp.import_array()


cdef inline bint is_native(object array, int kind) except -1:
    cdef cnp.ndarray a = <cnp.ndarray?>array
    return cnp.PyArray_TYPE(a) == kind and cnp.PyArray_ISNOTSWAPPED(a)


def native(out, *inputs) -> bool:
    """Return whether the kernels support these arrays.

    All must be float32 or all float64, and the output contiguous. Inputs may be None.
    """
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>out)
    if kind != cnp.NPY_FLOAT and kind != cnp.NPY_DOUBLE:
        return False
    if not cnp.PyArray_ISCARRAY(<cnp.ndarray>out):
        return False
    for array in inputs:
        if array is not None and not is_native(array, kind):
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
