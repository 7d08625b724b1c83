"""Sums whose bytes do not depend on the number of ranks.

A batch is split into shards, the same for any number of ranks. Sums over shards are computed in one
binary tree: neighbours first, ((0 + 1) + (2 + 3)) + (4 + 5); an unpaired node moves up a level.
A rank computes a contiguous range of shards and adds siblings of the tree; the remaining nodes are
its blocks. Each rank then reduces a part of each array: it receives that part of all blocks,
computes the rest of the tree, and sends the result to the other ranks. A rank sends (number of
blocks + 1) (P - 1) / P times the array: as little as a ring if P and the shards are powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from pydtnn.comm.checks import overlap
from pydtnn.comm.communicator import Communicator
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.sums import Sums
from pydtnn.utils.request import Chain, Completed, Request
from pydtnn.utils.split import even_cuts


class Subtree(NamedTuple):
    """A node of the tree: the sum of shards ``place 2^level`` to ``(place + 1) 2^level - 1``."""

    level: int
    place: int


def cover(start: int, stop: int) -> list[Subtree]:
    """Return the fewest nodes that cover a range of shards, in order.

    >>> [tuple(block) for block in cover(3, 8)]
    [(0, 3), (2, 1)]
    """
    blocks: list[Subtree] = []
    while start < stop:
        level = 0
        while start % (2 << level) == 0 and start + (2 << level) <= stop:
            level += 1
        blocks.append(Subtree(level, start >> level))
        start += 1 << level
    return blocks


def tree_sum(nodes: Mapping[Subtree, np.ndarray], shards: int) -> np.ndarray:
    """Add the arrays of nodes that cover all shards in tree order; the arrays are overwritten."""

    def total(block: Subtree) -> np.ndarray:
        if block in nodes:
            return nodes[block]
        level, place = block.level - 1, 2 * block.place
        left = total(Subtree(level, place))
        if (place + 1) << level < shards:  # nodes beyond the last shard are skipped
            left += total(Subtree(level, place + 1))
        return left

    return total(Subtree((shards - 1).bit_length(), 0))


class Stack:
    """Blocks of the shards that a rank has computed so far.

    Attributes
    ----------
    blocks : dict of Subtree to ndarray
        Blocks in order; their number is the number of arrays in use.
    """

    def __init__(self) -> None:
        self.blocks: dict[Subtree, np.ndarray] = {}

    def push(self, shard: int, array: np.ndarray) -> None:
        """Push the array of the next shard, which is stored or added to an earlier one."""
        block = Subtree(0, shard)
        while block.place % 2 and (left := Subtree(block.level, block.place - 1)) in self.blocks:
            total = self.blocks.pop(left)
            total += array
            block, array = Subtree(block.level + 1, block.place // 2), total
        self.blocks[block] = array


class ExactSums(Sums):
    """Sums of gradients in the order of the tree.

    Parameters
    ----------
    comm : Communicator
    shards : int
        Number of shards of every batch; at least the number of ranks.
    """

    def __init__(self, comm: Communicator, *, shards: int) -> None:
        super().__init__(comm)
        self.shards = shards
        self.present = shards
        self.stacks: dict[int, Stack] = {}

    def begin(self, samples: int) -> None:
        """Start a step on a batch of `samples` samples; shards without samples are skipped."""
        self.present = min(samples, self.shards or 1)
        self.stacks = {}

    def slots(self, shards: int, buckets: Iterable[Bucket]) -> Sequence[int]:
        """Return sets of gradients of buckets that contain no sum that is still needed."""
        stacks = (self.stacks.get(bucket.index) for bucket in buckets)
        used = max((len(stack.blocks) for stack in stacks if stack), default=0)
        return range(used, used + shards)

    def push(self, shard: int | None, bucket: Bucket, grads: np.ndarray) -> None:
        """Add a bucket's gradients of this rank's next shard; those of the first stay in place."""
        if shard is not None:
            self.stacks.setdefault(bucket.index, Stack()).push(shard, grads)

    def start(self, bucket: Bucket) -> Request:
        """Start to replace the bucket's gradients by the sum over all shards."""
        # The first round completes at different times on different ranks. A device executes rounds
        # in the order in which they were started, so all ranks start the second at the same point.
        return Chain(self._sum(bucket), by_test=not self.comm.capturable or self.comm.size == 1)

    def part(self, bucket: Bucket, counts: Sequence[int], out: np.ndarray) -> None:
        """Compute each rank's part of the sum over all shards."""
        nodes, gathered = self._gather(bucket, [0, *accumulate(counts)])
        gathered.wait()
        out[:] = tree_sum(nodes, self.present)

    def add_up(self, parts: Sequence[tuple[int | None, np.ndarray]]) -> tuple[np.ndarray, Request]:
        """Sum small arrays: all ranks receive all blocks."""
        stack, n = Stack(), len(parts[0][1])
        for shard, array in parts:
            if shard is not None:
                stack.push(shard, array.copy())
        runs = self.runs()
        counts = [n * len(run) for run in runs]
        like = parts[0][1]  # determines host or device of new arrays
        whole = np.empty_like(like, shape=sum(counts))
        self.comm.allgather(np.concatenate([like[:0], *stack.blocks.values()]), counts, whole)
        blocks = [block for run in runs for block in run]
        nodes = dict(zip(blocks, whole.reshape(len(blocks), n), strict=True))
        return tree_sum(nodes, self.present), Completed()

    def runs(self) -> tuple[tuple[Subtree, ...], ...]:
        """Return the blocks of every rank."""
        return _runs(tuple(even_cuts(self.shards or 1, self.comm.size)), self.present)

    def own(self, bucket: Bucket) -> list[np.ndarray]:
        """Return the arrays of this rank's blocks of a bucket."""
        stack = self.stacks.pop(bucket.index, None)
        return [] if stack is None else list(stack.blocks.values())

    def _gather(
        self, bucket: Bucket, cuts: Sequence[int]
    ) -> tuple[dict[Subtree, np.ndarray], Request]:
        """Start to gather a part of all blocks of a bucket on the rank that reduces it.

        Returns
        -------
        nodes : dict of Subtree to ndarray
            This rank's part, once the request is complete.
        request : Request
        """
        comm, own, runs = self.comm, self.own(bucket), self.runs()
        mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
        nodes = dict(zip(runs[comm.rank], (array[mine] for array in own), strict=True))
        sends, receives = [], []
        for rank in (other for other in range(comm.size) if other != comm.rank):
            for block in runs[rank]:
                nodes[block] = np.empty_like(bucket.grads[mine])
                receives.append((nodes[block], rank))
        for shift in range(1, comm.size):  # ranks start with different targets
            to = (comm.rank + shift) % comm.size
            theirs = slice(cuts[to], cuts[to + 1])
            sends += [(array[theirs], to) for array in own]
        return nodes, comm.exchange(sends, receives, tag=2 * bucket.index)

    def _sum(self, bucket: Bucket) -> Iterator[Request]:
        """Gather parts, compute the rest of the tree for this rank's part, exchange the results."""
        comm, grads, present = self.comm, bucket.grads, self.present
        cuts = even_cuts(len(grads), comm.size)
        nodes, gathered = self._gather(bucket, cuts)
        yield gathered
        own = tree_sum(nodes, present)
        parts = [grads[a:b] for a, b in pairwise(cuts)]
        if not overlap(own, parts[comm.rank]):
            parts[comm.rank][:] = own
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        sends = [(parts[comm.rank], rank) for rank in others]
        yield comm.exchange(sends, [(parts[rank], rank) for rank in others], 2 * bucket.index + 1)


@cache
def _runs(cuts: tuple[int, ...], present: int) -> tuple[tuple[Subtree, ...], ...]:
    return tuple(tuple(cover(a, min(b, present))) for a, b in pairwise(cuts))
