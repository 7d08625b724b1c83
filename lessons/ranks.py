"""Ranks that send each other arrays: the processes of mpirun, or else threads of this process.

A lesson needs two operations, `Rank.send` and `Rank.receive`, which count messages and bytes. The
sums and gathers below are made of them, as lessons 04 and 05 show, so that all bytes are counted.
"""

from __future__ import annotations

import argparse
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray

TIMEOUT_S = 60.0
"""Seconds after which a rank that waits for a message reports an error."""


class Rank:
    """One of `size` ranks.

    Attributes
    ----------
    rank, size : int
    messages, nbytes : int
        What this rank has sent.
    """

    def __init__(self, rank: int, size: int, boxes: Any) -> None:
        self.rank, self.size, self.boxes = rank, size, boxes
        self.messages = self.nbytes = 0

    def send(self, array: Array, to: int) -> None:
        """Send a copy of an array; do not wait for its receiver."""
        self.messages += 1
        self.nbytes += array.nbytes
        self.boxes.put(self.rank, to, np.array(array))

    def receive(self, source: int) -> Array:
        """Return the next array that `source` has sent to this rank."""
        return self.boxes.get(source, self.rank)

    def group(self, members: Sequence[int]) -> Rank:
        """Return this rank among some ranks, numbered from 0; what it sends is counted here."""
        return Group(self, members)

    def ring(self, array: Array) -> Iterator[None]:
        """Sum an array over all ranks in place; `yield` while messages are under way.

        Bytes sent: ``2 (P - 1) ceil(n / P)`` elements of `array`.
        """
        flat, parts = array.reshape(-1), self.size
        length = math.ceil(flat.size / parts)
        chunks = np.zeros((parts, length), array.dtype)  # (P, n / P), the last one padded
        chunks.reshape(-1)[: flat.size] = flat
        right, left = (self.rank + 1) % parts, (self.rank - 1) % parts
        for i in range(2 * parts - 2):  # P - 1 rounds that add, then P - 1 that copy
            self.send(chunks[(self.rank - i) % parts], right)
            yield
            chunk = self.receive(left)
            target = chunks[(self.rank - i - 1) % parts]
            target[:] = chunk + target if i < parts - 1 else chunk
        flat[:] = chunks.reshape(-1)[: flat.size]

    def allreduce(self, array: Array) -> Array:
        """Sum an array over all ranks in place, and return it."""
        for _ in self.ring(array):
            pass
        return array

    def allgather(self, array: Array) -> list[Array]:
        """Return the arrays of all ranks. Each rank sends ``(P - 1) n`` elements."""
        parts = {self.rank: np.array(array)}
        for i in range(self.size - 1):
            self.send(parts[(self.rank - i) % self.size], (self.rank + 1) % self.size)
            parts[(self.rank - i - 1) % self.size] = self.receive((self.rank - 1) % self.size)
        return [parts[rank] for rank in range(self.size)]

    def allgather_lists(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays of all ranks, in the order of ranks; they may have any sizes."""
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        for to in range(self.size):
            if to != self.rank:
                self.send(flat, to)
        return [flat if r == self.rank else self.receive(r) for r in range(self.size)]

    def reduce_scatter(self, parts: Sequence[Array]) -> Array:
        """Return the sum of `parts[rank]` of all ranks. Each rank sends the other P - 1 parts."""
        for to in range(self.size):
            if to != self.rank:
                self.send(parts[to], to)
        received = (self.receive(rank) for rank in range(self.size) if rank != self.rank)
        return sum(received, np.array(parts[self.rank]))

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """Send `parts[to]` to each rank; return what the ranks have sent to this one."""
        for to in range(self.size):
            if to != self.rank:
                self.send(parts[to], to)
        return [
            parts[rank] if rank == self.rank else self.receive(rank) for rank in range(self.size)
        ]


class Group(Rank):
    """A rank among the members of a group; its messages are those of the rank of all."""

    def __init__(self, parent: Rank, members: Sequence[int]) -> None:
        super().__init__(members.index(parent.rank), len(members), None)
        self.parent, self.members = parent, members

    def send(self, array: Array, to: int) -> None:
        self.parent.send(array, self.members[to])

    def receive(self, source: int) -> Array:
        return self.parent.receive(self.members[source])


class Threads:
    """Messages between threads: a queue for each pair of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: dict[Any, queue.SimpleQueue[Any]] = {
            (source, to): queue.SimpleQueue() for source in range(size) for to in range(size)
        }

    def put(self, source: int, to: int, array: Array) -> None:
        self.queues[source, to].put(array)

    def get(self, source: int, to: int) -> Array:
        array = self.queues[source, to].get(timeout=TIMEOUT_S)
        if array is None:
            raise RuntimeError(f"rank {to}: rank {source} has failed")
        return array

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """Call a function on all ranks, and return their results; raise the first error of one."""
        errors: list[BaseException] = []
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = function(Rank(rank, self.size, self))
            except BaseException as error:  # it is raised in the main thread
                errors.append(error)
                for to in range(self.size):
                    self.put(rank, to, None)  # type: ignore[arg-type]

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class Processes:
    """Messages between the processes of mpirun."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.requests = comm, list[Any]()

    def put(self, source: int, to: int, array: Array) -> None:
        self.requests.append(self.comm.isend(array, to))

    def get(self, source: int, to: int) -> Array:
        return self.comm.recv(source=source)

    def run(self, function: Callable[[Rank], None]) -> None:
        """Call a function on this rank; an error ends all ranks."""
        try:
            function(Rank(self.comm.rank, self.comm.size, self))
            for request in self.requests:
                request.wait()
        except BaseException:
            import traceback

            traceback.print_exc()
            self.comm.Abort(1)


def main(
    train: Callable[[Rank], Array],
    bytes_sent: Callable[[int], int],
    formula: str,
    library: str,
    *,
    serial: Callable[[int], Array] | None = None,
    tolerance: float = 1e-12,
) -> None:
    """Train on all ranks and on one, compare, and print messages and bytes beside the formula.

    Parameters
    ----------
    train : callable
        The lesson: returns what must not depend on the number of ranks, the parameters in the end.
    bytes_sent : callable
        Bytes that rank 0 sends, by the number of ranks.
    formula : str
        The same for people, for several ranks.
    library : str
        Where the library does it.
    serial : callable, optional
        Returns the same result for a number of ranks without messages; by default `train` on one.
    tolerance : float
        Largest difference; 0 requires equal bits.
    """
    parser = argparse.ArgumentParser(description=train.__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="threads, if not started by mpirun")
    options = parser.parse_args()

    def lesson(rank: Rank) -> None:
        expected = serial(rank.size) if serial else train(Rank(0, 1, None))
        result = train(rank)
        difference = float(np.max(np.abs(result - expected)))
        assert difference <= tolerance, f"rank {rank.rank}: differs from serial by {difference}"
        if rank.rank == 0:
            needed = bytes_sent(rank.size)
            print(f"{rank.size} rank{'s' * (rank.size > 1)}, largest", end=" ")
            print(f"difference from one process {difference:.1e}")
            print(f"rank 0 sent {rank.messages} messages, {rank.nbytes} bytes")
            if rank.size > 1:
                print(f"by the formula {formula}: {needed}")
            print(f"in the library: {library}")
            assert rank.nbytes == needed, f"sent {rank.nbytes} bytes, by the formula {needed}"

    world(options.ranks).run(lesson)


def world(ranks: int) -> Threads | Processes:
    """Return the processes of mpirun if there are several, else so many threads."""
    try:
        from mpi4py import MPI
    except ImportError:
        return Threads(ranks)
    return Processes(MPI.COMM_WORLD) if MPI.COMM_WORLD.size > 1 else Threads(ranks)
