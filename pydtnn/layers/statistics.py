"""Running statistics of batch norm: sums accumulated during a step, applied once at its end.

During a step every batch norm adds the count, sum and sum of squares of its input to one flat
array, over all micro-batches and shards. (In float64 sums have two parts each, see
`pydtnn.kernels.reference.norm`.) `RunningStatistics.fold` then updates the running means and
variances of all layers at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import ParameterPart

RUNNING = ("running_mean", "running_variance")
"""Names of the arrays of a statistic, after its own name."""


class Statistic:
    """Running mean and variance of one layer's channels.

    Parameters
    ----------
    name : str
        Dotted name of the layer.
    channels : int
    momentum : float
        Weight of a new step: ``running = (1 - momentum) running + momentum new``.
    length : int, optional
        Length of `sums`, as returned by `NormKernels.sums_length`; by default 1 + 2 C.

    Attributes
    ----------
    sums : Array, shape (length,), float64
        Count, sums and sums of squares of this step so far.
    mean, variance : Array, shape (C,), float64
        Running values; the variance is the unbiased one.
    frozen : bool
        Whether the running values are constant and used in training too, because the parameters of
        the layer are frozen.
    part : Part or None
        The part of the layer's channels that this rank of a mesh has, if not all of them.
    """

    def __init__(
        self, name: str, channels: int, momentum: float, length: int | None = None
    ) -> None:
        self.name = name
        self.length = length or 1 + 2 * channels
        self.channels = channels
        self.momentum = momentum
        self.sums: Array
        self.mean: Array
        self.variance: Array
        self.frozen = False
        self.part: ParameterPart | None = None
        self._totals: dict[str | None, Array] = {}

    def add_total(self, layer: str | None, total: Array) -> None:
        """Add a total that a layer has received, once: shards in flight share its memory."""
        before = self._totals.get(layer)  # kept, so that its memory is not used again
        if before is None or _address(before) != _address(total):
            self._totals[layer] = total
            self.sums += total

    def begin_step(self) -> None:
        """Forget the totals of the preceding step."""
        self._totals.clear()


def _address(array: Array) -> int:
    """Return the address of an array on the host or on a device."""
    return getattr(array.data, "ptr", None) or array.ctypes.data


class RunningStatistics:
    """The statistics of all layers of a model in flat float64 arrays.

    Parameters
    ----------
    statistics : sequence of Statistic
    backend : Backend
        The backend that allocates the arrays.

    Attributes
    ----------
    sums : Array
        This step's sums of all layers, each ``(count, sum x, sum x^2)``.
    running : Array
        Running means of all channels, then running variances.
    samples : float
        Samples since ranks last averaged: the weight of this rank's `running`.
    """

    def __init__(self, statistics: Sequence[Statistic], backend: Backend) -> None:
        self.statistics = tuple(statistics)
        channels = [s.channels for s in self.statistics]
        total = sum(channels)
        self._backend = backend
        self.sums = backend.zeros((sum(s.length for s in statistics),), "float64")
        self.running = backend.asarray(np.repeat([0.0, 1.0], total))
        self.samples = 0.0
        momentum = [s.momentum for s in self.statistics for _ in range(s.channels)]
        self._momentum = backend.asarray(momentum, "float64")
        # positions in `sums` of each channel's count (of its layer), sum and sum of squares
        parts = max(((s.length - 1) // s.channels for s in statistics), default=2)
        indices = np.empty((1 + parts, total), np.int64)
        start = first = 0
        for s in self.statistics:
            stop, last = start + s.length, first + s.channels
            s.sums = self.sums[start:stop]
            s.mean = self.running[first:last]
            s.variance = self.running[total + first : total + last]
            own = np.arange(s.channels)
            sums = [own + start + 1 + i * s.channels for i in range(parts)]
            indices[:, first:last] = [own * 0 + start, *sums]
            start, first = stop, last
        self._indices = backend.asarray(indices)

    def begin_step(self) -> None:
        """Clear the sums of an incomplete step and of forward passes outside of steps."""
        self.sums[:] = 0
        for s in self.statistics:
            s.begin_step()

    @contextlib.contextmanager
    def constant(self) -> Iterator[None]:
        """Context that preserves the running values of frozen layers."""
        kept = [(array, array.copy()) for array in self.frozen().values()]
        yield
        for array, values in kept:
            array[...] = values

    def frozen(self) -> dict[str, Array]:
        """Return the running values of frozen layers by name."""
        layers = {s.name for s in self.statistics if s.frozen}
        named = self.named(self.running).items()
        return {name: array for name, array in named if name.rpartition(".")[0] in layers}

    def fold(self) -> None:
        """Update the running values from this step's sums, if any, and clear the sums."""
        if len(self.running):
            self._backend.norm.fold(self.sums, self.running, self._indices, self._momentum)

    def state(self) -> dict[str, np.ndarray]:
        """Return running means and variances by name; on a CPU these are views."""
        named = self.named(self.running)
        return {name: self._backend.to_numpy(array) for name, array in named.items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load arrays returned by `state`; other entries are ignored."""
        for name, array in self.named(self.running).items():
            array[...] = self._backend.asarray(state[name], "float64")
        self.samples = 0.0

    def named(self, running: Array) -> dict[str, Array]:
        """Return views of an array with the layout of `running`, by name."""
        views: dict[str, Array] = {}
        first, total = 0, len(running) // 2
        for s in self.statistics:
            last = first + s.channels
            own = running[first:last], running[total + first : total + last]
            views |= {f"{s.name}.{what}": array for what, array in zip(RUNNING, own, strict=True)}
            first = last
        return views
