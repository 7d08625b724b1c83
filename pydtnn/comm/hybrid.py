"""Hybrid of processes and threads: ranks are threads of several processes, in any division.

A network that is cut over 4 ranks has the same kernels and shapes whether 1, 2 or 4 processes
compute these ranks. Messages between threads of a process are copied once, in its memory; those
between processes are messages of the processes, with tags that name the group and both threads.
All sums are added in the order of the ranks, so that every result has the same bytes for any number
of processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, pairwise
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.checks import MAX_TAG, overlap
from pydtnn.comm.communicator import Communicator, be_rank
from pydtnn.comm.meeting import divide, reduce_in_order
from pydtnn.comm.schedules.rule import without_rule
from pydtnn.comm.thread import ThreadCommunicator, run_threads
from pydtnn.comm.traffic import Traffic
from pydtnn.comm.waiting import sleep_until
from pydtnn.utils import clock
from pydtnn.utils.collective import call_difference
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.observer import Kind
from pydtnn.utils.request import Chain, Forwarding, Request
from pydtnn.utils.split import even_cuts

TAGS = 2 * (MAX_TAG + 1)
"""Tags of a group of ranks: those of messages, and as many for collectives."""

CODES = 1 << 13
"""Numbers of a group and two threads: with `TAGS`, tags that MPI libraries support."""

MAX_THREADS = 16
"""Ranks of a process, of which there are several."""


class ThreadOfProcess(NamedTuple):
    """The process that computes a rank, and the number of its thread there."""

    process: int
    thread: int


@dataclass
class _Origin:
    """What the groups of a rank share: the processes, most threads of one, numbers of groups."""

    processes: Communicator
    threads: int
    numbers: set[int] = field(default_factory=lambda: {0})  # in use


class HybridCommunicator(Communicator):
    """One rank of a group whose ranks are threads of several processes; made by `run_hybrid`.

    All ranks are on one host, as far as they know: nothing may depend on where they are.

    Parameters
    ----------
    origin : _Origin
    local : ThreadCommunicator
        The ranks of the group in this process, in their order.
    places : sequence of ThreadOfProcess
        Of all ranks of the group.
    rank : int
    number : int
        Of the group: another one than those of other groups that a rank of it belongs to.
    """

    def __init__(
        self,
        origin: _Origin,
        local: ThreadCommunicator,
        places: Sequence[ThreadOfProcess],
        rank: int,
        number: int = 0,
    ) -> None:
        super().__init__(rank, [0] * len(places), local.traffic)
        self._origin, self._local, self._places = origin, local, places
        self._number, self._turns = number, 0
        here = [r for r, place in enumerate(places) if place.process == places[rank].process]
        self._near = {r: index for index, r in enumerate(here)}
        self._peers = [(rank + shift) % self.size for shift in range(1, self.size)]

    def share(self, make: Callable[[], Any]) -> Any:
        return self._local.share(make)

    def abort(self, code: int) -> None:
        self._origin.processes.abort(code)

    # -- messages ---------------------------------------------------------------------------------

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        if to in self._near:
            return self._local._isend(array, self._near[to], tag)
        start, code = clock.now_ns(), self._code(self.rank, to, tag)
        sent = self._origin.processes._isend(array, self._places[to].process, code)
        request = _Passing(self, sent, to)
        return self._report_message(request, Kind.SENT, start, to, tag, array.nbytes)

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        if source is None:
            raise ValueError(
                "recv: which rank sends first depends on processes that share ranks; name a rank"
            )
        if source in self._near:
            return _Passing(self, self._local._irecv(array, self._near[source], tag), source)
        start, code = clock.now_ns(), self._code(source, self.rank, tag)
        received = self._origin.processes._irecv(array, self._places[source].process, code)
        request = _Passing(self, received, source)
        return self._report_message(request, Kind.RECEIVED, start, source, tag, array.nbytes)

    def _code(self, source: int, to: int, tag: int) -> int:
        """Return the tag of a message between processes."""
        threads = self._origin.threads
        pair = self._places[source].thread * threads + self._places[to].thread
        return (self._number * threads**2 + pair) * TAGS + tag

    # -- collectives ------------------------------------------------------------------------------

    def _turn(self) -> int:
        """Return the tag of the next round of a collective call."""
        self._turns += 1
        return MAX_TAG + 1 + self._turns % (MAX_TAG + 1)

    def _all_to_all(
        self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray], tag: int
    ) -> Request:
        """Start to send each other rank its array, and to receive one from each."""
        others = self._peers
        return self._exchange(
            [(sends[r], r) for r in others], [(receives[r], r) for r in others], tag
        )

    def _barrier(self) -> None:
        self._allgather(np.zeros(1, np.uint8), [1] * self.size, np.empty(self.size, np.uint8))

    def _gather_object(self, value: Any) -> list[Any]:
        own = pickle.dumps((f"gather_object{self.traffic.within}", value))
        lengths = np.empty(self.size, np.int64)
        self._allgather(np.array([len(own)]), [1] * self.size, lengths)
        whole = np.empty(lengths.sum(), np.uint8)
        self._allgather(np.frombuffer(own, np.uint8), lengths.tolist(), whole)
        parts = np.split(whole, np.cumsum(lengths)[:-1])
        calls, values = zip(*(pickle.loads(part.tobytes()) for part in parts), strict=True)
        if len({*calls}) > 1:
            raise AgreedError(call_difference(calls))
        return [*values]

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        return Chain(self._sum(array, op, self._turn()))

    def _sum(self, array: np.ndarray, op: str, tag: int) -> Iterator[Request]:
        """Reduce the arrays of all ranks on each of them.

        In one round, after which no rank needs another one that may be in a call of another group.
        """
        arrived = [array if r == self.rank else np.empty_like(array) for r in range(self.size)]
        yield self._all_to_all([array] * self.size, arrived, tag)
        array[:] = reduce_in_order(arrived, op)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        nothing = array[:0]
        sends = [array if self.rank == root else nothing] * self.size
        receives = [array if r == root else nothing for r in range(self.size)]
        self._all_to_all(sends, receives, self._turn()).wait()

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        parts = np.split(array, np.cumsum(counts)[:-1])
        arrived = [parts[r] if r == self.rank else np.empty_like(out) for r in range(self.size)]
        self._all_to_all(parts, arrived, self._turn()).wait()
        out[:] = reduce_in_order(arrived, "sum")

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        parts = [out[a:b] for a, b in pairwise([0, *accumulate(counts)])]
        if not overlap(array, parts[self.rank]):
            parts[self.rank][:] = array
        self._all_to_all([array] * self.size, parts, self._turn()).wait()

    def _split(self, color: int, key: int) -> Communicator:
        origin = self._origin
        wishes = self._gather_object((color, key, self.rank, origin.numbers))
        used = {*chain.from_iterable(numbers for *_, numbers in wishes)}
        number = next(n for n in count() if n not in used)
        if number >= CODES // origin.threads**2:
            raise AgreedError(
                f"split: expected at most {number} groups at a time with up to {origin.threads} "
                "ranks in a process; free others, or start more processes"
            )
        chosen = divide([(color, key, rank) for color, key, rank, _ in wishes])[color]
        places = [self._places[rank] for rank in chosen]
        local = self._local._split(color, key)
        assert isinstance(local, ThreadCommunicator)
        group: Communicator = local
        if local.size < len(places):
            origin.numbers.add(number)
            group = HybridCommunicator(origin, local, places, chosen.index(self.rank), number)
            group.members = [self.members[rank] for rank in chosen]
        group.name = f"{self.name}/{self._turns}.{color}"
        return group

    def _free(self) -> None:
        self._barrier()
        self._origin.numbers.discard(self._number)


class _Passing(Forwarding):
    """A message of a rank whose process has others: it waits without keeping them from working."""

    def __init__(self, comm: HybridCommunicator, inner: Request, peer: int) -> None:
        super().__init__(inner)
        self._comm, self._peer = comm, peer

    @property
    def source(self) -> int:
        return self._peer

    def wait(self) -> None:
        if self._comm._origin.threads > 1 and self._peer not in self._comm._near:
            sleep_until(self.test)
        else:
            self.inner.wait()

    def test(self) -> bool:
        return self._comm._local._world.passed(self.inner.test())


def run_hybrid(
    comm: Communicator, ranks: int, function: Callable[[Communicator], Any]
) -> list[Any]:
    """Call `function(own)` on ranks that are threads of processes, as `run_threads` does.

    Collective: all processes call it.

    Parameters
    ----------
    comm : Communicator
        The processes, at most as many as ranks.
    ranks : int
    function : callable

    Returns
    -------
    list
        The results of the ranks of this process.
    """
    cuts = even_cuts(ranks, comm.size)
    most = max(b - a for a, b in pairwise(cuts))
    if comm.size > ranks:
        raise AgreedError(
            f"{ranks} ranks can be shared by at most {ranks} processes, got {comm.size}; "
            "start fewer"
        )
    if comm.size > 1 and most > MAX_THREADS:
        raise AgreedError(
            f"{ranks} ranks require one process, or several with at most {MAX_THREADS} of them "
            f"each, got {comm.size}; start {-(-ranks // MAX_THREADS)} or more"
        )
    places = [
        ThreadOfProcess(p, t) for p, (a, b) in enumerate(pairwise(cuts)) for t in range(b - a)
    ]
    processes = without_rule(comm).split(0)
    processes.traffic = Traffic()  # those of the ranks are counted, and reported

    def run(local: Communicator) -> Any:
        assert isinstance(local, ThreadCommunicator)
        if comm.size == 1:
            return function(local)
        rank = cuts[comm.rank] + local.rank
        own = HybridCommunicator(_Origin(processes, most), local, places, rank)
        be_rank(own)
        return function(own)

    return run_threads(len(range(*cuts[comm.rank : comm.rank + 2])), run, first=cuts[comm.rank])
