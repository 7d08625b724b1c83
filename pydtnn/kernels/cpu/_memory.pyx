"""Recycled memory as NumPy's data memory: wrapper of src/recycle.c."""

from libc.stdlib cimport free, malloc
from libc.string cimport strcpy

from pydtnn.utils cimport ndarray as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_INCREF

cnp.import_array()

cdef extern from "recycle.h":
    struct recycler:
        pass
    struct recycler_counts:
        size_t in_use, peak, held, peak_held
    recycler *recycler_new(size_t threshold, int huge_pages) nogil
    void recycler_delete(recycler *r) nogil
    void *recycler_take(recycler *r, size_t size) noexcept nogil
    void *recycler_take_zeroed(recycler *r, size_t count, size_t size) noexcept nogil
    void *recycler_resize(recycler *r, void *memory, size_t size) noexcept nogil
    void recycler_give_back(recycler *r, void *memory) noexcept nogil
    recycler_counts recycler_count(recycler *r) nogil
    void recycler_reset_peak(recycler *r) nogil
    void recycler_trim(recycler *r) nogil
    size_t recycler_blocks(recycler *r, char **starts, char **ends, size_t *serials,
                           size_t most) nogil
    size_t recycler_serial(recycler *r, void *memory) nogil
    int recycler_claim(recycler *r, char *start, char *end) nogil
    void recycler_clear(char *start, size_t size) nogil

cdef extern from "numpy/arrayobject.h":
    ctypedef struct fields "PyArrayObject_fields":
        char *data
    # both steal the reference to the type
    object PyArray_Empty(int axes, cnp.npy_intp *sizes, cnp.dtype descr, int fortran)
    object PyArray_Zeros(int axes, cnp.npy_intp *sizes, cnp.dtype descr, int fortran)
    PyObject *PyArray_HANDLER(cnp.ndarray array)
    object PyArray_NewFromDescr(PyTypeObject *kind, cnp.dtype descr, int axes, cnp.npy_intp *sizes,
                                cnp.npy_intp *strides, void *data, int flags, void *model)

cdef enum:
    LARGE = 64 * 1024  # bytes; smaller arrays are allocated fast by malloc

cdef const char *CAPSULE = "mem_handler"  # the name that NumPy looks for


cdef void *take(void *ctx, size_t size) noexcept nogil:
    return recycler_take(<recycler *>ctx, size)


cdef void *take_zeroed(void *ctx, size_t count, size_t size) noexcept nogil:
    return recycler_take_zeroed(<recycler *>ctx, count, size)


cdef void *resize(void *ctx, void *memory, size_t size) noexcept nogil:
    return recycler_resize(<recycler *>ctx, memory, size)


cdef void give_back(void *ctx, void *memory, size_t size) noexcept nogil:
    # `size` is computed from the array's shape; the recycler needs only the address
    recycler_give_back(<recycler *>ctx, memory)


cdef void forget(object capsule) noexcept:
    """Delete the recycler, after the pool and the last array with its memory have been freed."""
    cdef cnp.PyDataMem_Handler *handler = (
        <cnp.PyDataMem_Handler *>PyCapsule_GetPointer(capsule, CAPSULE)
    )
    recycler_delete(<recycler *>handler.allocator.ctx)
    free(handler)


cdef object handler_new(size_t threshold, bint huge_pages):
    """Create a recycler and its NumPy handler; the capsule owns both."""
    cdef recycler *r = recycler_new(threshold, huge_pages)
    cdef cnp.PyDataMem_Handler *handler = (
        <cnp.PyDataMem_Handler *>malloc(sizeof(cnp.PyDataMem_Handler))
    )
    if r == NULL or handler == NULL:
        if r != NULL:
            recycler_delete(r)
        free(handler)
        raise MemoryError("MemoryPool: no memory to start with.")
    strcpy(handler.name, "pydtnn_recycler")
    handler.version = 1
    handler.allocator.ctx = r
    handler.allocator.malloc = take
    handler.allocator.calloc = take_zeroed
    handler.allocator.realloc = resize
    handler.allocator.free = give_back
    return PyCapsule_New(handler, CAPSULE, forget)


cdef class MemoryPool:
    """Memory of arrays that is reused instead of returned to the system.

    Arrays keep a reference to their pool (NumPy stores the handler with each, NEP 49), so arrays
    and their views may outlive the object.

    Parameters
    ----------
    threshold : int
        Minimum size of arrays in the pool, in B; smaller ones are allocated by malloc and not
        counted below.
    huge_pages : bool
        Whether to request huge pages, which reduce page faults and TLB misses.

    Attributes
    ----------
    threshold : int
    in_use, peak : int
        Bytes of existing arrays: now, and the maximum since the last `reset_peak`.
    held, peak_held : int
        Resident bytes: those of existing arrays and those that can be reused; now and maximum.
    """

    cdef object handler
    cdef recycler *recycler
    cdef readonly Py_ssize_t threshold

    def __cinit__(self, *, Py_ssize_t threshold=LARGE, bint huge_pages=True):
        self.threshold = threshold
        self.handler = handler_new(threshold, huge_pages)
        self.recycler = <recycler *>(
            <cnp.PyDataMem_Handler *>PyCapsule_GetPointer(self.handler, CAPSULE)
        ).allocator.ctx

    def empty(self, tuple shape, dtype):
        """Allocate an array with undefined contents."""
        return self.allocate(shape, dtype, False)

    def zeros(self, tuple shape, dtype):
        """Allocate an array of zeros."""
        return self.allocate(shape, dtype, True)

    cdef object allocate(self, tuple shape, dtype, bint zeroed):
        cdef cnp.npy_intp sizes[cnp.NPY_MAXDIMS]
        cdef int axes = len(shape), i
        cdef cnp.dtype descr = dtype if isinstance(dtype, cnp.dtype) else cnp.dtype(dtype)
        cdef double size = descr.itemsize
        cdef object before
        if axes > cnp.NPY_MAXDIMS:
            raise ValueError(f"MemoryPool: an array has at most {cnp.NPY_MAXDIMS} axes.")
        for i in range(axes):
            sizes[i] = shape[i]
            size *= sizes[i]
        if size < self.threshold:
            return create(axes, sizes, descr, zeroed)
        before = cnp.PyDataMem_SetHandler(self.handler)
        try:
            return create(axes, sizes, descr, zeroed)
        finally:
            cnp.PyDataMem_SetHandler(before)

    def recycling(self):
        """Return a context in which NumPy allocates large arrays of this thread from the pool."""
        return Recycling(self.handler)

    @property
    def in_use(self):
        return recycler_count(self.recycler).in_use

    @property
    def peak(self):
        return recycler_count(self.recycler).peak

    @property
    def held(self):
        return recycler_count(self.recycler).held

    @property
    def peak_held(self):
        return recycler_count(self.recycler).peak_held

    def reset_peak(self):
        """Reset the peaks to the current values of `in_use` and `held`."""
        recycler_reset_peak(self.recycler)

    def trim(self):
        """Return the memory after the last existing array to the system."""
        recycler_trim(self.recycler)

    def blocks(self):
        """Return the first and the last address of each block, and the number of its allocation.

        Allocations are counted from 1; a free block has 0.
        """
        cdef size_t room = recycler_blocks(self.recycler, NULL, NULL, NULL, 0) + 64, n, i
        cdef char **starts = <char **>malloc(2 * room * sizeof(char *))
        cdef size_t *serials = <size_t *>malloc(room * sizeof(size_t))
        try:
            if starts == NULL or serials == NULL:
                raise MemoryError("MemoryPool: no memory for the list of blocks.")
            n = min(recycler_blocks(self.recycler, starts, starts + room, serials, room), room)
            return [(<size_t>starts[i], <size_t>starts[room + i], serials[i]) for i in range(n)]
        finally:
            free(starts)
            free(serials)

    def claim(self, size_t start, size_t end):
        """Reserve the memory from one address to another until `release`, if all of it is free.

        Return whether it is. `start` is that of a block, or of an array that has been in it.
        """
        return recycler_claim(self.recycler, <char *>start, <char *>end) == 0

    def release(self, size_t start):
        """Free what `claim` has reserved."""
        recycler_give_back(self.recycler, <void *>start)

    def owner(self, cnp.ndarray array):
        """Return the array of the pool of which this one is a view; None if there is none."""
        cdef cnp.ndarray owner = array
        while isinstance(cnp.get_array_base(owner), cnp.ndarray):
            owner = cnp.get_array_base(owner)
        cdef bint own = <void *>PyArray_HANDLER(owner) == <void *>self.handler
        return owner if own and cnp.PyArray_NBYTES(owner) >= self.threshold else None

    def allocation(self, cnp.ndarray owner):
        """Return the number of the allocation of an array that is its own `owner`; see `blocks`."""
        return recycler_serial(self.recycler, cnp.PyArray_DATA(owner))

    def alias(self, cnp.ndarray array):
        """Return an array of the same memory that does not keep it from being used again."""
        cdef cnp.dtype descr = array.dtype
        Py_INCREF(descr)
        return PyArray_NewFromDescr(
            <PyTypeObject *>cnp.ndarray, descr, array.ndim, array.shape, array.strides,
            cnp.PyArray_DATA(array), cnp.NPY_ARRAY_WRITEABLE, NULL)

    def move(self, cnp.ndarray alias, Py_ssize_t nbytes):
        """Let an `alias` be an array at an address that is `nbytes` higher."""
        (<fields *>alias).data += nbytes

    def clear(self, array):
        """Set a contiguous part of an array to 0, and return its whole pages to the system.

        They are resident again when they are written.
        """
        recycler_clear(cnp.PyArray_BYTES(array), cnp.PyArray_NBYTES(array))


cdef object create(int axes, cnp.npy_intp *sizes, cnp.dtype descr, bint zeroed):
    Py_INCREF(descr)
    if zeroed:
        return PyArray_Zeros(axes, sizes, descr, 0)
    return PyArray_Empty(axes, sizes, descr, 0)


cdef class Recycling:
    """NumPy's allocations go to a pool between enter and exit, in one thread (context)."""

    cdef object handler, before

    def __cinit__(self, handler):
        self.handler = handler

    def __enter__(self):
        self.before = cnp.PyDataMem_SetHandler(self.handler)

    def __exit__(self, *error):
        cnp.PyDataMem_SetHandler(self.before)
