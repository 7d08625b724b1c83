"""Hashes of arrays: wrapper of src/hash.h."""

from libc.stdint cimport uint64_t

cimport numpy as cnp

cnp.import_array()

cdef extern from "hash.h":
    uint64_t hash64(const void *data, size_t size) noexcept nogil

cdef enum:
    LONG = 1 << 16  # bytes, some 5 us: for less the GIL is kept


def hash_arrays(list arrays, cnp.ndarray out not None):
    """Write the hash of each C-contiguous array (`pydtnn.kernels.reference.random`) to `out`.

    `out` is a contiguous array of uint64 with one element per array.
    """
    cdef Py_ssize_t i, n = len(arrays)
    cdef cnp.ndarray a
    cdef const void *data
    cdef size_t size
    cdef uint64_t *hashes
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
        if size < LONG:
            hashes[i] = hash64(data, size)
        else:
            with nogil:
                hashes[i] = hash64(data, size)
