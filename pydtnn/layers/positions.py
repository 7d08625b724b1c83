"""What attention adds to the products of queries and keys, by their distance."""

from __future__ import annotations

from abc import abstractmethod
from math import log
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer
from pydtnn.layers.initializers import Initializer
from pydtnn.utils.arguments import StoresArguments
from pydtnn.utils.validate import check_bool, check_int


class Positions(StoresArguments):
    """Adds a number to each product of a query and a key."""

    @abstractmethod
    def declare(self, layer: Any, queries: np.ndarray, keys: np.ndarray) -> None:
        """Compute what is constant, and declare parameters; called in `build` of the layer.

        With the positions (T1,) and (T2,) of its queries and keys.
        """

    @abstractmethod
    def added(self, layer: Any) -> dict[str, Any]:
        """Return the arguments ``bias`` or ``slopes`` of the kernels of attention."""

    def gradient(self, layer: Any, arguments: dict[str, Any]) -> Array | None:
        """Return the array for the gradient of the bias, if there are parameters to train."""
        return None

    def accumulate(self, layer: Any, gradient: Array | None) -> None:
        """Compute the gradients of the parameters."""


class LinearBiases(Positions):
    """``-slope |i - j|`` for positions i and j, with a slope for each head.

    Slopes are ``2^(-8 h / H)`` of heads h = 1 to H, if H is a power of 2. Otherwise those of the
    power below, and of the power above, every second one, for the heads that are left.

    References
    ----------
    Press et al., "Train short, test long: attention with linear biases enables input length
    extrapolation", ICLR 2022, section 3.
    """

    def slopes(self, heads: int) -> np.ndarray:
        """Return the slopes of all heads."""
        power = 2 ** (heads.bit_length() - 1)
        few, many = (2.0 ** (-8 * np.arange(1, n + 1) / n) for n in (power, 2 * power))
        return np.concatenate([few, many[::2][: heads - power]])

    def declare(self, layer: Any, queries: np.ndarray, keys: np.ndarray) -> None:
        """Compute the slopes of own heads."""
        own = self.slopes(layer.all_heads)[layer.first_head :][: layer.heads]
        layer.slopes = layer.backend.asarray(own, np.dtype("float64"))

    def added(self, layer: Any) -> dict[str, Any]:
        """Return the slopes."""
        return {"slopes": layer.slopes}


class RelativePositions(Positions):
    """A learned number for each head and bucket of distances.

    A bucket of small distances has one of them; those of others become wider with the logarithm of
    the distance, up to `distance`, from which on there is one bucket. With `bidirectional`, half of
    the buckets are for keys behind the query; otherwise those have the bucket of distance 0.

    Parameters
    ----------
    buckets : int
    distance : int
    bidirectional : bool
    initializer : str or Initializer

    Notes
    -----
    The layer's parameter ``positions (buckets, H)``.

    References
    ----------
    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
    transformer", JMLR 2020, section 2.1. T5 has one table for all layers of a stack, here each has
    its own, as in Chung et al., "UniMax" (UMT5), ICLR 2023.
    """

    def __init__(
        self,
        buckets: int = 32,
        distance: int = 128,
        *,
        bidirectional: bool = True,
        initializer: str | Initializer = "embedding",
    ) -> None:
        who = type(self).__name__
        self.buckets = check_int(who, "buckets", buckets, at_least=2 + 2 * bidirectional)
        self.bidirectional = check_bool(who, "bidirectional", bidirectional)
        self.distance = check_int(who, "distance", distance, at_least=buckets // 2 + 1)
        self.initializer = initializer

    def bucket(self, ahead: np.ndarray) -> np.ndarray:
        """Return the buckets of positions of keys minus those of queries."""
        half = self.buckets // 2 if self.bidirectional else self.buckets
        behind = half * (ahead > 0) if self.bidirectional else 0
        far = abs(ahead) if self.bidirectional else np.maximum(-ahead, 0)
        exact = half // 2
        ratio = np.log(np.maximum(far, 1) / exact) / log(self.distance / exact)
        wide = exact + (ratio * (half - exact)).astype(np.int64)
        return behind + np.where(far < exact, far, np.minimum(wide, half - 1))

    def declare(self, layer: Layer, queries: np.ndarray, keys: np.ndarray) -> None:
        """Declare the parameter, and find the bucket of each pair (T1, T2)."""
        owner: Any = layer
        shape = (self.buckets, owner.heads)
        owner.table = owner.parameter("positions", shape, self.initializer, decay=False)
        ahead = keys - queries[:, None]
        owner.pairs_buckets = owner.backend.asarray(self.bucket(ahead), np.dtype("int64"))

    def added(self, layer: Any) -> dict[str, Any]:
        """Return the bias (H, T1, T2)."""
        return {"bias": layer.xp.ascontiguousarray(layer.table.value.T[:, layer.pairs_buckets])}

    def gradient(self, layer: Any, arguments: dict[str, Any]) -> Array | None:
        """Return an array like the bias."""
        return None if layer.table.frozen else layer.xp.empty_like(arguments["bias"])

    def accumulate(self, layer: Any, gradient: Array | None) -> None:
        """Add up the gradients of each bucket."""
        if gradient is None:
            return
        buckets = layer.pairs_buckets.reshape(-1)
        sums = layer.xp.stack(
            [layer.xp.bincount(buckets, g.reshape(-1), self.buckets) for g in gradient], axis=-1
        )
        layer.table.store_grad(sums)
