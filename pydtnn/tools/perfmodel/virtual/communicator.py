"""The communicator of a virtual rank: values as between threads, times of a network."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from pydtnn.comm.meeting import Call, Meeting, MeetingCommunicator
from pydtnn.comm.schedules.steps import doublings
from pydtnn.comm.thread import Ended, name_source
from pydtnn.comm.traffic import Traffic
from pydtnn.tools.perfmodel.engine.engine import Completion, Engine
from pydtnn.tools.perfmodel.engine.post import PostOffice
from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.network import Network, Pair
from pydtnn.tools.perfmodel.patterns import PIECE, library_terms
from pydtnn.utils.clock import now_ns
from pydtnn.utils.errors import RankError
from pydtnn.utils.observer import Kind
from pydtnn.utils.request import Request


def library_costs(
    kind: str, nbytes: int, network: Network, members: Sequence[int], executed: int
) -> tuple[float, float, list[Pair]]:
    """Return what a collective call takes after the last rank has joined.

    It consists of the latencies of a tree, and of the bytes that pass each route of a ring. Where
    these take less time than the latencies, they share no links with other messages.

    Parameters
    ----------
    kind : str
        Name of the call.
    nbytes : int
        Length of the whole array, in B.
    network : Network
    members : sequence of int
        The ranks of the group.
    executed : int
        Number of the ranks that are executed, which are the first ones.

    Returns
    -------
    seconds, nbytes : float
    pairs : list of Pair
        The routes on which executed ranks send so many bytes.
    """
    rounds, sent = library_terms(kind, len(members))
    if not rounds:
        return 0.0, 0.0, []
    first = [*{network.hosts[rank]: rank for rank in reversed(members)}.values()][::-1]
    if len(first) == 1:
        first = [*members]
    tree = ((first[0], first[distance]) for distance in doublings(len(first)))
    ring = [*pairwise((*first, first[0]))]
    routes = [network.routes[pair] for pair in {network.pair(*two) for two in (*ring, *tree)}]
    latency = rounds * max(route.latency for route in routes)
    rates = {link: network.links[link] for route in routes for link in route.links}
    seconds = sent * nbytes / min([*rates.values(), *(route.bandwidth for route in routes)])
    if seconds <= latency:
        return latency + seconds, 0.0, []
    return latency, sent * nbytes, [network.pair(*two) for two in ring if two[0] < executed]


@dataclass
class Copies:
    """Copying of a rank, part of which takes place while the rank waits.

    Attributes
    ----------
    pending : int
        Messages that are not complete.
    waited : float
        Time in s for which the rank has waited since there are any, and has not yet used to copy.
    """

    pending: int = 0
    waited: float = 0.0

    def complete(self, seconds: float, last: float) -> float:
        """Return for how long a rank still copies when one of its messages is complete.

        Parameters
        ----------
        seconds : float
            Time to copy the message.
        last : float
            Time to copy its last piece.
        """
        hidden = min(self.waited, seconds - last)
        self.pending -= 1
        self.waited = self.waited - hidden if self.pending else 0.0
        return seconds - hidden


class VirtualGroup:
    """State shared by the communicators of one group.

    Parameters
    ----------
    engine : Engine
    processor : Processor
    name : str
    members : sequence of int
        Its ranks, numbered among all ranks of the run.
    """

    def __init__(
        self, engine: Engine, processor: Processor, name: str, members: Sequence[int]
    ) -> None:
        self.engine, self.processor, self.name, self.members = engine, processor, name, members
        self.hosts: list[Hashable] = [engine.network.hosts[rank] for rank in members]
        self.office = PostOffice(engine, members, processor)
        self.meetings: dict[int, _Times] = {}
        self.executed = [rank for rank in members if rank < engine.executed]

    def everyone(self, values: list[Any], kind: str) -> list[Any]:
        """Return the values of all ranks: colors and keys of splits continue, others repeat."""
        n, own = self.engine.alike, dict(zip(self.executed, values, strict=True))
        if n is None:
            return values
        found = []
        for place, rank in enumerate(self.members):
            pair = [own[r] for r in (rank % n, rank % n + n) if r in own]
            if kind == "split":
                ends = zip(pair[0][:2], pair[-1][:2], strict=True)
                found.append((*(x + rank // n * (y - x) for x, y in ends), place))
            else:
                found.append(own.get(rank, pair[0]))
        return found


class _Times:
    """A meeting, and the completions of the calls of its ranks."""

    def __init__(self, members: Sequence[int]) -> None:
        self.meeting = Meeting(len(members))
        self.left = [Completion(rank) for rank in members]
        self.nbytes = 0


@dataclass
class Buffers:
    """Memory of an MPI library for the pending sums of a rank.

    That of an all-reduce is as long as its array; a reduce-scatter takes two such arrays, and its
    result, which callers allocate for the call only.

    Attributes
    ----------
    pending, most : int
        Bytes now, and the most so far.
    """

    pending: int = 0
    most: int = 0

    def take(self, nbytes: int) -> None:
        """Allocate memory for a sum; a negative number of bytes returns it."""
        self.pending += nbytes
        self.most = max(self.most, self.pending)


class VirtualCommunicator(MeetingCommunicator):
    """One rank of a group of virtual ranks; created by `run_virtual` and `split`.

    Values are those of `run_threads`: reductions run in the order of the ranks.

    Attributes
    ----------
    buffers : Buffers
        Of all groups of the rank.
    copies : Copies
        Of all groups of the rank.
    """

    def __init__(self, group: VirtualGroup, rank: int, traffic: Traffic | None = None) -> None:
        super().__init__(group, rank, traffic)
        self.buffers, self.copies = Buffers(), Copies()
        self._engine = group.engine
        self._own = group.members[rank]

    def abort(self, code: int) -> NoReturn:
        self._engine.end(RankError(self.rank, f"aborted with status {code}"))
        raise Ended(f"rank {self.rank}: aborted with status {code}")

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        if self.size > 1:
            self.buffers.take(array.nbytes)
        return super()._iallreduce(array, op)

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        taken = 2 * array.nbytes + out.nbytes if self.size > 1 else out.nbytes
        self.buffers.take(taken)
        super()._reduce_scatter(array, counts, out)
        self.buffers.take(-taken)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        start = now_ns()
        done = self._group.office.send(self.rank, to, tag, array)
        sent = _VirtualRequest(self, f"send to rank {to} (tag {tag})", done, to, array.nbytes)
        return self._report_message(sent, Kind.SENT, start, to, tag, array.nbytes)

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        start = now_ns()
        done = self._group.office.receive(source, self.rank, tag, array)
        doing = f"recv from {name_source(source)} (tag {tag})"
        received = _VirtualRequest(self, doing, done, source, array.nbytes)
        return self._report_message(received, Kind.RECEIVED, start, source, tag, array.nbytes)

    def _create_group(self, name: str, members: list[int]) -> VirtualGroup:
        return VirtualGroup(self._engine, self._group.processor, name, members)

    def _create_member(self, group: VirtualGroup, rank: int) -> VirtualCommunicator:
        member = VirtualCommunicator(group, rank, self.traffic)
        member.buffers, member.copies = self.buffers, self.copies
        return member

    def _join(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> _Times:
        """Bring `value` to this rank's next meeting, at the present time of its clock."""
        turn, self._turn = self._turn, self._turn + 1
        group, engine, rank = self._group, self._engine, self.rank
        times = group.meetings.setdefault(turn, _Times(group.executed))

        def together(values: list[Any]) -> Any:
            found = combine(group.everyone(values, call.kind))
            if engine.alike and call.kind == "allgather":  # of parts that may differ by a unit
                return np.resize(found, call.nbytes // found.itemsize)
            return found

        def arrive() -> None:
            times.nbytes = max(times.nbytes, call.nbytes)
            if times.meeting.join(rank, call, value, together):
                del group.meetings[turn]
                self._leave(call, times)

        if self.size > 1:
            engine.spend(self._own, group.processor.call)
        engine.post(self._own, arrive)
        return times

    def _leave(self, call: Call, times: _Times) -> None:
        """Let all ranks leave a collective call when its bytes have passed the network."""
        engine, nbytes = self._engine, 0 if self._adds(call) else times.nbytes
        given = engine.network, self._group.members, engine.executed
        seconds, sent, pairs = library_costs(call.kind, nbytes, *given)
        left = [*pairs]

        def passed() -> None:
            del left[:1]
            if not left:
                for done in times.left:
                    engine.complete(done, engine.now + seconds)

        for pair in pairs:
            engine.transfer(pair, sent, passed, follows=True)
        if not pairs:
            passed()

    def _adds(self, call: Call) -> bool:
        """Return whether the processors of the ranks add and copy the arrays of a call."""
        group = self._group
        return call.kind == "allreduce" and group.processor.add > 0 and len({*group.hosts}) == 1

    def _finish(self, call: Call, times: _Times) -> Any:
        left = times.left[self.rank]
        self._wait(left, lambda: f"{call.text} (without rank {times.meeting.missing()})")
        if times.meeting.problem:
            raise ValueError(times.meeting.problem)
        if call.kind == "allreduce" and self.size > 1:
            self.buffers.take(-call.nbytes)
            if self._adds(call):
                nbytes = times.nbytes * (1 - 1 / self.size)
                self._engine.spend(self._own, nbytes * self._group.processor.add)
        return times.meeting.result

    def _wait(self, done: Completion, doing: Callable[[], str]) -> None:
        engine, own = self._engine, self._own
        before = engine.clock(own)
        engine.wait(own, done, doing)
        waited = engine.clock(own) - before
        if self.copies.pending:
            self.copies.waited += waited
        if waited:
            engine.sleep(own, self._group.processor.notice(waited))
        if tests := self._group.processor.testing(waited):
            engine.post(own, lambda: engine.work(own, tests))

    def _ended(self, times: _Times) -> bool:
        return self._engine.test(self._own, times.left[self.rank])


class _VirtualRequest(Request):
    """A pending message, whose bytes are copied by the processors of both ranks.

    A rank that waits copies them while they arrive, except for the last piece.
    """

    def __init__(
        self,
        comm: VirtualCommunicator,
        doing: str,
        done: Completion,
        peer: int | None,
        nbytes: int,
    ) -> None:
        self._comm, self._doing, self._done = comm, doing, done
        copying = comm._group.office.copying(comm.rank, peer)
        self._seconds, self._last = copying * nbytes, copying * min(nbytes, PIECE)
        if self._seconds:
            comm.copies.pending += 1

    @property
    def source(self) -> int:
        return self._done.source

    def wait(self) -> None:
        self._comm._wait(self._done, lambda: self._doing)
        self._complete()

    def test(self) -> bool:
        done = self._comm._engine.test(self._comm._own, self._done)
        if done:
            self._complete()
        return done

    def _complete(self) -> None:
        if self._done.problem:
            raise ValueError(self._done.problem)
        if self._seconds:
            comm, seconds, self._seconds = self._comm, self._seconds, 0.0
            comm._engine.spend(comm._own, comm.copies.complete(seconds, self._last))
