"""Thin wrapper of src/loss.c: picks the variant and passes raw pointers, without the GIL."""

from libc.stdint cimport int64_t

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, output

from pydtnn.kernels.reference.loss import wrong_target

cnp.import_array()

cdef extern from "loss.h":
    enum loss:
        BINARY_CROSS_ENTROPY, SQUARED_ERROR, ABSOLUTE_ERROR
    struct loss_kernels:
        int (*cross_entropy)(const void *logits, const int64_t *target, ptrdiff_t rows,
                             ptrdiff_t classes, double smoothing, double scale, void *out,
                             double *loss, int threads) nogil
        int (*weighted_cross_entropy)(const void *logits, const int64_t *target,
                                      const void *weights, int64_t ignored, ptrdiff_t rows,
                                      ptrdiff_t classes, double smoothing, double scale, void *out,
                                      double *loss, int threads) nogil
        int (*hinge)(const void *y, const int64_t *target, ptrdiff_t rows, ptrdiff_t classes,
                     double scale, void *out, double *loss, int threads) nogil
        int (*elementwise)(int kind, const void *y, const void *target, ptrdiff_t n, double scale,
                           void *out, double *loss, int threads) nogil
    const loss_kernels *loss_select(int isa, int itemsize)
    const int64_t NOTHING_IGNORED
    ptrdiff_t first_wrong_target(const int64_t *target, ptrdiff_t rows, ptrdiff_t classes,
                                 int ignores, int64_t ignored) nogil


cdef const int64_t *classes_of(
    str name, target, ptrdiff_t rows, ptrdiff_t classes, bint ignores=False, int64_t ignored=0
) except? NULL:
    """Return a pointer to the targets, which are classes or ignored."""
    cdef const int64_t *targets = <const int64_t *>data(target, sizeof(int64_t), rows)
    cdef ptrdiff_t wrong = first_wrong_target(targets, rows, classes, ignores, ignored)
    if wrong >= 0:
        raise wrong_target(name, wrong, targets[wrong], classes)
    return targets


cdef int check(int status) except -1:
    if status != 0:
        raise MemoryError("loss: no memory for the losses of the samples.")
    return 0


cdef class LossKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type.

    Classes are int64.
    """

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if loss_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def cross_entropy(self, logits, target, double smoothing, double scale, out, int threads):
        """Sum of the losses of logits (N, K); out = gradient times scale."""
        cdef int size = itemsize(logits)
        cdef ptrdiff_t rows = out.shape[0], classes = out.shape[1]
        cdef const void *x = data(logits, size, rows * classes)
        cdef void *out_ = output(out, size, rows * classes)
        cdef const int64_t *target_ = classes_of("cross_entropy", target, rows, classes)
        cdef const loss_kernels *kernels = loss_select(self.isa, size)
        cdef double loss
        cdef int status
        with nogil:
            status = kernels.cross_entropy(
                x, target_, rows, classes, smoothing, scale, out_, &loss, threads
            )
        check(status)
        return loss

    def weighted_cross_entropy(
        self, logits, target, weights, ignored, double smoothing, double scale, out, int threads
    ):
        """The same with weights (K,), or None, and without the rows of an ignored class, or None.
        """
        cdef int size = itemsize(logits)
        cdef ptrdiff_t rows = out.shape[0], classes = out.shape[1]
        cdef const void *x = data(logits, size, rows * classes)
        cdef void *out_ = output(out, size, rows * classes)
        cdef const void *weights_ = NULL if weights is None else data(weights, size, classes)
        cdef bint ignores = ignored is not None
        cdef int64_t ignored_ = ignored if ignores else NOTHING_IGNORED
        cdef const int64_t *target_ = classes_of(
            "cross_entropy", target, rows, classes, ignores, ignored_
        )
        cdef const loss_kernels *kernels = loss_select(self.isa, size)
        cdef double loss
        cdef int status
        with nogil:
            status = kernels.weighted_cross_entropy(
                x, target_, weights_, ignored_, rows, classes, smoothing, scale, out_, &loss,
                threads
            )
        check(status)
        return loss

    def hinge(self, y, target, double scale, out, int threads):
        """Sum of the losses of scores (N, K); out = gradient times scale."""
        cdef int size = itemsize(y)
        cdef ptrdiff_t rows = out.shape[0], classes = out.shape[1]
        cdef const void *y_ = data(y, size, rows * classes)
        cdef void *out_ = output(out, size, rows * classes)
        cdef const int64_t *target_ = classes_of("hinge", target, rows, classes)
        cdef const loss_kernels *kernels = loss_select(self.isa, size)
        cdef double loss
        cdef int status
        with nogil:
            status = kernels.hinge(y_, target_, rows, classes, scale, out_, &loss, threads)
        check(status)
        return loss

    def elementwise(self, int kind, y, target, double scale, out, int threads):
        """Sum of the losses of all elements; out = derivative times scale."""
        cdef int size = itemsize(y)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(out)
        cdef const void *y_ = data(y, size, n)
        cdef const void *target_ = data(target, size, n)
        cdef void *out_ = output(out, size, n)
        cdef const loss_kernels *kernels = loss_select(self.isa, size)
        cdef double loss
        cdef int status
        with nogil:
            status = kernels.elementwise(kind, y_, target_, n, scale, out_, &loss, threads)
        check(status)
        return loss


KINDS = {
    "binary_cross_entropy": BINARY_CROSS_ENTROPY,
    "squared_error": SQUARED_ERROR,
    "absolute_error": ABSOLUTE_ERROR,
}
"""Losses whose outputs are independent of each other."""
