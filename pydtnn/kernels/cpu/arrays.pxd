"""Raw pointers of NumPy arrays, checked: what the thin wrappers hand to C."""

from pydtnn.utils cimport ndarray as cnp

cdef extern from *:
    """
    #if defined(BUILT_F64)
    #define HAS_F64 1
    #else
    #define HAS_F64 0
    #endif
    #if defined(BUILT_BF16)
    #define HAS_BF16 1
    #else
    #define HAS_BF16 0
    #endif
    """
    const int HAS_F64
    const int HAS_BF16


cdef inline int itemsize(object array) except -1:
    """4 or 8 for an array of float32 or float64, 2 for bfloat16; other types raise TypeError."""
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>array)
    if kind == cnp.NPY_FLOAT:
        return 4
    if kind == cnp.NPY_DOUBLE and HAS_F64:
        return 8
    cdef bint half = cnp.PyTypeNum_ISUSERDEF(kind) and cnp.PyArray_ITEMSIZE(<cnp.ndarray>array) == 2
    if half and HAS_BF16:
        return 2  # which bfloat16 is, `supported` has found out
    if half or kind == cnp.NPY_DOUBLE:
        raise RuntimeError(
            f"the kernels for {array.dtype} have not been compiled: `make setup` compiles all, "
            f"PYDTNN_BUILD selected some."
        )
    raise TypeError(f"the compiled kernels take no arrays of {array.dtype}.")


cdef inline int real_size(int itemsize) noexcept:
    """Bytes of the elements of parameters and coefficients beside arrays of such elements."""
    return 4 if itemsize == 2 else itemsize


cdef inline void *data(object array, int itemsize, Py_ssize_t size) except? NULL:
    """Pointer to a contiguous, aligned array with `size` elements of `itemsize` bytes."""
    cdef cnp.ndarray a = <cnp.ndarray?>array
    if not cnp.PyArray_ISCARRAY_RO(a) or cnp.PyArray_ITEMSIZE(a) != itemsize:
        raise ValueError(f"a kernel needs a C-contiguous array of {itemsize}-byte elements.")
    if cnp.PyArray_SIZE(a) != size:
        raise ValueError(f"a kernel needs {size} elements, not an array of shape {array.shape}.")
    return cnp.PyArray_DATA(a)


cdef inline void *output(object array, int itemsize, Py_ssize_t size) except? NULL:
    """As `data`, for an array that the kernel writes to."""
    if not cnp.PyArray_ISWRITEABLE(<cnp.ndarray?>array):
        raise ValueError("a kernel was given an output that is read-only.")
    return data(array, itemsize, size)


cdef inline void *optional(object array, int itemsize, Py_ssize_t size) except? NULL:
    """As `data`; NULL for None."""
    return NULL if array is None else data(array, itemsize, size)


cdef enum:
    SERIAL = 1 << 19  # multiply-adds, about 10 us on one core: less is not worth waking threads for


cdef inline int team(double operations, int threads) noexcept:
    """How many threads so many multiply-adds deserve: all of them, or one."""
    return 1 if operations < SERIAL else threads
