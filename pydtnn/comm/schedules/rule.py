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
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules import SCHEDULES, Algorithm
from pydtnn.comm.schedules.executor import Scheduled
from pydtnn.utils.registry import Factory, Registry

RULE, VENDOR = "rule", "vendor"
"""Names of this selection, and of the allreduce that the communicator itself provides."""
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

    def _algorithm_for(self, array: np.ndarray) -> str | Algorithm | None:
        return None if _short(array.nbytes, array.dtype) else self.algorithm


def _schedule(algorithm: str | Algorithm) -> Callable[[Communicator], Communicator]:
    return lambda comm: Scheduled(without_rule(comm), algorithm)


ALLREDUCES: dict[str, Callable[[Communicator], Communicator]] = {
    RULE: by_rule,
    VENDOR: without_rule,
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
        MPI library.
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
