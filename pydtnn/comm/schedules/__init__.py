"""Allreduce algorithms as data: the messages of each rank, round by round.

An algorithm is a generator of the rounds of one rank (`steps`), built from a few combinators
(`compose`); those of the literature are in `algorithms`. Nothing here communicates: the rounds
are carried out by `executor`, and verified and displayed by `pydtnn.tools.schedules`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydtnn.comm.schedules.algorithms import (
    bidirectional_ring,
    binomial_tree,
    direct,
    fixed_tree,
    halving_doubling,
    hierarchical,
    recursive_doubling,
    ring,
    torus,
)
from pydtnn.comm.schedules.steps import Algorithm, Group, MessageStep, Part, Round, Rounds
from pydtnn.utils.moved import renamed
from pydtnn.utils.registry import Registry

__all__ = [
    "SCHEDULES",
    "Algorithm",
    "Group",
    "MessageStep",
    "Part",
    "Round",
    "Rounds",
    "find",
    "rounds",
]

SCHEDULES: dict[str, Algorithm] = {
    "ring": ring,
    "bidirectional_ring": bidirectional_ring,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "binomial_tree": binomial_tree,
    "fixed_tree": fixed_tree,
    "direct": direct,
    "torus": torus,
    "hierarchical": hierarchical,
}
"""All algorithms by their names on the command line."""

ALGORITHM: Registry[Any] = Registry(
    "allreduce schedule", SCHEDULES, Callable, "a function that yields rounds for a group"
)


def find(algorithm: str | Algorithm) -> Algorithm:
    """Return the algorithm of a name or of ``path/to/file.py:function``; an algorithm unchanged."""
    return ALGORITHM.find(algorithm).target


def rounds(algorithm: str | Algorithm, rank: int, hosts: Sequence[Hashable]) -> tuple[Round, ...]:
    """List the rounds of a rank.

    Parameters
    ----------
    algorithm : str or Algorithm
        A name of `SCHEDULES`, or a user-defined generator function.
    rank : int
        The rank, from 0.
    hosts : sequence of hashable
        Identifier of the host of each rank; its length is the number of ranks.

    Raises
    ------
    ValueError
        If a name is not in `SCHEDULES`, or the rank is not in the group.
    TypeError
        If the algorithm yields objects that are not rounds.

    >>> for steps in rounds("recursive_doubling", 0, hosts=("a", "a")):
    ...     print([(step.peer, step.op) for step in steps])
    [(1, 'copy'), (1, 'sum')]
    """
    algorithm = find(algorithm)
    if not 0 <= rank < len(hosts):
        raise ValueError(f"rounds: rank must be from 0 to {len(hosts) - 1}, got {rank}.")
    yielded = algorithm(Group(rank, tuple(hosts)))
    who = getattr(algorithm, "__name__", repr(algorithm))
    if not isinstance(yielded, Iterable):
        raise TypeError(f"{who}: an algorithm must yield rounds, got return value {yielded!r}")
    return tuple(_round(f"{who}: round {k} of rank {rank}", one) for k, one in enumerate(yielded))


def _round(where: str, steps: Any) -> Round:
    """Return a round as a tuple; reject a single step, which is also a tuple."""
    alone = isinstance(steps, MessageStep)
    if alone or not isinstance(steps, Iterable):
        hint = "; a comma makes one of a single step: `yield (send(0, ALL),)`" if alone else ""
        raise TypeError(f"{where} must be a tuple of steps, got {steps!r}{hint}")
    found = tuple(steps)
    for step in found:
        if not isinstance(step, MessageStep):
            raise TypeError(f"{where} must contain only send, receive and add, got {step!r}")
    return found


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = renamed(__name__)
