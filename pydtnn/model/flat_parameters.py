"""Parameters of a model in flat arrays, trainable and constant ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pydtnn.kernels import Backend, recycled
from pydtnn.layers.parameters import DEFAULT_BUCKET_BYTES, Bucket, Parameter, ParameterBuffer
from pydtnn.layers.statistics import RUNNING, RunningStatistics
from pydtnn.model.graph import Graph
from pydtnn.model.placement import freeze_statistics, place_parameters
from pydtnn.model.stage import Stage
from pydtnn.utils.selection import select


class FlatParameters:
    """Methods of `Model` that place parameters in flat arrays, freeze and thaw them."""

    backend: Backend
    graph: Graph
    parameters: dict[str, Parameter]
    buffers: tuple[ParameterBuffer, ...]
    frozen_buffers: tuple[ParameterBuffer, ...]
    buckets: tuple[Bucket, ...]
    statistics: RunningStatistics
    stage: Stage | None
    _frozen_elsewhere: frozenset[str] = frozenset()
    _buckets_fixed: bool
    _bucket_bytes: Sequence[int]

    def choose_segments(self) -> None:
        """Choose what is recomputed for a batch size."""
        raise NotImplementedError

    @recycled
    def _place_parameters(self, bucket_bytes: Sequence[int]) -> None:
        """Allocate flat arrays for all parameters, with the values they have, if any."""
        self._bucket_bytes = bucket_bytes
        values = {name: p.master.copy() for name, p in self.parameters.items()}
        placement = place_parameters(self.graph, bucket_bytes)
        self.buffers, self.frozen_buffers = placement.buffers, placement.frozen
        self.buckets, self.parameters = placement.buckets, placement.parameters
        for name, array in values.items():
            self.parameters[name].master[...] = array

    def choose_buckets(self, choose: Callable[[int, int], Sequence[int]]) -> None:
        """Partition the parameters again if `bucket_bytes` was not set, at the first call only.

        Later an optimizer references the arrays. Values are copied to new arrays. `choose` receives
        the bytes of all gradients and the default length of buckets, and returns their lengths.
        """
        total = sum(buffer.grads.nbytes for buffer in self.buffers)
        nbytes = choose(total, DEFAULT_BUCKET_BYTES)
        if not self._buckets_fixed and set(nbytes) != {DEFAULT_BUCKET_BYTES}:
            self._place_parameters(nbytes)
            self.refresh()
            self.backend.trim()
        self._buckets_fixed = True

    def refresh(self) -> None:
        """Round the parameters into the working copies of a 16-bit model; called by forward."""
        for buffer in (*self.buffers, *self.frozen_buffers):
            buffer.refresh()

    def freeze(self, *patterns: str) -> None:
        """Make parameters constant, from the next `fit` on.

        A frozen parameter has no gradient, message or update, and no state in the optimizer; layers
        before which everything is frozen run no backward. Frozen batch norms use their running
        statistics in training, too, and do not change them. All ranks must freeze the same.

        Parameters
        ----------
        *patterns : str
            Names of blocks, layers or parameters, such as "stage1" or "head.fc.b", with wildcards:
            "*.bn?", and "*" for all.

        Raises
        ------
        ValueError
            If a pattern matches no parameter.
        """
        self.set_frozen({*self.frozen, *self._select("Model.freeze", patterns)})

    def thaw(self, *patterns: str) -> None:
        """Train frozen parameters again: see `freeze`. The optimizer's state for them is 0."""
        self.set_frozen({*self.frozen} - {*self._select("Model.thaw", patterns)})

    def _select(self, who: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
        if not patterns:
            raise ValueError(f'{who}: expected names of layers, got none; "*" means all')
        return select(who, patterns, self.parameter_names)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters of the network: of all stages, if it is cut into several."""
        if self.stage is None:
            return tuple(self.parameters)
        return tuple(n for n in self.stage.shapes if n.rpartition(".")[2] not in RUNNING)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen parameters."""
        own = {name for name, p in self.parameters.items() if p.frozen} | self._frozen_elsewhere
        return tuple(name for name in self.parameter_names if name in own)

    def set_frozen(self, names: Collection[str]) -> None:
        """Freeze these parameters and thaw all others."""
        if {*names} == {*self.frozen}:
            return
        self._frozen_elsewhere = frozenset(names) - self.parameters.keys()
        for name, p in self.parameters.items():
            p.frozen = name in names
        freeze_statistics(self.statistics.statistics, self.parameters.values())
        self.graph.find_trained()
        self.choose_segments()
        self._place_parameters(self._bucket_bytes)
        self.refresh()
        self.backend.trim()
