"""Metrics, computed as sums that `Totals` divides by the number of samples.

A classifier's outputs are logits. Metrics of probabilities therefore apply a softmax first, unless
the model ends with one (`from_logits=False`); accuracies and the hinge use scores directly.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import exp, inf, log, nan
from sys import float_info
from typing import TYPE_CHECKING, Any

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.losses.targets import (
    check_dense,
    check_distribution,
    checked_index,
    dense,
    is_classes,
    most_likely,
    one_hot,
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
        "max" or "min": whether callbacks treat larger or smaller values as better.
    size : int
        Number of sums: `compute` returns an array of so many, and `finish` receives their means.
    """

    name: str
    better: str = "max"
    size: int = 1

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


class _Categorical(_ClassMetric):
    """An error of class probabilities against one-hot rows, mean over the classes.

    Parameters
    ----------
    from_logits : bool
        Whether to apply a softmax first; False for a model that ends with one.
    """

    better = "min"

    def __init__(self, from_logits: bool = True) -> None:
        super().__init__()
        self.from_logits = from_logits

    def difference(self, xp: Any, y: Array, target: Array) -> Array:
        """Return the probabilities minus the one-hot rows, or those of the target, (N, K)."""
        if self.from_logits:
            e = xp.exp(y - y.max(axis=1, keepdims=True))
            y = e / e.sum(axis=1, keepdims=True)
        if target.ndim == 2:
            return y - target
        return y - one_hot(xp, target, y.shape[1], y.dtype)


class CategoricalMSE(_Categorical):
    """Squared error of class probabilities against one-hot rows, mean over the classes.

    Parameters
    ----------
    from_logits : bool
        Whether to apply the softmax; False for a model that ends with one.
    """

    name = "categorical_mse"

    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        return _sum_of_means(xp.square(self.difference(xp, y, target)))


class CategoricalMAE(_Categorical):
    """Absolute error of class probabilities against one-hot rows, mean over the classes.

    Parameters
    ----------
    from_logits : bool
        Whether to apply the softmax; False for a model that ends with one.
    """

    name = "categorical_mae"

    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        return _sum_of_means(abs(self.difference(xp, y, target)))


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


METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": Accuracy,
    "binary_accuracy": BinaryAccuracy,
    "auc": AUC,
    "top_k_accuracy": TopKAccuracy,
    "perplexity": Perplexity,
    "categorical_mse": CategoricalMSE,
    "categorical_mae": CategoricalMAE,
    "categorical_hinge": CategoricalHinge,
    "regression_mse": RegressionMSE,
    "regression_mae": RegressionMAE,
}
"""Metrics by name; "top5_accuracy" is "top_k_accuracy" with k = 5, likewise for any k."""

ALIASES = {
    "mse": "regression_mse",
    "mae": "regression_mae",
    "hinge": "categorical_hinge",
    "acc": "accuracy",
    "categorical_accuracy": "accuracy",
    "sparse_categorical_accuracy": "accuracy",
}
"""Other names of the metrics."""

METRIC = Registry(
    "metric", METRICS, Metric, "a Metric, or a class or function that returns one", ALIASES
)


def get_metric(metric: str | Metric | Callable[..., Metric], **options: Any) -> Metric:
    """Return the metric of a name, or the argument itself.

    Parameters
    ----------
    metric : str, Metric or callable
        A name of `METRICS` or `ALIASES`, "top5_accuracy" with any number,
        ``path/to/file.py:name``, a metric, or a class or function that returns one.
    **options
        Parameters of a named one.

    Raises
    ------
    TypeError, ValueError
        If the argument is not a metric, or a name or option is unknown (the message contains the
        nearest ones).
    """
    if isinstance(metric, str) and (
        top := re.fullmatch(r"top_?(\d+)([_-]accuracy)?", metric.lower())
    ):
        return TopKAccuracy(int(top[1]))
    return METRIC.find(metric).make(options)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__)
