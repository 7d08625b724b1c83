"""Networks as ParaDL describes them: a list of layers with sizes and times per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from pydtnn.utils.validate import check_float

WITHOUT_MEMORY = ("relu", "bnorm")
"""Layers that the published memory sums leave out: frameworks compute them in place."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerSize:
    """One layer.

    Parameters
    ----------
    name : str
        Its first letters are its kind: CONV, FC, MPOOL, APOOL, RELU, BNORM, ADD, DROPOUT.
    x, y : tuple of int
        Shapes of input and output of one sample, channels first, such as (3, 224, 224).
    w : tuple of int
        Shape of the weights: input channels, filters, and the kernel along each axis of the maps. A
        single number is the number of weights.
    forward, backward : float
        Time per sample, in s.
    update : float
        Time of the update of its weights per step, in s.
    split : bool
        Whether spatial, filter and channel parallelism divide this layer; other layers are computed
        on every rank.
    """

    name: str
    x: Shape
    w: Shape
    y: Shape
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    split: bool = True

    def __post_init__(self) -> None:
        for what, shape in (("x", self.x), ("y", self.y), ("w", self.w)):
            if not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ValueError(
                    f"paradl: {self.name}: {what} must be sizes of at least 0, got {shape}; "
                    "write them as 3x224x224"
                )
        for what in ("forward", "backward", "update"):
            check_float("paradl", f"{what} of {self.name}", getattr(self, what), at_least=0)

    @property
    def items_x(self) -> int:
        """Values of the input of a sample."""
        return prod(self.x)

    @property
    def items_y(self) -> int:
        """Values of the output of a sample."""
        return prod(self.y)

    @property
    def items_w(self) -> int:
        """Number of weights."""
        return prod(self.w)

    @property
    def has_weights(self) -> bool:
        """Whether there are weights."""
        return self.items_w > 0

    @property
    def in_memory(self) -> bool:
        """Whether the published memory sums contain this layer."""
        return not self.name.lower().startswith(WITHOUT_MEMORY)

    @property
    def kernel(self) -> Shape:
        """Size of the window along each axis of the maps; ones where there is none."""
        axes = max(0, len(self.x) - 1)
        given = self.w[2:] if len(self.w) > 2 else ()
        return tuple(max(1, k) for k in given[:axes]) + (1,) * (axes - len(given))

    @property
    def filters(self) -> int:
        """Filters of a layer with weights, 0 of others."""
        return self.w[1] if self.has_weights and len(self.w) > 1 else 0

    @property
    def channels(self) -> int:
        """Input channels of a layer with weights, 0 of others."""
        return self.w[0] if self.has_weights and len(self.w) > 1 else 0

    @property
    def rows(self) -> int:
        """Length of the output's first axis of the maps."""
        return self.y[1] if len(self.y) > 1 else 1

    def halo(self, shape: Shape) -> int:
        """Return the values per sample that a rank exchanges with one neighbour.

        Stripes along the first axis of the maps: (K - 1) / 2 rows of all channels.
        """
        if not self.kernel or len(shape) < 2:
            return 0
        return (self.kernel[0] - 1) // 2 * shape[0] * prod(shape[2:])

    def flops(self, *, published: bool) -> float:
        """Return the operations per sample of forward and backward.

        Parameters
        ----------
        published : bool
            Whether to count as the published tool: backward of convolutions as 2 per multiplication
            plus one per weight, and windows of pools over all input channels. Otherwise the
            gradients of weights and of inputs cost as much as forward each, and pools have one
            channel.
        """
        kind, maps = self.name.lower(), prod(self.y[1:])
        window = prod(self.kernel) * maps
        if kind.startswith("conv"):
            forward = 2.0 * self.channels * self.filters * window
        elif kind.startswith(("mpool", "apool")):
            forward = float(self.y[0] * window * (self.x[0] if published else 1)) if self.y else 0.0
        elif kind.startswith("fc"):
            forward = float(self.items_w if published else 2 * self.items_w)
        elif kind.startswith("bnorm"):
            forward = 4.0 * self.items_x
        elif kind.startswith(("relu", "add")):
            forward = float(self.items_y)
        else:
            forward = 0.0
        if published:
            return 2 * forward + self.items_w
        return 3 * forward if self.has_weights else 2 * forward


@dataclass(frozen=True)
class LayerList:
    """A network and its data set.

    Parameters
    ----------
    name : str
    samples : int
        Samples of an epoch.
    layers : tuple of LayerSize
        In the order of execution.
    """

    name: str
    samples: int
    layers: tuple[LayerSize, ...]

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"paradl: samples must be at least 1, got {self.samples}")
        if not self.layers:
            raise ValueError(f"paradl: {self.name} must have layers, got none; add them")

    @property
    def split(self) -> tuple[LayerSize, ...]:
        """The layers that model parallelism divides."""
        return tuple(layer for layer in self.layers if layer.split)

    def with_split(self, chosen: Sequence[bool]) -> LayerList:
        """Return the same network with other layers that are divided.

        Raises
        ------
        ValueError
            If there is not one value for each layer.
        """
        if len(chosen) != len(self.layers):
            raise ValueError(
                f"paradl: expected a choice for each of the {len(self.layers)} layers of "
                f"{self.name}, got {len(chosen)}; add one line per layer"
            )
        pairs = zip(self.layers, chosen, strict=True)
        return replace(self, layers=tuple(replace(x, split=bool(own)) for x, own in pairs))

    def distribute(self, *, published: bool = True) -> LayerList:
        """Return the same network with the total time divided in proportion to operations.

        Only if the first layer alone has a time: the measurement of the whole network.
        """
        times = [x.forward + x.backward for x in self.layers]
        work = [x.flops(published=published) for x in self.layers]
        if len(times) == 1 or not times[0] or any(times[1:]) or not sum(work):
            return self
        first, total = self.layers[0], sum(work)
        return replace(
            self,
            layers=tuple(
                replace(
                    x,
                    forward=first.forward * own / total,
                    backward=first.backward * own / total,
                )
                for x, own in zip(self.layers, work, strict=True)
            ),
        )
