"""Collective calls between ranks of one process, in which their values meet."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.traffic import Traffic
from pydtnn.utils.request import Request

WISH = 16
"""Bytes of a rank's color and key in a split."""

_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Call(NamedTuple):
    """A collective call; that of all ranks must be equal, besides the length of objects.

    Attributes
    ----------
    kind : str
        Name of the method of the communicator, such as "broadcast".
    text : str
        Describes it in errors.
    nbytes : int
        Length of the whole array, or of this rank's object, in B.
    """

    kind: str
    text: str
    nbytes: int = 0


class MeetingCommunicator(Communicator):
    """Base class of communicators whose collectives are meetings in shared memory.

    An implementation brings values to meetings, waits for them, and transfers messages.

    Parameters
    ----------
    group : object
        What the ranks of the group share: `name`, `hosts` and `members`.
    rank : int
    traffic : Traffic, optional
        That of the group from which this one was split off.
    """

    def __init__(self, group: Any, rank: int, traffic: Traffic | None = None) -> None:
        super().__init__(rank, group.hosts, traffic)
        self.members, self.name = group.members, group.name
        self._group = group
        self._turn = 0  # collectives this rank has called: the n-th calls of all ranks meet

    @abstractmethod
    def _join(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring `value` to this rank's next meeting, and return the meeting."""

    @abstractmethod
    def _finish(self, call: Call, meeting: Any) -> Any:
        """Wait for a meeting of all ranks; return what `combine` made of their values."""

    @abstractmethod
    def _ended(self, meeting: Any) -> bool:
        """Return whether `_finish` does not wait."""

    @abstractmethod
    def _create_group(self, name: str, members: list[int]) -> Any:
        """Return the shared state of a group of ranks, which are numbered as in the run."""

    @abstractmethod
    def _create_member(self, group: Any, rank: int) -> Communicator:
        """Return this rank's communicator of a new group."""

    def _meet(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Bring `value`, wait for all ranks, and return what `combine` made of their values."""
        return self._finish(call, self._join(call, value, combine))

    def _call(self, kind: str, text: str = "", nbytes: int = 0) -> Call:
        """Return a call that errors describe with the method that it is made in."""
        return Call(kind, f"{text or kind}{self.traffic.within}", nbytes)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        # Without the method: a message that follows another one starts when that is complete.
        call = Call("allreduce", f"allreduce {op} of {describe_array(array)}", array.nbytes)
        meeting = self._join(call, array, lambda arrays: reduce_in_order(arrays, op))
        return _Reduction(self, call, meeting, array)

    def _split(self, color: int, key: int) -> Communicator:
        name = f"{self._group.name}/{self._turn}"  # equal on all ranks, whichever is the last

        def combine(wishes: list[tuple[int, int, int]]) -> dict[int, tuple[Any, int]]:
            places = {}
            for color, chosen in divide(wishes).items():
                members = [self.members[rank] for rank in chosen]
                group = self._create_group(f"{name}.{color}", members)
                places.update({rank: (group, place) for place, rank in enumerate(chosen)})
            return places

        call = self._call("split", nbytes=WISH)
        group, place = self._meet(call, (color, key, self.rank), combine)[self.rank]
        return self._create_member(group, place)

    def _barrier(self) -> None:
        self._meet(self._call("barrier"), None, lambda values: None)

    def _gather_object(self, value: Any) -> list[Any]:
        # Through pickle, as between processes: ranks must not share what they seem to have copied.
        own = pickle.dumps(value)
        call = self._call("gather_object", nbytes=len(own))
        return [pickle.loads(data) for data in self._meet(call, own, lambda values: values)]

    def share(self, make: Callable[[], Any]) -> Any:
        made, error = None, None
        if self.rank == 0:
            try:
                made = make()
            except Exception as problem:
                error = problem
        made, error = self._meet(self._call("share"), (made, error), itemgetter(0))
        if error is not None:
            raise error
        return made

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        # A copy, because the root goes on (and may write) before the last rank has read.
        text = f"broadcast of {describe_array(array)} from rank {root}"
        call = self._call("broadcast", text, array.nbytes)
        array[:] = self._meet(call, array, lambda arrays: arrays[root].copy())

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        text = f"reduce_scatter of {describe_array(array)} by {counts}"
        begin = sum(counts[: self.rank])
        call = self._call("reduce_scatter", text, array.nbytes)
        total = self._meet(call, array, lambda arrays: reduce_in_order(arrays, "sum"))
        out[:] = total[begin : begin + out.size]

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        call = self._call(
            "allgather", f"allgather of {describe_array(out)} by {counts}", out.nbytes
        )
        out[:] = self._meet(call, array, np.concatenate)

    def _free(self) -> None:
        self._meet(self._call("free"), None, lambda values: None)


@dataclass(eq=False)
class _Reduction(Request):
    """A pending allreduce: the result is copied to the rank's array by `wait` or `test`."""

    comm: MeetingCommunicator
    call: Call
    meeting: Any
    array: np.ndarray | None

    def wait(self) -> None:
        if self.array is not None:
            self.array[:] = self.comm._finish(self.call, self.meeting)
            self.array = None

    def test(self) -> bool:
        if self.array is not None and self.comm._ended(self.meeting):
            self.wait()
        return self.array is None


class Meeting:
    """One collective call: the value of each rank, and the result."""

    def __init__(self, size: int) -> None:
        self.absent = size
        self.calls: list[Call | None] = [None] * size
        self.values: list[Any] = [None] * size
        self.result: Any = None
        self.done = False
        self.problem = ""
        self.waiting: list[Any] = []  # of the world

    def join(self, rank: int, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> bool:
        """Add this rank's value; the last rank computes the result."""
        self.calls[rank], self.values[rank] = call, value
        self.absent -= 1
        if self.absent:
            return False
        texts = [call.text for call in self.calls if call is not None]
        odd = next((r for r, other in enumerate(texts) if other != texts[0]), None)
        if odd is None:
            self.result = combine(self.values)
        else:
            self.problem = (
                f"rank 0 calls {texts[0]} where rank {odd} calls {texts[odd]}; "
                "all ranks must make the same calls in the same order."
            )
        self.values = []
        self.done = True
        return True

    def missing(self) -> str:
        """List the ranks that have not called."""
        return ", ".join(str(rank) for rank, call in enumerate(self.calls) if call is None)


def divide(wishes: list[tuple[int, int, int]]) -> dict[int, list[int]]:
    """Return the ranks of each group of a split, in their order, from color, key and rank of all.

    >>> divide([(1, 0, 0), (0, 5, 1), (0, 2, 2)])
    {0: [2, 1], 1: [0]}
    """
    groups: dict[int, list[int]] = {}
    for color, _, rank in sorted(wishes):
        groups.setdefault(color, []).append(rank)
    return groups


def reduce_in_order(arrays: list[np.ndarray], op: str) -> np.ndarray:
    """Reduce from left to right, in the order of the ranks."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        _UFUNCS[op](total, array, out=total)
    return total


def describe_array(array: np.ndarray) -> str:
    """Return the length and the type of an array."""
    return f"{array.size} {array.dtype}"
