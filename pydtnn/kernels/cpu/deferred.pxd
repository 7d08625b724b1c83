"""Deferred arrays as the C kernels see them, for the wrappers of kernels that take them."""

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, optional, real_size

cdef extern from "fused.h":
    struct term:
        const void *x
        const void *pivot
        const void *factor
    struct source:
        term term[2]
        int terms
        const void *shift
        int relu
        double limit
        void *store
    enum sink_sums:
        SUMS_NONE, SUMS_MOMENTS, SUMS_GATE
    struct sink:
        void *y
        const void *add
        const source *gate
        int relu
        sink_sums sums


cdef inline int fill_map(source *s, object value, int itemsize, Py_ssize_t size,
                         Py_ssize_t channels) except -1:
    """The map of a `Deferred` of `size` elements, whether or not its values are kept."""
    cdef tuple terms = value.terms, term
    cdef int k
    s.terms = len(terms)
    if s.terms not in (1, 2):
        raise ValueError(f"a deferred array has one or two terms, not {s.terms}.")
    for k in range(s.terms):
        term = <tuple>terms[k]  # a named one
        s.term[k].x = data(term[0], itemsize, size)
        s.term[k].pivot = optional(term[1], real_size(itemsize), channels)
        s.term[k].factor = optional(term[2], real_size(itemsize), channels)
    s.shift = optional(value.shift, real_size(itemsize), channels)
    s.relu, s.limit = value.relu, value.limit
    s.store = NULL
    return 0


cdef inline int fill_source(source *s, object value, int itemsize, Py_ssize_t size,
                            Py_ssize_t channels) except -1:
    """An array, or a `Deferred`: the values it keeps, or its map."""
    cdef object array = value
    if not isinstance(value, cnp.ndarray):
        array = value.array
        if array is None:
            return fill_map(s, value, itemsize, size, channels)
    s.terms, s.shift, s.relu, s.store = 1, NULL, 0, NULL
    s.term[0].x = data(array, itemsize, size)
    s.term[0].pivot = s.term[0].factor = NULL
    return 0


cdef inline int fill_gate(source *s, object value, int itemsize, Py_ssize_t size,
                          Py_ssize_t channels) except -1:
    """The map of a `Deferred`, with the values that it keeps as its store."""
    fill_map(s, value, itemsize, size, channels)
    s.store = optional(value.array, itemsize, size)
    return 0
