"""Execution of schedules: a communicator that sums by an algorithm, over any other communicator.

The rounds of an allreduce are messages of the inner communicator. There is no background progress:
every call of `test` or `wait`, on any request, advances all sums in progress as far as their
messages have arrived.

A group and those split off from it share `ActiveSums`, one list of the sums in progress on
this rank. Every blocking call drives all of them, so that no order of calls that is valid for MPI
leads to a deadlock:

- Within one group sums are started in the same order on all ranks. A rank that waits for one drives
  the oldest first, whose messages depend only on ranks that do the same. If sums of several groups
  are in progress there is no common order, and all of them are polled in turn.
- A call that cannot be polled, such as a broadcast, completes the sums of its own group first.
  Those of other groups may depend on ranks that have not reached them yet: so once there are other
  groups, the ranks synchronise by a request before the call, and drive the sums until all arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.checks import MAX_TAG
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules import Algorithm, rounds
from pydtnn.comm.schedules.steps import MessageStep, Part, Round, part
from pydtnn.comm.wrapper import Driving, Wrapper
from pydtnn.utils import clock
from pydtnn.utils.request import Completed, Request

# A schedule compiled for arrays of one length: fractions are converted to slices once.
#
# Long arrays are cut into chunks, each of which passes through the whole schedule by itself: while
# one chunk is added, others are in transit, and all stages of a deep tree are busy.

CHUNK_BYTES = 2 << 20
"""Target length of chunks, in B: the number of chunks is chosen so that they come nearest to it.

Between hosts chunks are faster: 10 MB over 1 Gbit/s take 4 % longer in one chunk than in five if
all ranks are busy in every round, and 9 % longer on a tree. Inside a host five successive chunks
are about 10 % faster than one, because they stay in the cache; with shorter chunks the cost of the
messages exceeds that gain.
"""

ACTIVE = 4
"""Chunks of one array that are in progress at the same time between hosts."""


class Outgoing(NamedTuple):
    """A message to a peer: elements `what` of the chunk."""

    peer: int
    what: slice


class Incoming(NamedTuple):
    """A message from a peer.

    Attributes
    ----------
    peer : int
    where : slice
        Destination elements of the chunk.
    lands : slice or None
        Elements of scratch memory that hold it until the end of the round; None if it is received
        directly at its destination.
    adds : bool
        Whether it is added to the destination or replaces it.
    """

    peer: int
    where: slice
    lands: slice | None
    adds: bool


class RoundTransfers(NamedTuple):
    """One round of one rank."""

    incoming: tuple[Incoming, ...]
    outgoing: tuple[Outgoing, ...]


class Chunk(NamedTuple):
    """A part of the array, its rounds, and the number of scratch elements that they need.

    `number` counts all chunks of the array: a rank may not take part in some of them.
    """

    number: int
    elements: slice
    exchanges: tuple[RoundTransfers, ...]
    scratch: int


def pieces(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of chunks of an array.

    >>> pieces(2_600_000), pieces(10_000_000)
    (1, 5)
    """
    return max(1, round(nbytes / chunk_bytes))


def chunks_in_flight(hosts: Sequence[Hashable]) -> int:
    """Return the number of chunks of one array that are in progress at the same time.

    `ACTIVE`, or 1 if all ranks share a host: no other process could transfer messages while they
    add, and the chunks would evict each other from the caches.

    >>> chunks_in_flight("aab"), chunks_in_flight("aaa")
    (4, 1)
    """
    return 1 if len(set(hosts)) == 1 else ACTIVE


def work_out(rounds: Sequence[Round], n: int, chunks: int) -> tuple[Chunk, ...]:
    """Compute the operations of one rank on an array.

    Parameters
    ----------
    rounds : sequence of Round
        The schedule of this rank.
    n : int
        Elements of the array.
    chunks : int
        Number of chunks of nearly equal length to cut it into.

    Returns
    -------
    tuple of Chunk
        The chunks in which the rank takes part.
    """
    known: dict[int, tuple[RoundTransfers, ...]] = {}  # by length: there are at most two
    result = []
    for index in range(chunks):
        elements = part(index, chunks).elements(n)
        length = elements.stop - elements.start
        if length not in known:
            exchanges = (_exchange(steps, length) for steps in rounds)
            known[length] = tuple(one for one in exchanges if one.incoming or one.outgoing)
        if known[length]:
            scratch = max(map(_scratch, known[length]))
            result.append(Chunk(index, elements, known[length], scratch))
    return tuple(result)


def _exchange(steps: Sequence[MessageStep], n: int) -> RoundTransfers:
    """Return one round on a chunk of `n` elements, without empty messages."""
    outgoing = [
        Outgoing(step.peer, what) for step in steps if (what := _elements(step.send, n)) is not None
    ]
    incoming = [
        (step, where) for step in steps if (where := _elements(step.receive, n)) is not None
    ]
    touched = [what for _, what in outgoing] + [where for _, where in incoming]
    arrivals, scratch = [], 0
    for step, where in incoming:
        lands = None
        # A copy is received in place unless the round sends, or receives, the same elements.
        if step.op == "sum" or sum(_overlap(where, other) for other in touched) > 1:
            lands = slice(scratch, scratch + where.stop - where.start)
            scratch = lands.stop
        arrivals.append(Incoming(step.peer, where, lands, step.op == "sum"))
    return RoundTransfers(tuple(arrivals), tuple(outgoing))


def _elements(what: Part | None, n: int) -> slice | None:
    """Return the elements of a part, or None if there are none."""
    if what is None:
        return None
    elements = what.elements(n)
    return elements if elements.start < elements.stop else None


def _overlap(a: slice, b: slice) -> bool:
    return bool(a.start < b.stop and b.start < a.stop)


def _scratch(exchange: RoundTransfers) -> int:
    """Return the number of scratch elements that a round needs."""
    return max((one.lands.stop for one in exchange.incoming if one.lands), default=0)


try:
    import pydtnn.comm._sum as _sum
except ImportError:  # not compiled: NumPy is used for all types
    _sum = None

Adder = Callable[[np.ndarray, np.ndarray], object]
"""Adds its second argument, an array, to the first one in place."""

COMPILED = ("float32", "float64", "float16", "bfloat16")
"""Names of the element types for which compiled code is used."""


def adder_for(dtype: np.dtype) -> Adder:
    """Return the fastest function that adds contiguous arrays of an element type in place.

    Parameters
    ----------
    dtype : numpy.dtype
        A native integer or float type, or bfloat16 of the package ml_dtypes.
    """
    if _sum is not None and dtype.name in COMPILED:
        adder: Adder = _sum.Adder(dtype.name)
        return adder
    return add


def add(into: np.ndarray, other: np.ndarray) -> None:
    """Add `other` to `into` in place: the reference.

    Floats of 16 bits are added in float32, and the sum is rounded to nearest (ties to even). An
    overflow gives infinity without a warning, as in compiled code.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if into.dtype.name in ("float16", "bfloat16"):
            into[...] = into.astype(np.float32) + other.astype(np.float32)
        else:
            np.add(into, other, out=into)


class ActiveSums:
    """The sums in progress on this rank, of a group and of all groups split off from it.

    Attributes
    ----------
    several : bool
        Whether a group was split off; equal on all ranks between calls, as splits are collective.
    """

    def __init__(self) -> None:
        self.several = False
        self._pending: list[_Sum] = []

    def add(self, request: _Sum) -> None:
        """Add a sum that has just been started."""
        if not request.done:
            self._pending.append(request)

    def advance(self, *, wait: bool = False) -> None:
        """Advance all sums; with `wait` and one group, until the oldest completes a round."""
        pending = self._pending
        alone = wait and not any(request.comm is not pending[0].comm for request in pending)
        for index, request in enumerate(pending):
            request.advance(alone and index == 0)
        self._pending = [request for request in pending if not request.done]
        if wait and not alone:
            clock.current().pause()

    def drive(self, request: Request) -> None:
        """Advance all sums until the request, or all of them, are complete."""
        while self._pending and not request.test():
            self.advance()
            if self._pending:
                clock.current().pause()

    def pending(self, comm: Scheduled) -> bool:
        """Whether sums of a group are in progress."""
        return any(request.comm is comm for request in self._pending)


class Scheduled(Wrapper):
    """Sum arrays by a schedule; forward every other call to another communicator.

    As reproducible as the inner communicator: equal bytes on all ranks, and from run to run. Groups
    that are split off follow the same algorithm on their own hosts.

    Parameters
    ----------
    inner : Communicator
        Transfers the messages. Those of schedules use a separate group, a copy of this one, and
        never match the user's. Collective: all ranks construct one.
    algorithm : str or Algorithm
        A name of `SCHEDULES`, or a user-defined generator function.
    chunk_bytes : int
        Length of the chunks that long arrays are cut into, in B.
    active : int, optional
        Chunks of one array in progress at the same time; by default `chunks_in_flight`.

    Examples
    --------
    >>> from pydtnn.comm import run_threads
    >>> def three(comm):
    ...     x = np.full(5, comm.rank, "float32")
    ...     Scheduled(comm, "ring").allreduce(x)
    ...     return x.tolist()
    >>> run_threads(3, three)[0]
    [3.0, 3.0, 3.0, 3.0, 3.0]
    """

    def __init__(
        self,
        inner: Communicator,
        algorithm: str | Algorithm,
        chunk_bytes: int = CHUNK_BYTES,
        active: int | None = None,
    ) -> None:
        super().__init__(inner)
        self.algorithm = algorithm
        self.chunk_bytes = chunk_bytes
        self.active = active or chunks_in_flight(self.hosts)
        self._requested = active
        self.carrier = inner.split(0)
        self._rounds: dict[str | Algorithm, tuple[Round, ...]] = {}
        self._plans: dict[Any, _ChunkPlan] = {}
        self._scratch: dict[tuple[np.dtype, int], list[np.ndarray]] = {}
        self._tags = 0
        self.family = ActiveSums()

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        self.meet()
        return call(*args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        return Driving(call(*args), self.family.drive, self.family.advance)

    def wrapped(self, group: Communicator) -> Communicator:
        return Scheduled(group, self.algorithm, self.chunk_bytes, self._requested)

    def _split(self, color: int, key: int) -> Communicator:
        group = super()._split(color, key)
        if isinstance(group, Scheduled):
            group.family = self.family
        self.family.several = True
        return group

    def _free(self) -> None:
        self.meet()
        self.carrier.free()
        super()._free()

    def _algorithm_for(self, array: np.ndarray) -> str | Algorithm | None:
        """Return the algorithm of the sum of an array; None for the inner communicator's own."""
        return self.algorithm

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        way = self._algorithm_for(array) if op == "sum" else None
        if way is None:
            super()._allreduce(array, op)
        else:
            self.start(array, way).wait()

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        way = self._algorithm_for(array) if op == "sum" else None
        return super()._iallreduce(array, op) if way is None else self.start(array, way)

    def start(self, array: np.ndarray, algorithm: str | Algorithm) -> Request:
        """Start the sum of an array by an algorithm. Collective: all ranks call it."""
        plan = self._plan(algorithm, array.size, array.dtype)
        # A tag for each chunk, also for ranks that do not take part in it: equal on all ranks, as
        # they start sums in the same order. When tags repeat, their earlier sums are complete.
        tag, self._tags = self._tags, self._tags + plan.pieces
        if not plan.chunks:
            return Completed()
        request = _Sum(self, array, plan, tag)
        self.family.add(request)
        return request

    def meet(self) -> None:
        """Drive pending sums before a call that blocks until all ranks of the group make it.

        Collective: all ranks call it.
        """
        while self.family.pending(self):
            self.family.advance(wait=True)
        if self.family.several:
            request = self.carrier._iallreduce(np.zeros(1, "int32"), "max")
            self.family.drive(request)
            request.wait()

    def _plan(self, algorithm: str | Algorithm, n: int, dtype: np.dtype) -> _ChunkPlan:
        """Return the plan for arrays of a length and type, which is computed once."""
        key = algorithm, n, dtype
        if key not in self._plans:
            if algorithm not in self._rounds:
                self._rounds[algorithm] = rounds(algorithm, self.rank, self.hosts)
            count = pieces(n * dtype.itemsize, self.chunk_bytes)
            chunks = work_out(self._rounds[algorithm], n, count)
            self._plans[key] = _ChunkPlan(chunks, count, adder_for(dtype))
        return self._plans[key]

    def take_scratch(self, n: int, dtype: np.dtype) -> np.ndarray:
        """Return memory of at least `n` elements, reused if possible."""
        length = 1 << (n - 1).bit_length()
        free = self._scratch.setdefault((dtype, length), [])
        return free.pop() if free else np.empty(length, dtype)

    def give_back(self, scratch: np.ndarray) -> None:
        """Return memory of `take_scratch` for reuse."""
        self._scratch[scratch.dtype, scratch.size].append(scratch)


class _ChunkPlan(NamedTuple):
    """The chunks of a rank for arrays of one length and type, and the number of all chunks."""

    chunks: tuple[Chunk, ...]
    pieces: int
    add: Adder


class _Sum(Request):
    """An allreduce in progress: its chunks, some of which have started."""

    def __init__(self, comm: Scheduled, array: np.ndarray, plan: _ChunkPlan, tag: int) -> None:
        self.comm = comm
        self._array = array
        self._add = plan.add
        self._tag = tag
        self._waiting = deque(plan.chunks)
        self._active: list[_Journey] = []
        self.done = False
        self._start()

    def wait(self) -> None:
        while not self.done:
            self.comm.family.advance(wait=True)

    def test(self) -> bool:
        if not self.done:
            self.comm.family.advance()
        return self.done

    def advance(self, wait: bool) -> None:
        """Advance every chunk as far as possible; with `wait`, the oldest by at least a round."""
        for index, journey in enumerate(self._active):
            journey.advance(wait and index == 0)
        if any(journey.done for journey in self._active):
            self._active = [journey for journey in self._active if not journey.done]
            self._start()

    def _start(self) -> None:
        while self._waiting and len(self._active) < self.comm.active:
            chunk = self._waiting.popleft()
            tag = (self._tag + chunk.number) % (MAX_TAG + 1)
            self._active.append(_Journey(self.comm, self._array, chunk, tag, self._add))
        self.done = not self._active


class _Journey:
    """One chunk on its path through the rounds."""

    def __init__(
        self, comm: Scheduled, array: np.ndarray, chunk: Chunk, tag: int, add: Adder
    ) -> None:
        self._comm = comm
        self._array = array[chunk.elements]
        self._scratch = comm.take_scratch(chunk.scratch, array.dtype)
        self._tag = tag
        self._add = add
        self._exchanges = chunk.exchanges
        self._round = 0
        self._requests: list[Request] = []
        self.done = False
        self._post(self._exchanges[0])

    def advance(self, wait: bool) -> None:
        """Start the next round, and further ones while their messages have already arrived."""
        while not self.done and self._arrived(wait):
            self._receive_round(self._exchanges[self._round])
            self._round += 1
            if self._round < len(self._exchanges):
                self._post(self._exchanges[self._round])
            else:
                self._comm.give_back(self._scratch)
                self.done = True
            wait = False

    def _arrived(self, wait: bool) -> bool:
        requests = self._requests
        while requests:
            if wait:
                requests[-1].wait()
            elif not requests[-1].test():
                return False
            requests.pop()
        return True

    def _post(self, exchange: RoundTransfers) -> None:
        array, scratch, tag = self._array, self._scratch, self._tag
        requests, carrier = self._requests, self._comm.carrier
        for peer, where, lands, _ in exchange.incoming:
            into = array[where] if lands is None else scratch[lands]
            requests.append(carrier._irecv(into, peer, tag))
        for peer, what in exchange.outgoing:
            requests.append(carrier._isend(array[what], peer, tag))

    def _receive_round(self, exchange: RoundTransfers) -> None:
        """Add the received values, in the order of the steps, which is always the same."""
        added = 0
        for _, where, lands, adds in exchange.incoming:
            if adds and lands is not None:
                self._add(self._array[where], self._scratch[lands])
                added += lands.stop - lands.start
            elif lands is not None:
                self._array[where] = self._scratch[lands]
        if added:
            clock.current().add(added * self._array.itemsize)
