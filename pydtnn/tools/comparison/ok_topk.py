"""Ok-Topk: a sparse allreduce of the largest values, whose thresholds are seldom computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, cast

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.compression.compressor import LossySums, PackedGradients, send_to_each
from pydtnn.utils.request import Chain, Completed, Request
from pydtnn.utils.validate import check_float, check_int


def ok_topk(*, share: float = 0.01, renew: int = 32) -> Callable[[Communicator], OkTopk]:
    """Sum the largest values of each rank, and keep the largest sums; about k = `share` n of each.

    Parameters
    ----------
    share : float
        Fraction of a bucket's values, in (0, 1].
    renew : int
        Steps after which the thresholds are computed again.
    """
    share = check_float("ok_topk", "share", share, above=0, at_most=1)
    return partial(OkTopk, share=share, renew=check_int("ok_topk", "renew", renew, at_least=1))


class Thresholded(PackedGradients):
    """A bucket's gradients with error feedback, and what is seldom computed.

    Attributes
    ----------
    limits : ndarray (2,)
        Least magnitudes of values of this rank, and of sums.
    bounds : ndarray (P - 1,) of float64
        Where the regions begin whose sums the ranks compute, all but the first.
    last : Request
        The bucket's last sum.
    """

    def __init__(self, bucket: Bucket, size: int) -> None:
        super().__init__(bucket, feedback=True)
        self.index, self.last = bucket.index, cast(Request, Completed())
        self.limits, self.bounds = np.zeros_like(self.x, shape=2), np.zeros(size - 1)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the names and arrays of errors and thresholds."""
        yield from super().arrays()
        yield from ((f"limits/{self.index}", self.limits), (f"bounds/{self.index}", self.bounds))


class OkTopk(LossySums):
    """Sums of sparse gradients, each region of a bucket summed by one rank.

    A rank adds its gradients to those not sent yet, and sends each value of at least its threshold
    to the rank that sums the value's region. That rank sends the sums of at least the common
    threshold to all others. Values that were sent and whose sums were large enough start again from
    0. Every `renew` steps the thresholds become those of the k largest values of the rank and of
    all sums, which are sent in that step; every 2 `renew` steps the regions become those in which
    the ranks have equally many of their values, on average.

    If the thresholds select k values, each of P ranks sends on average 2 k (P - 1) / P indices and
    values between these steps: k to the regions and k back; the paper's bound is 3 k, with a step
    that balances the second messages, which does not change their sum and is omitted. Lengths are
    sent before, in messages of 8 B.

    Parameters
    ----------
    comm : Communicator
    share, renew
        See `ok_topk`.

    References
    ----------
    Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022,
    algorithms 1 and 2.
    """

    def __init__(self, comm: Communicator, *, share: float = 0.01, renew: int = 32) -> None:
        super().__init__(comm)
        self.share, self.renew = share, renew
        self._kept: dict[int, Thresholded] = {}

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Initialize errors with 0. Collective: all ranks call it."""
        super().prepare(buckets)
        self._kept = {b.index: Thresholded(b, self.comm.size) for b in buckets}

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the names and arrays of errors and thresholds."""
        for kept in self._kept.values():
            yield from kept.arrays()

    def send(self, bucket: Bucket) -> Request:
        """Start to replace a bucket's gradients by their sum over all ranks."""
        kept = self._kept[bucket.index]
        kept.last.wait()  # of delayed gradients: for its error
        kept.last = Chain(self._sum(kept, bucket)) if kept.x.size else kept.last
        return kept.last

    def _sum(self, kept: Thresholded, bucket: Bucket) -> Iterator[Request]:
        x, k = kept.take(bucket.grads), math.ceil(self.share * kept.x.size)
        step, size = self.steps[bucket.index] % (2 * self.renew), self.comm.size
        self.steps[bucket.index] += 1
        if renews := step % self.renew == 0:
            kept.limits[0] = smallest_of(k, x)
        chosen = at_least(kept.limits[0], x)
        if step == 0 and size > 1:
            ends = np.append(chosen, x.size) / size
            kept.bounds[...] = ends[np.arange(1, size) * len(chosen) // size]
            yield self.group.iallreduce(kept.bounds)
        parts = np.split(records(chosen, x), np.searchsorted(chosen, kept.bounds))
        kept.total.fill(0)
        for part in (yield from of_any_length(self.group, parts, bucket.index)):
            kept.total[part["index"]] += part["value"]
        sums = records(at_least(0 if renews else kept.limits[1], kept.total), kept.total)
        sums = np.concatenate((yield from of_any_length(self.group, [sums] * size, bucket.index)))
        if renews:
            kept.limits[1] = smallest_of(k, sums["value"])
        sums = sums[at_least(kept.limits[1], sums["value"])]
        kept.total.fill(0)
        kept.total[sums["index"]] = sums["value"]
        kept.x[chosen[kept.total[chosen] != 0]] = 0
        kept.give(bucket.grads)


def of_any_length(
    comm: Communicator, arrays: list[np.ndarray], tag: int
) -> Generator[Request, Any, list[np.ndarray]]:
    """Send an array of any length to each rank; yield requests, return what is received."""
    lengths = np.array([[len(array)] for array in arrays])
    yield from send_to_each(comm, list(lengths), list(theirs := 0 * lengths), tag)
    received = [np.empty_like(arrays[0], shape=int(n)) for n in theirs[:, 0]]
    flat = [array.view(np.uint8) for array in received]
    yield from send_to_each(comm, [array.view(np.uint8) for array in arrays], flat, tag)
    return received


def smallest_of(k: int, values: np.ndarray) -> float:
    """Return the smallest of the k largest magnitudes; 0 if there are fewer values."""
    return float(np.partition(np.abs(values), -k)[-k]) if len(values) >= k else 0.0


def at_least(limit: float, values: np.ndarray) -> np.ndarray:
    """Return where values other than 0 have a magnitude of at least `limit`, or are NaN."""
    return np.flatnonzero(~(np.abs(values) < limit) & (values != 0))


def records(where: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return pairs of an index and its value."""
    pairs = np.empty(len(where), [("index", "<u4"), ("value", values.dtype)])
    pairs["index"], pairs["value"] = where, values[where]
    return pairs
