"""Losses and their gradients with respect to the predictions.

A loss is a sum over samples, never a mean, and its gradient is multiplied by a scale that the
parallel scheme provides (1 / global batch), so that shards of any sizes add up exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.losses.cut import CutClasses, CutScores, columns
from pydtnn.losses.targets import (
    check_classes,
    check_dense,
    check_distribution,
    checked_index,
    dense,
    is_classes,
    one_hot,
    rows_of,
)
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.names import SuggestsNames
from pydtnn.utils.registry import Registry
from pydtnn.utils.validate import check_bool, check_float, check_int

WeightsLike = Sequence[float] | np.ndarray | Mapping[Any, float]


class ClassWeights:
    """Weights of the classes in a loss.

    Parameters
    ----------
    who : str
        First word of errors.
    given : sequence or mapping
        One weight of at least 0 for each class, or weights of some classes, by class; those of the
        others are 1. Keys may be text, as in JSON.

    Raises
    ------
    TypeError, ValueError
        If weights are not numbers of at least 0, or all are 0.
    """

    def __init__(self, who: str, given: WeightsLike) -> None:
        self.who = who
        pairs = given.items() if isinstance(given, Mapping) else enumerate(_list(who, given))
        self.weights: dict[int, float] = {}
        for key, value in pairs:
            index = int(key) if isinstance(key, str) and key.isdecimal() else key
            index = check_int(who, "a class of class_weights", index, at_least=0)
            self.weights[index] = check_float(
                who, f"class_weights of class {key}", value, at_least=0
            )
        self.every = not isinstance(given, Mapping)
        if self.every and not any(self.weights.values()):
            raise ValueError(
                f"{who}: class_weights must have at least one number above 0, got "
                f"{[*self.weights.values()]}; omit them for equal weights"
            )
        self._placed: tuple[Backend, Array] | None = None

    def check(self, classes: int) -> None:
        """Raise ValueError if the weights are not those of this number of classes.

        Raises
        ------
        ValueError
        """
        if self.every and len(self.weights) != classes:
            raise ValueError(
                f"{self.who}: class_weights must be {classes} numbers, one for each output of the "
                f"model, got {len(self.weights)}; or name some classes: {{0: 2.0}}"
            )
        if max(self.weights, default=0) >= classes:
            raise ValueError(
                f"{self.who}: class_weights must have classes in 0..{classes - 1}, got "
                f"{max(self.weights)}"
            )

    def place(self, backend: Backend, classes: int, dtype: Any) -> Array:
        """Return the weights (K,) as an array of a backend, which is allocated once."""
        known = self._placed
        if known is not None and known[0] is backend and known[1].dtype == dtype:
            return known[1]
        values = np.ones(classes)
        values[[*self.weights]] = [*self.weights.values()]
        array = backend.asarray(values, dtype)
        self._placed = backend, array
        return array


def _list(who: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple | np.ndarray) or np.ndim(given) != 1:
        raise TypeError(
            f"{who}: class_weights must be a list with one number per class, or a mapping of "
            f"classes to numbers, got {given!r}"
        )
    return [*given]


class Loss(SuggestsNames, StoresArguments, ABC):
    """A function of predictions and targets, summed over the samples.

    A custom loss overrides `compute`, and `check` to raise ValueError for invalid targets.

    Attributes
    ----------
    metrics : tuple of str
        Names of the metrics that a trainer reports by default.
    task : str
        What the outputs of a model predict whose targets are not the classes of a data set:
        "classes", "labels" that are independent of each other, or "numbers"; empty if unknown.
    ignore_index : int or None
        The class of targets that are left out, also by metrics.
    threshold : float or None
        The score above which an output is predicted, if outputs are independent of each other; also
        that of metrics.
    counts_targets : bool
        Whether the mean loss is the sum over all samples of all ranks divided by the sum of `count`
        rather than by the number of samples.
    takes_parts : bool
        Whether there is a method `compute_cut` for scores of which ranks have different classes
        (see `CategoricalCrossEntropy`), and the loss is the mean of those of positions.
    overwrites : bool
        Whether `compute` may write the gradient over the predictions, on a CPU. Not inherited.
    """

    metrics: tuple[str, ...] = ()
    task: str = ""
    ignore_index: int | None = None
    threshold: float | None = None
    counts_targets: bool = False
    takes_parts: bool = False
    overwrites: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.overwrites = vars(cls).get("overwrites", False)

    def __call__(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array | None = None
    ) -> tuple[Number, Array]:
        """Compute the loss and its gradient.

        Parameters
        ----------
        backend : Backend
        y : Array, shape (N, ...)
            Predictions; N may be 0.
        target : Array
            One entry per sample: classes ``(N,)``, or ``(N, T)`` at T positions, or numbers,
            depending on the loss.
        scale : Number
            Factor on the gradient (not on the loss).
        out : Array, shape (N, ...), optional
            Output array for the gradient; allocated by default.

        Returns
        -------
        loss : Number
            Sum of the samples' losses; on a device an array of no axes, for which the host does not
            wait.
        dy : Array, shape (N, ...)
            ``scale * d loss / d y``.

        Raises
        ------
        ValueError
            If the target does not fit the predictions.
        """
        self.check(y.shape, target)
        if out is None:
            out = backend.empty(y.shape, y.dtype)
        return self.compute(backend, y, target, scale, out), out

    def count(self, shape: tuple[int, ...], target: Array) -> Number:
        """Return the number of targets of predictions ``(N, ...)``: by default N."""
        return shape[0]

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if a target does not fit predictions of `shape`.

        Parameters
        ----------
        shape : tuple of int
            Shape of the predictions, ``(N, ...)``.
        target : Array

        Raises
        ------
        ValueError
            With the expected and the actual target, and the sample of a value out of range.
        """

    @abstractmethod
    def compute(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        """Return the sum of the losses and write the gradient to `out`."""


class _ClassLoss(Loss):
    """A loss of scores ``(N, K)``, or the mean over positions of ``(N, T, K)``."""

    metrics, task = ("accuracy",), "classes"

    def compute(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        rows, target, positions = rows_of(y, target)
        if positions == 1 or self.counts_targets:  # a mean over the targets that count
            return self.compute_rows(backend, rows, target, scale, out.reshape(rows.shape))
        scale = scale / positions
        return self.compute_rows(backend, rows, target, scale, out.reshape(rows.shape)) / positions

    @abstractmethod
    def compute_rows(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        """Return the sum of the losses of rows ``(N, K)``, and write the gradient to `out`."""


class _DenseLoss(Loss):
    """A loss of predictions and targets of equal shape; classes ``(N,)`` become one-hot rows."""

    kernel: ClassVar[str]
    """Name of the loss among the kernels of a backend."""

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets cannot be converted to the shape of the predictions."""
        check_dense(type(self).__name__, shape, target)

    def compute(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        loss = getattr(backend.loss, self.kernel)
        value: Number = loss(y, dense(backend.xp, y, target), scale, out=out)
        return value


class CategoricalCrossEntropy(_ClassLoss):
    """Cross-entropy of softmax(logits) with classes, or with the probability of each class.

    The model ends with logits, not with a Softmax layer.

    ``L = sum_n -sum_k w_k q_nk log softmax(y_n)_k`` with ``q = (1 - s) onehot(t) + s / K``. Targets
    are classes t ``(N,)``, or probabilities ``(N, K)`` in the place of onehot(t), such as those of
    mixed samples. Logits ``(N, T, K)`` with targets ``(N, T)`` or ``(N, T, K)`` have the mean over
    T positions, as have the pixels of masks ``(N, H, W)`` or ``(N, H, W, K)``.

    Parameters
    ----------
    label_smoothing : float
        The `s` above, in [0, 1).
    class_weights : sequence of float or mapping of int to float, optional
        The `w` above: one weight of at least 0 per class, or weights of some classes, where those
        of others are 1; by default all are 1. The loss stays a sum, whose mean divides by the
        number of samples and not by their weights, so that shards and ranks add up exactly. Weights
        with a mean of 1 over the training set, as `pydtnn.data.balanced_weights` returns, preserve
        the scale of the loss.
    ignore_index : int, optional
        A class, such as 255 or -100, of targets without a label, which need not be one of 0 to K -
        1. Such positions have neither loss nor gradient. The loss is the sum over all others, and
        the mean that is minimised divides by their number in the batch of all ranks, as PyTorch's
        does for a whole batch; without any it is 0.

    References
    ----------
    Szegedy et al., "Rethinking the Inception architecture for computer vision", CVPR 2016, section
    7.
    """

    overwrites = True

    def __init__(
        self,
        label_smoothing: float = 0.0,
        class_weights: WeightsLike | None = None,
        ignore_index: int | None = None,
    ) -> None:
        who = "CategoricalCrossEntropy"
        self.ignore_index = checked_index(who, ignore_index)
        self.label_smoothing = check_float(
            who, "label_smoothing", label_smoothing, at_least=0, below=1
        )
        self.class_weights = None if class_weights is None else ClassWeights(who, class_weights)

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets or `class_weights` are not those of K classes."""
        check_distribution(type(self).__name__, shape, target, self.ignore_index)
        if self.class_weights is not None:
            self.class_weights.check(shape[-1])

    @property
    def counts_targets(self) -> bool:  # type: ignore[override]
        """Whether the mean is over the targets that are not ignored."""
        return self.ignore_index is not None

    def count(self, shape: tuple[int, ...], target: Array) -> Number:
        """Count the targets that are not ignored: all if they are probabilities."""
        if self.ignore_index is None:
            return shape[0]
        if tuple(target.shape) == tuple(shape):
            return prod(shape[:-1])
        return (target != self.ignore_index).sum()

    def compute_rows(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        weights, smoothing = self._weights(backend, y), self.label_smoothing
        if target.ndim == 2 or weights is not None or self.ignore_index is not None:
            return backend.loss.weighted_cross_entropy(
                y, target, weights, self.ignore_index, smoothing, scale, out=out
            )
        return backend.loss.cross_entropy(y, target, smoothing, scale, out=out)

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        """Whether this is the plain cross-entropy: no smoothing, weights or ignored classes."""
        plain = not self.label_smoothing and self.class_weights is None
        return plain and self.ignore_index is None and type(self) is CategoricalCrossEntropy

    def compute_cut(
        self,
        backend: Backend,
        y: Array,
        target: Array,
        scale: Number,
        out: Array,
        classes: CutClasses,
    ) -> tuple[Number, CutScores]:
        """Compute the same as `compute` if ranks have scores of different classes.

        ``L = sum_n log sum_k exp y_nk - y_nt``; the gradient is ``softmax(y_n) - onehot(t)`` of own
        classes. Collective for the ranks that have the others.

        Parameters
        ----------
        backend : Backend
        y : Array, shape (N, ..., own classes)
        target : Array, shape (N, ...)
            Classes.
        scale, out
            See `compute`.
        classes : CutClasses

        Returns
        -------
        loss : Number
        scores : CutScores
            For the metrics.
        """
        xp = backend.xp
        rows, target, positions = rows_of(y, target)
        dy = out.reshape(rows.shape)
        scores = CutScores.of(xp, rows, target, classes, dy)
        column, here = columns(xp, target, classes, rows.shape[1])
        dy[xp.arange(len(rows)), column] -= here
        dy *= xp.asarray(scale / positions, dy.dtype)
        return (scores.log_sum - scores.own).sum() / positions, scores

    def _weights(self, backend: Backend, y: Array) -> Array | None:
        if self.class_weights is None:
            return None
        dtype = np.promote_types(y.dtype, "float32")
        return self.class_weights.place(backend, y.shape[1], dtype)


class KLDivergence(_ClassLoss):
    """Kullback-Leibler divergence of softmax(logits) from the distributions that are the targets.

    ``L = T^2 sum_n sum_k q_nk (log q_nk - log softmax(y_n / T)_k)``, whose gradient is
    ``T (softmax(y_n / T) - q_n)``. Targets q are probabilities ``(N, K)``, or ``softmax(t / T)`` of
    logits t of another network. Logits ``(N, T, K)`` have the mean over T positions. Targets may
    also be classes, which are one-hot rows.

    Parameters
    ----------
    temperature : float
        The `T` above, by which logits are divided; above 0. The factor T^2 keeps the scale of the
        gradient.
    from_logits : bool
        Whether targets are logits.
    ignore_nan : bool
        Whether positions with NaN in their targets have neither loss nor gradient. As with
        `ignore_index` of `CategoricalCrossEntropy`, the mean divides by the number of all others.

    References
    ----------
    Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network", 2015, section 2.
    """

    metrics = ()  # type: ignore[assignment]

    def __init__(
        self, temperature: float = 1.0, from_logits: bool = False, ignore_nan: bool = False
    ) -> None:
        who = "KLDivergence"
        self.temperature = check_float(who, "temperature", temperature, above=0)
        self.from_logits = check_bool(who, "from_logits", from_logits)
        self.ignore_nan = check_bool(who, "ignore_nan", ignore_nan)

    @property
    def counts_targets(self) -> bool:  # type: ignore[override]
        """Whether the mean is over the positions whose targets are not NaN."""
        return self.ignore_nan

    def count(self, shape: tuple[int, ...], target: Array) -> Number:
        """Count the positions that are not ignored."""
        if not self.ignore_nan:
            return shape[0]
        known = target == target
        return (known.all(axis=-1) if target.ndim == len(shape) else known).sum()

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are neither classes nor distributions, or logits of them."""
        if tuple(target.shape) == tuple(shape) and len(shape) > 1 and target.dtype.kind == "f":
            if self.from_logits:
                return
            if self.ignore_nan:
                missing, target = (target != target).any(axis=-1), target.copy()
                target[missing] = 1 / shape[-1]
        check_distribution(type(self).__name__, shape, target)

    def compute_rows(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        xp, t = backend.xp, self.temperature
        soft = target.ndim == 2
        q = target.astype(y.dtype, copy=False) if soft else one_hot(xp, target, y.shape[1], y.dtype)
        if soft and self.from_logits:
            q = xp.exp((q - q.max(axis=1, keepdims=True)) / t)
            q /= q.sum(axis=1, keepdims=True)
        if self.ignore_nan:
            q = xp.where((q == q).all(axis=1)[:, None], q, 0)
        y = y if t == 1 else y / t
        value = backend.loss.weighted_cross_entropy(y, q, None, None, 0.0, t * scale, out=out)
        return t**2 * (value + (q * xp.log(xp.where(q > 0, q, 1))).sum(dtype="float64"))


class BinaryCrossEntropy(_DenseLoss):
    """Cross-entropy of sigmoid(logits) with probabilities, mean over a sample's outputs.

    ``L = sum_n mean_j -(t log sigmoid(y) + (1 - t) log(1 - sigmoid(y)))``. Targets are in [0, 1]
    and have the shape of the logits; ``(N,)`` is also allowed for one logit per sample, and classes
    for several, as one-hot rows.
    """

    metrics, task, kernel = ("binary_accuracy",), "labels", "binary_cross_entropy"
    threshold = 0.0
    overwrites = True

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets have a wrong shape or are outside [0, 1]."""
        super().check(shape, target)
        if is_classes(shape, target):
            return
        wrong = ~((target >= 0) & (target <= 1))  # true for NaN too
        if wrong.any():
            at = int(wrong.argmax())
            sample = at * len(target) // target.size
            raise ValueError(
                "BinaryCrossEntropy: targets must be in [0, 1], got "
                f"{target.reshape(-1)[at]} for sample {sample} of the batch; "
                "use (y + 1) / 2 for targets of -1 and 1"
            )


class MeanSquaredError(_DenseLoss):
    """Squared error, mean over a sample's outputs: ``L = sum_n mean_j (y - t)^2``.

    Classes ``(N,)`` beside predictions ``(N, K)`` become one-hot rows.
    """

    metrics, task, kernel = ("regression_mae",), "numbers", "squared_error"
    overwrites = True


class MeanAbsoluteError(_DenseLoss):
    """Absolute error, mean over a sample's outputs: ``L = sum_n mean_j |y - t|``.

    The gradient at 0 is 0. Classes ``(N,)`` beside predictions ``(N, K)`` become one-hot rows.
    """

    metrics, task, kernel = ("regression_mse",), "numbers", "absolute_error"
    overwrites = True


class Hinge(_ClassLoss):
    """Multi-class hinge loss of scores: ``L = sum_n sum_{k != t} max(0, 1 + y_nk - y_nt)``.

    References
    ----------
    Weston and Watkins, "Support vector machines for multi-class pattern recognition", ESANN 1999,
    equation 6.
    """

    overwrites = True

    def check(self, shape: tuple[int, ...], target: Array) -> None:
        """Raise ValueError if targets are not classes from 0 to K - 1."""
        check_classes("Hinge", shape, target)

    def compute_rows(
        self, backend: Backend, y: Array, target: Array, scale: Number, out: Array
    ) -> Number:
        return backend.loss.hinge(y, target.astype("int64", copy=False), scale, out=out)


LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": CategoricalCrossEntropy,
    "kl_divergence": KLDivergence,
    "binary_cross_entropy": BinaryCrossEntropy,
    "mse": MeanSquaredError,
    "mae": MeanAbsoluteError,
    "hinge": Hinge,
}
"""Losses by name."""

ALIASES = {
    "categorical_cross_entropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "sparse_categorical_crossentropy": "cross_entropy",
    "crossentropy": "cross_entropy",
    "crossentropyloss": "cross_entropy",
    "ce": "cross_entropy",
    "kl": "kl_divergence",
    "kldivloss": "kl_divergence",
    "bce": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy",
    "bcewithlogitsloss": "binary_cross_entropy",
    "binary_crossentropy": "binary_cross_entropy",
    "l1": "mae",
    "l1loss": "mae",
    "mseloss": "mse",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
}
"""Other names of the losses."""

WHAT = "a Loss, or a class or function that returns one"
LOSS = Registry("loss", LOSSES, Loss, WHAT, ALIASES, tool="sequences")


def get_loss(loss: str | Loss | Callable[..., Loss], **options: Any) -> Loss:
    """Return the loss of a name, or the argument itself.

    Parameters
    ----------
    loss : str, Loss or callable
        A name of `LOSSES` or `ALIASES`, ``path/to/file.py:name``, a loss, or a class
        or function that returns one.
    **options
        Parameters of a named one: ``get_loss("cross_entropy", label_smoothing=0.1)``.

    Raises
    ------
    TypeError, ValueError
        If the argument is not a loss, or a name or option is unknown (the message contains the
        nearest ones).
    """
    return LOSS.find(loss).make(options)
