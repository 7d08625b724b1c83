"""Classes of unequal frequency: weights of the classes."""

from __future__ import annotations

import numpy as np

from pydtnn.data.dataset import Dataset

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
