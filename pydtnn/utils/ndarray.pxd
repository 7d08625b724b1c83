"""What the extensions use of NumPy's C interface.

NumPy's own declarations (``cimport numpy``) take longer to translate than an extension.
"""

from cpython.object cimport PyObject
from libc.stdint cimport uint8_t

cdef extern from "numpy/arrayobject.h":
    ctypedef Py_ssize_t npy_intp

    enum:
        NPY_MAXDIMS
        NPY_FLOAT
        NPY_DOUBLE
        NPY_UINT64
        NPY_ARRAY_ALIGNED
        NPY_ARRAY_C_CONTIGUOUS
        NPY_ARRAY_WRITEABLE

    ctypedef class numpy.dtype [object PyArray_Descr, check_size ignore]:
        @property
        cdef inline npy_intp itemsize(self) noexcept nogil:
            return PyDataType_ELSIZE(self)

    ctypedef class numpy.ndarray [object PyArrayObject, check_size ignore]:
        @property
        cdef inline int ndim(self) noexcept nogil:
            return PyArray_NDIM(self)

        @property
        cdef inline npy_intp *shape(self) noexcept nogil:
            return PyArray_DIMS(self)

        @property
        cdef inline npy_intp *strides(self) noexcept nogil:
            return PyArray_STRIDES(self)

    ctypedef struct PyDataMemAllocator:
        void *ctx
        void *(*malloc)(void *ctx, size_t size) noexcept nogil
        void *(*calloc)(void *ctx, size_t count, size_t size) noexcept nogil
        void *(*realloc)(void *ctx, void *memory, size_t size) noexcept nogil
        void (*free)(void *ctx, void *memory, size_t size) noexcept nogil

    ctypedef struct PyDataMem_Handler:
        char *name
        uint8_t version
        PyDataMemAllocator allocator

    int import_array "_import_array"() except -1
    object PyDataMem_SetHandler(object handler)
    object PyArray_FROM_OTF(object values, int type, int flags)
    bint PyTypeNum_ISUSERDEF(int type) nogil
    npy_intp PyDataType_ELSIZE(dtype descr) nogil
    PyObject *PyArray_BASE(ndarray a) nogil
    char *PyArray_BYTES(ndarray a) nogil
    void *PyArray_DATA(ndarray a) nogil
    npy_intp *PyArray_DIMS(ndarray a) nogil
    bint PyArray_ISCARRAY(ndarray a) nogil
    bint PyArray_ISCARRAY_RO(ndarray a) nogil
    bint PyArray_ISNOTSWAPPED(ndarray a) nogil
    bint PyArray_ISWRITEABLE(ndarray a) nogil
    bint PyArray_IS_C_CONTIGUOUS(ndarray a) nogil
    npy_intp PyArray_ITEMSIZE(ndarray a) nogil
    npy_intp PyArray_NBYTES(ndarray a) nogil
    int PyArray_NDIM(ndarray a) nogil
    npy_intp PyArray_SIZE(ndarray a) nogil
    npy_intp *PyArray_STRIDES(ndarray a) nogil
    int PyArray_TYPE(ndarray a) nogil


cdef inline object get_array_base(ndarray a):
    """The object that owns the memory of a view, else None."""
    cdef PyObject *base = PyArray_BASE(a)
    return None if base is NULL else <object>base
