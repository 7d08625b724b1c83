"""A rank's stages of a pipeline: messages to their neighbours, and passes through all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, StepContext
from pydtnn.layers.collectives import PIPELINE, contiguous
from pydtnn.layers.node import Node
from pydtnn.model.execution import check_inputs
from pydtnn.utils.request import Request
from pydtnn.utils.split import even_cuts

if TYPE_CHECKING:
    from pydtnn.layers.communicating import MeshLike
    from pydtnn.model.partition.stages import PipelineCut, Stage

FIRST_TAG, TAGS = 1 << 14 | 1 << 12, 1 << 13
"""Tags of the messages between stages, beside those of layers (`pydtnn.parallel.mesh`)."""

PARTS_PER_RANK = 2
"""Parts per rank into which samples are divided in inference."""


ModelLike = Any
"""A `Model`, whose module imports this one."""


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


class Pipeline:
    """The stages of a network that a rank computes, and their messages.

    Parameters
    ----------
    cut : PipelineCut
    mesh : MeshLike
    backend : Backend
    dtype : numpy.dtype
        Type of the messages: that of a model's outputs.

    Attributes
    ----------
    rank, ranks : int
        Along the axis "pipeline".
    owners : Owners
        The ranks of the stages of the network.
    stages : tuple of Stage
        Those of this rank; the position of each is the number of its part of the graph.
    copies : tuple of int
        The ranks that have them, this one included.
    output_shapes : tuple of tuple of int
        Of the model.
    shapes : dict of str to tuple of int
        Of the parameters and running statistics of all stages, by name.
    """

    def __init__(self, cut: PipelineCut, mesh: MeshLike, backend: Backend, dtype: np.dtype) -> None:
        self.rank, self.ranks = mesh.position[PIPELINE], mesh.shape[PIPELINE]
        self.owners, self.stages, self.shapes = cut.owners, cut.stages, cut.shapes
        self.copies: tuple[int, ...] = cut.owners.copies_of(self.rank)
        self.output_shapes = cut.output_shapes
        self._mesh, self._backend, self._dtype = mesh, backend, dtype
        self._group: Any = mesh.group(PIPELINE)  # a communicator
        self._handed: dict[tuple[int, int, int], Transfer] = {}  # between stages of this rank

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """Return the pipeline itself: communicators cannot be copied."""
        return self

    @property
    def last(self) -> bool:
        """Whether this rank computes the outputs of the model, of some of its samples."""
        return self.is_last(self.stages[-1])

    def is_last(self, stage: Stage) -> bool:
        """Return whether a stage computes the outputs of the model."""
        return stage.number == self.owners.stages - 1

    def describe(self) -> str:
        """Return the stages and their messages in words; a gradient has the size of its value."""
        words = []
        for stage in self.stages:
            words.append(f"stage {stage.number} of {self.owners.stages}")
            for what, values in (("receives", stage.receives), ("sends", stage.sends)):
                if values:
                    nbytes = sum(prod(value.shape) for value in values) * self._dtype.itemsize
                    names = ", ".join(value.name for value in values)
                    words.append(f"{what} {names}: {nbytes:,} B per sample, and as much back")
        return "; ".join(words)

    # -- messages: values to the stage after, gradients to the stage before -----------------------

    def receive(self, stage: Stage, direction: int, samples: int, micro_batch: int = 0) -> Transfer:
        """Start to receive what a stage waits for.

        Parameters
        ----------
        stage : Stage
        direction : int
            1 for the values of the stage before, -1 for the gradients of the sent values.
        samples, micro_batch : int
        """
        source = self.owners.of(stage.number - direction, micro_batch)
        values = stage.receives if direction > 0 else stage.sends
        if not values:
            return Transfer()
        if source == self.rank:
            return self._hand_over((stage.number, direction, micro_batch), Transfer())
        arrays = [self._backend.empty((samples, *v.shape), self._dtype) for v in values]
        tags = self._tags(stage.number, direction, micro_batch, len(values))
        requests = [
            self._group.irecv(array.reshape(-1), source, tag)
            for array, tag in zip(arrays, tags, strict=True)
        ]
        return Transfer(arrays, requests)

    def send(self, stage: Stage, direction: int, result: Any, micro_batch: int = 0) -> Transfer:
        """Start to send the result of a pass to the stage that waits for it, if any.

        Parameters
        ----------
        stage : Stage
        direction : int
            1 for the outputs of forward, -1 for the gradients of the stage's inputs.
        result : Array or tuple of Array
        micro_batch : int
        """
        to = stage.number + direction
        values = stage.sends if direction > 0 else stage.receives
        if not values:
            return Transfer()
        arrays = _parts(result)[0 if direction > 0 else len(stage.reads) :]
        owner = self.owners.of(to, micro_batch)
        if owner == self.rank:
            return self._hand_over((to, direction, micro_batch), Transfer(arrays))
        arrays = tuple(contiguous(array) for array in arrays)
        tags = self._tags(to, direction, micro_batch, len(values))
        requests: list[Request] = []
        for value, array, tag in zip(values, arrays, tags, strict=True):
            with self._mesh.counted(value.name):
                requests.append(self._group.isend(array.reshape(-1), owner, tag))
        return Transfer(arrays, requests)

    def _hand_over(self, key: tuple[int, int, int], own: Transfer) -> Transfer:
        """Return the transfer between two stages of this rank, with the arrays once one sends."""
        other = self._handed.pop(key, None)
        if other is None:
            self._handed[key] = own
            return own
        other.arrays = own.arrays = other.arrays or own.arrays
        return own

    def _tags(self, stage: int, direction: int, micro_batch: int, values: int) -> range:
        """Return the tags of the messages that a stage receives.

        They differ from those of the other direction, and of the rank's other stages.
        """
        own = self.owners.stages_of(self.owners.of(stage, micro_batch))
        width = TAGS // (2 * len(own))
        first = FIRST_TAG + (2 * own.index(stage) + (direction > 0)) * width
        first += micro_batch % (width // values) * values
        return range(first, first + values)

    def broadcast(self, array: Array) -> None:
        """Copy a flat array of the last stage's rank to all. Collective: all ranks call it."""
        self._group.broadcast(array, root=self.owners.of(self.owners.stages - 1))

    def add(self, array: Array) -> None:
        """Add up the flat arrays of all stages. Collective: all stages call it."""
        self._group.allreduce(array)

    def start_sum(self, array: Array) -> Request:
        """Start to add up the flat arrays of all stages. Collective: all stages call it."""
        return self._group.iallreduce(array)

    # -- passes through all stages ----------------------------------------------------------------

    def _first_path(self) -> list[int]:
        """Return the parts of the graph that compute micro-batch 0, and every sample here."""
        return [i for i, s in enumerate(self.stages) if self.owners.of(s.number) == self.rank]

    def forward(
        self,
        model: ModelLike,
        x: Any,
        context: StepContext,
        *,
        keep: bool = True,
        after_node: Callable[[Node, Array], None] | None = None,
    ) -> tuple[Any, list[list[Saved]]]:
        """Compute the outputs of the model, on the ranks of all stages.

        Collective: all ranks call it, with the same samples. Parameters and the result are those of
        `Model.forward`, with saved values for each stage. In inference the samples are divided, so
        that stages compute at the same time. Of stages that several ranks have, one computes all.
        """
        xs = _parts(x)
        check_inputs("Model", xs, model.input_shapes)
        samples = len(xs[0])
        whole = keep or context.training  # batch norm normalises all samples together
        pieces = 1 if whole else max(min(PARTS_PER_RANK * self.ranks, samples), 1)
        cuts = [slice(a, b) for a, b in pairwise(even_cuts(samples, pieces))]
        outputs = [self._backend.empty((samples, *s), self._dtype) for s in self.output_shapes]
        residuals: list[list[Saved]] = []
        sent: list[Transfer] = []
        numbers = range(0, pieces * len(self.owners.paths), len(self.owners.paths))
        own_pieces = [*zip(numbers, cuts, strict=True)]
        passes = [(i, m, rows) for i in self._first_path() for m, rows in own_pieces]

        def receive(i: int, m: int, rows: slice) -> Transfer:
            return self.receive(self.stages[i], 1, rows.stop - rows.start, m)

        awaited = [receive(*one) for one in passes[:1]]
        for number, (i, m, rows) in enumerate(passes):
            received = awaited.pop().wait()
            inputs = inputs_of(self.stages[i], tuple(part[rows] for part in xs), received)
            del received
            awaited += [receive(*one) for one in passes[number + 1 : number + 2]]
            ids = None if context.samples is None else context.samples[rows]
            own = replace(context, samples=ids)
            ((y, saved),) = model.forward_shards(
                [inputs], [own], part=i, keep=keep, after_node=after_node
            )
            del inputs
            residuals.append(saved)
            sent.append(self.send(self.stages[i], 1, y, m))
            for output, part in (
                zip(outputs, _parts(y), strict=True) if self.is_last(self.stages[i]) else ()
            ):
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
        residuals: list[list[Saved]],
        **options: Any,
    ) -> None:
        """Compute the gradients of all stages from those of the model's outputs.

        Collective: all ranks call it.

        Parameters
        ----------
        run : callable
            `Model.backward_shards`.
        dy, residuals, **options
            See `Model.backward`.
        """
        samples, sent = len(_parts(dy)[0]), []
        for part, saved in reversed([*zip(self._first_path(), residuals, strict=True)]):
            stage = self.stages[part]
            own = dy if self.is_last(stage) else self.receive(stage, -1, samples).wait()
            (dx,) = run([own], [saved], part=part, **options)
            sent.append(self.send(stage, -1, dx))
        for transfer in sent:
            transfer.wait()


def _parts(y: Any) -> tuple[Array, ...]:
    """Return one array, or several, as a tuple."""
    return y if isinstance(y, tuple) else (y,)


def inputs_of(stage: Stage, x: Any, received: Iterable[Array]) -> tuple[Array, ...]:
    """Return the inputs of a stage: those of the model that it reads, and received values."""
    xs = _parts(x)
    return (*(xs[i] for i in stage.reads), *received)


def create_pipeline(
    cut: PipelineCut | None,
    mesh: MeshLike | None,
    backend: Backend,
    dtype: np.dtype,
    input_gradient: bool,
) -> Pipeline | None:
    """Return the stages of a model of a dtype; None if the network is not cut into stages.

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
    return Pipeline(cut, mesh, backend, arithmetic(dtype))
