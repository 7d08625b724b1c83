"""Procedural images, a function of the index: hard for a linear model, easy for convolutions.

A sample shows a woven texture, ``sin(2 pi (u x + a)) sin(2 pi (v y + b))``, inside a window. The
class is the pair of bands that the frequencies (u, v) come from. Everything else is random: the
frequencies inside their bands, the phases a and b, the window's place and size, the strength and
sign of the texture in each channel, the background colour, and noise. The random phases make the
mean of every pixel the same for every class, and each image as likely as its negative, so a linear
model of the pixels learns almost nothing; a few small filters detect the frequencies at any
position of the window. A mirrored or shifted texture has the same class, so flips and crops are
valid augmentations.

All arithmetic is in small integers, one long row at a time: the same bytes on every machine, and
fast enough to compute images when they are read. A rank computes only its own shard, and nothing is
stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.order import as_indices, below
from pydtnn.data.statistics import Statistics, pixel_sums
from pydtnn.kernels.reference.random import bits, stream
from pydtnn.utils.validate import check_int

TRAIN_DIGITS = 1437
"""The first four fifths train: the cut of ``train_test_split(test_size=0.2, shuffle=False)``."""


Array = NDArray[Any]

LOWEST, HIGHEST = 0.10, 0.40
"""Middle of the lowest and of the highest band, in cycles per pixel; the limit is 0.5."""

DEFAULT_SAMPLES = 10_240
"""Default number: the batches of 1, 2, 4, 5, 8 or 10 ranks with 64 samples each divide it."""

MIN_IMAGE_SIDE = 8
"""Smallest height and width in pixels: one window."""

STATISTICS_SAMPLES = 1000
"""Number of samples for the statistics: sufficient for three digits."""

CONTRAST = (48, 80)  # minimum and maximum; with background and noise all pixels are in 0..255
BACKGROUND = (100, 155)
NOISE = (-19, 19)
STRIP = 1 << 16  # places in a strip of noise where an image's noise may start
CYCLE = 1 << 16  # frequencies and phases count in parts of a cycle
SINE = (127 * np.sin(np.arange(1024) * (2 * np.pi / 1024))).round().astype(np.int16)


class Synthetic(Dataset):
    """Woven textures; the label of sample i is ``i % classes``.

    Parameters
    ----------
    samples : int, default 10,240
    shape : (int, int, int), default (32, 32, 3)
        Height, width and channels.
    classes : int, default 10
    seed : int, default 0
    split : str, default "train"
        Other names give other samples of the same classes.
    like : Dataset, optional
        The training set, if this is the test set.

    Raises
    ------
    ValueError
        If there are no samples, fewer than two classes, or images smaller than 8 x 8.
    TypeError
        If one of these is not an int.
    """

    def __init__(
        self,
        samples: int = DEFAULT_SAMPLES,
        *,
        shape: tuple[int, ...] = (32, 32, 3),
        classes: int = 10,
        seed: int = 0,
        split: str = "train",
        like: Dataset | None = None,
    ) -> None:
        _check(samples, shape, classes)
        self.name, self.like = "synthetic", like
        self.input_shape, self.classes = tuple(shape), classes
        self._samples, self._classes = samples, classes
        self._seed, self._stream = seed, stream(f"synthetic/{split}")
        self._bands = _bands(classes)
        length = STRIP + math.prod(shape)
        words = bits(seed, stream("synthetic/noise"), 0, np.arange(-(-length // 4)), 4)
        self._noise = _between(NOISE, words.reshape(-1)[:length])

    def __len__(self) -> int:
        return self._samples

    def measure(self) -> Statistics:
        """Compute the statistics from the first samples only, as an estimate for all."""
        samples = range(min(STATISTICS_SAMPLES, len(self)))
        return pixel_sums(self.read, self.input_shape, samples).statistics()

    def read(self, indices: Array) -> tuple[Array, Array]:
        indices = as_indices(self.name, indices, len(self))
        labels = indices % self._classes
        height, width, channels = self.input_shape
        words = bits(self._seed, self._stream, 0, indices, 9 + 3 * channels)
        down = _wave(height, self._bands[labels, 0], words[:, 0:4])  # (n, H)
        across = _wave(width, self._bands[labels, 1], words[:, 4:8])  # (n, W)
        places = sliding_window_view(self._noise, height * width * channels)
        noise = places[below(words[:, 8], STRIP)]
        strength, sign, colour = np.split(words[:, 9:], 3, axis=1)  # (n, C) each
        contrast = np.where(sign >> 31, np.int16(1), np.int16(-1)) * _between(CONTRAST, strength)

        # An image row has W * C numbers; the product of two numbers in -127..127 fits 16 bits.
        row = (across[:, :, None] * contrast[:, None, :]) >> 7  # (n, W, C)
        x = down[:, :, None] * row.reshape(-1, 1, width * channels)  # (n, H, W * C)
        x >>= 7
        x += np.tile(_between(BACKGROUND, colour), width)[:, None, :]
        x += noise.reshape(x.shape)
        return x.astype(np.uint8).reshape(-1, *self.input_shape), labels


def load_synthetic(
    *,
    samples: int = DEFAULT_SAMPLES,
    test_samples: int = 2_000,
    shape: tuple[int, ...] = (32, 32, 3),
    classes: int = 10,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """Create the training and the test set; parameters as for `Synthetic`."""
    train = Synthetic(samples, shape=shape, classes=classes, seed=seed)
    test = Synthetic(
        test_samples, shape=shape, classes=classes, seed=seed, split="test", like=train
    )
    return train, test


def _check(samples: int, shape: tuple[int, ...], classes: int) -> None:
    if not isinstance(shape, Sequence) or len(shape) != 3:
        raise ValueError(
            f"synthetic: shape must be (height, width, channels), such as [32,32,3], got {shape!r}"
        )
    for name, value, least in (
        *(("samples", samples, 1), ("classes", classes, 2), ("height", shape[0], MIN_IMAGE_SIDE)),
        *(("width", shape[1], MIN_IMAGE_SIDE), ("channels", shape[2], 1)),
    ):
        check_int("synthetic", name, value, at_least=least)


def _bands(classes: int) -> NDArray[np.int64]:
    """Choose each class's bands of v and u: (classes, 2, 2), their ends in CYCLEths per pixel."""
    levels = math.isqrt(classes - 1) + 1  # the smallest square grid for all classes
    cells = np.linspace(0, levels * levels - 1, classes).round().astype(np.int64)
    middle = np.linspace(LOWEST, HIGHEST, levels)
    half = 0.3 * (HIGHEST - LOWEST) / (levels - 1)  # gaps between bands are 0.4 of their distance
    grid = (np.stack([middle - half, middle + half], axis=1) * CYCLE).round().astype(np.int64)
    return grid[np.stack(np.divmod(cells, levels), axis=1)]


def _between(limits: tuple[int, int], words: Array) -> NDArray[np.int16]:
    """Convert random words to 16-bit integers from the lower to the upper limit, both included."""
    low, high = limits
    return (low + below(words, high - low + 1)).astype(np.int16)


def _wave(size: int, band: Array, words: Array) -> NDArray[np.int16]:
    """Draw a sine under a random window along one axis: (n, size), in -127..127.

    The window rises from 0 to 1 and falls again within a half-width of a fifth to a third of the
    axis, at least 4 pixels, and lies inside the image.
    """
    place = np.arange(size)
    frequency = band[:, 0] + below(words[:, 0], band[:, 1] - band[:, 0])
    angle = (frequency[:, None] * place + words[:, 1, None]) % CYCLE  # (n, size)
    narrow, wide = max(size // 5, 4), max(size // 3, 4)
    half = narrow + below(words[:, 2], wide - narrow + 1)
    centre = half + below(words[:, 3], size + 1 - 2 * half)
    height = 254 * (half[:, None] - np.abs(place - centre[:, None])) // half[:, None]
    return SINE[angle >> 6] * np.clip(height, 0, 127).astype(np.int16) >> 7
