"""Reference pooling: windows as strided slices, like the reference convolution."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.geometry import PoolGeometry
from pydtnn.kernels.reference.family import Array, KernelFamily, wide


def taps(geometry: PoolGeometry) -> Iterator[tuple[slice, ...]]:
    """Yield the slices of the padded input for each offset, in row-major order."""
    for offset in product(*map(range, geometry.kernel)):
        yield tuple(
            slice(o, o + s * (n - 1) + 1, s)
            for o, s, n in zip(offset, geometry.stride, geometry.output, strict=True)
        )


def check_index(index: Array, geometry: PoolGeometry) -> None:
    """Raise ValueError if the type of `index` cannot represent all taps of a window."""
    if index.dtype.itemsize == 1 and (taps := prod(geometry.kernel)) > 256:
        raise ValueError(
            f"max pooling: the index for windows of {taps} taps must be int32, got {index.dtype}, "
            "which represents at most 256"
        )


class PoolKernels(KernelFamily):
    """Maximum and mean over windows: ``x (N, *size, C)``, ``y (N, *output, C)``."""

    def max_forward(self, x: Array, geometry: PoolGeometry, *, out: Array, index: Array) -> None:
        """Compute the maximum of each window.

        `index` (uint8 or int32, the shape of `out`) receives the index of the tap; uint8 raises
        ValueError for windows of more than 256 taps.

        Taps are counted in row-major order within the window; of equal values the first is chosen;
        padding is never chosen. A NaN in a window is its maximum.
        """
        check_index(index, geometry)
        x = wide(x)
        lowest = -self.xp.inf if x.dtype.kind == "f" else self.xp.iinfo(x.dtype).min
        padded = self.xp.pad(x, ((0, 0), *geometry.padding, (0, 0)), constant_values=lowest)
        windows = self.xp.stack([padded[:, *window] for window in taps(geometry)])
        inside = self.xp.pad(self.xp.ones(geometry.size, bool), geometry.padding)
        real = self.xp.stack([inside[window] for window in taps(geometry)])  # (taps, *output)
        out[...] = windows.max(axis=0)
        wins = (windows == out) | (windows != windows)  # only NaN differs from itself
        index[...] = (wins & real[:, None, ..., None]).argmax(axis=0)

    def max_backward(self, dy: Array, index: Array, geometry: PoolGeometry, *, out: Array) -> None:
        """Add each gradient to the input that was the maximum."""
        check_index(index, geometry)
        padded = self._padded_zeros(out, geometry)
        for tap, window in enumerate(taps(geometry)):
            padded[:, *window] += self.xp.where(index == tap, wide(dy), 0)
        out[...] = self._inside(padded, geometry)

    def average_forward(
        self, x: Array, geometry: PoolGeometry, *, out: Array, count_padding: bool = True
    ) -> None:
        """Compute the mean of each window, padding counted as zeros or not counted at all."""
        padded = self.xp.pad(wide(x), ((0, 0), *geometry.padding, (0, 0)))
        total = sum(padded[:, *window] for window in taps(geometry))
        out[...] = total / self._counts(geometry, count_padding, padded.dtype)

    def average_backward(
        self, dy: Array, geometry: PoolGeometry, *, out: Array, count_padding: bool = True
    ) -> None:
        """Distribute each gradient equally over the inputs of its window."""
        share = wide(dy) / self._counts(geometry, count_padding, arithmetic(dy.dtype))
        padded = self._padded_zeros(out, geometry)
        for window in taps(geometry):
            padded[:, *window] += share
        out[...] = self._inside(padded, geometry)

    def adaptive_forward(self, x: Array, *, out: Array) -> None:
        """Compute the mean of bins: output i covers ``floor(i H / OH) : ceil((i + 1) H / OH)``."""
        for position, window in self._bins(x.shape[1:-1], out.shape[1:-1]):
            out[:, *position] = wide(x[:, *window]).mean(axis=tuple(range(1, x.ndim - 1)))

    def adaptive_backward(self, dy: Array, *, out: Array) -> None:
        """Distribute each gradient equally over the inputs of its bin; overlapping bins add."""
        dx = self.xp.zeros(out.shape, arithmetic(out.dtype))
        axes = tuple(range(1, out.ndim - 1))
        for position, window in self._bins(out.shape[1:-1], dy.shape[1:-1]):
            count = prod(w.stop - w.start for w in window)
            dx[:, *window] += self.xp.expand_dims(wide(dy[:, *position]) / count, axes)
        out[...] = dx

    def _counts(self, geometry: PoolGeometry, count_padding: bool, dtype: Array) -> Array:
        if count_padding:
            return self.xp.asarray(prod(geometry.kernel), dtype)
        inside = self.xp.pad(self.xp.ones(geometry.size, dtype), geometry.padding)
        counts = sum(inside[window] for window in taps(geometry))
        return counts[..., None]  # (*output, 1)

    def _padded_zeros(self, x: Array, geometry: PoolGeometry) -> Array:
        size = (n + sum(p) for n, p in zip(geometry.size, geometry.padding, strict=True))
        return self.xp.zeros((len(x), *size, geometry.channels), arithmetic(x.dtype))

    @staticmethod
    def _inside(padded: Array, geometry: PoolGeometry) -> Array:
        inside = tuple(
            slice(before, before + n)
            for n, (before, _) in zip(geometry.size, geometry.padding, strict=True)
        )
        return padded[:, *inside]

    @staticmethod
    def _bins(
        size: tuple[int, ...], output: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        for position in product(*map(range, output)):
            yield (
                position,
                tuple(
                    slice(i * n // o, -(-(i + 1) * n // o))
                    for i, n, o in zip(position, size, output, strict=True)
                ),
            )
