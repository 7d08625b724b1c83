"""Which arrays the compiled kernels take, told quickly: these run before every kernel call."""

cimport numpy as cnp

import numpy as np

cnp.import_array()


cdef inline bint is_native(object array, int kind):
    return cnp.PyArray_TYPE(<cnp.ndarray?>array) == kind and cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray>array)


def native(out, *inputs) -> bool:
    """Whether the kernels take these arrays: one real type, and an output whose elements lie in order.

    Inputs may be None.
    """
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>out)
    if (kind != cnp.NPY_FLOAT and kind != cnp.NPY_DOUBLE) or not cnp.PyArray_ISCARRAY(<cnp.ndarray>out):
        return False
    for array in inputs:
        if array is not None and not is_native(array, kind):
            return False
    return True


def contiguous(array):
    """`array` itself if its elements lie in order, else a copy in which they do."""
    if cnp.PyArray_ISCARRAY_RO(<cnp.ndarray?>array):
        return array
    return np.require(array, requirements="CA")
