"""How much memory a training step will take: the step is rehearsed with kernels that do nothing.

The rehearsal runs the loops of `Model` on a copy of its graph, so whatever the layers, the fusion
pass and the loops do with arrays is done here too. Its arrays come from a pool of their own that
counts them; they are never written, so the system never gives them memory.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pydtnn.kernels.backend import Backend, create_backend
from pydtnn.kernels.dry import dry_backend, scratch
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Shape, StepContext
from pydtnn.layers.parameters import Parameter, ParameterBuffer
from pydtnn.layers.statistics import RunningStatistics, Statistic
from pydtnn.model.graph import Graph

PROCESS = 8 << 20
"""Bytes that code and small objects need once a process trains, whatever it trains."""


class Network(Protocol):
    """What is read of a `Model`."""

    backend: Backend
    dtype: np.dtype
    input_shapes: tuple[Shape, ...]
    graph: Graph
    parameters: dict[str, Parameter]
    buffers: tuple[ParameterBuffer, ...]
    statistics: RunningStatistics

    def forward(self, x: Any, context: StepContext) -> tuple[Any, list[Any]]:
        """Run every node in order."""

    def backward(self, dy: Any, residuals: list[Any]) -> Any:
        """Run every node's backward in reverse."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step on one rank.

    Attributes
    ----------
    parameters, copies, gradients, slots : int
        The flat arrays, padding included; copies are the 16-bit ones of the parameters, slots those
        of the optimizer.
    kept : tuple of int
        For each node of the graph, what its backward keeps alive that no earlier node's does. The
        sum is what forward leaves behind; the batch is part of it if a layer keeps it.
    peak : int
        The most that is alive at one time: the flat arrays, the batch and all arrays of the loops.
    pool : int
        The most that the backend's `MemoryPool` has in use at one time, `memory.peak`; the batch is
        not from there. 0 for a backend without one.
    scratch : int
        About what kernels allocate for themselves at one time.
    resident : int
        About how much more memory the process has at the peak than before the model was built, with
        the batch; on a GPU, how much of its memory.
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


def forecast_memory(model: Network, batch: int, *, slots: int = 0) -> Memory:
    """Rehearse a step.

    Parameters
    ----------
    model : Model
    batch : int
        Samples per rank, and per micro-batch where gradients are accumulated.
    slots : int
        Slots of the optimizer: 1 for SGD with momentum, 2 for Adam.

    Returns
    -------
    Memory
        Exact for what layers allocate from their backend or with NumPy; what kernels allocate for
        themselves is estimated.
    """
    everything = _Rehearsal(model, batch, slots, threshold=1)
    kept = everything.kept()
    x = everything.new_batch()
    everything.step(x)
    peak = held = everything.memory.peak
    pool = 0
    if model.backend.memory:
        large = _Rehearsal(model, batch, slots, threshold=model.backend.memory.threshold)
        large.step(tuple(np.empty(part.shape, part.dtype) for part in x))
        pool = large.memory.peak
        held = large.memory.peak_held + sum(part.nbytes for part in x)
    parameters = sum(buffer.values.nbytes for buffer in model.buffers)
    copies = [buffer.working for buffer in model.buffers if buffer.working is not None]
    extra = scratch(model.backend, everything.backend, model.dtype.itemsize)
    return Memory(
        parameters=parameters,
        copies=sum(copy.nbytes for copy in copies),
        gradients=parameters,
        slots=slots * parameters,
        kept=kept,
        peak=peak,
        pool=pool,
        scratch=extra,
        resident=held + extra + (PROCESS if model.backend.name != "cuda" else 0),
    )


class _Rehearsal:
    """A model's copy on a dry backend, with the flat arrays of an optimizer."""

    def __init__(self, model: Network, batch: int, slots: int, *, threshold: int) -> None:
        self.backend = dry_backend(model.backend, threshold)
        self.memory: Any = self.backend.memory
        self.model = _dry_copy(model, self.backend)
        self.slots = [
            self.backend.zeros((buffer.size,), buffer.dtype)
            for buffer in model.buffers
            for _ in range(slots)
        ]
        self.context = StepContext(training=True, samples=np.arange(batch))

    def new_batch(self) -> tuple[Array, ...]:
        shapes = self.model.input_shapes
        samples = len(self.context.samples)
        return tuple(self.backend.empty((samples, *s), self.model.dtype) for s in shapes)

    def forward(self, x: tuple[Array, ...]) -> tuple[Any, list[Any]]:
        with np.errstate(all="ignore"):
            return self.model.forward(x, self.context)

    def kept(self) -> tuple[int, ...]:
        """Count what each node keeps: what is freed when it drops it, later nodes first."""
        y, residuals = self.forward(self.new_batch())
        del y
        kept = [0] * len(residuals)
        for index in reversed(range(len(residuals))):
            before = self.memory.in_use
            residuals[index] = None
            kept[index] = before - self.memory.in_use
        return tuple(kept)

    def step(self, x: tuple[Array, ...]) -> None:
        """Go through a step; the pool remembers its peak."""
        self.memory.reset_peak()
        y, residuals = self.forward(x)
        outputs = y if isinstance(y, tuple) else (y,)
        dy = tuple(self.backend.empty(part.shape, part.dtype) for part in outputs)
        del y, outputs
        with np.errstate(all="ignore"):
            self.model.backward(dy, residuals)


def _dry_copy(model: Network, backend: Backend) -> Network:
    """Copy a model onto a dry backend: with parameters that have no values."""
    known: dict[int, Any] = {id(model.backend): backend}
    for buffer in model.buffers:
        for flat, member, view in (
            (buffer.working, None, "value"),
            (buffer.values, "values", "master"),  # after "value", which may be the same array
            (buffer.grads, "grads", "grad"),
        ):
            if flat is None:
                continue
            array = backend.zeros((buffer.size,), flat.dtype)
            known[id(flat)] = array
            for bucket in buffer.buckets:
                part = array[bucket.start : bucket.stop]
                if member:
                    known[id(getattr(bucket, member))] = part
                for entry in bucket.parameters:
                    p = model.parameters[entry.name]
                    known[id(getattr(p, view))] = part[entry.slice].reshape(p.shape)
    running = {
        id(s): Statistic(s.name, s.channels, s.momentum) for s in model.statistics.statistics
    }
    host = create_backend("numpy")  # whose arrays are not counted: they are no part of a step
    known |= running
    known[id(model.statistics)] = RunningStatistics(list(running.values()), host)
    # Nodes refer to each other along the whole graph, deeper than Python recurses: all of them
    # first, then what they hold.
    for node in model.graph.nodes:
        known[id(node)] = copy.copy(node)
    for node in model.graph.nodes:
        new = known[id(node)]
        vars(new).update({name: copy.deepcopy(v, known) for name, v in vars(node).items()})
    return copy.deepcopy(model, known)
