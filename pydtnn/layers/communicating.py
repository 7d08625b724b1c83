"""Layers that exchange arrays with other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from pydtnn.kernels import Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Finisher, Saved, StepContext
from pydtnn.layers.collectives import BATCH, Steps, Sum
from pydtnn.layers.parameters import Cut, Parameter, ParameterPart
from pydtnn.utils.split import even_cuts


class MeshLike(Protocol):
    """The attributes of a `pydtnn.parallel.Mesh` that layers and models use."""

    shape: dict[str, int]
    position: dict[str, int]

    @property
    def comm(self) -> Any:
        """All ranks."""

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes along which a network is cut."""

    def group(self, axis: str) -> Any:
        """Return the group of this rank along an axis."""

    def counted(self, layer: str) -> AbstractContextManager[None]:
        """Count the messages of the ``with`` block for a layer."""

    def communicate(self, asked: Any) -> Any:
        """Start collectives: `pydtnn.model.execution.Communicate`."""

    def gather(self, own: Any, part: ParameterPart) -> Any:
        """Return the whole of an array of which each rank has a part."""


@runtime_checkable
class Follower(Protocol):
    """A layer with a rule of its own for plans, which takes the place of the library's.

    A layer without one, and without one of the library's, takes whole arrays along all axes of the
    mesh, and computes the same on each rank. One that communicates must have one.
    """

    def follow(self, draft: Any, cut: Cut) -> bool:
        """Partition this layer, whose input is cut along an axis of the mesh, if it can be.

        Called before `build` on a copy of the layer for this rank, for each axis along which an
        input is cut; the copy may store what its passes need to know.

        Parameters
        ----------
        draft : pydtnn.model.partition.Draft
            Takes the layouts that inputs and output have in this layer.
        cut : Cut
            How the first input that is cut is cut along ``cut.axis``, or a partial one can be:
            ``cut.dim`` is an axis of a sample, or -1, the samples.

        Returns
        -------
        bool
            Whether the layer computes with parts. False: it receives whole arrays along this axis.
        """


class Communicating(ABC):
    """Mixin for layers whose passes are generators that yield collectives.

    See `pydtnn.layers.collectives`. The model calls these methods instead of `forward` and
    `backward`, and `Layer`'s rules for both apply to them. A layer of one's own is also a
    `Follower`, and so states which parts of arrays it exchanges the results of.

    Attributes
    ----------
    mesh : MeshLike or None
        The mesh of ranks, set before `build`. None: the layer is that of the whole network, and the
        model calls `forward` and `backward`.
    """

    mesh: MeshLike | None = None

    def even_cut(self, dim: int, axis: str, size: int) -> Cut:
        """Return a cut of `size` items into even parts, one for each rank along an axis.

        Parameters
        ----------
        dim : int
            Axis of an array that is cut.
        axis : str
            Axis of the mesh; without a mesh, or without this axis, there is one part.
        size : int

        Raises
        ------
        ValueError
            If there are fewer items than ranks.
        """
        ranks = 1 if self.mesh is None else self.mesh.shape.get(axis, 1)
        if size < ranks:
            raise ValueError(
                f"{type(self).__name__}: expected at least {ranks} items to cut along the axis "
                f"{axis}={ranks}, got {size}; use fewer ranks"
            )
        return Cut(dim, axis, tuple(even_cuts(size, ranks)))

    def own(self, cut: Cut) -> slice:
        """Return this rank's items of a cut."""
        position = {} if self.mesh is None else self.mesh.position
        return cut.range({cut.axis: 0, **position})

    def cut_parameter(self, parameter: Parameter, cut: Cut) -> None:
        """Declare that a parameter is this rank's part of a larger one, which has its name.

        Initial values are then parts of those of the whole parameter, and checkpoints contain the
        whole one.
        """
        if self.mesh is None or cut.axis not in self.mesh.shape:
            return
        shape = list(parameter.shape)
        shape[cut.dim] = cut.bounds[-1]
        parameter.become_part(ParameterPart(tuple(shape), (cut,)), self.mesh.position)

    def communicates(self, *, training: bool, joint: bool) -> bool:
        """Return whether the layer exchanges anything in such a pass; by default if on a mesh.

        Parameters
        ----------
        training : bool
        joint : bool
            Whether all shards of the batch are normalised together.
        """
        return self.mesh is not None

    @abstractmethod
    def forward_steps(self, *xs: Any, context: StepContext, joint: bool) -> Steps:
        """Compute the output and the values that backward requires, as a generator."""

    @abstractmethod
    def backward_steps(self, dy: Any, saved: Saved, *, joint: bool) -> Steps:
        """Compute each input's gradient, and write those of parameters, as a generator."""


class OnlyCommunicating(Communicating):
    """Mixin for layers without kernels: they only exchange arrays."""

    def communicates(self, *, training: bool, joint: bool) -> bool:
        """Return True."""
        return True

    def forward(self, *xs: Any, context: StepContext) -> tuple[Any, Saved]:
        """Not used: the model calls `forward_steps`."""
        raise NotImplementedError

    def backward(self, dy: Any, saved: Saved) -> Any:
        """Not used: the model calls `backward_steps`."""
        raise NotImplementedError


class CommunicatingFinisher(Communicating, Finisher):
    """Mixin for layers that communicate and can add to a gradient if they contribute last."""

    @abstractmethod
    def finish_steps(self, dy: Any, saved: Saved, so_far: Array | None) -> Steps:
        """Compute the same as `Finisher.finish_backward`, as a generator."""


class TwoPhase(Communicating):
    """Mixin for layers with forward and backward passes that each start with sums over the batch.

    If batch norm is synchronised, or maps are cut into stripes, the model first computes the sums
    of all shards and ranks and passes the total to each of them. Otherwise `forward` and `backward`
    use the sums of the shard.

    Attributes
    ----------
    sum_axes : tuple of str
        Axes of the mesh along which the positions of a channel are distributed.
    """

    sum_axes: tuple[str, ...] = ()

    @abstractmethod
    def forward_sums(self, *xs: Array | Deferred, context: StepContext) -> Array:
        """Return this shard's sums for the forward pass: float64, one axis."""

    @abstractmethod
    def forward(
        self, *xs: Any, context: StepContext, total: Array | None = None
    ) -> tuple[Any, Saved]:
        """Compute the output with the total of `forward_sums` of all shards; see `Layer`."""

    @abstractmethod
    def backward_sums(self, dy: Any, saved: Saved) -> tuple[Any, Array]:
        """Return the values that `backward_rest` requires, and this shard's sums, as above."""

    @abstractmethod
    def backward_rest(self, needed: Any, saved: Saved, total: Array | None = None) -> Any:
        """Compute inputs' gradients with the total, those of parameters with this shard's sums."""

    def backward(self, dy: Any, saved: Saved) -> Any:
        """Compute each input's gradient, and write those of parameters."""
        needed, _ = self.backward_sums(dy, saved)
        return self.backward_rest(needed, saved)

    def communicates(self, *, training: bool, joint: bool) -> bool:
        """Return whether sums are added up outside the layer."""
        return training and (joint or bool(self.sum_axes))

    def forward_steps(self, *xs: Any, context: StepContext, joint: bool) -> Steps:
        """Compute the sums, have them added up, and compute the output with the total."""
        own = self.forward_sums(*xs, context=context)
        total = (yield Sum(own, self._axes(joint))).wait()
        return self.forward(*xs, context=context, total=total)

    def backward_steps(self, dy: Any, saved: Saved, *, joint: bool) -> Steps:
        """Compute the sums, have them added up, and compute the gradients with the total."""
        needed, own = self.backward_sums(dy, saved)
        total = (yield Sum(own, self._axes(joint))).wait()
        return self.backward_rest(needed, saved, total)

    def _axes(self, joint: bool) -> tuple[str, ...]:
        return (*self.sum_axes, BATCH) if joint else self.sum_axes
