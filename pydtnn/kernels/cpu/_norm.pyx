"""Thin wrapper of src/norm.c: picks the variant and passes raw pointers, without the GIL."""

from pydtnn.utils cimport ndarray as cnp
from libc.math cimport sqrt
from pydtnn.kernels.cpu.arrays cimport data, itemsize, output, real_size

cnp.import_array()

cdef extern from "norm.h":
    struct norm_kernels:
        int (*statistics)(const void *x, ptrdiff_t rows, ptrdiff_t channels, double *out,
                          int accumulate, int threads) nogil
        int (*backward_statistics)(const void *x, const void *dy, ptrdiff_t rows,
                                   ptrdiff_t channels, const double *mean, const double *inv_std,
                                   double *out, int accumulate, int threads) nogil
        int (*normalize)(const void *x, ptrdiff_t rows, ptrdiff_t channels, const double *scale,
                         const double *shift, void *out, int threads) nogil
        int (*backward_normalize)(const void *x, const void *dy, ptrdiff_t rows,
                                  ptrdiff_t channels, const double *a, const double *b,
                                  const double *c, void *out, int threads) nogil
        int (*group_forward)(const void *x, ptrdiff_t batch, ptrdiff_t positions,
                             ptrdiff_t channels, ptrdiff_t groups, const void *gamma,
                             const void *beta, double epsilon, void *out, double *mean,
                             double *inv_std, int threads) nogil
        int (*group_backward)(const void *x, const void *dy, ptrdiff_t batch, ptrdiff_t positions,
                              ptrdiff_t channels, ptrdiff_t groups, const void *gamma,
                              const double *mean, const double *inv_std, void *out, void *dgamma,
                              void *dbeta, int accumulate, int threads) nogil
        int (*response_forward)(const void *x, ptrdiff_t rows, ptrdiff_t channels, ptrdiff_t size,
                                double alpha, double beta, double k, void *out,
                                int threads) nogil
        int (*response_backward)(const void *x, const void *dy, ptrdiff_t rows,
                                 ptrdiff_t channels, ptrdiff_t size, double alpha, double beta,
                                 double k, void *out, int threads) nogil
    const norm_kernels *norm_select(int isa, int itemsize)


cdef cnp.ndarray doubles(object values):
    """Return the values as contiguous float64, copied only if necessary."""
    cdef int flags = cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_ALIGNED
    return cnp.PyArray_FROM_OTF(values, cnp.NPY_DOUBLE, flags)


cdef ptrdiff_t channels_of(cnp.ndarray x):
    return x.shape[x.ndim - 1]


cdef ptrdiff_t rows_of(cnp.ndarray x):
    return cnp.PyArray_SIZE(x) // max(channels_of(x), 1)


cdef inline bint is_doubles(object array) except -1:
    """Return whether an array of statistics can be used where it is."""
    cdef cnp.ndarray a = <cnp.ndarray?>array
    return cnp.PyArray_TYPE(a) == cnp.NPY_DOUBLE and cnp.PyArray_ISCARRAY(a)


cdef inline bint is_real(object array, int kind) except -1:
    """Return whether an array of this real type can be used where it is."""
    cdef cnp.ndarray a = <cnp.ndarray?>array
    return cnp.PyArray_TYPE(a) == kind and cnp.PyArray_ISCARRAY(a)


cdef int real_type(object array) except -1:
    """Return the type of a contiguous array of float32 or float64; 0 for another one."""
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray?>array)
    if kind != cnp.NPY_FLOAT and kind != cnp.NPY_DOUBLE:
        return 0
    return kind if is_real(array, kind) else 0


cdef const double *coefficients(cnp.ndarray values, ptrdiff_t n) except? NULL:
    return <const double *>data(values, sizeof(double), n)


cdef int check(int status) except -1:
    if status != 0:
        raise MemoryError("norm: no memory for sums and tables.")
    return 0


ctypedef fused real:
    float
    double


cdef void fill_coefficients(const double *sums, const real *gamma, const real *beta,
                            double epsilon, ptrdiff_t n, double *moments, real *out) noexcept nogil:
    cdef ptrdiff_t i
    cdef double count = max(sums[0], 1.0), mean, variance, factor
    for i in range(n):
        mean = sums[1 + i] / count
        variance = max(sums[1 + n + i] / count - mean * mean, 0.0)
        moments[i] = mean
        moments[n + i] = 1 / sqrt(variance + epsilon)
        factor = gamma[i] * moments[n + i]
        out[i] = <real>mean
        out[n + i] = <real>factor
        out[2 * n + i] = <real>(beta[i] - (mean - out[i]) * factor)


cdef void fill_backward(const double *sums, double rows, const double *moments, const real *pivot,
                        const real *gamma, ptrdiff_t n, bint accumulate, real *dgamma,
                        real *dbeta, real *out) noexcept nogil:
    cdef ptrdiff_t i
    cdef double total, offset, gradient, a, b
    for i in range(n):
        total, offset = sums[i], moments[i] - pivot[i]
        gradient = moments[n + i] * (sums[n + i] - offset * total)
        dgamma[i] = <real>((dgamma[i] if accumulate else 0) + gradient)
        dbeta[i] = <real>((dbeta[i] if accumulate else 0) + total)
        a = gamma[i] * moments[n + i]
        b = -a * moments[n + i] * gradient / rows
        out[i] = <real>a
        out[n + i] = <real>b
        out[2 * n + i] = <real>(-a * total / rows - b * offset)


cdef class NormKernels:
    """The kernels of one instruction set; methods take C-contiguous arrays of one real type.

    Statistics are float64.
    """

    cdef int isa

    def __cinit__(self, int isa):
        self.isa = isa
        if norm_select(isa, 4) == NULL:
            raise ValueError(f"instruction set number {isa} was not built.")

    def statistics(self, x, out, bint accumulate, int threads):
        """out (1 + 2 C,) = count, sums and sums of squares of x (..., C)."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t rows = rows_of(x), channels = channels_of(x), n = rows * channels
        cdef const void *x_ = data(x, size, n)
        cdef double *out_ = <double *>output(out, sizeof(double), 1 + 2 * channels)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.statistics(x_, rows, channels, out_, accumulate, threads)
        check(status)

    def backward_statistics(self, x, dy, mean, inv_std, out, bint accumulate, int threads):
        """out (2, C) = sums of dy and of dy xhat."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t rows = rows_of(x), channels = channels_of(x), n = rows * channels
        cdef const void *x_ = data(x, size, n)
        cdef const void *dy_ = data(dy, size, n)
        cdef cnp.ndarray means = doubles(mean), inv_stds = doubles(inv_std)
        cdef const double *mean_ = coefficients(means, channels)
        cdef const double *inv_std_ = coefficients(inv_stds, channels)
        cdef double *out_ = <double *>output(out, sizeof(double), 2 * channels)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.backward_statistics(
                x_, dy_, rows, channels, mean_, inv_std_, out_, accumulate, threads
            )
        check(status)

    def normalize(self, x, scale, shift, out, int threads):
        """out = x scale + shift."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t rows = rows_of(x), channels = channels_of(x), n = rows * channels
        cdef const void *x_ = data(x, size, n)
        cdef cnp.ndarray scales = doubles(scale), shifts = doubles(shift)
        cdef const double *scale_ = coefficients(scales, channels)
        cdef const double *shift_ = coefficients(shifts, channels)
        cdef void *out_ = output(out, size, n)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.normalize(x_, rows, channels, scale_, shift_, out_, threads)
        check(status)

    def backward_normalize(self, x, dy, a, b, c, out, int threads):
        """out = a dy + b x + c."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t rows = rows_of(x), channels = channels_of(x), n = rows * channels
        cdef const void *x_ = data(x, size, n)
        cdef const void *dy_ = data(dy, size, n)
        cdef cnp.ndarray as_ = doubles(a), bs = doubles(b), cs = doubles(c)
        cdef const double *a_ = coefficients(as_, channels)
        cdef const double *b_ = coefficients(bs, channels)
        cdef const double *c_ = coefficients(cs, channels)
        cdef void *out_ = output(out, size, n)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.backward_normalize(x_, dy_, rows, channels, a_, b_, c_, out_, threads)
        check(status)

    def coefficients(self, sums, gamma, beta, double epsilon, moments, out, collect) -> bool:
        """moments (2, C) and out (3, C) = pivot, factor, shift from sums (1 + 2 C,).

        `sums` are added to `collect`, or None. Returns whether these arrays are supported;
        otherwise nothing is computed.
        """
        cdef int kind = real_type(out)
        if not kind or not is_real(gamma, kind) or not is_real(beta, kind):
            return False
        if not is_doubles(sums) or not is_doubles(moments):
            return False
        if collect is not None and not is_doubles(collect):
            return False
        if len(sums) > 1 + 2 * channels_of(out):
            return False
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = channels_of(out), i
        cdef const double *sums_ = <const double *>data(sums, sizeof(double), 1 + 2 * n)
        cdef const void *gamma_ = data(gamma, size, n)
        cdef const void *beta_ = data(beta, size, n)
        cdef double *moments_ = <double *>output(moments, sizeof(double), 2 * n)
        cdef void *out_ = output(out, size, 3 * n)
        cdef double *collect_ = NULL
        if collect is not None:
            collect_ = <double *>output(collect, sizeof(double), 1 + 2 * n)
            for i in range(1 + 2 * n):
                collect_[i] += sums_[i]
        if size == 4:
            fill_coefficients(sums_, <const float *>gamma_, <const float *>beta_, epsilon, n,
                              moments_, <float *>out_)
        else:
            fill_coefficients(sums_, <const double *>gamma_, <const double *>beta_, epsilon, n,
                              moments_, <double *>out_)
        return True

    def backward_coefficients(self, sums, double rows, moments, pivot, gamma, dgamma, dbeta, out,
                              bint accumulate) -> bool:
        """out (3, C) = a, b, c; dgamma and dbeta (C,) = [themselves +] their gradients.

        Returns whether these arrays are supported; otherwise nothing is computed.
        """
        cdef int kind = real_type(out)
        if not kind or not (is_real(pivot, kind) and is_real(gamma, kind)):
            return False
        if not (is_real(dgamma, kind) and is_real(dbeta, kind)):
            return False
        if not is_doubles(sums) or not is_doubles(moments):
            return False
        cdef int size = itemsize(out)
        cdef ptrdiff_t n = channels_of(out)
        cdef const double *sums_ = <const double *>data(sums, sizeof(double), 2 * n)
        cdef const double *moments_ = <const double *>data(moments, sizeof(double), 2 * n)
        cdef const void *pivot_ = data(pivot, size, n)
        cdef const void *gamma_ = data(gamma, size, n)
        cdef void *dgamma_ = output(dgamma, size, n)
        cdef void *dbeta_ = output(dbeta, size, n)
        cdef void *out_ = output(out, size, 3 * n)
        if size == 4:
            fill_backward(sums_, rows, moments_, <const float *>pivot_, <const float *>gamma_, n,
                          accumulate, <float *>dgamma_, <float *>dbeta_, <float *>out_)
        else:
            fill_backward(sums_, rows, moments_, <const double *>pivot_, <const double *>gamma_, n,
                          accumulate, <double *>dgamma_, <double *>dbeta_, <double *>out_)
        return True

    def group_forward(self, x, gamma, beta, ptrdiff_t groups, double epsilon, out, mean, inv_std,
                      int threads):
        """out = normalised x (N, P, C); mean and inv_std (N, G) float64; without beta, RMS norm."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t batch = x.shape[0], positions = x.shape[1], channels = x.shape[2]
        cdef ptrdiff_t n = batch * positions * channels
        cdef const void *x_ = data(x, size, n)
        cdef const void *gamma_ = data(gamma, real_size(size), channels)
        cdef const void *beta_ = NULL
        if beta is not None:
            beta_ = data(beta, real_size(size), channels)
        cdef void *out_ = output(out, size, n)
        cdef double *mean_ = <double *>output(mean, sizeof(double), batch * groups)
        cdef double *inv_std_ = <double *>output(inv_std, sizeof(double), batch * groups)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.group_forward(
                x_, batch, positions, channels, groups, gamma_, beta_, epsilon, out_, mean_,
                inv_std_, threads,
            )
        check(status)

    def group_backward(self, x, dy, gamma, ptrdiff_t groups, mean, inv_std, out, dgamma, dbeta,
                       bint accumulate, int threads):
        """out = dx; dgamma and dbeta (C,) = [themselves +] the gradients of gamma and beta."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t batch = x.shape[0], positions = x.shape[1], channels = x.shape[2]
        cdef ptrdiff_t n = batch * positions * channels
        cdef const void *x_ = data(x, size, n)
        cdef const void *dy_ = data(dy, size, n)
        cdef const void *gamma_ = data(gamma, real_size(size), channels)
        cdef const double *mean_ = <const double *>data(mean, sizeof(double), batch * groups)
        cdef const double *inv_std_ = <const double *>data(inv_std, sizeof(double), batch * groups)
        cdef void *out_ = output(out, size, n)
        cdef void *dgamma_ = output(dgamma, real_size(size), channels)
        cdef void *dbeta_ = NULL
        if dbeta is not None:
            dbeta_ = output(dbeta, real_size(size), channels)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.group_backward(
                x_, dy_, batch, positions, channels, groups, gamma_, mean_, inv_std_, out_,
                dgamma_, dbeta_, accumulate, threads,
            )
        check(status)

    def response_forward(self, x, ptrdiff_t window, double alpha, double beta, double k, out,
                         int threads):
        """out = x (..., C) over a power of the mean square of `window` channels."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t rows = rows_of(x), channels = channels_of(x)
        cdef const void *x_ = data(x, size, rows * channels)
        cdef void *out_ = output(out, size, rows * channels)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.response_forward(
                x_, rows, channels, window, alpha, beta, k, out_, threads,
            )
        check(status)

    def response_backward(self, x, dy, ptrdiff_t window, double alpha, double beta, double k, out,
                          int threads):
        """out = dx, which may be dy."""
        cdef int size = itemsize(x)
        cdef ptrdiff_t rows = rows_of(x), channels = channels_of(x)
        cdef const void *x_ = data(x, size, rows * channels)
        cdef const void *dy_ = data(dy, size, rows * channels)
        cdef void *out_ = output(out, size, rows * channels)
        cdef const norm_kernels *kernels = norm_select(self.isa, size)
        cdef int status
        with nogil:
            status = kernels.response_backward(
                x_, dy_, rows, channels, window, alpha, beta, k, out_, threads,
            )
        check(status)
