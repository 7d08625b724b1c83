"""Scores of which each rank has a part: what a loss and metrics know of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydtnn.kernels.reference.family import Array

Gather = Callable[[Array], Array]
"""Return the arrays ``(1, ...)`` of all ranks that have classes, in their order, ``(P, ...)``."""


@dataclass(frozen=True)
class CutClasses:
    """The classes of a rank, if ranks have different ones.

    Attributes
    ----------
    first : int
        The first class of this rank.
    gather : callable
    """

    first: int
    gather: Gather


@dataclass(frozen=True)
class CutPositions:
    """The positions of a rank, if ranks have the scores of all classes at different ones.

    The loss of a sample is the mean over its positions: ranks add up those of their positions, and
    likewise metrics.

    Attributes
    ----------
    own : slice
        The positions of this rank.
    gather : callable
    """

    own: slice
    gather: Gather


@dataclass(frozen=True)
class CutScores:
    """Numbers of scores ``(n, K)``, of which each rank has the columns of some classes.

    The scores are not gathered. Of each row a rank sends four numbers: the maximum of its scores,
    the sum of ``exp(y - maximum)``, the score of the target, 0 if that is of another rank, and the
    class of the maximum.

    Attributes
    ----------
    top, log_sum, own, predicted : Array, shape (n,)
        Of all classes: the maximum, the logarithm of the sum of exponentials, the score of the
        target, and the first class with the maximum.

    References
    ----------
    Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model
    parallelism", 2019, section 3.
    """

    top: Array
    log_sum: Array
    own: Array
    predicted: Array

    @classmethod
    def of(cls, xp: Any, y: Array, target: Array, classes: CutClasses, out: Array) -> CutScores:
        """Exchange the numbers of this rank's scores, and write its part of softmax to `out`.

        Parameters
        ----------
        xp : module
        y : Array, shape (n, own classes)
        target : Array of int64, shape (n,)
        classes : CutClasses
        out : Array, shape (n, own classes)
            May be `y`.
        """
        top, predicted = y.max(axis=1), y.argmax(axis=1) + classes.first
        column, here = columns(xp, target, classes, y.shape[1])
        own = xp.where(here, y[xp.arange(len(y)), column], 0)
        xp.exp(xp.subtract(y, top[:, None], out=out), out=out)
        total = out.sum(axis=1, dtype="float64")
        numbers = xp.stack([xp.asarray(part, y.dtype) for part in (top, total, own, predicted)])
        gathered = classes.gather(numbers[None])  # (P, 4, n)
        tops, totals, owns, places = (gathered[:, i].astype("float64") for i in range(4))
        most = tops.max(axis=0)
        total = (totals * xp.exp(tops - most)).sum(axis=0)
        out *= (xp.exp(top - most) / total).astype(out.dtype)[:, None]
        first = tops.argmax(axis=0)  # lower ranks have lower classes
        predicted = places[first, xp.arange(len(y))]
        return cls(most, most + xp.log(total), owns.sum(axis=0), predicted)


def columns(xp: Any, target: Array, classes: CutClasses, count: int) -> tuple[Array, Array]:
    """Return the columns of targets among a rank's classes, 0 elsewhere, and which it has."""
    column = target.astype("int64") - classes.first
    here = (column >= 0) & (column < count)
    return xp.where(here, column, 0), here
