"""Adam whose state is stored in 8 bits."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import BucketEntry
from pydtnn.optimizers.adaptive import Adam
from pydtnn.optimizers.base import SlotForm
from pydtnn.utils.option import option

BLOCK = 256
"""Consecutive elements of a parameter with a scale of their own."""

CHUNK = 1024
"""Blocks whose values are in memory at a time."""


def codebook(signed: bool) -> np.ndarray:
    """Return the 256 numbers of dynamic quantisation, in increasing order.

    For each decade from 1e-6 to 1 these are the centres of intervals of equal width, of twice as
    many as in the one below, of both signs or only positive; besides, 0 and 1.

    References
    ----------
    Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022,
    sections 1.3 and 2.2.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        ends = np.linspace(0.1, 1, 2 ** (decade + 1 - signed) + 1)
        centres = 10.0 ** (decade - 6) * (ends[:-1] + ends[1:]) / 2
        numbers += [*centres, *(-centres if signed else ())]
    return np.sort(numbers)


class Adam8bit(Adam):
    """Adam with moments of a byte for each element, and a float32 scale for each 256.

    A block of 256 consecutive elements of a parameter is divided by its largest magnitude, and each
    element is stored as the nearest number of a `codebook`, with signs for m and without for v.
    An update reads them, computes as `Adam` does, and rounds them again. The state is 2.03 bytes
    per element instead of 8 in float32.

    Parameters
    ----------
    decoupled : bool
        Whether the weight decay is that of `AdamW`.
    lr, beta1, beta2, epsilon, weight_decay, clip_norm, groups
        See `Adam`.

    References
    ----------
    Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022.
    """

    slots: tuple[str, ...] = ("m", "m_scale", "v", "v_scale")
    per_parameter = True
    scales = True
    decoupled: bool = option(False)

    @property
    def state_size(self) -> int:
        return 1

    def slot_form(self, slot: str, entry: BucketEntry) -> SlotForm:
        if slot in ("m", "v"):
            return entry.shape, "uint8"
        return (-(-prod(entry.shape) // BLOCK),), "float32"

    def update(self, w: Array, g: Array, *slots: Any, **numbers: Any) -> None:
        m, m_scale, v, v_scale = slots
        for first in range(0, len(m_scale), CHUNK):
            blocks = slice(first, first + CHUNK)
            part = slice(first * BLOCK, blocks.stop * BLOCK)
            stored = (m[part], m_scale[blocks], True), (v[part], v_scale[blocks], False)
            values = [self._read(*state, w.dtype) for state in stored]
            flat = (array.reshape(-1)[: len(w[part])] for array in values)
            super().update(w[part], g[part], *flat, **numbers)
            for state, array in zip(stored, values, strict=True):
                self._write(*state, array)

    def _numbers(self, signed: bool, dtype: Any) -> Array:
        return self.backend.asarray(codebook(signed), dtype)

    def _read(self, codes: Array, scale: Array, signed: bool, dtype: Any) -> Array:
        """Return the values of blocks, shape (blocks, 256), the last filled with zeros."""
        values = self.backend.zeros((len(scale) * BLOCK,), dtype)
        values[: len(codes)] = self._numbers(signed, dtype)[codes]
        values = values.reshape(-1, BLOCK)
        values *= scale[:, None]
        return values

    def _write(self, codes: Array, scale: Array, signed: bool, values: Array) -> None:
        """Store the values of blocks: each by the nearest number, of two the lower."""
        xp, numbers = self.backend.xp, self._numbers(signed, values.dtype)
        scale[...] = abs(values).max(axis=1)
        values /= xp.where(scale > 0, scale, 1)[:, None]
        nearest = xp.searchsorted((numbers[1:] + numbers[:-1]) / 2, values.reshape(-1))
        codes[...] = nearest[: len(codes)]
