"""Classes of unequal frequency: weights of the classes, and samples drawn by weight."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pydtnn.data.dataset import Dataset, Subset
from pydtnn.data.order import as_indices, weighted_order
from pydtnn.utils.validate import check_int, plain_array

Array = NDArray[Any]

SAMPLES_PER_READ = 1024
"""Samples that are read at once."""


def balanced_weights(dataset: Dataset) -> np.ndarray:
    """Compute class weights inversely proportional to the number of samples of each class.

    ``w_k = n / (K n_k)`` for n samples of K classes, n_k of class k: every class has the same total
    weight, and the mean weight of a sample is 1. Classes without samples are not counted and have
    weight 1. If samples have labels at several positions, such as masks, the positions are counted.

    Parameters
    ----------
    dataset : Dataset
        The training set; all of its targets are read.

    Returns
    -------
    ndarray of float64, shape (K,)
        Values for ``CategoricalCrossEntropy(class_weights=...)``.

    Raises
    ------
    ValueError
        If the data set has no classes, or several targets.

    Examples
    --------
    >>> from pydtnn.data import ArrayDataset
    >>> balanced_weights(ArrayDataset(np.zeros((4, 2)), np.array([0, 0, 0, 1])))
    array([0.66666667, 2.        ])
    """
    if not isinstance(dataset.classes, int):
        raise ValueError(
            f"balanced_weights: expected a data set with one class per sample, got {dataset.name} "
            f"with classes {dataset.classes}; compute the weights from its targets"
        )
    counts = np.zeros(dataset.classes, np.int64)
    for start in range(0, len(dataset), SAMPLES_PER_READ):
        rows = np.arange(start, min(start + SAMPLES_PER_READ, len(dataset)))
        labels = np.asarray(dataset.read_targets(rows)).reshape(-1)
        labels = labels[(labels >= 0) & (labels < len(counts))]  # without those of `ignore_index`
        counts += np.bincount(labels, minlength=len(counts))
    present = np.count_nonzero(counts)
    return np.where(counts > 0, counts.sum() / (max(present, 1) * np.maximum(counts, 1)), 1.0)


class WeightedDataset(Subset):
    """A data set whose epochs have samples that are drawn at random with replacement.

    The probability of a sample is proportional to its weight. The samples of an epoch depend only
    on the seed and the epoch, so that they are the same for any number of ranks and when training
    is resumed. Each repetition of a sample in an epoch is augmented in another way. Samples of
    shards are read from all of them, not in windows.

    Parameters
    ----------
    dataset : Dataset
        The training set.
    weights : array of float, shape ``(n,)``, or "balanced"
        Weight of each sample, at least 0. "balanced" draws all classes equally often.
    length : int, optional
        Samples of an epoch; by default as many as `dataset` has.

    Raises
    ------
    ValueError
        If there is not one weight for each sample, one is negative or not finite, or all are 0; or
        if the targets are not classes and weights "balanced".

    Examples
    --------
    >>> from pydtnn.data import ArrayDataset
    >>> rare = ArrayDataset(np.zeros((1000, 2)), np.arange(1000) < 10, classes=2)
    >>> drawn = WeightedDataset(rare, "balanced")
    >>> _, y = drawn.read(drawn.shuffled(seed=0, epoch=0))
    >>> np.bincount(y)
    array([485, 515])
    """

    def __init__(
        self, dataset: Dataset, weights: ArrayLike | str = "balanced", length: int | None = None
    ) -> None:
        super().__init__(dataset, np.arange(len(dataset)))
        self.weights = _weights(dataset, weights)
        if length is not None:
            check_int("WeightedDataset", "length", length, at_least=1)
        self.length = len(dataset) if length is None else length

    def __len__(self) -> int:
        return self.length

    def shuffled(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch, see `weighted_order`."""
        return weighted_order(seed, epoch, self.weights, self.length)

    def read(self, indices: Array) -> tuple[Any, Any]:
        return super().read(as_indices(self.name, indices, len(self)) % len(self.indices))

    def read_targets(self, indices: Array) -> Any:
        return super().read_targets(as_indices(self.name, indices, len(self)) % len(self.indices))


def _weights(dataset: Dataset, given: Any) -> NDArray[np.float64]:
    who, count = "WeightedDataset", len(dataset)
    if isinstance(given, str):
        if given != "balanced":
            raise ValueError(f"{who}: weights must be an array or 'balanced', got {given!r}")
        weights, targets = balanced_weights(dataset), dataset.read_targets(np.arange(count))
        if np.ndim(targets) != 1 or np.min(targets) < 0 or np.max(targets) >= len(weights):
            raise ValueError(
                f"{who}: balanced weights require one class for each sample, got targets of shape "
                f"{np.shape(targets)[1:]} in {dataset.name}; pass one weight for each sample"
            )
        return weights[targets]
    weights = plain_array(who, "weights", given).astype(np.float64)
    valid = np.isfinite(weights) & (weights >= 0)
    if weights.shape != (count,) or not valid.all() or not weights.any():
        raise ValueError(
            f"{who}: weights must be {count} finite numbers of at least 0, some above 0, one for "
            f"each sample of {dataset.name}, got {weights[~valid][:1]} in an array of shape "
            f"{weights.shape}"
        )
    return weights
