"""Metrics, computed as sums that `Totals` divides by the number of samples.

A classifier's outputs are logits. Metrics of probabilities therefore apply a softmax first, unless
the model ends with one (`from_logits=False`); accuracies and the hinge use scores directly.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import exp, inf, log, nan, prod
from sys import float_info
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.kernels.reference import doubled
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.losses.cut import CutScores
from pydtnn.losses.targets import (
    check_dense,
    check_distribution,
    checked_index,
    dense,
    is_classes,
    most_likely,
    rows_of,
)
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.names import SuggestsNames, module_getattr
from pydtnn.utils.registry import Registry
from pydtnn.utils.validate import check_bool, check_float, check_int


class Metric(SuggestsNames, StoresArguments, ABC):
    """A quantity of each sample, summed over the samples.

    Attributes
    ----------
    name : str
        Name in logs.
    better : str
        "max" or "min": whether callbacks treat larger or smaller values as better. Empty if the
        result is an array, which no callback can monitor.
    size : int
        Number of sums: `compute` returns an array of so many, and `finish` receives their means.
        `prepare` sets it if it depends on the predictions.
    takes_parts : bool
        Whether there is a method `compute_cut` for scores of which ranks have different classes
        (see `Accuracy`), and the metric is the mean of those of positions.
    """

    name: str
    better: str = "max"
    size: int = 1
    takes_parts: bool = False

    def prepare(self, shape: tuple[int, ...]) -> None:
        """Set what depends on the shape ``(N, ...)`` of the predictions, such as `size`."""

    def __call__(self, xp: Any, y: Array, target: Array) -> Number:
        """Sum the metric over the samples.

        Parameters
        ----------
        xp : module
            Array module of the backend.
        y : Array, shape (N, ...)
            Predictions; N may be 0.
        target : Array
            Classes ``(N,)`` or numbers, depending on the metric.

        Returns
        -------
        Number
            On a device an array of no axes, for which the host does not wait. An array of `size`
            sums if it is not 1.

        Raises
        ------
        ValueError
            If the target does not fit the predictions.
        """
        self.check(y.shape, target)
        self.prepare(y.shape)
        return self.compute(xp, y, target)

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if a target does not fit predictions of `shape`, see `Loss.check`."""

    @abstractmethod
    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        """Return the sum over the samples; implemented by subclasses."""

    def finish(self, mean: Any) -> float:
        """Return what is logged for a mean over all samples: by default the mean itself.

        Parameters
        ----------
        mean : float, or ndarray of shape ``(size,)``
        """
        return mean

    def result(self, sums: Any, count: int) -> Any:
        """Return what is logged for sums over `count` samples: by default `finish` of the mean.

        Parameters
        ----------
        sums : float, or ndarray of shape ``(size,)``
        count : int
            Above 0.

        Returns
        -------
        float or ndarray
        """
        return self.finish(sums / count)


class _ClassMetric(Metric):
    """A metric of scores ``(N, K)`` and classes ``(N,)``, or probabilities ``(N, K)``.

    That of scores ``(N, T, K)`` and classes ``(N, T)`` is the mean over a sample's T positions.

    Parameters
    ----------
    ignore_index : int, optional
        A class of targets without a label, see `pydtnn.losses.CategoricalCrossEntropy`: the metric
        is the mean over all other positions of all samples.
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index = checked_index(type(self).__name__, ignore_index)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of sums: with `ignore_index` the positions are counted, too."""
        return 1 if self.ignore_index is None else 2

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        """Whether a metric with `compute_cut` has no classes to ignore."""
        return hasattr(self, "compute_cut") and self.ignore_index is None

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are neither classes from 0 to K - 1 nor probabilities."""
        check_distribution(type(self).__name__, shape, target, self.ignore_index)

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        rows, target, positions = rows_of(y, target)
        if self.ignore_index is None:
            total = self.compute_rows(xp, rows, target)
            return total if positions == 1 else total / positions
        if target.ndim == 1:
            kept = target != self.ignore_index
            rows, target = rows[kept], target[kept]
        total = xp.asarray(self.compute_rows(xp, rows, target), "float64")
        return xp.stack([total, xp.asarray(len(target), "float64")])

    def finish(self, mean: Any) -> float:
        """Return the mean, that over positions with a label if `ignore_index` is set."""
        if self.ignore_index is None:
            return mean
        return float(mean[0] / mean[1]) if mean[1] else 0.0

    @abstractmethod
    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        """Return the sum over rows ``(N, K)``."""


class _DenseMetric(Metric):
    """A metric of predictions and targets of equal shape; classes are compared as one-hot rows."""

    better = "min"

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets cannot be converted to the shape of the predictions."""
        check_dense(type(self).__name__, shape, target)


class Accuracy(_ClassMetric):
    """Share of samples whose largest score is that of their class.

    If scores are equal, the first is used. The class of a mixed sample is the most likely one. With
    one output per sample, class 1 is predicted if the logit is above 0.
    """

    name = "accuracy"

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are not classes; numbers are allowed with one output."""
        if shape[1:] == (1,):
            check_dense("Accuracy", shape, target)
        else:
            super().check(shape, target)

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        if y.shape[1:] != (1,):
            return super().compute(xp, y, target)
        target = target.reshape(-1)
        right = (y[:, 0] > 0) == (target > 0.5)
        if self.ignore_index is None:
            return right.sum()
        kept = target != self.ignore_index
        return xp.stack([(right & kept).sum(), kept.sum()])

    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        """Count the samples predicted right."""
        return (y.argmax(axis=1) == most_likely(target)).sum()

    def compute_cut(self, scores: CutScores, target: Array) -> Number:
        """Compute the same as `compute` with numbers of scores that ranks have in part."""
        right = (scores.predicted == target.reshape(-1)).sum()
        return right / prod(target.shape[1:])


class BinaryAccuracy(_DenseMetric):
    """Share of the outputs of a sample that are on the right side of a threshold.

    Targets are 0 and 1, one for each output, such as several labels of a sample; probabilities
    count as 1 above 0.5, and classes as one-hot rows.

    Parameters
    ----------
    threshold : float
        Of the outputs: 0 for logits, 0.5 for probabilities.
    """

    name = "binary_accuracy"
    better = "max"

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = check_float("BinaryAccuracy", "threshold", threshold)

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        return _sum_of_means((y > self.threshold) == (dense(xp, y, target) > 0.5))


class AUC(_DenseMetric):
    """Area under the receiver operating characteristic, of scores in intervals of equal length.

    The probability that an output with target 1 has a larger score than one with target 0, of which
    equal scores count as a half. Scores are ``sigmoid(y)``, or ``softmax(y)`` if targets are
    classes (each class against all others). Two scores in one interval ``(i / n, (i + 1) / n]``,
    with ``n = thresholds - 1``, are equal, as in Keras; the sums are the numbers of scores in each
    interval, so that the area does not depend on batches and ranks.

    Parameters
    ----------
    thresholds : int
        Number of thresholds, with 0 and 1; at least 2.
    labels : int, optional
        Number of outputs of a sample. With it, the result is the mean of the areas of all outputs
        ("macro"), without those whose targets are equal; by default, all outputs are one set
        ("micro").
    from_logits : bool
        Whether to apply sigmoid or softmax; False for a model that ends with one.

    References
    ----------
    Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic
    (ROC) curve", Radiology 143, 1982.
    """

    name = "auc"
    better = "max"

    def __init__(
        self, thresholds: int = 200, labels: int | None = None, from_logits: bool = True
    ) -> None:
        self.thresholds = check_int("AUC", "thresholds", thresholds, at_least=2, at_most=1 << 20)
        self.labels = None if labels is None else check_int("AUC", "labels", labels, at_least=1)
        self.from_logits = check_bool("AUC", "from_logits", from_logits)
        self.size = 2 * (self.thresholds - 1) * (self.labels or 1)

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets do not fit the outputs, or these are not `labels`."""
        super().check(shape, target)
        if self.labels not in (None, shape[-1]):
            raise ValueError(
                f"AUC: labels must be the {shape[-1]} outputs of a sample, got {self.labels}"
            )

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        """Count the scores in each interval, of targets 0 and of targets 1, for each label."""
        x = y.astype("float64")
        if self.from_logits and is_classes(y.shape, target):
            e = xp.exp(x - x.max(axis=1, keepdims=True))
            x = e / e.sum(axis=1, keepdims=True)
        elif self.from_logits:
            e = xp.exp(-abs(x))
            x = xp.where(x >= 0, 1, e) / (1 + e)
        count = self.thresholds - 1
        place = xp.ceil(xp.where(x >= 0, x, 0) * count).astype("int64") - 1  # 0 for NaN
        place = xp.clip(place, 0, count - 1) + count * (dense(xp, y, target) > 0.5)
        if self.labels is not None:
            place = place + 2 * count * xp.arange(self.labels)
        return xp.bincount(place.reshape(-1), minlength=self.size).astype("float64")

    def finish(self, mean: Any) -> float:
        """Return the area; NaN if all targets are equal."""
        counts = mean.reshape(-1, 2, self.thresholds - 1)
        negatives, positives = counts[:, 0], counts[:, 1]
        below = negatives.cumsum(axis=1) - negatives / 2
        pairs = negatives.sum(axis=1) * positives.sum(axis=1)
        known = pairs > 0
        areas = (positives * below).sum(axis=1)[known] / pairs[known]
        return float(areas.mean()) if known.any() else nan


class TopKAccuracy(_ClassMetric):
    """Share of samples whose class is among the k largest scores.

    A wrong class with an equal score is ranked first, so constant outputs and NaN are never counted
    as correct.

    Parameters
    ----------
    k : int
        At most the number of classes.
    ignore_index : int, optional
        A class of targets without a label.
    """

    def __init__(self, k: int = 5, ignore_index: int | None = None) -> None:
        super().__init__(ignore_index)
        self.k = check_int("TopKAccuracy", "k", k, at_least=1)
        self.name = f"top{k}_accuracy"

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are not classes or there are fewer classes than k."""
        super().check(shape, target)
        if self.k > shape[-1]:
            raise ValueError(
                f"TopKAccuracy: k must be at most the number of classes {shape[-1]}, got {self.k}"
            )

    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        """Count the samples predicted right."""
        own = y[xp.arange(len(y)), most_likely(target)][:, None]  # (N, 1)
        ahead = (~(y < own)).sum(axis=1)  # itself included
        return (ahead <= self.k).sum()


class Perplexity(_ClassMetric):
    """Exponential of the mean cross-entropy of logits; K for uniform probabilities of K classes.

    The mean is that over all positions of all samples: it is not the mean of perplexities.
    """

    name = "perplexity"
    better = "min"

    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        """Sum the cross-entropies, of which `finish` takes the exponential."""
        y = y.astype("float64") - y.max(axis=1, keepdims=True)
        own = y[xp.arange(len(y)), most_likely(target)]
        return (xp.log(xp.exp(y).sum(axis=1)) - own).sum()

    def compute_cut(self, scores: CutScores, target: Array) -> Number:
        """Compute the same as `compute` with numbers of scores that ranks have in part."""
        return (scores.log_sum - scores.own).sum() / prod(target.shape[1:])

    def finish(self, mean: Any) -> float:
        """Return the exponential, infinite if it is too large."""
        mean = super().finish(mean)
        return exp(mean) if mean < log(float_info.max) else inf


class CategoricalHinge(_ClassMetric):
    """Hinge of scores against the strongest wrong class: ``max(0, 1 + max_{k != t} y_k - y_t)``.

    References
    ----------
    Crammer and Singer, "On the algorithmic implementation of multiclass kernel-based vector
    machines", JMLR 2, 2001, equation 3.
    """

    name = "categorical_hinge"
    better = "min"

    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        """Sum the hinges over the samples."""
        rows, target = xp.arange(len(y)), most_likely(target)
        margin = 1 + y - y[rows, target][:, None]
        margin[rows, target] = 0  # the max with 0, too
        return xp.maximum(margin.max(axis=1), 0).sum(dtype="float64")


class RegressionMSE(_DenseMetric):
    """Squared error, mean over a sample's outputs; classes are compared as one-hot rows."""

    name = "regression_mse"

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        return _sum_of_means(xp.square(y - dense(xp, y, target)))


class RegressionMAE(_DenseMetric):
    """Absolute error, mean over a sample's outputs; classes are compared as one-hot rows."""

    name = "regression_mae"

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        return _sum_of_means(abs(y - dense(xp, y, target)))


def _sum_of_means(errors: Array) -> Number:
    """Sum over samples of the mean over a sample's outputs, in float64."""
    return errors.sum(dtype="float64") / max(errors[:1].size, 1)


AVERAGES = ("macro", "micro", "weighted", "none")
"""Values of `average`."""


class _Counted(Metric):
    """A quotient of the numbers of right predictions, predictions and targets of each label.

    The labels are the classes, of which the one with the largest score is predicted, or outputs
    that are independent of each other (`threshold`). With one output per sample, the only label is
    class 1. Counts are sums over all samples of all ranks, so that the quotients are those of the
    whole data set.

    Parameters
    ----------
    average : {"macro", "micro", "weighted", "none"}
        "macro" is the mean of the labels' results, "weighted" the same with the numbers of targets
        as weights, "micro" the result for the sums of their counts, and "none" an array with the
        result of each label, NaN without any. Labels that neither targets nor predictions contain
        are left out, and 0 / 0 is 0 otherwise, as in scikit-learn.
    label : int, optional
        The result of this label alone.
    threshold : float, optional
        Scores above it are predicted, each output for itself, and targets are 0 and 1 for each
        output: several labels of a sample. 0 for logits, 0.5 for probabilities. A metric that is
        given by name has that of the loss, which `binary_cross_entropy` sets. With one output, the
        default is 0.
    ignore_index : int, optional
        A class of targets without a label.
    """

    kind: str

    def __init__(
        self,
        average: str = "macro",
        *,
        label: int | None = None,
        threshold: float | None = None,
        ignore_index: int | None = None,
    ) -> None:
        who = type(self).__name__
        if average not in AVERAGES:
            raise ValueError(
                f"{who}: average must be one of {', '.join(AVERAGES)}, got {average!r}"
            )
        self.average = average
        self.label = None if label is None else check_int(who, "label", label, at_least=0)
        self.threshold = None if threshold is None else check_float(who, "threshold", threshold)
        self.ignore_index = checked_index(who, ignore_index)
        self.better = "" if average == "none" and label is None else "max"

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name in logs, such as "f1", "micro_f1", "per_label_f1" and "f1_3" of label 3."""
        if self.label is not None:
            return f"{self.kind}_{self.label}"
        prefix = {"macro": "", "none": "per_label_"}.get(self.average, f"{self.average}_")
        return prefix + self.kind

    def prepare(self, shape: tuple[int, ...]) -> None:
        """Count three numbers for each label."""
        self.size = 3 * shape[-1]
        if self.label is not None and self.label >= shape[-1]:
            raise ValueError(
                f"{type(self).__name__}: label must be in 0..{shape[-1] - 1}, the outputs of the "
                f"model, got {self.label}"
            )

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are neither classes nor labels of the outputs."""
        if self._independent(shape):
            check_dense(type(self).__name__, shape, target)
        else:
            check_distribution(type(self).__name__, shape, target, self.ignore_index)

    def _independent(self, shape: tuple[int, ...]) -> bool:
        return self.threshold is not None or shape[-1] == 1

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        """Count right predictions, predictions and targets, of each label."""
        if self._independent(y.shape):
            truth, predicted = dense(xp, y, target), y > (self.threshold or 0)
            counted = [(truth > 0.5) & predicted, predicted, truth > 0.5]
            if self.ignore_index is not None and not is_classes(y.shape, target):
                counted = [part & (truth != self.ignore_index) for part in counted]
            counts = [part.reshape(-1, y.shape[-1]).sum(axis=0) for part in counted]
        else:
            truth, predicted, labels = _classes(xp, y, target, self.ignore_index)
            right = xp.where(truth == predicted, truth, labels)
            counts = [
                xp.bincount(part, minlength=labels + 1)[:labels]
                for part in (right, predicted, truth)
            ]
        return xp.concatenate(counts).astype("float64")

    def finish(self, mean: Any) -> Any:
        """Return the quotient, or its average over the labels."""
        counts = mean.reshape(3, -1)
        if self.label is not None:
            counts = counts[:, self.label : self.label + 1]
        elif self.average == "micro":
            counts = counts.sum(axis=1, keepdims=True)
        _, predicted, actual = counts
        above, below = self.quotient(*counts)
        present, values = predicted + actual > 0, np.zeros(len(above))
        np.divide(above, below, out=values, where=below > 0)
        if not self.better:
            return np.where(present, values, nan)
        if not present.any():
            return nan
        if self.average == "weighted" and self.label is None:
            return float((values * actual).sum() / actual.sum()) if actual.any() else 0.0
        return float(values[present].mean())

    @abstractmethod
    def quotient(self, right: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        """Return numerator and denominator for counts of each label."""


class Precision(_Counted):
    """Share of the predictions of a label that are right: ``right / predicted``.

    Parameters
    ----------
    average : {"macro", "micro", "weighted", "none"}
        Over the labels: "macro" is the mean, "micro" counts all together, "weighted" weights by the
        number of targets, "none" is an array with each label's result.
    label : int, optional
        The result of this label alone, such as that of class 1 of two.
    threshold : float, optional
        For outputs that are independent of each other, the score above which one is predicted.
    ignore_index : int, optional
        A class of targets without a label.
    """

    kind = "precision"

    def quotient(self, right: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return right, predicted


class Recall(_Counted):
    """Share of the targets of a label that are predicted: ``right / actual``.

    Parameters
    ----------
    average, label, threshold, ignore_index
        See `Precision`.
    """

    kind = "recall"

    def quotient(self, right: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return right, actual


class F1(_Counted):
    """Harmonic mean of precision and recall, Dice's: ``2 right / (predicted + actual)``.

    Parameters
    ----------
    average, label, threshold, ignore_index
        See `Precision`.
    """

    kind = "f1"

    def quotient(self, right: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return 2 * right, predicted + actual


class IoU(_Counted):
    """Intersection over union, Jaccard's index: ``right / (predicted + actual - right)``.

    With the default average it is the mean IoU of semantic segmentation.

    Parameters
    ----------
    average, label, threshold, ignore_index
        See `Precision`.
    """

    kind = "iou"

    def quotient(self, right: Array, predicted: Array, actual: Array) -> tuple[Array, Array]:
        return right, predicted + actual - right


class ConfusionMatrix(Metric):
    """Numbers of samples by class and predicted class, an array ``(K, K)`` of int64.

    Row i contains the samples, or positions, of class i, as in scikit-learn. With one output per
    sample, the classes are 0 and 1, which is predicted if the logit is above 0. It is a result of
    `Trainer.evaluate`, and in ``trainer.logs`` of each epoch; `Trainer.history` contains numbers
    only. Ranks add up K^2 numbers in every step: for 1000 classes these are 8 MB.

    Parameters
    ----------
    ignore_index : int, optional
        A class of targets without a label.
    """

    name = "confusion_matrix"
    better = ""

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index = checked_index("ConfusionMatrix", ignore_index)

    def prepare(self, shape: tuple[int, ...]) -> None:
        """Count every pair of classes."""
        self.size = max(shape[-1], 2) ** 2

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are not classes, or numbers for one output."""
        if shape[-1] == 1:
            check_dense("ConfusionMatrix", shape, target)
        else:
            check_distribution("ConfusionMatrix", shape, target, self.ignore_index)

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        """Count the pairs."""
        if y.shape[-1] == 1:
            y, ignored = y.reshape(-1), self.ignore_index
            kept, truth = target.reshape(-1) != ignored, target.reshape(-1) > 0.5
            pairs, count = xp.where(kept, 2 * truth.astype("int64") + (y > 0), 4), 4
        else:
            truth, predicted, labels = _classes(xp, y, target, self.ignore_index)
            count = labels**2
            pairs = xp.where(truth < labels, truth * labels + predicted, count)
        return xp.bincount(pairs, minlength=count + 1)[:count].astype("float64")

    def result(self, sums: Any, count: int) -> Any:
        """Return the matrix."""
        classes = round(sums.size**0.5)
        return sums.reshape(classes, classes).astype("int64")


def _classes(
    xp: Any, y: Array, target: Array, ignore_index: int | None
) -> tuple[Array, Array, int]:
    """Return classes, those with the largest scores, and the number K of classes.

    Both classes of positions without a label are K.
    """
    rows, target, _ = rows_of(y, target)
    classes, truth, predicted = y.shape[-1], most_likely(target), rows.argmax(axis=1)
    if ignore_index is not None and target.ndim == 1:
        kept = truth != ignore_index
        truth, predicted = xp.where(kept, truth, classes), xp.where(kept, predicted, classes)
    return truth, predicted, classes


class R2(_DenseMetric):
    """Coefficient of determination: ``1 - sum (y - t)^2 / sum (t - mean t)^2``, mean over outputs.

    The mean is that of the targets of all samples of all ranks. As in scikit-learn, an output whose
    targets are all equal has the result 1 if it is predicted exactly, and 0 otherwise. Sums have
    two parts, so that targets with a mean far larger than their deviation do not lose digits.
    """

    name = "r2"
    better = "max"

    def prepare(self, shape: tuple[int, ...]) -> None:
        """Add up the samples, and five numbers for each output."""
        self.size = 1 + 5 * shape[-1]

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        """Add up targets, their squares, both in two parts, and squared errors."""
        t = dense(xp, y, target).astype("float64").reshape(-1, y.shape[-1])
        if not len(t):
            return xp.zeros(1 + 5 * y.shape[-1])
        errors = xp.square(y.astype("float64").reshape(t.shape) - t).sum(axis=0)
        offsets = t - t[0]
        sums = doubled.about_zero(
            float(len(t)), t[0], offsets.sum(axis=0), xp.square(offsets).sum(axis=0)
        )
        return xp.concatenate([xp.full(1, float(len(t))), *sums, errors])

    def result(self, sums: Any, count: int) -> float:
        """Return the mean of the outputs' results."""
        x, xx, x_rest, xx_rest, errors = sums[1:].reshape(5, -1)
        mean, variance = doubled.moments(sums[0], x, xx, x_rest, xx_rest)
        spread = sums[0] * variance
        varies = spread > sums[0] * (4 * float_info.epsilon * mean) ** 2
        values = np.where(errors > 0, 0.0, 1.0)
        np.divide(spread - errors, spread, out=values, where=varies)
        return float(values.mean())


METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": Accuracy,
    "binary_accuracy": BinaryAccuracy,
    "auc": AUC,
    "top_k_accuracy": TopKAccuracy,
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "iou": IoU,
    "confusion_matrix": ConfusionMatrix,
    "perplexity": Perplexity,
    "categorical_hinge": CategoricalHinge,
    "regression_mse": RegressionMSE,
    "regression_mae": RegressionMAE,
    "r2": R2,
}
"""Metrics by name; "top5_accuracy" is "top_k_accuracy" with k = 5, likewise for any k, and
"micro_f1" is "f1" with this average, likewise for "weighted", "per_label" and the others that have
averages."""

ALIASES = {
    "mse": "regression_mse",
    "mae": "regression_mae",
    "hinge": "categorical_hinge",
    "acc": "accuracy",
    "f1_score": "f1",
    "dice": "f1",
    "mean_iou": "iou",
    "miou": "iou",
    "jaccard": "iou",
    "r2_score": "r2",
    "categorical_accuracy": "accuracy",
    "sparse_categorical_accuracy": "accuracy",
}
"""Other names of the metrics."""

METRIC = Registry(
    "metric",
    METRICS,
    Metric,
    "a Metric, or a class or function that returns one",
    ALIASES,
    tool="sequences",
)
"""Finds metrics by name."""


def get_metric(metric: str | Metric | Callable[..., Metric], **options: Any) -> Metric:
    """Return the metric of a name, or the argument itself.

    Results have the name that is given: those of "mae" are "mae".

    Parameters
    ----------
    metric : str, Metric or callable
        A name of `METRICS` or `ALIASES`, "top5_accuracy" with any number, "micro_f1" or another
        average of a metric that has them,
        ``path/to/file.py:name``, a metric, or a class or function that returns one.
    **options
        Parameters of a named one.

    Raises
    ------
    TypeError, ValueError
        If the argument is not a metric, or a name or option is unknown (the message contains the
        nearest ones).
    """
    name = metric.lower() if isinstance(metric, str) else ""
    if top := re.fullmatch(r"top_?(\d+)([_-]accuracy)?", name):
        return TopKAccuracy(int(top[1]))
    if part := re.fullmatch(r"(macro|micro|weighted|per_label)_(\w+)", name):
        average = "none" if part[1] == "per_label" else part[1]
        return METRIC.find(part[2]).make({"average": average} | options)
    found = METRIC.find(metric).make(options)
    if name in ALIASES and isinstance(getattr(type(found), "name", None), str):
        found.name = name
    return found


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__)
