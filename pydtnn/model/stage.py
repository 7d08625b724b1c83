"""A stage of a pipeline: the messages to its neighbours, and passes through all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, Protocol, cast

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import PIPELINE, contiguous
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Parameter, ParameterBuffer
from pydtnn.layers.statistics import RunningStatistics
from pydtnn.model.execution import Communicate, check_inputs
from pydtnn.model.graph import Graph
from pydtnn.model.partition.draft import MeshLike
from pydtnn.model.partition.stages import StageCut, Value
from pydtnn.utils.observer import Observer
from pydtnn.utils.split import even_cuts

FIRST_TAG, TAGS = 1 << 14 | 1 << 12, 1 << 13
"""Tags of the messages between stages, beside those of layers (`pydtnn.parallel.mesh`)."""

PARTS_PER_STAGE = 2
"""Parts per stage into which samples are divided in inference."""


class Request(Protocol):
    """A started operation of a communicator."""

    def wait(self) -> None:
        """Wait until it is complete."""

    def test(self) -> bool:
        """Return whether it is complete."""


class Group(Protocol):
    """The ranks along the axis "pipeline": a communicator."""

    rank: int
    size: int

    def isend(self, array: Any, to: int, tag: int = 0) -> Request:
        """Start to send a flat array."""

    def irecv(self, array: Any, source: int, tag: int = 0) -> Request:
        """Start to receive into a flat array."""

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy a flat array of one rank to all."""


class Network(Protocol):
    """The interface of a `Model` for its stages, memory and summary."""

    backend: Backend
    dtype: np.dtype
    input_shapes: tuple[Shape, ...]
    graph: Graph
    parameters: dict[str, Parameter]
    buffers: tuple[ParameterBuffer, ...]
    frozen_buffers: tuple[ParameterBuffer, ...]
    statistics: RunningStatistics
    mesh: MeshLike | None
    stage: Stage | None
    communicate: Communicate | None
    observer: Observer | None
    cut_outputs: bool
    cuts: tuple[int, ...]

    def cut(self, cuts: Sequence[int]) -> None:
        """Recompute the segments between cuts."""

    def find_cuts(self, batch: int, *, slots: int = 0) -> tuple[int, ...]:
        """Return the cuts for a batch size."""

    def forward_shards(
        self,
        xs: Sequence[Any],
        contexts: Sequence[StepContext],
        *,
        keep: bool = True,
        after_node: Callable[[Node, Array], None] | None = None,
    ) -> list[tuple[Any, list[Saved]]]:
        """Run every node of this rank in order."""

    def backward_shards(
        self,
        dys: Sequence[Any],
        residuals: Sequence[list[Any]],
        *,
        after_node: Callable[[Node], None] | None = None,
    ) -> list[Any]:
        """Run every node's backward in reverse."""


class Transfer:
    """Messages in progress between two neighbouring stages.

    Parameters
    ----------
    arrays : sequence of Array
        The arrays that are sent or received; kept until the messages are complete.
    requests : sequence of Request
    """

    def __init__(self, arrays: Sequence[Array] = (), requests: Sequence[Request] = ()) -> None:
        self.arrays, self._requests = tuple(arrays), [*requests]

    def test(self) -> bool:
        """Return whether all messages are complete, and let the communicator make progress."""
        self._requests = [request for request in self._requests if not request.test()]
        return not self._requests

    def wait(self) -> tuple[Array, ...]:
        """Wait until all messages are complete, and return the arrays."""
        for request in self._requests:
            request.wait()
        self._requests = []
        return self.arrays


class Stage:
    """The stage of a network that a rank computes, and its messages.

    Parameters
    ----------
    cut : StageCut
    mesh : MeshLike
    backend : Backend
    dtype : numpy.dtype
        Type of the messages: that of a model's outputs.

    Attributes
    ----------
    number, count : int
        This stage, from 0, and the number of stages.
    layers, first_layers : tuple of str
        Names of the layers of all stages, and of the first one of each stage.
    receives, sends : tuple of Value
        See `StageCut`.
    reads : tuple of int
        Numbers of the inputs of the model that this stage reads.
    output_shapes : tuple of tuple of int
        Of the model.
    shapes : dict of str to tuple of int
        Of the parameters and running statistics of all stages, by name.
    """

    def __init__(self, cut: StageCut, mesh: MeshLike, backend: Backend, dtype: np.dtype) -> None:
        self.number, self.count = mesh.position[PIPELINE], mesh.shape[PIPELINE]
        self.layers, self.first_layers, self.shapes = cut.layers, cut.first_layers, cut.shapes
        self.receives, self.sends = cut.receives, cut.sends
        self.output_shapes = cut.output_shapes
        self.reads, self._mesh, self._backend, self._dtype = cut.reads, mesh, backend, dtype
        self._group: Group = cast(Group, mesh.group(PIPELINE))

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """Return the stage itself: communicators cannot be copied."""
        return self

    @property
    def last(self) -> bool:
        """Whether this stage computes the outputs of the model."""
        return self.number == self.count - 1

    def describe(self) -> str:
        """Return the stage and its messages in words; a gradient has the size of its value."""
        words = [f"stage {self.number} of {self.count}"]
        for what, values in (("receives", self.receives), ("sends", self.sends)):
            if values:
                nbytes = sum(prod(value.shape) for value in values) * self._dtype.itemsize
                names = ", ".join(value.name for value in values)
                words.append(f"{what} {names}: {nbytes:,} B per sample, and as much back")
        return "; ".join(words)

    def inputs(self, x: Any, received: Iterable[Array]) -> tuple[Array, ...]:
        """Return the inputs of the stage: those of the model that it reads, and received values."""
        xs = _parts(x)
        return (*(xs[i] for i in self.reads), *received)

    # -- messages: values to the stage after, gradients to the stage before -----------------------

    def receive_values(self, samples: int, micro_batch: int = 0) -> Transfer:
        """Start to receive the values of a micro-batch from the stage before."""
        return self._receive(self.receives, self.number - 1, samples, micro_batch)

    def receive_gradients(self, samples: int, micro_batch: int = 0) -> Transfer:
        """Start to receive the gradients of the sent values of a micro-batch."""
        return self._receive(self.sends, self.number + 1, samples, micro_batch)

    def send_values(self, y: Any, micro_batch: int = 0) -> Transfer:
        """Start to send the outputs of this stage to the stage after; nothing in the last stage."""
        return self._send(self.sends, y, self.number + 1, micro_batch)

    def send_gradients(self, dx: Any, micro_batch: int = 0) -> Transfer:
        """Start to send the gradients of this stage's inputs to the stage before, if any."""
        return self._send(
            self.receives, _parts(dx)[len(self.reads) :], self.number - 1, micro_batch
        )

    def _receive(
        self, values: Sequence[Value], source: int, samples: int, micro_batch: int
    ) -> Transfer:
        arrays = [self._backend.empty((samples, *v.shape), self._dtype) for v in values]
        requests = [
            self._group.irecv(array.reshape(-1), source, self._tag(micro_batch, i, len(values)))
            for i, array in enumerate(arrays)
        ]
        return Transfer(arrays, requests)

    def _send(self, values: Sequence[Value], sent: Any, to: int, micro_batch: int) -> Transfer:
        if not values:
            return Transfer()
        arrays = [contiguous(array) for array in _parts(sent)]
        requests: list[Request] = []
        for i, (value, array) in enumerate(zip(values, arrays, strict=True)):
            with self._mesh.counted(value.name):
                tag = self._tag(micro_batch, i, len(values))
                requests.append(self._group.isend(array.reshape(-1), to, tag))
        return Transfer(arrays, requests)

    @staticmethod
    def _tag(micro_batch: int, value: int, values: int) -> int:
        return FIRST_TAG + (micro_batch * values + value) % TAGS

    def broadcast(self, array: Array) -> None:
        """Copy a flat array of the last stage to all stages. Collective: all stages call it."""
        self._group.broadcast(array, root=self.count - 1)

    # -- passes through all stages ----------------------------------------------------------------

    def forward(
        self,
        model: Network,
        x: Any,
        context: StepContext,
        *,
        keep: bool = True,
        after_node: Callable[[Node, Array], None] | None = None,
    ) -> tuple[Any, list[Saved]]:
        """Compute the outputs of the model, on the ranks of all stages.

        Collective: all stages call it, with the same samples. Parameters and the result are those
        of `Model.forward`. In inference the samples are divided, so that stages compute at the same
        time.
        """
        xs = _parts(x)
        check_inputs("Model", xs, model.input_shapes)
        samples = len(xs[0])
        whole = keep or context.training  # batch norm normalises all samples together
        pieces = 1 if whole else max(min(PARTS_PER_STAGE * self.count, samples), 1)
        cuts = [slice(a, b) for a, b in pairwise(even_cuts(samples, pieces))]
        outputs = [self._backend.empty((samples, *s), self._dtype) for s in self.output_shapes]
        residuals: list[Saved] = []
        sent: list[Transfer] = []
        awaited = self.receive_values(cuts[0].stop)
        for number, rows in enumerate(cuts):
            inputs = self.inputs(tuple(part[rows] for part in xs), awaited.wait())
            if number + 1 < len(cuts):
                following = cuts[number + 1]
                awaited = self.receive_values(following.stop - following.start, number + 1)
            ids = None if context.samples is None else context.samples[rows]
            ((y, residuals),) = model.forward_shards(
                [inputs], [replace(context, samples=ids)], keep=keep, after_node=after_node
            )
            del inputs
            sent.append(self.send_values(y, number))
            for output, part in zip(outputs, _parts(y), strict=True) if self.last else ():
                output[rows] = part
        for transfer in sent:
            transfer.wait()
        for output in outputs:
            self.broadcast(output.reshape(-1))
        return (tuple(outputs) if len(outputs) > 1 else outputs[0]), residuals

    def backward(
        self,
        run: Callable[..., list[Any]],
        dy: Any,
        residuals: list[Saved],
        **options: Any,
    ) -> None:
        """Compute the gradients of all stages from those of the model's outputs.

        Collective: all stages call it.

        Parameters
        ----------
        run : callable
            `Model.backward_shards`.
        dy, residuals, **options
            See `Model.backward`.
        """
        if not self.last:
            samples = len(_parts(dy)[0])
            dy = self.receive_gradients(samples).wait()
        dx = run([dy], [residuals], **options)[0]
        self.send_gradients(dx).wait()


def _parts(y: Any) -> tuple[Array, ...]:
    """Return one array, or several, as a tuple."""
    return y if isinstance(y, tuple) else (y,)


def create_stage(
    cut: StageCut | None,
    mesh: MeshLike | None,
    backend: Backend,
    dtype: np.dtype,
    input_gradient: bool,
) -> Stage | None:
    """Return the stage of a model of a dtype; None if the network is not cut into stages.

    Raises
    ------
    ValueError
        If the gradient of the model's inputs is required.
    """
    if cut is None or mesh is None:
        return None
    if input_gradient:
        raise ValueError(
            "Model: the gradient of the inputs is not available from the stages of a pipeline; use "
            "input_gradient=False, or a mesh without this axis"
        )
    return Stage(cut, mesh, backend, arithmetic(dtype))
