"""Which allreduce to use: by a rule, the communicator's own, by name, or what proves fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator, Request
from pydtnn.comm.schedules import SCHEDULES, Algorithm
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.rule import VENDOR, by_rule, without_rule
from pydtnn.utils.registry import Found, Kind

RULE, AUTO = "rule", "auto"
"""Names of two ways to choose: without measuring, and by it."""
TURNS = 7
"""How often each candidate is tried; the first turn makes connections and does not count."""
LONGEST = 2.0
"""Time after which no further turn begins, in s, so that slow networks do not delay the start."""


@dataclass(frozen=True)
class Choice:
    """What was found fastest for one kind of sum.

    Attributes
    ----------
    call : {"allreduce", "iallreduce"}
        They differ: MPI libraries have other algorithms for sums that do not wait.
    dtype : str
    nbytes : int
        The longest arrays that it holds for, in B; those of half the length have another choice.
    name : str
        The fastest candidate.
    seconds : dict of str to float
        Time of each candidate on the slowest rank, in s: the median of the turns.
    """

    call: str
    dtype: str
    nbytes: int
    name: str
    seconds: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {1e3 * seconds:.3g} ms"
            for name, seconds in sorted(self.seconds.items(), key=lambda item: item[1])
        )
        return f"{self.call} of {self.dtype} up to {self.nbytes} B: {self.name} ({times})"


class Auto(Scheduled):
    """Sum arrays in whichever way is fastest for their length and type on these ranks.

    The first sum of each size class (a power of two of bytes), type and call tries all candidates
    on arrays of its own, in turns, and all ranks agree on the one that was fastest on its slowest
    rank. Later sums use it: in one run, equal sums give equal bytes. Another run may choose
    otherwise and round otherwise; where that matters, name the algorithm.

    Parameters
    ----------
    inner : Communicator
    candidates : sequence of str
        "vendor" and names of `SCHEDULES`.
    """

    def __init__(
        self, inner: Communicator, candidates: Sequence[str] = (VENDOR, *SCHEDULES)
    ) -> None:
        super().__init__(inner, AUTO)
        self.candidates = tuple(candidates)
        self._chosen: dict[tuple[str, np.dtype, int], Choice] = {}

    @property
    def choices(self) -> list[Choice]:
        """What has been chosen so far, in the order in which it was met."""
        return list(self._chosen.values())

    def wrapped(self, group: Communicator) -> Communicator:
        return Auto(group, self.candidates)

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        name = self._choose("allreduce", array) if op == "sum" else VENDOR
        self._carry_out("allreduce", name, array, op)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        name = self._choose("iallreduce", array) if op == "sum" else VENDOR
        return self._begin(name, array, op)

    def _begin(self, name: str, array: np.ndarray, op: str = "sum") -> Request:
        if name == VENDOR:
            return self.started("iallreduce", self.inner._iallreduce, array, op)
        return self.start(array, name)

    def _carry_out(self, call: str, name: str, array: np.ndarray, op: str = "sum") -> None:
        if name == VENDOR and call == "allreduce":
            self.called("allreduce", self.inner._allreduce, array, op)
        else:
            self._begin(name, array, op).wait()

    def _choose(self, call: str, array: np.ndarray) -> str:
        """The name of the fastest way to sum such an array."""
        if self.size == 1 or array.nbytes == 0:
            return VENDOR
        key = call, array.dtype, (array.nbytes - 1).bit_length()
        if key not in self._chosen:
            self.meet()  # measuring waits for all ranks
            self._chosen[key] = self._measure(call, array.size, array.dtype)
        return self._chosen[key].name

    def _measure(self, call: str, n: int, dtype: np.dtype) -> Choice:
        """Try the candidates on an array of such a length; collective."""
        names = [name for name in self.candidates if name != VENDOR or self._vendor_sums(dtype)]
        array = np.empty(n, dtype)
        times: dict[str, list[float]] = {name: [] for name in names}
        begin = time.perf_counter()
        for _ in range(TURNS):
            seconds = [self._seconds(call, name, array) for name in names]
            # The slowest rank's times are the same numbers on all ranks, and so is what follows.
            slowest = np.array([*seconds, time.perf_counter() - begin])
            self.inner.allreduce(slowest, "max")
            *seconds, elapsed = slowest.tolist()
            for name, one in zip(names, seconds, strict=True):
                times[name].append(one)
            if elapsed > LONGEST:
                break
        medians = {name: statistics.median(turns[1:] or turns) for name, turns in times.items()}
        nbytes = 1 << (array.nbytes - 1).bit_length()
        return Choice(call, dtype.name, nbytes, min(names, key=medians.__getitem__), medians)

    def _seconds(self, call: str, name: str, array: np.ndarray) -> float:
        """Time of one sum, in s."""
        array.fill(0)  # as if just computed: in this core's cache, and no other's
        self.inner.barrier()
        start = time.perf_counter()
        self._carry_out(call, name, array)
        return time.perf_counter() - start

    def _vendor_sums(self, dtype: np.dtype) -> bool:
        """Whether the communicator inside can sum such elements at all."""
        try:
            self.inner._allreduce(np.zeros(1, dtype), "sum")
        except TypeError:
            return False
        return True


def _schedule(algorithm: str | Algorithm) -> Callable[[Communicator], Communicator]:
    return lambda comm: Scheduled(without_rule(comm), algorithm)


ALLREDUCES: dict[str, Callable[[Communicator], Communicator]] = {
    RULE: by_rule,
    VENDOR: without_rule,
    AUTO: lambda comm: Auto(without_rule(comm)),
    **{name: _schedule(name) for name in SCHEDULES},
}
"""Every way to sum by the name that the command line knows it by."""

ALLREDUCE: Kind[Any] = Kind(
    "allreduce", ALLREDUCES, Callable, "a function that yields rounds for a group"
)


def create_allreduce(algorithm: str | Algorithm | Found[Any], comm: Communicator) -> Communicator:
    """Give a communicator another way to sum. Collective: all ranks call it.

    Parameters
    ----------
    algorithm : str or Algorithm
        A name of `ALLREDUCES`, ``path/to/file.py:function`` or an algorithm. "rule" is what
        `create_communicator` does already (`pydtnn.comm.schedules.rule`), "vendor" the MPI
        library's own way, "auto" whichever is fastest here (`Auto`).
    comm : Communicator
        If it follows the rule, it does no longer.

    Returns
    -------
    Communicator
        For "vendor", and for "rule" inside a host, `comm` itself or what it was made of.

    Raises
    ------
    TypeError, ValueError
        For what is no algorithm, and for an unknown name.
    """
    found = ALLREDUCE.find(algorithm)
    way = _schedule(found.target) if found.ready else found.target
    return way(comm)
