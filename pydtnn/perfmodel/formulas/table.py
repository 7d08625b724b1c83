"""Closed formulas of collective operations, as coefficients of a linear model.

With n bytes, latency alpha, time per byte beta and time to add a byte gamma, an operation takes

    rounds alpha + sent n beta + added n gamma

and a rank handles `messages` messages. P is the number of ranks, q = (P - 1) / P and
h = log2 P, rounded up. For an all-gather and a reduce-scatter n is the length of the whole array,
for an all-to-all that of the data of one rank.

References
----------
Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005;
Chan, Heimlich, Purkayastha, van de Geijn, Collective communication: theory, practice, and
experience, 2007; Rabenseifner, Optimization of collective reduction operations, 2004.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import NamedTuple

from pydtnn.utils.names import unknown


class Terms(NamedTuple):
    """Coefficients of the cost of an operation.

    Attributes
    ----------
    rounds : float
        Messages that follow one another: latencies.
    sent : float
        Bytes that pass through the busiest link, in units of the length of the array.
    added : float
        Bytes that a rank adds, in the same unit.
    messages : float
        Messages that a rank sends.
    """

    rounds: float = 0.0
    sent: float = 0.0
    added: float = 0.0
    messages: float = 0.0

    def plus(self, other: Terms, share: float = 1.0) -> Terms:
        """Return the terms of this operation and then another one on a share of the array."""
        return Terms(
            self.rounds + other.rounds,
            self.sent + share * other.sent,
            self.added + share * other.added,
            self.messages + other.messages,
        )


NONE = Terms()
"""The terms of a sum over a single rank."""

Formula = Callable[[int], Terms]
"""Terms for a number of ranks, at least 2."""


def log2_up(ranks: int) -> int:
    """Return log2 of a number of ranks, rounded up.

    >>> [log2_up(ranks) for ranks in (2, 3, 4, 5)]
    [1, 2, 2, 3]
    """
    return (ranks - 1).bit_length()


def _q(ranks: int) -> float:
    return (ranks - 1) / ranks


def _columns(ranks: int) -> int:
    """Return the columns of the grid of `torus`."""
    return ranks // max(rows for rows in range(1, isqrt(ranks) + 1) if ranks % rows == 0)


def _folded(formula: Formula) -> Formula:
    """Extend a formula for 2^k ranks: the others send their array first and receive the result."""

    def extended(ranks: int) -> Terms:
        power = 1 << (ranks.bit_length() - 1)
        inner = formula(power)
        return inner if power == ranks else inner.plus(Terms(2, 2, 1, 2))

    return extended


def _same(rounds: Callable[[int], float], sent: float, added: float) -> Formula:
    """Return a formula in which every round sends one message, and volumes are in units of q."""
    return lambda p: Terms(rounds(p), sent * _q(p), added * _q(p), rounds(p))


ALGORITHMS: dict[str, dict[str, Formula]] = {
    "allreduce": {
        "ring": _same(lambda p: 2 * (p - 1), 2, 1),
        "bidirectional_ring": lambda p: Terms(2 * (p - 1), 2 * _q(p), _q(p), 4 * (p - 1)),
        "recursive_doubling": _folded(lambda p: Terms(*[float(log2_up(p))] * 4)),
        "halving_doubling": _folded(_same(lambda p: 2 * log2_up(p), 2, 1)),
        "binomial_tree": lambda p: Terms(
            2 * log2_up(p), 2 * log2_up(p), log2_up(p), 2 * log2_up(p)
        ),
        "direct": lambda p: Terms(2, 2 * _q(p), _q(p), 2 * (p - 1)),
        "torus": _same(lambda p: 2 * (p // _columns(p) + _columns(p) - 2), 2, 1),
    },
    "broadcast": {
        "binomial": lambda p: Terms(log2_up(p), log2_up(p), 0, log2_up(p)),
        "van_de_geijn": lambda p: Terms(log2_up(p) + p - 1, 2 * _q(p), 0, log2_up(p) + p - 1),
    },
    "reduce": {
        "binomial": lambda p: Terms(*[float(log2_up(p))] * 4),
        "rabenseifner": _same(lambda p: 2 * log2_up(p), 2, 1),
    },
    "allgather": {
        "ring": _same(lambda p: p - 1, 1, 0),
        "recursive_doubling": _same(log2_up, 1, 0),
        "direct": lambda p: Terms(1, _q(p), 0, p - 1),
    },
    "reduce_scatter": {
        "ring": _same(lambda p: p - 1, 1, 1),
        "recursive_halving": _same(log2_up, 1, 1),
        "direct": lambda p: Terms(1, _q(p), _q(p), p - 1),
    },
    "gather": {"binomial": _same(log2_up, 1, 0)},
    "scatter": {"binomial": _same(log2_up, 1, 0)},
    "alltoall": {
        "pairwise": _same(lambda p: p - 1, 1, 0),
        "direct": lambda p: Terms(1, _q(p), 0, p - 1),
    },
    "message": {"direct": lambda p: Terms(1, 1, 0, 1)},
}
"""The formulas of each operation, by algorithm; "halving_doubling" is Rabenseifner's."""


def terms_of(operation: str, algorithm: str, ranks: int) -> Terms:
    """Return the coefficients of an operation on links of one kind that no messages share.

    Parameters
    ----------
    operation, algorithm : str
        Names in `ALGORITHMS`.
    ranks : int

    Returns
    -------
    Terms
        Zero for one rank.

    Raises
    ------
    ValueError
        If there is no formula of this name.

    Examples
    --------
    >>> terms_of("allreduce", "ring", 4)
    Terms(rounds=6, sent=1.5, added=0.75, messages=6)
    """
    if operation not in ALGORITHMS:
        raise ValueError(f"formulas: {unknown('operation', operation, ALGORITHMS)}")
    if algorithm not in ALGORITHMS[operation]:
        raise ValueError(
            f"formulas: {unknown(f'formula of {operation}', algorithm, ALGORITHMS[operation])}"
        )
    return NONE if ranks == 1 else ALGORITHMS[operation][algorithm](ranks)


LIBRARY = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "broadcast": 1.0}
"""How many times (P - 1) / P of an array's bytes pass the slowest link; others pass none."""


def library_terms(kind: str, ranks: int) -> Terms:
    """Return the coefficients of a collective call of an MPI library: a tree, and least bytes."""
    sent = LIBRARY.get(kind, 0.0) * _q(ranks)
    return Terms(log2_up(ranks), sent, 0.0, log2_up(ranks)) if ranks > 1 else NONE
