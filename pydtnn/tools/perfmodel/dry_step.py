"""A step of one rank without computation, which gives the outline of the step.

The rank's part of the network is built on a backend with empty kernels, and the passes of the model
run on it, so that the outline has the same nodes, exchanges, buckets and arrays as training, for
every layer, plan and recomputation. Two passes with few samples give all quantities that depend on
their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import isqrt, prod
from typing import Any

from pydtnn.comm.schedules.rule import bucket_bytes
from pydtnn.kernels import Backend
from pydtnn.kernels.dry import dry_backend, scratch
from pydtnn.layers.collectives import PIPELINE, Collective, Pending
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import DEFAULT_BUCKET_BYTES, Bucket
from pydtnn.model.memory import DryMesh, Rehearsal
from pydtnn.model.presence import reads_of
from pydtnn.model.recompute import Cuts, beginning
from pydtnn.model.recompute_choice import AUTO, check_recompute
from pydtnn.tools.perfmodel import outline as outlines
from pydtnn.tools.perfmodel.compute import Label
from pydtnn.tools.perfmodel.compute.segments import SegmentObserver
from pydtnn.tools.perfmodel.outline import Affine, Event, NodeWork, Read
from pydtnn.training.axis_sums import further_axes
from pydtnn.training.workload import Workload
from pydtnn.utils.observer import RECOMPUTED, Kind

MIN_COUNTED_BYTES = 1
"""Least size of arrays that are counted, in B."""


_Flat = tuple[dict[str, Any], list[tuple[int, outlines.BucketOutline]], dict[tuple[str, int], Read]]


def inner_position(shape: Mapping[str, int]) -> dict[str, int]:
    """Return the position of a rank with the most work: in maps, not at an edge."""
    inside = ("spatial", "height", "width")
    return {axis: 1 if axis in inside and ranks > 2 else 0 for axis, ranks in shape.items()}


class DryStep:
    """A rank's part of the network of a run on a backend without computation.

    Parameters
    ----------
    work : Workload
    backend : Backend
        The backend whose allocations are counted.
    stage : int
        Of a pipeline.
    blocks : sequence of str
        Names of equal blocks; the second of a stage is to be repeated.

    Raises
    ------
    ValueError
        If the plan does not fit the network.
    """

    def __init__(
        self, work: Workload, backend: Backend, *, stage: int = 0, blocks: Sequence[str] = ()
    ) -> None:
        shape = work.cut
        position = inner_position(shape) | ({PIPELINE: stage} if PIPELINE in shape else {})
        plain = replace(work, recompute=None, memory_limit=None, plan=work.plan if shape else None)
        self.mesh = _Mesh(shape, position)
        self.real, self.backend = backend, dry_backend(backend, MIN_COUNTED_BYTES)
        mesh: Any = self.mesh if shape else None  # it gathers nothing
        self.model = plain.create_model(plain.create_net(), self.backend, mesh)
        self.model.cut_outputs = True  # as with the usual losses
        nodes = {name: self._nodes_of(name) for name in blocks}
        # received values may be exchanged
        self.blocks = {k: own for k, own in nodes.items() if any("/" not in n.name for n in own)}
        self._flat = [self._flat_of()]  # inside a host, and between hosts
        self.model.share_gradients()
        self._shared = self._flat_of()[0]["gradients"]
        self.model.separate_gradients()
        total = sum(buffer.grads.nbytes for buffer in self.model.buffers)
        usual = work.bucket_bytes or DEFAULT_BUCKET_BYTES
        further = any(further_axes(p.group) for p in self.model.parameters.values())
        between = (usual,) if further else bucket_bytes(("a", "b"), total, usual)
        self.model.choose_buckets(lambda total, usual: between)
        self._flat.append(self._flat_of())
        self._outlines: dict[str, list[outlines.Outline]] = {}
        # a layer may compute a part of the samples
        cuts_batch = any(layer.batch_part is not None for layer in self.model.layers)
        self.few = max(shape.values(), default=1) if cuts_batch else 1

    def _nodes_of(self, block: str) -> list[Node]:
        nodes = self.model.graph.nodes  # without received values
        return [node for node in nodes if node.inputs and node.name.startswith(f"{block}.")]

    def _flat_of(self) -> _Flat:
        """Return the bytes of flat arrays, buckets with the nodes that complete them, and reads."""
        model, graph = self.model, self.model.graph
        buffers = (*model.buffers, *model.frozen_buffers)
        sizes: dict[str, Any] = {
            "values": sum(buffer.values.nbytes for buffer in buffers),
            "gradients": sum(buffer.grads.nbytes for buffer in buffers),
            "copies": sum(b.working.nbytes for b in buffers if b.working is not None),
            "trained": sum(buffer.values.nbytes for buffer in model.buffers),
        }
        buckets = [(bucket.ready_at, _outline_of(bucket)) for bucket in model.buckets]
        reads = {
            (graph.nodes[index].name, kind): Read(*(tuple(b.index for b in own) for own in both))
            for kind, found in enumerate(reads_of(graph.nodes, graph.trained, model.buckets))
            for index, both in found.items()
        }
        return sizes, buckets, reads

    def _recompute(self, recompute: Any) -> None:
        """Choose the segments that backward recomputes."""
        model, graph = self.model, self.model.graph
        model.cut(())
        if recompute != AUTO:
            model.recompute, _ = check_recompute(recompute, None)
            model.choose_segments(self.few)
        elif self.blocks:  # each is a segment
            starts = [own[0].index for own in self.blocks.values()]
            model.cut((beginning(graph.nodes, graph.trained), *starts[1:]))
        elif graph.trained:
            sizes = [self.few * prod(node.shape) * graph.dtype.itemsize for node in graph.nodes]
            kept = Rehearsal(model, self.few).kept()
            cuts = Cuts(graph.nodes, graph.trained, kept, sizes)
            parts = isqrt(len(cuts.places))
            model.cut(cuts.even(parts) if parts > 1 else ())

    def _run(self, samples: int) -> tuple[_Recording, float, tuple[int, ...]]:
        """Run both passes; return their events, the peak of memory, and what nodes keep, in B."""
        model, rehearsal, recording = self.model, Rehearsal(self.model, samples), _Recording()
        kept = rehearsal.kept() if model.pipeline is not None or self.blocks else ()
        model.statistics.begin_step()
        model.observer = self.mesh.recording = recording
        rehearsal.step(rehearsal.new_batch(), recording.after)
        model.observer = self.mesh.recording = None
        return recording, rehearsal.memory.peak, kept

    def outline(self, recompute: Any = None, *, between_hosts: bool = False) -> outlines.Outline:
        """Return the outline of the step.

        Parameters
        ----------
        recompute : int, str or sequence of str, optional
            A number of parts or names of layers, see `Model`; "auto" is about the square root of
            the possible parts.
        between_hosts : bool
            Whether gradients are exchanged between hosts, which shortens buckets.

        Raises
        ------
        ValueError
            If a name matches no layer.
        """
        key = repr(recompute)
        if key not in self._outlines:
            self._outlines[key] = self._both_outlines(recompute)
        return self._outlines[key][between_hosts]

    def _both_outlines(self, recompute: Any) -> list[outlines.Outline]:
        """Return the outlines inside a host and between hosts, whose passes are the same."""
        self._recompute(recompute)
        few, many = map(self._run, (self.few, 2 * self.few))

        def line(value: float, other: float) -> Affine:
            return Affine.through(self.few, value, 2 * self.few, other)

        model, graph = self.model, self.model.graph
        layers = {node.name: node.layer for node in graph.nodes}
        forward, backward = (
            tuple(_join(a, b, layers, line))
            for a, b in zip(few[0].passes, many[0].passes, strict=True)
        )
        stages = () if model.pipeline is None else model.pipeline.stages
        transfers = tuple(
            outlines.StageBytes(*(tuple(4 * prod(v.shape) for v in values) for values in sides))
            for sides in ((stage.receives, stage.sends) for stage in stages)
        )
        self.backend.trim()
        now = self._flat[-1][0]
        flat = now["values"] + now["gradients"] + now["copies"]
        memory = outlines.MemoryOutline(
            **now,
            shared=self._shared,
            peak=line(few[1] - flat, many[1] - flat),
            nodes=tuple(map(line, few[2], many[2])),
            scratch=scratch(self.real, self.backend, graph.dtype.itemsize),
        )
        model.cut(())  # costs are those of layers, whatever has been outlined before
        found = []
        for sizes, buckets, reads in self._flat:
            ready: dict[int, list[Event]] = {}
            for number, (node, _) in enumerate(buckets):
                ready.setdefault(node, []).append(outlines.BucketReady(number))
            events = (ready.get(e, ()) if isinstance(e, int) else (e,) for e in backward)
            after = tuple[Event, ...](chain.from_iterable(events))
            found.append(
                outlines.Outline(
                    forward=forward,
                    backward=after,
                    buckets=tuple(bucket for _, bucket in buckets),
                    memory=replace(memory, **sizes),
                    transfers=transfers,
                    reads=reads,
                    parts={n.name: i for i, own in enumerate(graph.parts) for n in own.layers},
                    period=self._period(forward, after, memory.nodes),
                )
            )
        return found

    def _period(
        self, forward: Sequence[Event], backward: Sequence[Event], kept: Sequence[Affine]
    ) -> outlines.Period | None:
        """Return what the second block has, if it is like the third."""
        if not self.blocks:
            return None
        (first, _), (name, own), (last, others) = self.blocks.items()
        suffixes = [
            [node.name.removeprefix(block) for node in nodes]
            for block, nodes in ((name, own), (last, others))
        ]
        places = _range_of(forward, name, last), _range_of(backward, name, first)
        ready = (isinstance(event, outlines.BucketReady) for event in backward[places[1]])
        if suffixes[0] != suffixes[1][: len(own)] or not any(ready):
            raise Irregular
        nodes = [kept[node.index] for node in own]
        return outlines.Period(*places, Affine(*map(sum, zip(*nodes, strict=True))))


class Irregular(ValueError):
    """Equal blocks of a network are not equal on a rank."""


def _range_of(events: Sequence[Event], block: str, following: str) -> slice:
    """Return the events of a block, moved to where no collective is in progress."""
    running, places = [0], dict[str, int]()
    for i, event in enumerate(events):
        running.append(running[-1] + isinstance(event, outlines.Start))
        running[-1] -= isinstance(event, outlines.Finish)
        node = event.node if isinstance(event, outlines.Start) else ""
        node = event.part[0] if isinstance(event, NodeWork) else node
        places.setdefault(node.partition(".")[0], i)
    start, stop = places[block], places[following]
    found = (i for i in range(stop - start) if not running[start + i] + running[stop + i])
    shift = next(found, None)
    if shift is None:
        raise Irregular
    return slice(start + shift, stop + shift)


class _Recording(SegmentObserver):
    """The events of both passes: of nodes, collectives and buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: tuple[list[Any], list[Any]] = [], []
        self.events = self.passes[0]
        self._started = 0

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        if kind is Kind.BACKWARD or name.endswith(RECOMPUTED):
            self.events = self.passes[1]
        super().begin(kind, name)

    def notified(self) -> None:
        if label := self.ending():
            self.events.append(label)

    def after(self, node: Node) -> None:
        """Record that the gradients that a node completes are complete."""
        self.events.append(node.index)

    def start(self, *operation: Any) -> int:
        """Record the start of an operation; return its number."""
        self._started += 1
        self.events.append((self._started, *operation))
        return self._started


class _Mesh(DryMesh):
    """A mesh whose collectives are recorded."""

    recording: _Recording | None = None

    def start(self, layer: str, collective: Collective) -> Pending:
        own = self.recording
        if own is None:
            return super().start(layer, collective)
        numbers: list[int] = []
        own.notified()
        for axis in collective.axes:
            group = self.group(axis)
            pending = collective.start(group, 0)
            numbers += [own.start(layer, operation, axis, sent) for operation, sent in group.asked]
        # sums over several axes are sums of sums: all but the last are awaited at once
        own.events.extend(outlines.Finish(number) for number in numbers[:-1])

        def finish() -> Any:
            own.notified()
            own.events.extend(outlines.Finish(number) for number in numbers[-1:])
            return pending.wait()

        return Pending(None, finish)


def _join(
    few: list[Any],
    many: list[Any],
    layers: Mapping[str, Any],
    line: Callable[[float, float], Affine],
) -> list[Any]:
    """Return the events of two passes, with quantities as functions of the samples.

    Numbers are nodes whose gradients are complete.
    """
    events: list[Any] = []
    for one, other in zip(few, many, strict=True):
        if isinstance(one, Label):
            events.append(NodeWork(one, layers[one.name.removesuffix(RECOMPUTED)]))
        elif isinstance(one, tuple):
            number, node, operation, axis, sent = one
            total = line(sum(sent), sum(other[-1]))
            largest = line(max(sent, default=0), max(other[-1], default=0))
            events.append(outlines.Start(number, node, operation, axis, total, largest, len(sent)))
        else:
            events.append(one)
    return events


def _outline_of(bucket: Bucket) -> outlines.BucketOutline:
    shapes = [entry.shape for entry in bucket.parameters]
    matrices = tuple((s[0], prod(s[1:])) for s in shapes if len(s) > 1)
    return outlines.BucketOutline(
        nbytes=bucket.grads.nbytes,
        group=tuple(bucket.group.split("+")),
        matrices=matrices,
        vectors=sum(prod(s) for s in shapes if len(s) < 2),
        itemsize=bucket.grads.dtype.itemsize,
    )
