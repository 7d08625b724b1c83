"""PowerSGD: gradients of matrices as products of two matrices of low rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.kernels.reference.random import stream
from pydtnn.layers.parameters import Bucket, BucketEntry
from pydtnn.parallel.compression.compressor import (
    Context,
    LossySums,
    forget_if_not_finite,
    is_finite,
)
from pydtnn.utils.request import Chain, Queue, Request
from pydtnn.utils.validate import check_int


def power_sgd(*, rank: int = 2, seed: int = 0) -> Callable[[Communicator], PowerSGD]:
    """Send matrices of gradients as products of two matrices of `rank` columns.

    Parameters
    ----------
    rank : int
        Number of columns. Vectors, and matrices that would not become smaller, are sent
        uncompressed.
    seed : int
        Seed of the random matrices of the first step.
    """
    return partial(PowerSGD, rank=check_int("power_sgd", "rank", rank, at_least=1), seed=seed)


class Matrix:
    """A parameter whose gradient is sent as ``p q^T``.

    Parameters
    ----------
    entry : Entry
        Parameter of shape (n, ...), reshaped to (n, m).
    dtype : numpy.dtype
    rank, seed : int
    size : int
        Number of ranks.

    Attributes
    ----------
    error : ndarray (n, m)
        Compression error: the part of the gradients that this rank has not sent.
    q : ndarray (m, r)
        Right factor of the last step: the initial value of the next one.
    """

    def __init__(
        self, entry: BucketEntry, dtype: np.dtype, rank: int, seed: int, size: int = 1
    ) -> None:
        n, m = matrix_shape(entry)
        largest = float(np.finfo(dtype).max)
        self._largest_p = largest**0.5 / size
        self._largest_q = largest / (2 * rank * size)  # keeps entries of p q^T finite
        self.entry = entry
        self.error = np.zeros((n, m), dtype)
        self.q = np.empty((m, rank), dtype)
        self._draws = Context(seed, 0, stream(entry.name), 0, ())
        self._guess()

    def _guess(self) -> None:
        """Initialize `q` with random directions, the same on all ranks."""
        self.q[...] = self._draws.shared_random.standard_normal(self.q.shape)

    def project(self, grads: np.ndarray, p: np.ndarray) -> None:
        """Add the gradient to the error, multiply it by the last `q`, and write that to `p`."""
        self.error += grads[self.entry.slice].reshape(self.error.shape)
        greatest = np.max(np.abs(self.q))
        if not np.isfinite(greatest):
            self._guess()
        elif greatest > 0:  # prevents overflow; if all are 0, any directions are valid
            self.q /= greatest
        np.matmul(self.error, self.q, out=p)
        if not _within(p, self._largest_p) and is_finite(self.error):
            # Only the directions matter: scale the product below the largest number.
            np.matmul(self.error / np.abs(self.error).max(), self.q, out=p)
            p *= self._largest_p / np.abs(p).max()

    def project_back(self, p: np.ndarray, q: np.ndarray) -> None:
        """Multiply the error by an orthonormal basis of the summed `p`, into `q` (m, r).

        This rank thereby sends ``p q^T = p p^T error``, which is subtracted from the error.
        """
        self.directions, _ = np.linalg.qr(p)
        np.matmul(self.error.T, self.directions, out=q)
        if not _within(q, self._largest_q) and is_finite(self.error) and is_finite(p):
            # The sum would be infinite: send less, and keep the rest in the error.
            greatest = float(np.abs(self.error).max())
            np.matmul((self.error / greatest).T, self.directions, out=q)
            q *= min(greatest, self._largest_q / float(np.abs(q).max()))
        self.error -= self.directions @ q.T
        forget_if_not_finite(self.error)

    def finish(self, grads: np.ndarray, q: np.ndarray) -> None:
        """Write the sum over all ranks to the gradient."""
        self.q[...] = q
        np.matmul(self.directions, q.T, out=grads[self.entry.slice].reshape(self.error.shape))


def _within(array: np.ndarray, limit: float) -> bool:
    """Return whether all elements are finite and in ``[-limit, limit]``."""
    return bool(np.max(array) <= limit and np.min(array) >= -limit)


class _Bucket:
    """A bucket's matrices, its other parameters, and the buffers of its two messages.

    Attributes
    ----------
    first : ndarray
        ``p`` of each matrix, then the uncompressed gradients.
    second : ndarray
        ``q`` of each matrix.
    """

    def __init__(self, bucket: Bucket, rank: int, seed: int, size: int) -> None:
        def pays(entry: BucketEntry) -> bool:
            n, m = matrix_shape(entry)
            return rank * (n + m) < n * m

        dtype = bucket.grads.dtype
        self.matrices = [Matrix(e, dtype, rank, seed, size) for e in bucket.parameters if pays(e)]
        self.rest = [entry for entry in bucket.parameters if not pays(entry)]
        sizes = [matrix.error.shape for matrix in self.matrices]
        self.first = np.empty(
            rank * sum(n for n, _ in sizes) + sum(prod(e.shape) for e in self.rest), dtype
        )
        self.second = np.empty(rank * sum(m for _, m in sizes), dtype)
        self._p = list(_cut(self.first, [(n, rank) for n, _ in sizes]))
        self._q = list(_cut(self.second, [(m, rank) for _, m in sizes]))
        begin = rank * sum(n for n, _ in sizes)
        self._rest = list(_cut(self.first[begin:], [(prod(e.shape),) for e in self.rest]))

    def fill_first(self, grads: np.ndarray) -> None:
        for matrix, p in zip(self.matrices, self._p, strict=True):
            matrix.project(grads, p)
        for entry, values in zip(self.rest, self._rest, strict=True):
            values[...] = grads[entry.slice]

    def fill_second(self) -> None:
        for matrix, p, q in zip(self.matrices, self._p, self._q, strict=True):
            matrix.project_back(p, q)

    def finish(self, grads: np.ndarray) -> None:
        for matrix, q in zip(self.matrices, self._q, strict=True):
            matrix.finish(grads, q)
        for entry, values in zip(self.rest, self._rest, strict=True):
            grads[entry.slice] = values


def matrix_shape(entry: BucketEntry) -> tuple[int, int]:
    """Return the rows (the first axis) and columns (all others) of a parameter."""
    size, rows = prod(entry.shape), (entry.shape or (1,))[0]
    return rows, size // max(rows, 1)


def _cut(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Yield consecutive views of an array with these shapes."""
    begin = 0
    for shape in shapes:
        yield flat[begin : begin + prod(shape)].reshape(shape)
        begin += prod(shape)


class PowerSGD(LossySums):
    """Sums of matrices of low rank by two allreduces: one step of a power iteration.

    With ``M`` the gradient of each rank plus its compression error::

        p = orthonormal basis of sum(M q)       q of the previous step; at first random
        q = sum(M^T p)
        sum of gradients = p q^T                error of each rank: M - p p^T M

    Parameters
    ----------
    comm : Communicator
    rank, seed : int
        See `power_sgd`.

    References
    ----------
    Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019, algorithms 1 and 2.
    """

    orders = 2  # first and second messages of several buckets are pending at the same time

    def __init__(self, comm: Communicator, *, rank: int = 2, seed: int = 0) -> None:
        super().__init__(comm)
        self.rank = rank
        self.seed = seed
        self._queue = Queue()
        self._buckets: dict[int, _Bucket] = {}
        self._last: dict[int, Request] = {}

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Initialize errors with 0. Collective: all ranks call it."""
        super().prepare(buckets)
        self._buckets = {b.index: _Bucket(b, self.rank, self.seed, self.comm.size) for b in buckets}
        self._last.clear()

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the names and arrays of the error and the last `q` of each matrix."""
        for bucket in self._buckets.values():
            for matrix in bucket.matrices:
                yield f"error/{matrix.entry.name}", matrix.error
                yield f"q/{matrix.entry.name}", matrix.q

    def send(self, bucket: Bucket) -> Request:
        """Start to replace a bucket's gradients by their sum over all ranks."""
        if bucket.index in self._last:  # delayed gradients: wait for its `q`
            self._last[bucket.index].wait()
        self.steps[bucket.index] += 1
        request = Chain(self._sum(self._buckets[bucket.index], bucket.grads), self._queue)
        self._last[bucket.index] = request
        return request

    def _sum(self, bucket: _Bucket, grads: np.ndarray) -> Iterator[Request]:
        """Sum a bucket in two messages; all ranks start the second ones in the same order."""
        with np.errstate(all="ignore"):  # values that are not finite appear in the next loss
            bucket.fill_first(grads)
        yield self.group.iallreduce(bucket.first)
        with np.errstate(all="ignore"):
            bucket.fill_second()
        yield self.groups[1].iallreduce(bucket.second)
        with np.errstate(all="ignore"):
            bucket.finish(grads)
