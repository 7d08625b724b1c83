"""The communicator of a virtual rank: values as between threads, times of a network."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from pydtnn.comm.communicator import Request
from pydtnn.comm.meeting import (
    Call,
    Meeting,
    MeetingCommunicator,
    allreduce_call,
    divide,
    reduce_in_order,
)
from pydtnn.comm.messages import Messages
from pydtnn.comm.world import Ended
from pydtnn.perfmodel.engine.engine import Completion, Engine
from pydtnn.perfmodel.engine.post import PostOffice
from pydtnn.perfmodel.engine.processor import Processor
from pydtnn.perfmodel.virtual.library import library_times
from pydtnn.utils.clock import now_ns
from pydtnn.utils.errors import RankError
from pydtnn.utils.observer import Kind, Observer


class Group:
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


class _Times:
    """A meeting, the times at which ranks arrive, and the completions of their calls."""

    def __init__(self, members: Sequence[int]) -> None:
        self.meeting = Meeting(len(members))
        self.joined = [0.0] * len(members)
        self.left = [Completion(rank) for rank in members]
        self.nbytes = 0


@dataclass
class Buffers:
    """Memory of an MPI library for the pending sums of a rank: as long as their arrays.

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
    """

    def __init__(
        self,
        group: Group,
        rank: int,
        observer: Observer,
        messages: Messages | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        super().__init__(rank, group.hosts)
        self.buffers = buffers or Buffers()
        self.members = group.members
        self._observer = observer
        self._group, self._engine = group, group.engine
        self._own = group.members[rank]
        self._messages = messages or Messages()
        self._turn = 0

    @property
    def own_observer(self) -> Observer:
        return self._observer

    def observe(self, observer: Observer | None) -> None:
        self._messages.observe(observer, self.members)

    def abort(self, code: int) -> NoReturn:
        self._engine.end(RankError(self.rank, f"aborted with status {code}"))
        raise Ended(f"rank {self.rank}: aborted with status {code}")

    def pause(self) -> None:
        self._engine.pause(self._own)

    def adds(self, nbytes: int) -> None:
        self._engine.spend(self._own, nbytes * self._engine.network.add)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        def combine(arrays: list[np.ndarray]) -> np.ndarray:
            return reduce_in_order(arrays, op)

        call = allreduce_call(array, op)
        if self.size > 1:
            self.buffers.take(array.nbytes)
        return _Reduction(self, call, self._join(call, array, combine), array)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        start = now_ns()
        done = self._group.office.send(self.rank, to, tag, array)
        sent = _Transfer(self, lambda: f"send to rank {to} (tag {tag})", done, None)
        return self._reported(sent, Kind.SENT, start, to, tag, array.nbytes)

    def _irecv(self, array: np.ndarray, source: int, tag: int) -> Request:
        start = now_ns()
        done = self._group.office.receive(source, self.rank, tag, array)
        received = _Transfer(self, lambda: f"recv from rank {source} (tag {tag})", done, array)
        return self._reported(received, Kind.RECEIVED, start, source, tag, array.nbytes)

    def _reported(
        self, request: Request, kind: Kind, start: int, peer: int, tag: int, size: int
    ) -> Request:
        return self._messages.reported(
            request,
            kind,
            self._group.name,
            start=start,
            peer=self.members[peer],
            tag=tag,
            size=size,
        )

    def _split(self, color: int, key: int) -> VirtualCommunicator:
        name = f"{self._group.name}/{self._turn}"

        def combine(wishes: list[tuple[int, int, int]]) -> dict[int, tuple[Group, int]]:
            places = {}
            for color, chosen in divide(wishes).items():
                members = [self.members[rank] for rank in chosen]
                group = Group(self._engine, self._group.processor, f"{name}.{color}", members)
                places.update({rank: (group, place) for place, rank in enumerate(chosen)})
            return places

        call = Call("split", "split", 16)
        group, place = self._meet(call, (color, key, self.rank), combine)[self.rank]
        return VirtualCommunicator(group, place, self._observer, self._messages, self.buffers)

    def _meet(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        return self._finish(call, self._join(call, value, combine))

    def _join(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> _Times:
        """Bring `value` to this rank's next meeting, at the present time of its clock."""
        turn, self._turn = self._turn, self._turn + 1
        group, engine, rank = self._group, self._engine, self.rank
        times = group.meetings.setdefault(turn, _Times(self.members))

        def arrive() -> None:
            times.joined[rank] = engine.now
            times.nbytes = max(times.nbytes, call.nbytes)
            if times.meeting.join(rank, call, value, combine):
                del group.meetings[turn]
                nbytes = 0 if self._adds(call) else times.nbytes
                left = library_times(call.kind, nbytes, times.joined, group.hosts, engine)
                for done, at in zip(times.left, left, strict=True):
                    engine.complete(done, at)

        if self.size > 1:
            engine.spend(self._own, group.processor.call)
        engine.post(self._own, arrive)
        return times

    def _adds(self, call: Call) -> bool:
        """Return whether the processors of the ranks add and copy the arrays of a call."""
        group = self._group
        return call.kind == "allreduce" and group.processor.add > 0 and len({*group.hosts}) == 1

    def _finish(self, call: Call, times: _Times) -> Any:
        self._engine.wait(
            self._own,
            times.left[self.rank],
            lambda: f"{call.text} (without rank {times.meeting.missing()})",
        )
        if times.meeting.problem:
            raise ValueError(times.meeting.problem)
        if self._adds(call) and self.size > 1:
            self._engine.spend(self._own, times.nbytes * self._group.processor.add)
        return times.meeting.result


@dataclass(eq=False)
class _Reduction(Request):
    """A pending allreduce: the result is copied to the rank's array by `wait` or `test`."""

    comm: VirtualCommunicator
    call: Call
    times: _Times
    array: np.ndarray | None

    def wait(self) -> None:
        if self.array is not None:
            self.array[:] = self.comm._finish(self.call, self.times)
            if self.comm.size > 1:
                self.comm.buffers.take(-self.array.nbytes)
            self.array = None

    def test(self) -> bool:
        comm = self.comm
        if self.array is not None and comm._engine.test(comm._own, self.times.left[comm.rank]):
            self.wait()
        return self.array is None


@dataclass(eq=False)
class _Transfer(Request):
    """A pending message."""

    comm: VirtualCommunicator
    doing: Callable[[], str]
    done: Completion
    received: np.ndarray | None  # which the rank has to copy

    def wait(self) -> None:
        self.comm._engine.wait(self.comm._own, self.done, self.doing)
        self._complete()

    def test(self) -> bool:
        done = self.comm._engine.test(self.comm._own, self.done)
        if done:
            self._complete()
        return done

    def _complete(self) -> None:
        if self.done.problem:
            raise ValueError(self.done.problem)
        if self.received is not None:
            array, self.received = self.received, None
            self.comm._group.office.take(self.comm.rank, array)
