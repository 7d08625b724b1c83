"""The choice of what a model recomputes in backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.layers.base import Shape, StepContext
from pydtnn.layers.parameters import Parameter, ParameterBuffer
from pydtnn.layers.statistics import RunningStatistics
from pydtnn.model.description import Description
from pydtnn.model.execution import Communicate
from pydtnn.model.graph import Graph
from pydtnn.model.memory import Forecast
from pydtnn.model.partition.draft import MeshLike
from pydtnn.model.recompute import Cuts, Segments, cut, named_cuts
from pydtnn.model.stage import Network, Stage
from pydtnn.utils.observer import Observer
from pydtnn.utils.units import quantity
from pydtnn.utils.validate import check_int

AUTO = "auto"

USUAL_BATCH = 32
"""Samples for which memory is compared before the batch size is known."""

MAX_PEAK_RATIO = 1.02
"""Largest ratio of peaks of which the one with less computation is chosen."""

Recompute = int | str | Sequence[str] | None
"""A number of parts, names of layers, or "auto"."""


class Recomputing:
    """Methods of `Model` that choose the segments that backward recomputes."""

    backend: Backend
    dtype: np.dtype
    graph: Graph
    description: Description
    stage: Stage | None
    input_shapes: tuple[Shape, ...]
    parameters: dict[str, Parameter]
    buffers: tuple[ParameterBuffer, ...]
    frozen_buffers: tuple[ParameterBuffer, ...]
    statistics: RunningStatistics
    mesh: MeshLike | None
    communicate: Communicate | None
    observer: Observer | None
    recompute: int | tuple[str, ...] | None
    memory_limit: int | None
    segments: Segments
    cuts: tuple[int, ...]

    def forward_shards(
        self, xs: Sequence[Any], contexts: Sequence[StepContext]
    ) -> list[tuple[Any, list[Any]]]:
        """Run every node in order, for each shard."""
        raise NotImplementedError

    def backward_shards(self, dys: Sequence[Any], residuals: Sequence[list[Any]]) -> list[Any]:
        """Run every node's backward in reverse, for each shard."""
        raise NotImplementedError

    def choose_segments(
        self, batch: int | None = None, *, slots: int = 0, in_flight: int = 1
    ) -> None:
        """Choose what is recomputed for a batch size: see `find_cuts`."""
        self.cut(self.find_cuts(batch, slots=slots, in_flight=in_flight))

    def find_cuts(
        self, batch: int | None = None, *, slots: int = 0, in_flight: int = 1
    ) -> tuple[int, ...]:
        """Return the cuts for a batch size: nodes before which segments begin or end.

        Parameters
        ----------
        batch : int, optional
            Samples per pass. If it is not known, `memory_limit` is ignored.
        slots : int
            Slots of the optimizer, for the memory.
        in_flight : int
            Micro-batches whose saved values exist at a time, in a stage of a pipeline. If there are
            several, the last part of the stage is recomputed too.

        Raises
        ------
        ValueError
            If a name matches no layer, there are too few layers for the parts, or no choice of
            segments needs at most `memory_limit`.
        """
        nodes, trained = self.graph.nodes, self.graph.trained
        if self.recompute is None or not trained:
            return ()
        if self.recompute != (AUTO,) and not isinstance(self.recompute, int):
            names = [part.name for part in self.description.parts]
            return named_cuts(nodes, trained, self.recompute, names)
        limit = None if batch is None else self.memory_limit
        batch = batch or USUAL_BATCH
        forecast = Forecast(cast(Network, self), batch, slots, in_flight)
        end = (len(nodes),) if in_flight > 1 else ()
        whole_step = forecast.memory(())
        itemsize = self.dtype.itemsize
        sizes = [batch * prod(node.shape) * itemsize for node in nodes]
        cuts = Cuts(nodes, trained, whole_step.kept, sizes)
        if isinstance(self.recompute, int):
            if self.recompute > len(cuts.places) and self.stage is None:
                raise ValueError(
                    f"Model: recompute must be at most {len(cuts.places)}, the parts into which "
                    f"this network can be cut, got {self.recompute}"
                )
            return (*cuts.even(min(self.recompute, len(cuts.places))), *end)
        tried = cuts.trials()
        if in_flight > 1:
            tried += [(*(own or (cuts.first,)), *end) for own in tried]
        trials = {own: forecast.memory(own) for own in tried}
        if limit is None:
            peak = MAX_PEAK_RATIO * min(memory.peak for memory in trials.values())
            fitting = [own for own in trials if trials[own].peak <= peak]
        else:
            fitting = [own for own in trials if trials[own].resident <= limit]
        if fitting:
            return min(fitting, key=lambda own: (own[-1:], len(own)))
        least = min(memory.resident for memory in trials.values())
        raise ValueError(
            f"Model: memory_limit must be at least {least:,} B ({quantity(least, 1024, 'B')}) for "
            f"{batch} samples per pass, got {limit:,} B; use smaller batches or "
            "accumulation"
        )

    def cut(self, cuts: Sequence[int]) -> None:
        """Recompute the segments between cuts, and nothing if there are none."""
        self.cuts = tuple(cuts)
        self.segments = cut(self.graph.nodes, self.graph.trained, self.cuts)
        self.graph.find_overwrites(self.segments.checkpoints)

    def _set_recompute(self, recompute: Recompute, memory_limit: int | None) -> None:
        """Store the arguments of the model, and choose segments."""
        if memory_limit is not None:
            memory_limit = check_int("Model", "memory_limit", memory_limit, at_least=1)
            if recompute != AUTO:
                raise ValueError(
                    f'Model: memory_limit requires recompute="auto", got recompute={recompute!r}'
                )
        if isinstance(recompute, int):
            self.recompute = check_int("Model", "recompute", recompute, at_least=2)
        else:
            self.recompute = None if recompute is None else _names(recompute)
        self.memory_limit = memory_limit
        self.choose_segments()


def _names(recompute: str | Sequence[str]) -> tuple[str, ...]:
    names = (recompute,) if isinstance(recompute, str) else recompute
    if isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise TypeError(
        f'Model: recompute must be a number of parts, names of layers or "auto", got {recompute!r}'
    )
