"""Augmentation and normalisation of raw images on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from pydtnn.kernels.cuda.layout import THREADS, ceil
from pydtnn.kernels.cuda.module import DeviceState, aligned
from pydtnn.kernels.reference.family import Array

KINDS = {"crop": 1, "flip": 2, "cutout": 3}
"""Changes of images by the number that they have in images.cu."""

FLIGHT = 4
"""Vectors that a thread makes."""

CHANGES = CHANNELS = 4
"""As many as the kernel has arguments for."""


class PrepareKernel:
    """The kernel behind `pydtnn.data.Prepare`, whose NumPy path is its reference.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: DeviceState) -> None:
        self._module = device.module("images")

    def prepare(
        self,
        x: Array,
        words: Array,
        changes: Sequence[tuple[str, int]],
        fill: np.ndarray,
        scale: np.ndarray,
        shift: np.ndarray,
        *,
        out: Array,
    ) -> None:
        """Change each image as its words say, then ``out = x scale + shift``.

        The product and the sum are rounded as the coefficients' type is, and then once to that of
        `out`.

        Parameters
        ----------
        x : Array of uint8, shape ``(n, H, W, C)``, contiguous; C is at most 4
        words : Array of uint32, shape ``(n, 4 len(changes))``, contiguous
        changes : sequence of (str, int)
            At most 4: "crop" and its padding, "flip" and any number, "cutout" and its size.
        fill : ndarray of uint8, shape ``(C,)``, of the host
            Colour of what is not in an image.
        scale, shift : ndarray, shape ``(C,)``, of the host
        out : Array of a floating type, like `x`
        """
        n, height, width, channels = x.shape
        if not out.size:
            return
        each = 16 // out.itemsize
        kind = "wide"
        if prod(x.shape[1:]) % each or not aligned(each, out):
            kind, each = "single", 1
        blocks = ceil(prod(x.shape[1:]), THREADS * FLIGHT * each)
        codes = [KINDS[name] + 4 * pixels for name, pixels in changes]
        self._module.kernel(f"prepare{channels}_{kind}", out.dtype.name)(
            (n * blocks,),
            (THREADS,),
            (
                *(x, words, *codes, *[0] * (CHANGES - len(codes)), 4 * len(codes)),
                sum(int(value) << 8 * c for c, value in enumerate(fill)),
                *_padded(scale),
                *_padded(shift),
                *(out, height, width, blocks),
            ),
        )


def _padded(values: np.ndarray) -> list[float]:
    """As Python's floats, which hold float32 and float64 exactly, for all channels there may be."""
    return [*map(float, values), *[0.0] * (CHANNELS - len(values))]
