"""Mixtures of two training samples and of their labels.

Each sample of a step is mixed with the one before it in the global batch, the first with the last.
A rank therefore reads and augments one sample more than it trains. Weights and boxes are keyed by
(seed, epoch, sample) as augmentation is, so that the mixtures do not depend on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import between
from pydtnn.data.augment.resized_crop import Boxes
from pydtnn.data.batch import has_several_inputs
from pydtnn.data.dataset import Dataset
from pydtnn.data.order import below
from pydtnn.kernels.reference.random import bits, stream
from pydtnn.utils.validate import check_float

Array = NDArray[Any]

QUANTILE_NODES = 8193
"""Tabulated quantiles of a distribution."""


def beta_quantiles(alpha: float) -> tuple[Array, Array]:
    """Tabulate the quantiles of Beta(alpha, alpha), between which interpolation is linear.

    With ``x = 1 / (1 + exp(-z))`` the density of z is proportional to ``(x (1 - x))^alpha``, which
    has no singularity and falls as ``exp(-alpha |z|)``. It is integrated by the trapezoidal rule.

    Parameters
    ----------
    alpha : float
        Above 0.

    Returns
    -------
    probabilities, quantiles : ndarray of float64, shape ``(QUANTILE_NODES,)``
        Both increase from 0 to 1.

    Examples
    --------
    >>> probabilities, quantiles = beta_quantiles(2.0)
    >>> round(float(np.interp(0.104, probabilities, quantiles)), 4)  # 3 x^2 - 2 x^3 = 0.104
    0.2
    """
    end = 40 / alpha + np.sqrt(160 / alpha)  # the density is below 1e-15 of its maximum
    z = np.linspace(-end, end, QUANTILE_NODES)
    log = np.log1p(np.exp(-abs(z)))
    density = np.exp(-alpha * (abs(z) + 2 * log - 2 * np.log(2)))
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return below / below[-1], np.exp(np.minimum(z, 0) - log)


WORDS = 4
"""Random words of a mixture: one block of Philox."""


@dataclass(frozen=True)
class Mixing(ABC):
    """A random mixture of two samples; a subclass implements ``__call__``.

    Parameters
    ----------
    alpha : float
        The weight of the first sample has the distribution Beta(alpha, alpha): below 1 mostly near
        0 and 1, with 1 uniform.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_float(type(self).__name__, "alpha", self.alpha, above=0)

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError if it is not applicable to samples of this shape."""

    @cached_property
    def _quantiles(self) -> tuple[Array, Array]:
        return beta_quantiles(self.alpha)

    def weights(self, words: Array) -> Array:
        """Return the random weights of the first samples, float64 ``(n,)``."""
        return np.interp(between(words[:, 1], 0, 1), *self._quantiles)

    @abstractmethod
    def __call__(self, x: Array, other: Array, words: Array) -> tuple[Array, Array]:
        """Mix pairs of samples.

        Parameters
        ----------
        x, other : ndarray of float, shape ``(n, *input_shape)``
            Normalised samples, which are not changed.
        words : ndarray of uint32, shape ``(n, 4)``
            The random bits of each pair; the first word is not random.

        Returns
        -------
        mixed : ndarray, of the shape and dtype of `x`
        share : ndarray of float64, shape ``(n,)``
            The share of `x` in each, which is that of its label.
        """


@dataclass(frozen=True)
class Mixup(Mixing):
    """Average pairs of samples: ``w x + (1 - w) other`` with w from Beta(alpha, alpha).

    References
    ----------
    Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018.
    """

    alpha: float = 0.2

    def __call__(self, x: Array, other: Array, words: Array) -> tuple[Array, Array]:
        share = self.weights(words)
        dtype = np.promote_types(x.dtype, np.float32)
        weight = share.astype(dtype).reshape(-1, *[1] * (x.ndim - 1))
        mixed = weight * x.astype(dtype, copy=False)
        mixed += (1 - weight) * other.astype(dtype, copy=False)
        return mixed.astype(x.dtype, copy=False), share


@dataclass(frozen=True)
class CutMix(Mixing):
    """Replace a box of each image by that of another one.

    The box has the shape of the image and the share ``1 - w`` of its area, w from Beta(alpha,
    alpha), and its centre is anywhere in the image; the part outside is cut off, and the share of
    the labels is that of the pixels.

    References
    ----------
    Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable
    features", ICCV 2019.
    """

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError if samples are no images."""
        if len(input_shape) != 3:
            raise ValueError(
                f"CutMix: samples must be images (height, width, channels), got shape {input_shape}"
                "; use Mixup"
            )

    def __call__(self, x: Array, other: Array, words: Array) -> tuple[Array, Array]:
        height, width = x.shape[1:3]
        side = np.sqrt(1 - self.weights(words))
        (top, bottom), (left, right) = (
            _clipped(below(words[:, axis], extent), (extent * side).astype(np.int64) // 2, extent)
            for axis, extent in ((2, height), (3, width))
        )
        box = Boxes(top, left, bottom - top, right - left)
        mixed = np.where(box.mask(height, width)[..., None], other, x)
        return mixed, 1 - box.height * box.width / (height * width)


def _clipped(centre: Array, half: Array, extent: int) -> tuple[Array, Array]:
    """Return begin and end of ranges around a centre that are cut off at 0 and at the extent."""
    return np.maximum(centre - half, 0), np.minimum(centre + half, extent)


def with_partners(samples: Array, rows: slice) -> Array:
    """Return samples of rows of a global batch, after the one with which the first is mixed.

    >>> with_partners(np.array([5, 3, 8, 1]), slice(0, 2))
    array([1, 5, 3])
    """
    return samples[np.arange(rows.start - 1, rows.stop)]


def mix_samples(
    mixings: Sequence[Mixing], x: Array, labels: Array, words: Array, classes: int
) -> tuple[Array, Array]:
    """Mix each sample but the first with the one before it.

    If there are several mixings, each sample is mixed by one of them, chosen uniformly.

    Parameters
    ----------
    mixings : sequence of Mixing
    x : ndarray of float, shape ``(n + 1, *input_shape)``
    labels : ndarray of int64, shape ``(n + 1,)``
    words : ndarray of uint32, shape ``(n, 4)``
        Random bits of each sample but the first.
    classes : int

    Returns
    -------
    x : ndarray, shape ``(n, *input_shape)``
    y : ndarray of float64, shape ``(n, classes)``
        The probability of each class.
    """
    own, other = x[1:], x[:-1]
    mixed, share = own.copy(), np.ones(len(own))
    chosen = below(words[:, 0], len(mixings))
    for which, mixing in enumerate(mixings):
        rows = np.flatnonzero(chosen == which)
        mixed[rows], share[rows] = mixing(own[rows], other[rows], words[rows])
    y, row = np.zeros((len(own), classes)), np.arange(len(own))
    y[row, labels[1:]] = share
    y[row, labels[:-1]] += 1 - share
    return mixed, y


def draw_words(seed: int, epoch: int, samples: Array) -> Array:
    """Draw the random bits of the mixtures of samples, uint32 ``(n, 4)``."""
    return bits(seed, stream("mix"), epoch, samples, WORDS)


def check_mixings(who: str, mixings: Sequence[Mixing], dataset: Dataset) -> None:
    """Raise an error if samples of a data set cannot be mixed.

    Raises
    ------
    TypeError
        If `mixings` is not a list of mixings.
    ValueError
        If samples have several inputs or targets, or no classes, or a mixing is for other samples.
    """
    if isinstance(mixings, Mixing) or not all(isinstance(mixing, Mixing) for mixing in mixings):
        raise TypeError(
            f"{who}: mix must be a list of mixings, such as [Mixup(0.2)], got {mixings!r}"
        )
    if not mixings:
        return
    if not isinstance(dataset.classes, int) or has_several_inputs(dataset.input_shape):
        raise ValueError(
            f"{who}: mixing requires samples of one input with classes, got {dataset.classes} "
            f"classes and inputs of shape {dataset.input_shape} in {dataset.name}; omit it"
        )
    for mixing in mixings:
        mixing.check(dataset.input_shape)
    labels = np.asarray(dataset.read_targets(np.arange(min(len(dataset), 1))))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{who}: mixing requires one integer class per sample, got {labels.dtype} of shape "
            f"{labels.shape[1:]} in {dataset.name}; omit it"
        )


def check_labels(who: str, labels: Array, classes: int) -> None:
    """Raise ValueError if labels are not classes."""
    if ((labels < 0) | (labels >= classes)).any():
        raise ValueError(
            f"{who}: classes must be in 0..{classes - 1}, got {labels.min()} to {labels.max()}"
        )
