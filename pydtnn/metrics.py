"""Metrics, computed as sums that `Totals` divides by the number of samples.

A classifier's outputs are logits. Metrics of probabilities therefore apply a softmax first, unless
the model ends with one (`from_logits=False`); accuracies and the hinge use scores directly.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import exp, inf, log
from sys import float_info
from typing import TYPE_CHECKING, Any

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.losses.targets import (
    check_dense,
    check_distribution,
    dense,
    most_likely,
    one_hot,
    rows_of,
)
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.foreign_names import SuggestsNames, suggesting_getattr
from pydtnn.utils.registry import Kind
from pydtnn.utils.validate import whole


class Metric(SuggestsNames, StoresArguments, ABC):
    """A quantity of each sample, summed over the samples.

    Attributes
    ----------
    name : str
        Name in logs.
    better : str
        "max" or "min": whether callbacks treat larger or smaller values as better.
    """

    name: str
    better: str = "max"

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
            On a device an array of no axes, for which the host does not wait.

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

    def finish(self, mean: float) -> float:
        """Return what is logged for a mean over all samples: by default the mean itself."""
        return mean


class _ClassMetric(Metric):
    """A metric of scores ``(N, K)`` and classes ``(N,)``, or probabilities ``(N, K)``.

    That of scores ``(N, T, K)`` and classes ``(N, T)`` is the mean over a sample's T positions.
    """

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are neither classes from 0 to K - 1 nor probabilities."""
        check_distribution(type(self).__name__, shape, target)

    def compute(self, xp: Any, y: Array, target: Array) -> Number:
        rows, target, positions = rows_of(y, target)
        total = self.compute_rows(xp, rows, target)
        return total if positions == 1 else total / positions

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
        (check_dense if shape[1:] == (1,) else check_distribution)("Accuracy", shape, target)

    def compute_rows(self, xp: Any, y: Array, target: Array) -> Number:
        """Count the samples predicted right."""
        if y.shape[1:] == (1,):
            return ((y[:, 0] > 0) == (target.reshape(-1) > 0.5)).sum()
        return (y.argmax(axis=1) == most_likely(target)).sum()


class TopKAccuracy(_ClassMetric):
    """Share of samples whose class is among the k largest scores.

    A wrong class with an equal score is ranked first, so constant outputs and NaN are never counted
    as correct.

    Parameters
    ----------
    k : int
        At most the number of classes.
    """

    def __init__(self, k: int = 5) -> None:
        self.k = whole("TopKAccuracy", "k", k, at_least=1)
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

    def finish(self, mean: float) -> float:
        """Return the exponential, infinite if it is too large."""
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
    "binary_accuracy": "accuracy",
    "categorical_accuracy": "accuracy",
    "sparse_categorical_accuracy": "accuracy",
}
"""Other names of the metrics."""

METRIC = Kind(
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
    __getattr__ = suggesting_getattr(__name__)
