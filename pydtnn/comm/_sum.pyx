"""Thin wrapper of src/sum.c: picks the variant once and passes raw pointers."""

from pydtnn.utils cimport ndarray as cnp

cnp.import_array()

cdef extern from "available.h":
    int isa_available(int isa)

cdef extern from "sum.h":
    ctypedef void addition(void *into, const void *other, ptrdiff_t n) noexcept nogil
    struct sum_kernels:
        addition *add_real
        addition *add_half
        addition *add_bfloat
    const sum_kernels *sum_select(int isa, int itemsize)

cdef enum:
    LONG = 1 << 15  # B, some 2 us: a shorter sum is over before another thread could take over


def available() -> list[int]:
    """Numbers of the instruction sets that were built and that this CPU runs."""
    return [isa for isa in range(3) if isa_available(isa)]


cdef class Adder:
    """Adds arrays of one of the types "float32", "float64", "float16" and "bfloat16".

    Called with (into, other), contiguous arrays of that type and equal length, it adds the second
    to the first. Instruction set number `isa`, by default the widest.
    """

    cdef addition *add
    cdef int itemsize

    def __cinit__(self, str name, isa=None):
        cdef int number = max(available()) if isa is None else isa
        cdef const sum_kernels *kernels = sum_select(number, 8 if name == "float64" else 4)
        if kernels == NULL:
            raise RuntimeError(
                f"sums of {name} have not been compiled: `make setup` compiles all kernels."
            )
        if name == "float32":
            self.add, self.itemsize = kernels.add_real, 4
        elif name == "float64":
            self.add, self.itemsize = kernels.add_real, 8
        elif name == "float16":
            self.add, self.itemsize = kernels.add_half, 2
        elif name == "bfloat16":
            self.add, self.itemsize = kernels.add_bfloat, 2
        else:
            raise ValueError(f"no compiled sum of elements of type {name}.")

    def __call__(self, cnp.ndarray into not None, cnp.ndarray other not None):
        cdef ptrdiff_t n = cnp.PyArray_SIZE(into)
        if not (
            cnp.PyArray_ISCARRAY(into)
            and cnp.PyArray_ISCARRAY_RO(other)
            and cnp.PyArray_ITEMSIZE(into) == self.itemsize
            and cnp.PyArray_ITEMSIZE(other) == self.itemsize
            and cnp.PyArray_SIZE(other) == n
        ):
            raise ValueError(
                f"a sum needs two contiguous arrays of equal length with elements of "
                f"{self.itemsize} bytes, the first one writeable."
            )
        cdef void *a = cnp.PyArray_DATA(into)
        cdef const void *b = cnp.PyArray_DATA(other)
        if n * self.itemsize < LONG:
            self.add(a, b, n)
        else:
            with nogil:
                self.add(a, b, n)
