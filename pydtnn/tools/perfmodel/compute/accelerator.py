"""Times of kernels on a device that was not measured: its data sheet and four numbers."""

from __future__ import annotations

from math import ceil, prod

from pydtnn.layers import Conv2d, Linear
from pydtnn.layers.base import Layer
from pydtnn.layers.cost import NO_COST, Cost
from pydtnn.tools.perfmodel.platform import Platform

TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
"""Rows and columns of the tiles of which a library chooses those that take the least time."""

WINOGRAD: dict[tuple[int, ...], float] = {(3, 3): (6 / 4) ** 2, (5, 5): (10 / 6) ** 2}
"""Multiplications in float32 that F(2x2, 3x3) and F(2x2, 5x5) save, by the window (Lavin and Gray
2016, section 4.1): cuDNN has such kernels for both windows (CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD and
WINOGRAD_NONFUSED)."""

INNER = 128
"""Least part of the sums of a tile that a unit computes."""


class Accelerator:
    """Times of matrix products and of kernels that move arrays, from `Compute.kernels`.

    A product of (m, k) and (k, n) is divided into tiles, which the units of the device compute
    in waves, each of them at `products` of its part of the peak and after a time `fill`, in which
    operands arrive and results leave. With fewer tiles than units, k is divided, too; of the
    `TILES`, those with the least time are used. Operands and results pass the memory at `memory` of
    its bandwidth meanwhile; the longer time counts. Every kernel takes the time `launch` besides.

    Parameters
    ----------
    platform : Platform
        With `compute.kernels`.
    dtype : str
        Of operands, for the peak.

    Raises
    ------
    ValueError
        If the platform has no such numbers or no peak.

    Examples
    --------
    >>> device = Accelerator(Platform.load("dgx-a100"), "bfloat16")
    >>> round(2 * 4096**3 / device.product(4096, 4096, 4096) / 1e12)  # Tflop/s
    224
    """

    def __init__(self, platform: Platform, dtype: str) -> None:
        compute = platform.compute
        if compute.kernels is None or dtype not in compute.peak:
            missing = f"peak.{dtype}" if compute.kernels else "kernels"
            raise ValueError(f"platform {platform.name}: expected compute.{missing}; add it")
        self.kernels = compute.kernels
        self.rate = self.kernels.products * compute.peak[dtype]
        self.bandwidth = self.kernels.memory * platform.rank_bandwidth
        self.winograd = dtype == "float32"
        self.vector = compute.peak.get("float32", self.rate) / 2  # peaks are of multiply-adds
        self.itemsize = {"float64": 8, "float32": 4, "tfloat32": 4}.get(dtype, 2)

    def moved(self, nbytes: float, kernels: float = 1) -> float:
        """Return the time of kernels that move so many bytes together, in s."""
        return kernels * self.kernels.launch + nbytes / self.bandwidth

    def product(
        self, m: float, n: float, k: float, count: float = 1, moved: float | None = None
    ) -> float:
        """Return the time of so many equal products in one kernel, in s.

        Parameters
        ----------
        m, n, k : float
            Rows and columns of the result, and terms of each sum.
        count : float
        moved : float, optional
            Bytes of operands and results; by default those of all matrices.
        """
        if moved is None:
            moved = count * (m * k + k * n + m * n) * self.itemsize
        sides = [*TILES, *((columns, rows) for rows, columns in TILES)]
        best = min(
            self._waves(count * ceil(m / a) * ceil(n / b), 2 * a * b * k, k) for a, b in sides
        )
        return self.kernels.launch + max(best, moved / self.bandwidth)

    def _waves(self, tiles: float, operations: float, k: float) -> float:
        """Return the time of tiles of so many operations each, in s."""
        units = self.kernels.units
        parts = max(1, min(units // ceil(tiles), int(k // INNER)))
        of_part = operations / parts / (self.rate / units)
        return ceil(tiles * parts / units) * (of_part + self.kernels.fill)

    def layer(self, layer: Layer, samples: int, backward: bool) -> float:
        """Return the time of a pass of a layer, in s: products, or bytes of `Layer.cost`.

        What is fused with a convolution is swept besides, with the bytes of `fused_cost`.
        """
        cost, fused, groups, saved = layer.cost(samples), NO_COST, 1, 1.0
        if not isinstance(layer, Conv2d | Linear):
            return self.moved(self._bytes(layer, cost, backward))
        if isinstance(layer, Conv2d):
            fused, geometry = layer.fused_cost(samples), layer.geometry
            groups, unit = geometry.groups, {*geometry.stride} == {1}
            saved = WINOGRAD.get(geometry.kernel, 1.0) if self.winograd and unit else 1.0
        swept = self._bytes(layer, fused, backward) / self.bandwidth
        n, k = layer.w.shape[0] // groups, prod(layer.w.shape[1:])
        m = (cost.flops_forward - fused.flops_forward) // (2 * groups * n * k)
        values = m * n + samples * prod(layer.input_shapes[0]) / groups + n * k
        nbytes = groups * values * self.itemsize
        if not backward:
            return swept + self.product(m, n, k / saved, groups, nbytes)
        inputs = self.product(m, k, n / saved, groups, nbytes) if layer.needs_dx else 0.0
        return swept + inputs + self.product(k, n, m / saved, groups, nbytes)

    def _bytes(self, layer: Layer, cost: Cost, backward: bool) -> float:
        """Return the bytes of a pass, of elements of the type of operands."""
        _, nbytes = cost.of_pass(backward)
        return nbytes * self.itemsize / layer.dtype.itemsize
