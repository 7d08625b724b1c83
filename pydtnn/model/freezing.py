"""Parameters that are constant during training."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydtnn.kernels import Backend
from pydtnn.layers.parameters import Parameter
from pydtnn.layers.statistics import RUNNING, RunningStatistics
from pydtnn.model.graph import Graph
from pydtnn.model.placement import freeze_statistics
from pydtnn.model.stage import Stage
from pydtnn.utils.selection import select


class Freezing:
    """Methods of `Model` that freeze and thaw parameters."""

    backend: Backend
    graph: Graph
    parameters: dict[str, Parameter]
    statistics: RunningStatistics
    stage: Stage | None
    _bucket_bytes: Sequence[int]
    _frozen_elsewhere: frozenset[str] = frozenset()

    def _place_parameters(self, bucket_bytes: Sequence[int]) -> None:
        raise NotImplementedError

    def choose_segments(self) -> None:
        """Choose what is recomputed for a batch size."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Round the parameters into the working copies of a 16-bit model."""
        raise NotImplementedError

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
