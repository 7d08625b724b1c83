"""Instruction sets and OpenMP support of the compiled kernels."""

cdef extern from "available.h":
    int isa_available(int isa) nogil
    int isa_of_doubles(int isa) nogil

cdef extern from *:
    """
    #ifdef _OPENMP
    #define HAS_OPENMP 1
    #else
    #define HAS_OPENMP 0
    #endif
    """
    const int HAS_OPENMP


def available(int isa) -> bool:
    """Return whether instruction set number ``isa`` was built and runs on this CPU."""
    return isa_available(isa) != 0


def of_doubles(int isa) -> int:
    """Return the number of the instruction set that float64 has with set ``isa``; -1 for none."""
    return isa_of_doubles(isa)


def has_openmp() -> bool:
    """Return whether the kernels were compiled with OpenMP; without it they use one thread."""
    return HAS_OPENMP != 0
