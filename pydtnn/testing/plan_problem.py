"""The network and the data with which a plan is checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend
from pydtnn.layers import Block, Layer, Sequential, StepContext
from pydtnn.layers.base import Shape
from pydtnn.layers.blocks import Net
from pydtnn.model import Model
from pydtnn.model.partition import Plan
from pydtnn.parallel.mesh import Mesh
from pydtnn.utils.split import even_cut

STEPS = 3
EVALUATION = STEPS
"""Number of the forward pass without training after the last step."""

BATCHES = 3
"""Batches of the data set with which a trainer is checked; another one has a single sample."""

AnyPlan = Plan | Mapping[str, Any] | str | None
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Problem:
    """A network, and the same random data for every model of it.

    Attributes
    ----------
    net : callable
        Returns new layers.
    input_shape : tuple of int, or tuple of such tuples
    plan : Plan, mapping, str or None
    backend : str
    batch : int
        Samples of a step, over all ranks of the axis "data".
    seed : int
    prepare : callable, optional
        Called with each model before it is used.
    """

    net: Callable[[], Net]
    input_shape: Shape | Sequence[Shape]
    plan: AnyPlan
    backend: str
    batch: int
    seed: int
    prepare: Callable[[Model], Any] | None

    def model(self, mesh: Mesh | None, *, fuse: bool, input_gradient: bool = True) -> Model:
        """Construct a model in float64, for the ranks of a mesh or one rank."""
        model = Model(
            self.net(),
            self.input_shape,
            backend=create_backend(self.backend, threads=1, tuning="fixed"),
            dtype="float64",
            seed=self.seed,
            input_gradient=input_gradient,
            fuse=fuse,
            plan=None if mesh is None else self.plan,
            mesh=mesh,
        )
        if self.prepare is not None:
            self.prepare(model)
        return model

    def rows(self, mesh: Mesh | None) -> slice:
        """Return the samples of this rank: even parts along the axis "data"."""
        if mesh is None:
            return slice(0, self.batch)
        ranks, place = mesh.shape["data"], mesh.position["data"]
        return slice(*(even_cut(self.batch, ranks, p) for p in (place, place + 1)))

    def inputs(self, step: int, shapes: Sequence[Shape], rows: slice) -> Arrays:
        """Return a rank's inputs of a step."""
        return self._normal(step, shapes, rows)

    def gradients(self, step: int, shapes: Sequence[Shape], rows: slice) -> Arrays:
        """Return the gradient of the loss with respect to a rank's outputs."""
        return tuple(array / self.batch for array in self._normal(STEPS + 1 + step, shapes, rows))

    def _normal(self, stream: int, shapes: Sequence[Shape], rows: slice) -> Arrays:
        rng = np.random.default_rng([self.seed, stream])
        return tuple(rng.normal(size=(self.batch, *shape))[rows].copy() for shape in shapes)

    def dataset(self, model: Model) -> ArrayDataset:
        """Return samples and targets for a model of the whole network."""
        rng = np.random.default_rng([self.seed, 2 * EVALUATION + 1])
        samples = BATCHES * self.batch + 1
        x, y = (
            tuple(rng.normal(size=(samples, *shape)) for shape in shapes)
            for shapes in (model.input_shapes, model.output_shapes)
        )
        return ArrayDataset(x if len(x) > 1 else x[0], y if len(y) > 1 else y[0])

    def context(self, step: int, rows: slice) -> StepContext:
        """Return the settings of a rank's forward pass."""
        samples = np.arange(self.batch)[rows]
        return StepContext(step != EVALUATION, seed=self.seed, epoch=step, samples=samples)


def factory_of(net: Net | Sequence[Net] | Callable[[], Net | Sequence[Net]]) -> Callable[[], Net]:
    """Return a function that returns new layers.

    Raises
    ------
    TypeError
        If `net` is neither a layer, block, list of them nor a function.
    """
    if isinstance(net, Layer | Block | list | tuple):
        return lambda: _joined(copy.deepcopy(net))
    if not callable(net):
        raise TypeError(
            "check_plan: expected a layer, a block, a list of them or a function that returns "
            f"one, got {net!r}"
        )
    return lambda: _joined(net())


def _joined(net: Any) -> Net:
    made: Net = Sequential(*net) if isinstance(net, list | tuple) else net
    return made
