"""Interface of augmentations, and numbers from the random words of a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from numpy.typing import NDArray

Array = NDArray[Any]

WORDS_PER_SAMPLE = 4
"""Random 32-bit words of an augmentation per sample, by default: one block of Philox."""


class Augmentation(ABC):
    """A random change of images. A subclass is a frozen dataclass and implements ``__call__``.

    Attributes
    ----------
    pixels : bool
        Whether it requires pixels: uint8, or floats in [0, 1]. By default any numbers.
    moves : bool
        Whether pixels may move, so that targets with positions have to be moved with their image.
        True by default; false if only colours change, or parts are covered.
    kernel : str
        Its name in the kernel of a device, with the attribute that is its parameter behind a colon;
        empty without one. Not inherited.
    alternates : bool
        Whether the random bits of a sample are the same in all even epochs, and their complement in
        the odd ones. False by default: each epoch has its own.
    """

    pixels: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    kernel: ClassVar[str] = ""
    alternates: ClassVar[bool] = False

    @property
    def words(self) -> int:
        """Random 32-bit words per sample, a multiple of `WORDS_PER_SAMPLE`."""
        return WORDS_PER_SAMPLE

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError if it is not applicable to images of this shape."""

    @abstractmethod
    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        """Return the changed images; `x` itself may be changed and returned.

        The change of an image must not depend on the other images of `x`, which depend on the
        number of ranks.

        Parameters
        ----------
        x : ndarray, shape ``(n, H, W, C)``, contiguous, uint8 or float, not normalised yet
        words : ndarray of uint32, shape ``(n, self.words)``
            The random bits of each sample.
        fill : ndarray, shape ``(C,)``, of the dtype of `x`
            The training set's mean pixel, which is normalised to zero (within rounding).
        """

    def on_masks(self, masks: Array, words: Array, fill: Array) -> Array:
        """Return masks whose pixels are moved as those of images by `__call__` with these words.

        Values are neither interpolated nor changed. By default there are none: augmentations that
        move pixels are refused for masks unless they implement it.

        Parameters
        ----------
        masks : ndarray, shape ``(n, H, W, C)``, of any dtype
            Targets of n images; it may be changed and returned.
        words : ndarray of uint32, shape ``(n, self.words)``
        fill : ndarray, shape ``(C,)``, of the dtype of `masks`
            Value of pixels outside of an image.
        """
        raise NotImplementedError


def blocks(count: int) -> int:
    """Round a number of words up to whole blocks of `WORDS_PER_SAMPLE`.

    >>> blocks(5)
    8
    """
    return -(-count // WORDS_PER_SAMPLE) * WORDS_PER_SAMPLE


def between(words: Array, low: float, high: float) -> Array:
    """Map random 32-bit words to float64 numbers in [low, high), uniformly distributed."""
    return low + (high - low) * (words * 2.0**-32)
