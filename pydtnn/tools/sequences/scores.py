"""Scores of sequences: those that are predicted as a whole, and BLEU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import or_
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.losses.targets import check_classes, checked_index
from pydtnn.metrics import Metric
from pydtnn.utils.validate import check_int


class _SequenceMetric(Metric):
    """A metric of the sequences of predicted classes and of targets.

    Scores are ``(N, T, K)``, of which the classes with the largest are predicted, and targets
    classes ``(N, T)``. With teacher forcing these are predictions for given preceding targets; for
    sequences that a network has generated see `bleu`.

    Parameters
    ----------
    ignore_index : int, optional
        A class of targets at positions that neither sequence contains, such as padding.
    end : int, optional
        A class that ends a sequence: it contains neither this class nor what follows.
    """

    def __init__(self, ignore_index: int | None = None, end: int | None = None) -> None:
        who = type(self).__name__
        self.ignore_index = checked_index(who, ignore_index)
        self.end = None if end is None else check_int(who, "end", end, at_least=0)

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are not classes at each position."""
        check_classes(type(self).__name__, shape, target, ignored=self.ignore_index)

    def _sequences(self, xp: Any, y: Array, target: Array) -> tuple[Array, Array]:
        """Return predicted and target sequences ``(N, T)``, followed by -1."""
        samples, positions = len(y), prod(y.shape[1:-1])
        truth = target.reshape(samples, positions).astype("int64")
        present = truth == truth if self.ignore_index is None else truth != self.ignore_index
        place, rows = xp.arange(positions), xp.arange(samples)[:, None]

        def sequence(classes: Array) -> Array:
            kept = present
            if self.end is not None:
                kept = kept & ((kept & (classes == self.end)).cumsum(axis=1) == 0)
            order = xp.where(kept, place, positions + place).argsort(axis=1)
            return xp.where(kept, classes, -1)[rows, order]

        return sequence(y.argmax(axis=-1).reshape(samples, positions)), sequence(truth)


class ExactMatch(_SequenceMetric):
    """Share of samples whose predicted sequence is the target, at every position.

    Parameters
    ----------
    ignore_index : int, optional
        A class of targets without a label, such as padding; nothing else is compared.
    end : int, optional
        A class that ends a sequence.
    """

    name = "exact_match"

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        """Count the samples that match."""
        predicted, truth = self._sequences(xp, y, target)
        return (predicted == truth).all(axis=1).sum()


class BLEU(_SequenceMetric):
    """Geometric mean of the precisions of n-grams, times a penalty for short predictions.

    ``min(1, exp(1 - r / c)) prod_n p_n^(1 / order)``, in [0, 1], where c and r are the lengths of
    all predictions and of all targets, and p_n is the share of the n-grams of predictions that are
    in the target; each of them counts at most as often as it is there. The sums are integers, of
    all samples of all ranks: the result is that of the corpus, not a mean over sentences.

    Parameters
    ----------
    order : int
        The largest n.
    ignore_index : int, optional
        A class of targets without a label, such as padding.
    end : int, optional
        A class that ends a sequence.

    References
    ----------
    Papineni et al., "BLEU: a method for automatic evaluation of machine translation", ACL 2002.
    """

    def __init__(
        self, order: int = 4, ignore_index: int | None = None, end: int | None = None
    ) -> None:
        super().__init__(ignore_index, end)
        self.order = check_int("BLEU", "order", order, at_least=1)
        self.size, self.name = 2 * order + 2, "bleu" if order == 4 else f"bleu{order}"

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        """Count the n-grams of predictions that match, all of them, and both lengths."""
        predicted, truth = self._sequences(xp, y, target)
        # Whether the n-grams at i and j are equal: those of n + 1 are if those of n are, and the
        # next classes. The k-th of equal n-grams matches if the target has it at least k times.
        alike, found = (predicted[:, :, None] == other[:, None, :] for other in (predicted, truth))
        own, theirs = alike, found
        right, all_of = [], []
        for n in range(self.order):
            if n:
                own = own[:, :-1, :-1] & alike[:, n:, n:]
                theirs = theirs[:, :-1, :-1] & found[:, n:, n:]
            whole = predicted[:, n:] >= 0
            earlier = xp.tril(own, -1).sum(axis=2)
            right.append(((earlier < theirs.sum(axis=2)) & whole).sum())
            all_of.append(whole.sum())
        lengths = [(predicted >= 0).sum(), (truth >= 0).sum()]
        return xp.stack([*right, *all_of, *lengths]).astype("float64")

    def result(self, sums: Any, count: int) -> float:
        """Return the score of the corpus."""
        return _bleu(sums[: self.order], sums[self.order : -2], *sums[-2:])


def bleu(predictions: Sequence[Any], references: Sequence[Any], order: int = 4) -> float:
    """Return the BLEU of generated sequences, each with one or several references; see `BLEU`.

    Of several references, an n-gram counts as often as it is in one of them, and r is the sum of
    the lengths nearest to those of the predictions, the shorter of two.

    Parameters
    ----------
    predictions : sequence of sequences
        Of words, or of numbers of tokens.
    references : sequence of lists of sequences
        For each prediction a list of one or several.
    order : int
        The largest n.

    Examples
    --------
    >>> round(bleu(["the cat sat here".split()], [["the cat sat there".split()]], order=2), 4)
    0.7071
    """
    counts, length, nearest = np.zeros((2, order)), 0, 0
    for own, several in zip(predictions, references, strict=True):
        length += len(own)
        nearest += min(map(len, several), key=lambda r: (abs(r - len(own)), r))
        for n in range(order):
            parts = [[s[k:] for k in range(n + 1)] for s in (own, *several)]
            grams, *others = (Counter(zip(*shifted, strict=False)) for shifted in parts)
            counts[:, n] += (grams & reduce(or_, others)).total(), grams.total()
    return _bleu(counts[0], counts[1], length, nearest)


def _bleu(right: Array, all_of: Array, length: float, reference: float) -> float:
    """Return the score for numbers of n-grams and lengths: 0 if none of an order is right."""
    if not right.all():
        return 0.0
    return float(min(1.0, np.exp(1 - reference / length)) * np.exp(np.log(right / all_of).mean()))
