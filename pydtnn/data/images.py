"""Data sets of PNG and JPEG images that are decoded when they are read."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.decode import Decoder
from pydtnn.data.statistics import Statistics
from pydtnn.utils.validate import number

Array = NDArray[Any]

SMALL = 48 * 48
"""Pixels of images that are decoded by one thread at a time: decoding them takes less time than
threads lose when they hand Python's interpreter lock to one another for every image."""


class EncodedImages(Dataset):
    """Labelled images of one size; a subclass finds their encoded bytes.

    Only the images of a batch are in memory. They are decoded by the threads of the loader.

    Parameters
    ----------
    decode : Decoder
    labels : array of int, shape ``(n,)``
    class_names : sequence of str
    like : EncodedImages, optional
        The training set, if this one is a test set.
    statistics : Statistics, optional
        Of a training set, if they are known. Otherwise they are measured before training.
    check : bool
        Whether all images are decoded once before training, also if nothing is to be measured.

    Raises
    ------
    ValueError
        If the decoder has no size and the first image is damaged.
    """

    def __init__(
        self,
        decode: Decoder,
        labels: Array,
        class_names: Sequence[str],
        *,
        like: EncodedImages | None,
        statistics: Statistics | None,
        check: bool,
    ) -> None:
        self.name, self.decode, self.like = decode.who, decode, like
        self.labels = np.asarray(labels, np.int64)
        self.class_names, self.classes = tuple(class_names), len(class_names)
        if like is not None:
            self.input_shape = like.input_shape
        elif decode.shape is not None:
            self.input_shape = decode.shape
        else:
            self.input_shape = decode(self.encoded(0), self.place(0)).shape
        if statistics is not None and like is None:
            self.statistics = statistics
        height, width = self.input_shape[:2]
        self._turn = threading.Lock() if height * width <= SMALL else nullcontext()
        known = like is not None or statistics is not None
        self.examined = known and decode.size is not None and not check

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """Return the content of an image's file."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Name an image in error messages."""

    def position(self, indices: Array) -> Array:
        """Return numbers in whose order samples are read fastest."""
        return indices

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: Array) -> tuple[Array, Array]:
        indices = np.asarray(indices, np.int64)
        x = np.empty((len(indices), *self.input_shape), np.uint8)
        with self._turn:
            for row in np.argsort(self.position(indices), kind="stable"):
                x[row] = self._image(int(indices[row]))
        return x, self.labels[indices]

    def read_targets(self, indices: Array) -> Array:
        return self.labels[indices]

    def _image(self, index: int) -> Array:
        where = self.place(index)
        pixels = self.decode(self.encoded(index), where)
        if pixels.shape != self.input_shape:
            height, width = pixels.shape[:2]
            raise ValueError(
                f"{self.name}: expected images of {self.input_shape[0]} x {self.input_shape[1]} "
                f"pixels, as the first one has, got {height} x {width} in {where}; set "
                "--image-size N, to which all are resized and cropped"
            )
        return pixels


def given_statistics(
    who: str, mean: Sequence[float] | None, std: Sequence[float] | None, channels: int
) -> Statistics | None:
    """Return statistics that the user gives, for pixels in [0, 1], or None.

    Raises
    ------
    TypeError, ValueError
        If only one of them is given, or they are not one number per channel.
    """
    if mean is None and std is None:
        return None
    arrays = []
    for name, values, limits in (("mean", mean, {"at_least": 0}), ("std", std, {"above": 0})):
        if not isinstance(values, list | tuple) or len(values) != channels:
            raise ValueError(
                f"{who}: mean and std must both be lists of {channels} numbers, one per channel, "
                f"for pixels from 0 to 1, got {name} {values}"
            )
        arrays.append(np.array([number(who, name, v, at_most=1, **limits) for v in values]))
    return Statistics(*arrays)
