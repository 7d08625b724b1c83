"""Thin wrapper of src/update.c: picks the variant and passes raw pointers, without the GIL."""

from pydtnn.utils cimport ndarray as cnp
from pydtnn.kernels.cpu.arrays cimport data, itemsize, output

cnp.import_array()

cdef extern from "update.h":
    struct update_kernels:
        void (*sgd)(void *w, const void *g, void *velocity, ptrdiff_t n, double lr, double decay,
                    double momentum, int nesterov, double factor, int threads) nogil
        void (*rmsprop)(void *w, const void *g, void *square, ptrdiff_t n, double lr, double decay,
                        double rho, double epsilon, int threads) nogil
        void (*adagrad)(void *w, const void *g, void *square, ptrdiff_t n, double lr, double decay,
                        double initial, double epsilon, int threads) nogil
        void (*lion)(void *w, const void *g, void *m, ptrdiff_t n, double lr, double shrink,
                     double beta1, double beta2, int threads) nogil
        void (*adam)(void *w, const void *g, void *m, void *v, ptrdiff_t n, double rate,
                     double decay, double shrink, double beta1, double beta2, double inv_root,
                     double epsilon, double factor, int threads) nogil
        void (*nadam)(void *w, const void *g, void *m, void *v, ptrdiff_t n, double lr,
                      double decay, double beta1, double beta2, double inv_root, double epsilon,
                      double ahead, double now, int threads) nogil
        int (*squared_norm)(const void *x, ptrdiff_t n, double *norm, int threads) nogil
        void (*scale)(void *x, ptrdiff_t n, double factor, int threads) nogil
    const update_kernels *update_select(int isa, int itemsize)


cdef class UpdateKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type."""

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if update_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def sgd(self, w, g, velocity, double lr, double decay, double momentum, bint nesterov,
            double scale, int threads):
        """One step of w and, unless it is None, velocity, with the gradient scale g."""
        cdef int size = itemsize(w)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(w)
        cdef void *w_ = output(w, size, n)
        cdef const void *g_ = data(g, size, n)
        cdef void *v_ = NULL if velocity is None else output(velocity, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        with nogil:
            kernels.sgd(w_, g_, v_, n, lr, decay, momentum, nesterov, scale, threads)

    def rmsprop(self, w, g, square, double lr, double decay, double rho, double epsilon,
                int threads):
        """One step of w and square."""
        cdef int size = itemsize(w)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(w)
        cdef void *w_ = output(w, size, n)
        cdef const void *g_ = data(g, size, n)
        cdef void *square_ = output(square, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        with nogil:
            kernels.rmsprop(w_, g_, square_, n, lr, decay, rho, epsilon, threads)

    def adagrad(self, w, g, square, double lr, double decay, double initial, double epsilon,
                int threads):
        """One step of w and square."""
        cdef int size = itemsize(w)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(w)
        cdef void *w_ = output(w, size, n)
        cdef const void *g_ = data(g, size, n)
        cdef void *square_ = output(square, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        with nogil:
            kernels.adagrad(w_, g_, square_, n, lr, decay, initial, epsilon, threads)

    def lion(self, w, g, m, double lr, double shrink, double beta1, double beta2, int threads):
        """One step of w and m: ``w = shrink w - lr sign(beta1 m + (1 - beta1) g)``."""
        cdef int size = itemsize(w)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(w)
        cdef void *w_ = output(w, size, n)
        cdef const void *g_ = data(g, size, n)
        cdef void *m_ = output(m, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        with nogil:
            kernels.lion(w_, g_, m_, n, lr, shrink, beta1, beta2, threads)

    def adam(self, w, g, m, v, double rate, double decay, double shrink, double beta1,
             double beta2, double inv_root, double epsilon, double scale, int threads):
        """One step of w, m and v: ``w = shrink w - rate m / (sqrt(v) inv_root + epsilon)``.

        The gradient is scale g.
        """
        cdef int size = itemsize(w)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(w)
        cdef void *w_ = output(w, size, n)
        cdef const void *g_ = data(g, size, n)
        cdef void *m_ = output(m, size, n)
        cdef void *v_ = output(v, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        with nogil:
            kernels.adam(
                w_, g_, m_, v_, n, rate, decay, shrink, beta1, beta2, inv_root, epsilon, scale,
                threads
            )

    def nadam(self, w, g, m, v, double lr, double decay, double beta1, double beta2,
              double inv_root, double epsilon, double ahead, double now, int threads):
        """One step of w, m and v: ``w -= lr (ahead m + now g) / (sqrt(v) inv_root + epsilon)``."""
        cdef int size = itemsize(w)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(w)
        cdef void *w_ = output(w, size, n)
        cdef const void *g_ = data(g, size, n)
        cdef void *m_ = output(m, size, n)
        cdef void *v_ = output(v, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        with nogil:
            kernels.nadam(
                w_, g_, m_, v_, n, lr, decay, beta1, beta2, inv_root, epsilon, ahead, now, threads
            )

    def squared_norm(self, x, int threads):
        """Sum of squares of x."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(x)
        cdef const void *x_ = data(x, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        cdef double norm
        cdef int status
        with nogil:
            status = kernels.squared_norm(x_, n, &norm, threads)
        if status != 0:
            raise MemoryError("update.squared_norm: no memory for partial sums.")
        return norm

    def scale(self, x, double factor, int threads):
        """x *= factor."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t n = cnp.PyArray_SIZE(x)
        cdef void *x_ = output(x, size, n)
        cdef const update_kernels *kernels = update_select(self.isa, size)
        with nogil:
            kernels.scale(x_, n, factor, threads)
