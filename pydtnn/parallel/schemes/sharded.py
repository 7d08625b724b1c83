"""ZeRO-1: every rank stores and updates a part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.kernels.reference.family import Number
from pydtnn.layers.parameters import ALIGNMENT, Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.optimizers.base import Place
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.option import option
from pydtnn.parallel.sums import Sums


class Partition(GradientExchange):
    """Every element is updated by one rank, which alone stores the optimizer's state for it.

    Subclasses with several `copies` have as many groups of consecutive ranks, which divide the
    elements alike.

    Attributes
    ----------
    copies : int
        Number of ranks that update each element.
    parts, place : int
        Ranks among which the elements are divided, and the number of this one among them.
    counts : dict of int to list of int
        Length of each rank's part of a bucket, in the order of `group`, by the bucket's index; set
        when the optimizer is bound.
    """

    equal = True
    copies: int = 1

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        compressed = self.sums.shards is None and type(self.sums) is not Sums
        if comm.size % self.copies or (self.copies > 1 and compressed):
            raise ValueError(
                f"{type(self).__name__}: copies must divide the {comm.size} ranks, and be 1 with "
                f"compressed sums, got {self.copies}"
            )
        self.parts = comm.size // self.copies
        self.place = comm.rank % self.parts
        self._groups: tuple[Communicator, ...] = ()
        self.counts: dict[int, list[int]] = {}
        self._divided: dict[int, Bucket] = {}
        self._loads: dict[int, list[int]] = {}
        self.exact_norms = self.sums.shards is not None

    @property
    def group(self) -> Communicator:
        """The ranks that have one copy together. Collective, as all that use it."""
        return self.comm if self.copies == 1 else self._split()[0]

    def _split(self) -> tuple[Communicator, ...]:
        """Return the ranks that have one copy together, and those that have the same part."""
        if not self._groups:
            colors = self.comm.rank // self.parts, self.place
            self._groups = tuple(self.comm.split(color) for color in colors)
        return self._groups

    def free(self) -> None:
        for group in self._groups:
            group.free()
        self._groups = ()
        super().free()

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks.

        Raises
        ------
        ValueError
            If the parts are no longer those of this model: another optimizer has been bound since.
        """
        if any(self._divided.get(bucket.index) is not bucket for bucket in self.buckets):
            raise ValueError(
                f"{type(self).__name__}: the exchange partitions the parameters of another model, "
                "bound by a later trainer; create one exchange per trainer"
            )
        super().broadcast_parameters()

    def divide(self, bucket: Bucket, costs: Sequence[int] | None) -> list[int]:
        """Return the length of each rank's part of a bucket; the default balances all ranks.

        Parameters
        ----------
        bucket : Bucket
        costs : sequence of int, optional
            If parameters must not be split, the cost of the update of each.
        """
        if costs:
            places = np.cumsum([0, *costs])
            parts = self._loads[bucket.index] = level(self.loads(bucket), places)
            starts = [*(entry.slice.start for entry in bucket.parameters), len(bucket.values)]
            ends = np.array(starts)[np.searchsorted(places, np.cumsum(parts))]
            return np.diff(ends, prepend=0).tolist()
        # Whole cache lines: vector instructions then process the same groups of elements as if one
        # rank updated all, so that results are bitwise equal.
        places = np.arange(0, len(bucket.values), ALIGNMENT // bucket.values.itemsize)
        return level(self.loads(bucket), np.append(places, len(bucket.values)))

    def loads(self, bucket: Bucket) -> np.ndarray:
        """Return the elements, or the costs, of other buckets that each rank has."""
        others = [loads for index, loads in self._loads.items() if index != bucket.index]
        return np.sum([[0] * self.parts, *others], axis=0)

    def own(self, bucket: Bucket, costs: Sequence[int] | None) -> slice:
        """Choose and return the range of a bucket that this rank updates."""
        if bucket.index == 0:  # the first of all; there may have been other buckets before
            self.counts, self._divided, self._loads = {}, {}, {}
        self.counts[bucket.index] = self.divide(bucket, costs)
        self._loads.setdefault(bucket.index, self.counts[bucket.index])
        self._divided[bucket.index] = bucket
        return self.local_slice(bucket)

    def local_slice(self, bucket: Bucket) -> slice:
        """Return the range chosen by `own`."""
        counts = self.counts[bucket.index]
        start = sum(counts[: self.place])
        return slice(start, start + counts[self.place])

    def sum_part(self, bucket: Bucket, out: np.ndarray) -> None:
        """Compute this rank's part of the sum of a bucket's gradients over all ranks."""
        counts = self.counts[bucket.index]
        if self.copies == 1:
            self.sums.part(bucket, counts, out)
            return
        group, alike = self._split()
        if self.sums.shards is None:
            group.reduce_scatter(bucket.grads, counts, out)
            alike.allreduce(out)
        else:  # in the order of all shards, by the ranks of the first copy
            none = [0] * (self.comm.size - self.parts)
            self.sums.part(bucket, [*counts, *none], out if alike.rank == 0 else out[:0])
            alike.broadcast(out)

    def gather(self, bucket: Bucket, part: np.ndarray, place: Place = int) -> np.ndarray:
        """Return an array gathered from the parts of all ranks, see `Share`."""
        ends = [place(end) for end in accumulate(self.counts[bucket.index], initial=0)]
        whole = np.empty_like(part, shape=ends[-1])
        self.group.allgather(part, np.diff(ends).tolist(), whole)
        return whole

    def total(self, value: Number) -> Number:
        """Return the sum of a number over the ranks that have different parts."""
        is_plain = isinstance(value, float | int)
        array = np.array([value]) if is_plain else value.reshape(1).copy()
        self.group.allreduce(array)
        return float(array[0]) if is_plain else array.reshape(())


def level(loads: np.ndarray, places: np.ndarray) -> list[int]:
    """Split a range into parts for all ranks so that their total loads are balanced.

    Parameters
    ----------
    loads : ndarray of int, shape (P,)
        Current load of each rank.
    places : ndarray of int
        Allowed boundaries, from 0 to the length of the range.

    Returns
    -------
    list of int
        Lengths of the P parts in the order of the ranks; may be 0.

    Examples
    --------
    >>> level(np.array([0, 0, 6]), np.arange(11))
    [5, 5, 0]
    >>> level(np.array([0, 10, 0]), np.array([0, 8, 10]))
    [8, 0, 2]
    """
    length = places[-1]
    # Final load if only the k least loaded ranks receive elements; the minimum is the solution.
    surface = ((length + np.cumsum(np.sort(loads))) / np.arange(1, len(loads) + 1)).min()
    wanted = np.cumsum(np.maximum(surface - loads, 0))[:-1]
    nearest = places[np.searchsorted((places[1:] + places[:-1]) / 2, wanted)]
    return np.diff(nearest, prepend=0, append=length).tolist()


class ShardedOptimizer(Partition):
    """Synchronous data parallelism in which each rank updates its part of each bucket only.

    ``G_r = part r of sum_i g_i`` (reduce-scatter); ``w_r <- U(w_r, G_r)`` on rank r alone; all
    parts are then sent to all ranks (all-gather). The same result as `AllReduce` within rounding,
    for every rule: element-wise ones, those that need whole parameters (LARS, LAMB), and clipping
    by the global norm. An all-reduce consists of these two operations, so the volume is the same.

    Each rank stores about 1 / P of the optimizer's state: with Adam, 2 / P numbers per parameter
    instead of 2. Checkpoints contain all of it, and can be resumed on another number of ranks.

    With C `copies` (hybrid sharding), the state is divided over P / C consecutive ranks: parts of
    gradients are summed over those ranks, and then over the C ranks that have the same part. With
    as many copies as hosts, only 1 / (P / C) of the gradients is sent between hosts, and the
    all-gathers stay within them.

    Parameters
    ----------
    comm : Communicator
    copies : int
        Number of copies of the state, which divides the number of ranks.

    References
    ----------
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC
    2020, section 5.1 (P_os). Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data
    parallel", VLDB 2023, section 3.2.2 (hybrid sharding).
    """

    equal = sums_gradients = exact = static = True
    copies: int = option(1, at_least=1)

    def update(self, optimizer: Optimizer) -> None:
        optimizer.step(self.reduce)
        self.gather_all()

    def gather_all(self) -> None:
        """Send each rank's part of the parameters to all others."""
        for bucket in self.buckets:
            own = bucket.values[self.local_slice(bucket)]
            self.group.allgather(own, self.counts[bucket.index], bucket.values)

    def reduce(self, bucket: Bucket) -> None:
        """Write the sum over all ranks to this rank's part of a bucket's gradients."""
        own = bucket.grads[self.local_slice(bucket)]
        total = np.empty_like(own)
        self.sum_part(bucket, total)
        own[...] = total
