"""The default allreduce: selected by a rule, so that the same run gives the same bytes.

Nothing is measured. The selection depends on the hosts of the ranks, and the length and type of the
array. The figures were measured on emulated hosts with links of 1 Gbit/s, under Open MPI 5 over
TCP.

* **One host: the communicator's own.** MPI libraries sum through shared memory, in C.
* **Several hosts, more than `MAX_VENDOR_BYTES`: `hierarchical`.** The time is determined by the
  link of a host, which all its ranks share; it transfers 2 (H-1)/H n, the minimum, however many
  ranks a host has. MPI's non-blocking allreduce (`Iallreduce`) sends two to three times as much:
  2.6 MB between 2 hosts of 2 ranks take 63.8 ms with it, and 22.6 ms with `hierarchical`.
* **Up to `MAX_DIRECT_HOSTS` hosts of a single rank: `direct`.** It sends the same volume in 2
  rounds, where `hierarchical` takes 2 log2 H or 2 (H-1): 256 KB between 4 hosts take 6.2 instead of
  7.2 ms, between 6 hosts 10.4 instead of 12.9. With more hosts, its 2 (H-1) messages dominate the
  time.
* **Up to `MAX_VENDOR_BYTES`: the communicator's own.** Here the number of rounds determines the
  time, not the bytes. The library's rounds are implemented in C: 1 KB takes 0.16 ms, and 0.28 to
  0.47 ms with the schedules of this package. From 16 KB on, at 100 Mbit/s, its `Iallreduce` is the
  slower one.
* **Floats of 16 bits never use the communicator's own**: libraries add them slowly or not at all.

Buckets are shorter between hosts than inside one, where messages take less time. The first one is
sent shortly after backward begins: on slow links the time of a step is that of its messages plus
the time before the first. The others are longer: on fast links the time of a step is that of the
computation, to which each message adds 0.1 ms. ResNet-20, 16 images per rank, on 4 hosts: with
buckets of 128 KiB a step takes 155 ms at 100 Mbit/s and 81 ms at 1 Gbit/s; with a first one of 128
and others of 384 KiB, 158 and 80; with buckets of 512 KiB, 170 and 76; of 1024 KiB, 192 and 72.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules import SCHEDULES, Algorithm
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.utils import clock
from pydtnn.utils.registry import Factory, Registry
from pydtnn.utils.request import Request

VENDOR = "vendor"
"""Name of the allreduce that the communicator itself provides."""
MAX_VENDOR_BYTES = 8 << 10
"""Length of arrays in B up to which rounds take more time than bytes."""
MAX_DIRECT_HOSTS = 8
"""Number of hosts of a single rank up to which all of them exchange messages at once."""
FIRST_BUCKET_DIVISOR, OTHER_BUCKETS_FACTOR = 8, 3
"""Into how many parts the gradients are cut, of which the first bucket has one, and how many times
as long the other buckets are."""
MIN_FIRST_BUCKET_BYTES = 128 << 10
"""Minimum length of the first bucket, in B: 1 ms at 1 Gbit/s."""


def choose(hosts: Sequence[Hashable], nbytes: int, dtype: np.dtype) -> str:
    """Return the name of the allreduce for an array: "vendor" or one of `SCHEDULES`.

    >>> f32 = np.dtype("float32")
    >>> choose("aaaa", 2_600_000, f32), choose("aabb", 2_600_000, f32), choose("aabb", 64, f32)
    ('vendor', 'hierarchical', 'vendor')
    """
    schedule = schedule_for(hosts)
    return VENDOR if schedule is None or _short(nbytes, dtype) else schedule


def schedule_for(hosts: Sequence[Hashable]) -> str | None:
    """Return the name of the schedule for long arrays; None inside a host (the communicator's own).

    >>> schedule_for("aa"), schedule_for("aab"), schedule_for("abc")
    (None, 'hierarchical', 'direct')
    """
    ranks = Counter(hosts)
    if len(ranks) == 1:
        return None
    single = max(ranks.values()) == 1
    return "direct" if single and len(ranks) <= MAX_DIRECT_HOSTS else "hierarchical"


def _short(nbytes: int, dtype: np.dtype) -> bool:
    half = dtype.name in ("float16", "bfloat16")
    return nbytes <= MAX_VENDOR_BYTES and not half


def bucket_bytes(hosts: Sequence[Hashable], total: int, usual: int) -> tuple[int, ...]:
    """Choose the lengths of buckets, in B.

    Parameters
    ----------
    hosts : sequence of hashable
        Identifier of the host of each rank.
    total : int
        Length of all gradients, in B.
    usual : int
        Length inside a host, and maximum length between hosts, in B.

    Returns
    -------
    tuple of int
        Length of the first bucket that backward completes, and of those that follow.

    >>> bucket_bytes("aa", 2_600_000, 1 << 20), bucket_bytes("ab", 2_600_000, 1 << 20)
    ((1048576,), (325000, 975000))
    """
    if schedule_for(hosts) is None:
        return (usual,)
    first = max(MIN_FIRST_BUCKET_BYTES, total // FIRST_BUCKET_DIVISOR)
    return min(usual, first), min(usual, OTHER_BUCKETS_FACTOR * first)


def explain(hosts: Sequence[Hashable]) -> str:
    """Describe the selection for these hosts in words.

    >>> explain("aabb")
    'hierarchical, vendor up to 8 KiB: there are 2 hosts of 2 ranks'
    """
    schedule, ranks = schedule_for(hosts), sorted(set(Counter(hosts).values()))
    if schedule is None:
        return f"{VENDOR}: all ranks share a host"
    each = " to ".join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))
    plural = "s" * (ranks[-1] > 1)
    where = f"there are {len(set(hosts))} hosts of {each} rank{plural}"
    return f"{schedule}, {VENDOR} up to {MAX_VENDOR_BYTES >> 10} KiB: {where}"


def by_rule(comm: Communicator) -> Communicator:
    """Return a communicator that sums arrays by the rule. Collective: all ranks call it.

    Returns
    -------
    Communicator
        `comm` itself inside a host, where it already follows the rule.
    """
    if isinstance(comm, Ruled):
        return comm
    schedule = schedule_for(comm.hosts)
    return comm if schedule is None else Ruled(comm, schedule)


def without_rule(comm: Communicator) -> Communicator:
    """Return the communicator that was the argument of `by_rule`."""
    return comm.inner if isinstance(comm, Ruled) else comm


class Ruled(Scheduled):
    """Sum long arrays by a schedule, and short ones by the inner communicator.

    Made by `by_rule`; groups that are split off follow the rule on their own hosts.
    """

    def wrapped(self, group: Communicator) -> Communicator:
        return by_rule(group)

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        if _short(array.nbytes, array.dtype):
            self.called("allreduce", self.inner._allreduce, array, op)
        else:
            super()._allreduce(array, op)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        if _short(array.nbytes, array.dtype):
            return self.started("iallreduce", self.inner._iallreduce, array, op)
        return super()._iallreduce(array, op)


RULE, AUTO = "rule", "auto"
"""Names of two selection modes: by the rule without measuring, and by measuring."""
MEASUREMENTS = 7
"""Number of times each candidate is measured; the first is a warm-up that opens connections."""
MAX_MEASURING_S = 2.0
"""Time after which no further turn begins, in s, which limits the delay on slow networks."""


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
        self._carry_out(call, name, array)
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
