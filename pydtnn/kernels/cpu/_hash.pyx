"""Hashes of arrays: wrapper of src/hash.h."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t

from pydtnn.utils cimport ndarray as cnp

cnp.import_array()

cdef extern from "hash.h":
    ctypedef struct Hash:
        pass
    void hash_begin(Hash *hash) noexcept nogil
    void hash_add(Hash *hash, const void *data, size_t size) noexcept nogil
    uint64_t hash_end(const Hash *hash) noexcept nogil

cdef enum:
    LONG = 1 << 16  # bytes, some 5 us: for less the GIL is kept


cdef class Hash64:
    """The hash of bytes that are given in several parts, with the methods of `hashlib`."""

    cdef Hash hash

    def __cinit__(self):
        hash_begin(&self.hash)

    def update(self, data):
        """Add the bytes of an object with a contiguous buffer."""
        cdef Py_buffer given
        PyObject_GetBuffer(data, &given, PyBUF_SIMPLE)
        if given.len < LONG:
            hash_add(&self.hash, given.buf, given.len)
        else:
            with nogil:
                hash_add(&self.hash, given.buf, given.len)
        PyBuffer_Release(&given)

    def hexdigest(self):
        """Return the hash in 16 digits, as the program xxhsum prints it."""
        return f"{hash_end(&self.hash):016x}"


def hash_arrays(list arrays, cnp.ndarray out not None):
    """Write the hash of each C-contiguous array (`pydtnn.kernels.reference.hash`) to `out`.

    `out` is a contiguous array of uint64 with one element per array.
    """
    cdef Py_ssize_t i, n = len(arrays)
    cdef cnp.ndarray a
    cdef const void *data
    cdef size_t size
    cdef uint64_t *hashes
    cdef Hash hash
    if (
        not cnp.PyArray_ISCARRAY(out)
        or cnp.PyArray_TYPE(out) != cnp.NPY_UINT64
        or cnp.PyArray_SIZE(out) != n
    ):
        raise ValueError(f"hash_arrays: out must be a contiguous array of {n} elements of uint64.")
    hashes = <uint64_t *>cnp.PyArray_DATA(out)
    for i in range(n):
        a = <cnp.ndarray?>arrays[i]
        if not cnp.PyArray_IS_C_CONTIGUOUS(a):
            raise ValueError("hash_arrays: arrays must be contiguous.")
        data, size = cnp.PyArray_DATA(a), cnp.PyArray_NBYTES(a)
        hash_begin(&hash)
        if size < LONG:
            hash_add(&hash, data, size)
        else:
            with nogil:
                hash_add(&hash, data, size)
        hashes[i] = hash_end(&hash)
