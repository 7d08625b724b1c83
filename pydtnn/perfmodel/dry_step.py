"""A step of one rank without computation, which gives the outline of the step.

The rank's part of the network is built on a backend with empty kernels, and the model's loops run
on it, so that the outline has the same nodes, exchanges and buckets as training, for every layer,
plan and recomputation. Two passes with few samples give all quantities that depend on their number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from math import isqrt, prod
from typing import Any

import numpy as np

from pydtnn.comm.schedules.rule import bucket_bytes
from pydtnn.kernels import Backend
from pydtnn.kernels.dry import dry_backend, scratch
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.layers import Net
from pydtnn.layers.base import StepContext
from pydtnn.layers.collectives import Collective, Pending
from pydtnn.layers.node import nodes
from pydtnn.layers.parameters import ALIGNMENT, DEFAULT_BUCKET_BYTES, Bucket
from pydtnn.layers.statistics import RunningStatistics
from pydtnn.model.execution import Reports, backward_loop, forward_loop, run_together
from pydtnn.model.fusion import fuse
from pydtnn.model.graph import Graph, shapes_of
from pydtnn.model.partition.apply import partition
from pydtnn.model.placement import completed, place_parameters
from pydtnn.model.recompute import KEPT_ALL, Cuts, cut, named_cuts
from pydtnn.perfmodel.compute import Label
from pydtnn.perfmodel.dry_mesh import Position, start_dry
from pydtnn.perfmodel.outline import (
    BucketOutline,
    Compute,
    Event,
    Linear,
    MemoryOutline,
    NodeMemory,
    Outline,
    Ready,
    Start,
    Transfer,
    Wait,
)
from pydtnn.utils.observer import RECOMPUTED, Kind, Observer

MIN_COUNTED_BYTES = 1
"""Least size of arrays that are counted, in B."""


def inner_position(shape: Mapping[str, int]) -> dict[str, int]:
    """Return the position of a rank with the most work: in maps, not at an edge."""
    inside = ("spatial", "height", "width")
    return {axis: 1 if axis in inside and ranks > 2 else 0 for axis, ranks in shape.items()}


class DryStep:
    """A rank's part of a network on a backend without computation.

    Parameters
    ----------
    net : Net
        Not part of a model; it is not changed.
    input_shape : tuple of int, or several
    backend : Backend
        The backend whose allocations are counted.
    shape : mapping of str to int
        Ranks along the axes of the mesh besides "data".
    position : mapping of str to int, optional
        Of the rank; by default one with the most work.
    plan : Plan, mapping or str, optional
    dtype : str
    fused : bool
    between_hosts : bool
        Whether gradients are exchanged between hosts, which shortens buckets.
    own_bytes : int, optional
        Length of buckets everywhere, in B.

    Attributes
    ----------
    same_buckets : bool
        Whether buckets inside a host and between hosts have the same lengths.

    Raises
    ------
    ValueError
        If the plan does not fit the network.
    """

    def __init__(
        self,
        net: Net,
        input_shape: Any,
        backend: Backend,
        shape: Mapping[str, int] | None = None,
        *,
        position: Mapping[str, int] | None = None,
        plan: Any = None,
        dtype: str = "float32",
        fused: bool = True,
        between_hosts: bool = False,
        own_bytes: int | None = None,
    ) -> None:
        shape = dict(shape or {})
        place = inner_position(shape) if position is None else position
        self.mesh = Position(shape, place) if shape else None
        self.real = backend
        self.backend = dry_backend(backend, MIN_COUNTED_BYTES)
        self.graph = Graph(shapes_of(input_shape), backend=self.backend, dtype=dtype)
        outputs = nodes(self.graph.add(copy.deepcopy(net), *self.graph.inputs))
        outputs, stage = partition(self.graph, outputs, plan, self.mesh)
        self.staged = stage is not None
        self.transfer = Transfer(
            *(
                0 if stage is None else sum(prod(v.shape) for v in values) * 4
                for values in ((stage.receives, stage.sends) if stage else ((), ()))
            )
        )
        if fused:
            outputs = fuse(self.graph, outputs)
        received = stage is not None and bool(stage.receives)
        self.graph.finish(outputs, input_gradient=received)
        itemsize = arithmetic(self.graph.dtype).itemsize
        total = sum(
            ALIGNMENT * -(-p.size * itemsize // ALIGNMENT) for p, _ in completed(self.graph)
        )
        usual = own_bytes or DEFAULT_BUCKET_BYTES
        between = (usual,) if own_bytes else bucket_bytes(("a", "b"), total, usual)
        self.same_buckets = {*between} == {usual}
        self.placement = place_parameters(self.graph, between if between_hosts else (usual,))
        statistics = dict.fromkeys(s for node in self.graph.nodes for s in node.layer.statistics)
        self.statistics = RunningStatistics(list(statistics), self.backend)
        # a layer may compute a part of the samples
        self.few = max(shape.values(), default=1) if self.graph.cuts_batch else 1
        self.segments = KEPT_ALL

    def _recompute(self, recompute: Any) -> None:
        """Choose the segments that backward recomputes."""
        graph = self.graph
        if self.segments is not KEPT_ALL:
            self.segments = KEPT_ALL
            graph.find_overwrites(())
        if recompute is None or not graph.trained:
            return
        if recompute == "auto" or isinstance(recompute, int):
            sizes = [self.few * prod(node.shape) * graph.dtype.itemsize for node in graph.nodes]
            cuts = Cuts(graph.nodes, graph.trained, self.kept(self.few), sizes)
            parts = isqrt(len(cuts.places)) if recompute == "auto" else recompute
            if parts < 2:
                return
            bounds = cuts.even(min(parts, len(cuts.places)))
        else:
            names = (recompute,) if isinstance(recompute, str) else recompute
            known = [str(node.layer.name) for node in graph.nodes if node.inputs]
            bounds = named_cuts(graph.nodes, graph.trained, names, known)
        self.segments = cut(graph.nodes, graph.trained, bounds)
        graph.find_overwrites(self.segments.checkpoints)

    # -- passes -----------------------------------------------------------------------------------

    def _inputs(self, samples: int) -> tuple[Any, ...]:
        shapes = [node.shape for node in self.graph.inputs]
        return tuple(self.backend.empty((samples, *s), self.graph.dtype) for s in shapes)

    def _forward(self, samples: int, recording: _Recording | None = None) -> tuple[Any, list[Any]]:
        context = StepContext(training=True, samples=np.arange(samples))
        own = recording or _Recording(self.mesh)
        self.statistics.begin_step()
        loop = forward_loop(
            self.graph,
            self._inputs(samples),
            context,
            True,
            None,
            joint=False,
            segments=self.segments,
            reports=Reports(own, 1),
        )
        result: tuple[Any, list[Any]] = run_together([loop], own.communicate)[0]
        return result

    def kept(self, samples: int) -> tuple[int, ...]:
        """Return the bytes that each node keeps for backward, see `Memory.kept`."""
        memory: Any = self.backend.memory
        with self.backend.recycling(), np.errstate(all="ignore"):
            y, residuals = self._forward(samples)
            del y
            kept = [0] * len(residuals)
            for index in reversed(range(len(residuals))):
                before = memory.in_use
                residuals[index] = None
                kept[index] = before - memory.in_use
        return tuple(kept)

    def run(self, samples: int) -> tuple[_Recording, _Recording, int]:
        """Run both passes; return the events of each, and the peak of memory in B."""
        memory: Any = self.backend.memory
        memory.trim()
        memory.reset_peak()
        forward, backward = _Recording(self.mesh), _Recording(self.mesh)
        with self.backend.recycling(), np.errstate(all="ignore"):
            y, residuals = self._forward(samples, forward)
            outputs = y if isinstance(y, tuple) else (y,)
            dy = tuple(self.backend.empty(part.shape, part.dtype) for part in outputs)
            del y, outputs
            loop = backward_loop(
                self.graph,
                self.placement.buckets,
                dy,
                residuals,
                backward.ready,
                None,
                joint=False,
                shard=0,
                reports=Reports(backward, 1),
            )
            run_together([loop], backward.communicate)
        return forward, backward, memory.peak

    def outline(self, recompute: Any = None) -> Outline:
        """Return the outline of the step.

        Parameters
        ----------
        recompute : int, str or sequence of str, optional
            A number of parts or names of layers, see `Model`; "auto" is about the square root of
            the possible parts.

        Raises
        ------
        ValueError
            If a name matches no layer.
        """
        self._recompute(recompute)
        samples = self.few, 2 * self.few
        few, many = map(self.run, samples)

        def line(value: float, other: float) -> Linear:
            return Linear.through(samples[0], value, samples[1], other)

        layers = {node.name: node.layer for node in self.graph.nodes}
        placement = self.placement
        buffers = (*placement.buffers, *placement.frozen)
        names = [node.name for node in self.graph.nodes]
        kept = zip(names, *map(self.kept, samples), strict=True) if self.staged else ()
        forward, backward = (
            tuple(_join(a.events, b.events, layers, line))
            for a, b in zip(few[:2], many[:2], strict=True)
        )
        self.backend.trim()
        return Outline(
            forward=forward,
            backward=backward,
            buckets=tuple(map(_outline_of, placement.buckets)),
            memory=MemoryOutline(
                values=sum(buffer.values.nbytes for buffer in buffers),
                gradients=sum(buffer.grads.nbytes for buffer in buffers),
                copies=sum(b.working.nbytes for b in buffers if b.working is not None),
                trained=sum(buffer.values.nbytes for buffer in placement.buffers),
                peak=line(few[2], many[2]),
                nodes=tuple(NodeMemory(name, line(a, b)) for name, a, b in kept),
                scratch=scratch(self.real, self.backend, self.graph.dtype.itemsize),
            ),
            shape={} if self.mesh is None else {a: n for a, n in self.mesh.shape.items() if n > 1},
            transfer=self.transfer,
            parameters=sum(p.size for p in placement.parameters.values()),
        )


class _Recorded(Pending):
    """A collective whose wait is recorded."""

    def __init__(self, pending: Pending, wait: Callable[[], None]) -> None:
        self._pending, self._wait = pending, wait

    def wait(self) -> Any:
        """Record the wait, and return the result."""
        self._wait()
        return self._pending.wait()


class _Recording(Observer):
    """The events of a pass: of nodes, collectives and buckets."""

    def __init__(self, mesh: Position | None) -> None:
        self.mesh = mesh
        self.events: list[Any] = []
        self._open: list[list[Any]] = []  # kind, name and number of the next segment
        self._started = 0

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self._open.append(["forward" if kind is Kind.FORWARD else "backward", name, 0])

    def end(self) -> None:
        self._segment()
        self._open.pop()

    def _segment(self) -> None:
        """End a segment of the activity that is running."""
        if self._open:
            activity = self._open[-1]
            self.events.append(Label(*activity))
            activity[2] += 1

    def ready(self, bucket: Bucket, shard: int) -> None:
        """Record that a bucket is complete."""
        self.events.append(Ready(bucket.index))

    def communicate(self, asked: Sequence[tuple[Any, Collective]]) -> list[Pending]:
        """Record the start of collectives."""
        return [self._start(node.name, collective) for node, collective in asked]

    def _start(self, node: str, collective: Collective) -> Pending:
        assert self.mesh is not None
        self._segment()
        numbers = []
        for axis in collective.axes:
            group = self.mesh.group(axis)
            pending = start_dry(collective, group)
            for operation, sent in group.asked:
                self._started += 1
                numbers.append(self._started)
                self.events.append((self._started, node, operation, axis, sent))
        # sums over several axes are sums of sums: all but the last are awaited at once
        self.events.extend(Wait(number) for number in numbers[:-1])
        return _Recorded(pending, lambda: self._waited(numbers[-1:]))

    def _waited(self, numbers: list[int]) -> None:
        self._segment()
        self.events.extend(Wait(number) for number in numbers)


def _join(
    few: list[Any],
    many: list[Any],
    layers: Mapping[str, Any],
    line: Callable[[float, float], Linear],
) -> list[Event]:
    """Return the events of two passes, with quantities as functions of the samples."""
    events: list[Event] = []
    for one, other in zip(few, many, strict=True):
        if isinstance(one, Label):
            events.append(Compute(one, layers[one.name.removesuffix(RECOMPUTED)]))
        elif isinstance(one, tuple):
            number, node, operation, axis, sent = one
            total, largest = (
                line(measure(sent), measure(other[-1]))
                for measure in (sum, lambda sizes: max(sizes, default=0))
            )
            events.append(Start(number, node, operation, axis, total, largest, len(sent)))
        else:
            events.append(one)
    return events


def _outline_of(bucket: Bucket) -> BucketOutline:
    shapes = [entry.shape for entry in bucket.parameters]
    matrices = tuple((s[0], prod(s[1:])) for s in shapes if len(s) > 1)
    return BucketOutline(
        nbytes=bucket.grads.nbytes,
        group=tuple(bucket.group.split("+")),
        matrices=matrices,
        vectors=sum(prod(s) for s in shapes if len(s) < 2),
        itemsize=bucket.grads.dtype.itemsize,
    )
