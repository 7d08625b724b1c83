"""Prediction of the memory of a training step, by running it with kernels that do nothing.

The dry run executes the loops of `Model` on a copy of its graph, so that layers, the fusion pass
and the loops allocate the same arrays. These come from a separate pool that counts them; they are
never written, so the system does not allocate physical memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels import Backend, create_backend
from pydtnn.kernels.dry import dry_backend, scratch
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import StepContext
from pydtnn.layers.collectives import AllGather, Collective, Pending
from pydtnn.layers.node import Node
from pydtnn.layers.statistics import RunningStatistics, Statistic
from pydtnn.model.partition.exchange import Exchange
from pydtnn.model.stage import ModelLike
from pydtnn.utils.request import Completed, Request

CLASS_NUMBERS, POSITION_NUMBERS = 4, 2
"""Numbers that ranks exchange for the loss and the accuracy of an output that remains cut: for each
position if ranks have different classes, in total if they have different positions."""


class Volume(NamedTuple):
    """Messages and bytes that a rank sends, counted as by `pydtnn.comm.traffic`."""

    messages: int
    nbytes: int


class DryGroup:
    """A group of ranks along an axis in which messages are noted but not sent.

    Parameters
    ----------
    rank, size : int

    Attributes
    ----------
    asked : list of (str, list of int)
        "allreduce" with the length of the array, or "messages", or "neighbours" to which all of
        them are sent if there are other ranks, with that of each message, in B.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.asked: list[tuple[str, list[int]]] = []

    def iallreduce(self, array: Any) -> Request:
        """Note a sum."""
        self.asked.append(("allreduce", [array.nbytes]))
        return Completed()

    def exchange(self, sends: Any, receives: Any, tag: int) -> Request:
        """Note messages."""
        peers = {peer for _, peer in sends}
        near = peers <= {self.rank - 1, self.rank + 1} and len(peers) < self.size - 1
        sizes = [array.nbytes for array, _ in sends]
        self.asked.append(("neighbours" if near else "messages", sizes))
        return Completed()

    def volumes(self) -> Iterator[Volume]:
        """Yield what the rank sends, with the minimum of algorithms for an allreduce."""
        for operation, sizes in self.asked:
            if operation != "allreduce":
                yield Volume(len(sizes), sum(sizes))
            elif self.size > 1:
                yield Volume(1, round(2 * (self.size - 1) / self.size * sum(sizes)))


class DryMesh:
    """A mesh whose collectives allocate their arrays and send nothing.

    Parameters
    ----------
    shape, position : mapping of str to int
        See `pydtnn.parallel.Mesh`.

    Attributes
    ----------
    sent : dict of str to Volume
        Messages that this rank would have sent, by the name of the layer.
    """

    def __init__(self, shape: Mapping[str, int], position: Mapping[str, int]) -> None:
        self.shape, self.position = {"data": 1, **shape}, {"data": 0, **position}
        self.sent: dict[str, Volume] = {}

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes along which a network is cut."""
        return tuple(axis for axis in self.shape if axis != "data")

    def group(self, axis: str) -> DryGroup:
        """Return the group along an axis."""
        return DryGroup(self.position.get(axis, 0), self.shape.get(axis, 1))

    def communicate(self, asked: Sequence[tuple[Any, Collective]]) -> list[Pending]:
        """Start collectives; see `pydtnn.parallel.Mesh.communicate`."""
        return [self.start(node.name, collective) for node, collective in asked]

    def start(self, layer: str, collective: Collective) -> Pending:
        """Start a collective of a layer along each of its axes."""
        for axis in collective.axes:
            group = self.group(axis)
            pending = collective.start(group, 0)
            for volume in group.volumes():
                before = self.sent.get(layer, Volume(0, 0))
                self.sent[layer] = Volume(*map(sum, zip(before, volume, strict=True)))
        return pending


PROCESS_BYTES = 5 << 20
"""Bytes of code and small objects in a training process, independent of the model."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step on one rank.

    Attributes
    ----------
    parameters, copies, gradients, slots : int
        The flat arrays, padding included; copies are the 16-bit ones of the parameters, slots those
        of the optimizer.
    kept : tuple of int
        For each node of the graph, the arrays saved for its backward that no earlier node saves.
        The sum is the memory after forward; it includes the batch if a layer saves it. Values that
        enter a recomputed segment are those of its first node that is trained.
    peak : int
        Maximum of live arrays: the flat arrays, the batch and all arrays of the loops.
    pool : int
        Maximum of the backend's `MemoryPool`, `memory.peak`, without the batch; 0 for a backend
        without a pool.
    scratch : int
        Estimate of the scratch memory of kernels.
    resident : int
        Estimate of the growth of the process at the peak since the model was built, with the batch;
        on a GPU, of its memory.
    sent : mapping of str to Volume
        Messages to ranks with other parts of the network, by layer.
    """

    parameters: int
    copies: int
    gradients: int
    slots: int
    kept: tuple[int, ...]
    peak: int
    pool: int
    scratch: int
    resident: int
    sent: Mapping[str, Volume]


def forecast_memory(
    model: ModelLike, batch: int, *, slots: int = 0, cuts: Sequence[int] | None = None
) -> Memory:
    """Run a step without computation.

    Parameters
    ----------
    model : Model
    batch : int
        Samples per rank, and per micro-batch if gradients are accumulated.
    slots : int
        Slots of the optimizer: 1 for SGD with momentum, 2 for Adam.
    cuts : sequence of int, optional
        Cuts between which values are recomputed; by default those of the model, none if empty.

    Returns
    -------
    Memory
        Exact for arrays that layers allocate from their backend or with NumPy; scratch memory of
        kernels is estimated.
    """
    return Forecast(model, batch, slots).memory(model.cuts if cuts is None else cuts)


class Forecast:
    """The memory of a step with different recomputed segments.

    Parameters
    ----------
    model, batch, slots
        See `forecast_memory`.
    in_flight : int
        Micro-batches whose saved values exist at a time, in a stage of a pipeline.
    halved : int
        Those of them that are between the halves of backward at a time.
    """

    def __init__(
        self, model: ModelLike, batch: int, slots: int, in_flight: int = 1, halved: int = 0
    ) -> None:
        self._model = model
        self._slots = slots
        pool = model.backend.memory
        self._everything, self._large = (
            None
            if threshold is None
            else _with_slots(model, batch, slots, threshold, in_flight, halved)
            for threshold in (1, pool.threshold if pool else None)
        )

    def memory(self, cuts: Sequence[int]) -> Memory:
        """Run a step that recomputes the segments between cuts, without computation."""
        model, everything, large = self._model, self._everything, self._large
        assert everything is not None
        everything.model.cut(cuts)
        kept = everything.kept()
        x = everything.new_batch()
        everything.step(x)
        peak = held = everything.memory.peak
        pool = 0
        if large:
            large.model.cut(cuts)
            large.step(tuple(np.zeros(part.shape, part.dtype) for part in x))
            pool = large.memory.peak
            held = large.memory.peak_held + sum(part.nbytes for part in x)
        buffers = (*model.buffers, *model.frozen_buffers)
        copies = [buffer.working for buffer in buffers if buffer.working is not None]
        extra = scratch(model.backend, everything.backend, model.dtype.itemsize)
        return Memory(
            parameters=sum(buffer.values.nbytes for buffer in buffers),
            copies=sum(copy.nbytes for copy in copies),
            gradients=sum(buffer.grads.nbytes for buffer in buffers),
            slots=self._slots * sum(bucket.values.nbytes for bucket in model.buckets),
            kept=kept,
            peak=peak,
            pool=pool,
            scratch=extra,
            resident=held + extra + (PROCESS_BYTES if model.backend.name != "cuda" else 0),
            sent=everything.sent,
        )


class Rehearsal:
    """Passes of a model on a dry backend.

    Parameters
    ----------
    model : Network
    batch : int
        Samples of a pass.
    in_flight, halved : int
        See `Forecast`.

    Attributes
    ----------
    sent : dict of str to Volume
        Messages of the last step, by layer.
    """

    def __init__(self, model: ModelLike, batch: int, in_flight: int = 1, halved: int = 0) -> None:
        self.model, self.backend = model, model.backend
        self.in_flight, self.halved = in_flight, halved
        self.memory: Any = self.backend.memory
        self.sent: dict[str, Volume] = model.mesh.sent if isinstance(model.mesh, DryMesh) else {}
        self.slots: list[Array] = []
        self.context = StepContext(
            training=True, samples=np.arange(batch), cut_outputs=model.cut_outputs
        )

    def new_batch(self) -> tuple[Array, ...]:
        """Allocate a batch."""
        shapes = [node.shape for node in self.model.graph.inputs]
        samples = len(self.context.samples)
        return tuple(self.backend.empty((samples, *s), self.model.dtype) for s in shapes)

    def forward(self, x: tuple[Array, ...]) -> tuple[Any, list[Any]]:
        """Run forward; return the outputs, and what backward requires."""
        with np.errstate(all="ignore"):
            return self.model.forward_shards([x], [self.context])[0]

    def kept(self) -> tuple[int, ...]:
        """Measure the arrays saved by each node: those freed with it, later nodes first."""
        y, residuals = self.forward(self.new_batch())
        del y
        kept = [0] * len(residuals)
        for index in reversed(range(len(residuals))):
            before = self.memory.in_use
            residuals[index] = None
            kept[index] = before - self.memory.in_use
        return tuple(kept)

    def step(self, x: tuple[Array, ...], after_node: Callable[[Node], None] | None = None) -> None:
        """Run a step; the pool records its peak, and `sent` its messages."""
        self.sent.clear()
        self.memory.trim()
        self.memory.reset_peak()
        whole = self.in_flight - max(self.halved, 1)
        others = [self.forward(self.new_batch())[1] for _ in range(whole)]
        others += [self._passes(self.new_batch()) for _ in range(self.halved - 1)]
        self._passes(x, after_node)
        del others

    def _passes(
        self, x: tuple[Array, ...], after_node: Callable[[Node], None] | None = None
    ) -> list[Any]:
        """Run forward and backward, with halves the first of them; return what it leaves."""
        y, residuals = self.forward(x)
        outputs = y if isinstance(y, tuple) else (y,)
        self._exchange_losses(outputs)
        unread = dict(zip(self.model.output_nodes, self.model.unread_outputs, strict=True))
        dy = tuple(
            part if unread.get(node) else self.backend.empty(part.shape, part.dtype)
            for node, part in zip(self.model.graph.outputs, outputs, strict=True)
        )
        del y, outputs
        with np.errstate(all="ignore"):
            # with gradients where they are
            halves: dict[str, Any] = {"shared": True, "inputs_only": self.halved > 0}
            self.model.backward_shards([dy], [residuals], after_node=after_node, **halves)
        return residuals

    def _exchange_losses(self, outputs: Sequence[Array]) -> None:
        """Exchange the numbers of outputs that remain cut, as their losses do."""
        mesh: Any = self.model.mesh
        for node, y in zip(self.model.graph.outputs, outputs, strict=True):
            layer = node.layer
            if self.model.cut_outputs and isinstance(layer, Exchange) and layer.optional:
                if y.shape[1:-1] == node.shape[:-1]:
                    numbers = self.backend.empty((1, CLASS_NUMBERS, y.size // y.shape[-1]), y.dtype)
                else:
                    numbers = self.backend.empty((1, POSITION_NUMBERS), "float64")
                bounds = range(mesh.shape[layer.axis] + 1)
                mesh.start("loss", AllGather(numbers, layer.axis, dim=0, bounds=bounds)).wait()


def _with_slots(
    model: ModelLike, batch: int, slots: int, threshold: int, in_flight: int, halved: int
) -> Rehearsal:
    """Return a rehearsal of a model's copy, with the flat arrays of an optimizer."""
    backend = dry_backend(model.backend, threshold)
    found = Rehearsal(_dry_copy(model, backend), batch, in_flight, halved)
    found.slots = [
        backend.zeros((len(bucket.values),), bucket.buffer.dtype)
        for bucket in model.buckets
        for _ in range(slots)
    ]
    return found


def _dry_copy(model: ModelLike, backend: Backend) -> ModelLike:
    """Copy a model onto a dry backend, with parameters without values."""
    known: dict[int, Any] = {id(model.backend): backend, id(model.observer): None}
    if model.mesh is not None:
        mesh = DryMesh(model.mesh.shape, model.mesh.position)
        known |= {id(model.mesh): mesh, id(model.communicate): mesh.communicate}
    for buffer in (*model.buffers, *model.frozen_buffers):
        for flat, member, view in (
            (buffer.working, None, "value"),
            (buffer.values, "values", "master"),  # after "value", which may be the same array
            (buffer.grads, "grads", "grad"),
        ):
            if flat is None or not flat.size:
                continue
            array = backend.zeros(flat.shape, flat.dtype)
            known[id(flat)] = array
            for bucket in buffer.buckets:
                start = bucket.start
                if member == "grads" and buffer.shared:
                    start = (bucket.grads.ctypes.data - flat.ctypes.data) // flat.itemsize
                part = array[start : start + len(bucket.values)]
                if member:
                    known[id(getattr(bucket, member))] = part
                for entry in bucket.parameters:
                    p = model.parameters[entry.name]
                    known[id(getattr(p, view))] = part[entry.slice].reshape(p.shape)
    known.pop(id(None), None)  # gradients that are used up
    running = {
        id(s): Statistic(s.name, s.channels, s.momentum, s.length)
        for s in model.statistics.statistics
    }
    host = create_backend("numpy")  # its arrays are not counted: they are not part of a step
    known |= running
    known[id(model.statistics)] = RunningStatistics(list(running.values()), host)
    # References between nodes exceed Python's recursion limit: copy all nodes first, then their
    # contents.
    for node in model.graph.nodes:
        known[id(node)] = copy.copy(node)
    for node in model.graph.nodes:
        new = known[id(node)]
        vars(new).update({name: copy.deepcopy(v, known) for name, v in vars(node).items()})
    dry: Any = object.__new__(type(model))
    vars(dry).update({name: copy.deepcopy(v, known) for name, v in vars(model).items()})
    return dry
