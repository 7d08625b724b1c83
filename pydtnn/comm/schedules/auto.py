"""Selection of the allreduce: by a rule, the vendor's, by name, or the fastest one measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules import SCHEDULES, Algorithm
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.comm.schedules.rule import VENDOR, by_rule, without_rule
from pydtnn.utils import clock
from pydtnn.utils.registry import Factory, Registry

MEASUREMENTS = 7
"""Number of times each candidate is measured; the first is a warm-up that opens connections."""

MAX_MEASURING_S = 2.0
"""Time after which no further turn begins, in s, which limits the delay on slow networks."""


RULE, AUTO = "rule", "auto"
"""Names of two selection modes: by the rule without measuring, and by measuring."""


@dataclass(frozen=True)
class Choice:
    """The fastest candidate for one kind of sum.

    Attributes
    ----------
    call : {"allreduce", "iallreduce"}
        They differ: MPI libraries use other algorithms for non-blocking sums.
    dtype : str
    nbytes : int
        Longest arrays that it applies to, in B; arrays of half the length have another choice.
    name : str
        The fastest candidate.
    seconds : dict of str to float
        Time of each candidate on the slowest rank, in s: the median of the measurements.
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
    """Sum arrays by the fastest algorithm for their length and type on these ranks.

    The first sum of each size class (a power of two of bytes), type and call measures all
    candidates alternately on temporary arrays, and all ranks select the candidate that was fastest
    on its slowest rank. Later sums use it: in one run, equal sums give equal bytes. Another run may
    select another algorithm and round differently; where that matters, name the algorithm.

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
        """All choices so far, in the order in which they were made."""
        return list(self._chosen.values())

    def wrapped(self, group: Communicator) -> Communicator:
        return Auto(group, self.candidates)

    def _algorithm_for(self, call: str, array: np.ndarray) -> str | Algorithm | None:
        name = self._choose(call, array)
        return None if name == VENDOR else name

    def _choose(self, call: str, array: np.ndarray) -> str:
        """Return the name of the fastest algorithm for such an array, measuring it if needed."""
        if self.size == 1 or array.nbytes == 0:
            return VENDOR
        key = call, array.dtype, (array.nbytes - 1).bit_length()
        if key not in self._chosen:
            self.meet()  # the measurement synchronises all ranks
            self._chosen[key] = self._measure(call, array.size, array.dtype)
        return self._chosen[key].name

    def _measure(self, call: str, n: int, dtype: np.dtype) -> Choice:
        """Measure the candidates on an array of this length and type; collective."""
        names = [name for name in self.candidates if name != VENDOR or self._vendor_sums(dtype)]
        array = np.empty(n, dtype)
        times: dict[str, list[float]] = {name: [] for name in names}
        begin = clock.now()
        for _ in range(MEASUREMENTS):
            seconds = [self._seconds(call, name, array) for name in names]
            # The maxima over the ranks are equal on all ranks, and so are the decisions below.
            slowest = np.array([*seconds, clock.now() - begin])
            self.inner._allreduce(slowest, "max")
            *seconds, elapsed = slowest.tolist()
            for name, one in zip(names, seconds, strict=True):
                times[name].append(one)
            if elapsed > MAX_MEASURING_S:
                break
        medians = {name: float(np.median(turns[1:] or turns)) for name, turns in times.items()}
        nbytes = 1 << (array.nbytes - 1).bit_length()
        return Choice(call, dtype.name, nbytes, min(names, key=medians.__getitem__), medians)

    def _seconds(self, call: str, name: str, array: np.ndarray) -> float:
        """Return the time of one sum, in s."""
        array.fill(0)  # as after computing it: in the cache of this core only
        self.inner._barrier()
        start = clock.now()
        if name != VENDOR:
            self.start(array, name).wait()
        elif call == "allreduce":
            self.called(call, self.inner._allreduce, array, "sum")
        else:
            self.started(call, self.inner._iallreduce, array, "sum").wait()
        return clock.now() - start

    def _vendor_sums(self, dtype: np.dtype) -> bool:
        """Whether the inner communicator supports sums of this element type."""
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
"""All ways to sum by their names on the command line."""

ALLREDUCE: Registry[Any] = Registry(
    "allreduce", ALLREDUCES, Callable, "a function that yields rounds for a group"
)


def create_allreduce(algorithm: str | Algorithm | Factory[Any], comm: Communicator) -> Communicator:
    """Return a communicator that sums by another algorithm. Collective: all ranks call it.

    Parameters
    ----------
    algorithm : str or Algorithm
        A name of `ALLREDUCES`, ``path/to/file.py:function`` or an algorithm. "rule" is the default
        of `create_communicator` (`pydtnn.comm.schedules.rule`), "vendor" the implementation of the
        MPI library, "auto" the fastest one measured (`Auto`).
    comm : Communicator
        If it follows the rule, the result no longer does.

    Returns
    -------
    Communicator
        For "vendor", and for "rule" inside a host, `comm` itself or the communicator it wraps.

    Raises
    ------
    TypeError, ValueError
        If the argument is not an algorithm, or the name is unknown.
    """
    found = ALLREDUCE.find(algorithm)
    way = _schedule(found.target) if found.ready else found.target
    return way(comm)
