"""Augmentation and normalisation of the raw samples of a batch, on the host or on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pydtnn.data.augment.augmentation import Augmentation
from pydtnn.data.statistics import Normalize, Statistics
from pydtnn.kernels.reference.random import bits, stream

if TYPE_CHECKING:
    from pydtnn.kernels.backend import Backend

Array = NDArray[Any]

MOST_CHANGES, MOST_CHANNELS = 4, 4
"""Maximum number of augmentations, and of channels of an image, in the kernel of a device."""


class Prepare:
    """Augment and normalise samples, with the same bytes on the host and on a device.

    Objects with equal parameters are equal and have equal hashes.

    Parameters
    ----------
    augment : sequence of Augmentation
        Applied in order, before normalisation.
    statistics : Statistics or None
        Statistics of the training set; None if samples are only converted.
    input_shape : tuple of int
        Shape of one sample, channels last.
    dtype : dtype of the result

    Attributes
    ----------
    words : int
        Random 32-bit words per sample.
    why_not : str
        Reason why the device cannot prepare uint8 samples; empty if it can.
    """

    def __init__(
        self,
        augment: Sequence[Augmentation],
        statistics: Statistics | None,
        input_shape: tuple[int, ...],
        dtype: DTypeLike,
    ) -> None:
        self.augment = tuple(augment)
        self.words = sum(change.words for change in self.augment)
        self.normalize = Normalize(statistics, input_shape, dtype)
        self.why_not = _why_not(self.augment, input_shape)

    def draw(self, seed: int, epoch: int, samples: Array) -> Array:
        """Draw the random bits of samples, ``(n, self.words)`` uint32."""
        if not self.words:
            return np.empty((len(samples), 0), np.uint32)
        words = bits(seed, stream("augment"), epoch, samples, self.words)
        alternate = [own.alternates for own in self.augment for _ in range(own.words)]
        if any(alternate):
            even = bits(seed, stream("augment"), 0, samples, self.words)
            words = np.where(alternate, ~even if epoch % 2 else even, words)
        return words

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the result."""
        return self.normalize.dtype

    def __call__(self, backend: Backend, x: Array, words: Array) -> Array:
        """Return a new array of the backend from raw samples `x`; `x` is not changed.

        On a device with a kernel for it nothing is copied from the host, so that it may be captured
        in a graph; this requires that `why_not` is empty.

        Parameters
        ----------
        backend : Backend
        x : Array of uint8, shape ``(n, H, W, C)``, contiguous
        words : Array of uint32, shape ``(n, self.words)``, contiguous
            The random bits of each sample.
        """
        if backend.images is None:
            return self.on_host(x.copy() if self.augment else x, words)
        out = backend.empty(x.shape, self.dtype)
        scale, shift = self.normalize.coefficients(np.uint8)
        changes = [_kernel(change) for change in self.augment]
        backend.images.prepare(x, words, changes, self._fill(np.uint8), scale, shift, out=out)
        return out

    def on_host(self, x: Array, words: Array) -> Array:
        """Return a new array, with NumPy; `x` itself may be changed."""
        fill = self._fill(x.dtype)
        for change, own in self._words(words):
            x = change(x, own, fill)
        return self.normalize(x)

    def move(self, y: Array, words: Array, fill: int) -> Array:
        """Return masks whose pixels are moved as those of the samples with these words are.

        Parameters
        ----------
        y : ndarray, shape ``(n, H, W)`` or ``(n, H, W, ...)``
        words : ndarray of uint32, shape ``(n, self.words)``
        fill : int
            Label of pixels outside of an image; numbers that are no labels are 0 there.
        """
        fill = fill if y.dtype.kind in "iu" else 0
        masks = y.reshape(*y.shape[:3], math.prod(y.shape[3:])).copy()
        for change, own in self._words(words):
            if change.moves:
                masks = change.on_masks(masks, own, np.full(masks.shape[-1], fill, y.dtype))
        return masks.reshape(y.shape)

    def _words(self, words: Array) -> Iterator[tuple[Augmentation, Array]]:
        begin = 0
        for change in self.augment:
            yield change, words[:, begin : begin + change.words]
            begin += change.words

    def _fill(self, dtype: DTypeLike) -> Array:
        """Colour of pixels outside an image, ``(C,)``: the mean, or zero."""
        mean = self.normalize.mean
        return (np.rint(255 * mean) if np.dtype(dtype) == np.uint8 else mean).astype(dtype)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        scale, shift = self.normalize.coefficients(np.uint8)
        numbers = (self._fill(np.float64), scale, shift)
        return self.augment, self.dtype, *(array.tobytes() for array in numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prepare) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _kernel(change: Augmentation) -> tuple[str, int] | None:
    """Return the name of a change in the kernel of a device, and its parameter, if it has one."""
    if "kernel" not in vars(type(change)):  # a subclass may change something else
        return None
    name, _, parameter = type(change).kernel.partition(":")
    return name, getattr(change, parameter, 0)


def _why_not(augment: tuple[Augmentation, ...], input_shape: tuple[int, ...]) -> str:
    if len(input_shape) != 3:
        return f"samples of shape {input_shape} are no images (height, width, channels)"
    if input_shape[-1] > MOST_CHANNELS:
        return f"images have {input_shape[-1]} channels, and the device takes {MOST_CHANNELS}"
    for change in augment:
        if _kernel(change) is None:
            return f"{type(change).__name__} has no kernel of its own"
    if len(augment) > MOST_CHANGES:
        return f"there are {len(augment)} augmentations, and the device takes {MOST_CHANGES}"
    return ""
