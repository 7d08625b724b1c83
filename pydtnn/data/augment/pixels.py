"""Changes of the colours of 8-bit pixels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.augment.augmentation import Augmentation

Array = NDArray[Any]


class PixelAugmentation(Augmentation):
    """A random change of 8-bit pixels; a subclass is a frozen dataclass and implements `change`.

    Images of floats in [0, 1] are rounded to 8 bits and divided by 255 afterwards.
    """

    pixels: ClassVar[bool] = True

    def check(self, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError if images are neither grey nor of red, green and blue."""
        if input_shape[-1] not in (1, 3):
            raise ValueError(
                f"{type(self).__name__}: images must have 1 or 3 channels, grey or red, green and "
                f"blue, got {input_shape[-1]}; use crop, flip or cutout"
            )

    def __call__(self, x: Array, words: Array, fill: Array) -> Array:
        if x.dtype == np.uint8:
            return self.change(x, words, fill)
        changed = self.change(_to_bytes(x), words, _to_bytes(fill))
        return (changed / 255).astype(x.dtype)

    @abstractmethod
    def change(self, x: Array, words: Array, fill: Array) -> Array:
        """Return the changed images of uint8: see `Augmentation.__call__`."""


def _to_bytes(x: Array) -> Array:
    return np.rint(255 * np.clip(x, 0, 1)).astype(np.uint8)
