"""The mesh of a training run: which ranks have other samples, and which other parts of the network.

Samples, losses and gradients are divided over the axis "data", of which a scheme is constructed
with the group. Files, messages and checks are those of all ranks of the mesh.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from pydtnn.comm import Communicator, create_communicator
from pydtnn.comm.wrapper import Wrapper
from pydtnn.kernels.reference.family import Number
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.parameters import Parameter
from pydtnn.model import Model
from pydtnn.optimizers.base import PartSums
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.training.axis_sums import further_axes


def choose_mesh(model: Model, mesh: Mesh | None) -> Mesh | None:
    """Return the mesh of a trainer: the given one or that of the model, which is set to it.

    Raises
    ------
    TypeError, ValueError
        If it is not a mesh, or not that of the model.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"Trainer: mesh must be a Mesh, got {mesh!r}; use Mesh(comm, data=2, ...)")
    if mesh is None:
        return cast("Mesh | None", model.mesh)
    if model.mesh is None:
        model.mesh = mesh
        model.communicate = model.communicate or mesh.communicate
    elif model.mesh is not mesh:
        raise ValueError(
            f"Trainer: mesh must be that of the model, {model.mesh}, got another one, {mesh}; "
            "omit it, or construct both with the same object"
        )
    return mesh


def choose_exchange(exchange: GradientExchange | None, mesh: Mesh | None) -> GradientExchange:
    """Return the given scheme, or by default an `AllReduce` on the axis "data".

    Raises
    ------
    ValueError
        If the scheme is not one of this axis, or does not divide its state over the axis "shard".
    """
    if exchange is None:
        exchange = AllReduce(create_communicator() if mesh is None else mesh.data)
    if mesh is not None and mesh.copies not in (None, getattr(exchange, "copies", None)):
        raise ValueError(
            f"Trainer: the axis shard requires a scheme that divides its state over it, got "
            f"{exchange!r}; use ShardedParameters(mesh.data, copies={mesh.copies})"
        )
    if mesh is None or _innermost(exchange.comm) is _innermost(mesh.data):
        return exchange
    if exchange.comm.size == mesh.data.size == 1:
        return exchange
    raise ValueError(
        f"Trainer: {type(exchange).__name__} must be constructed with the ranks of the axis data "
        f"of {mesh}, got {exchange.comm.size} other ranks; use "
        f"{type(exchange).__name__}(mesh.data)"
    )


def _innermost(comm: Communicator) -> Communicator:
    while isinstance(comm, Wrapper):
        comm = comm.inner
    return comm


def check_groups(model: Model, mesh: Mesh | None) -> None:
    """Raise ValueError if gradients are to be summed over axes that the mesh does not have."""
    for p in model.parameters.values():
        for axis in (*further_axes(p.group), *axes_of(p)):
            if mesh is None or axis not in mesh.shape:
                raise ValueError(
                    f"Trainer: the parameter {p.name} is distributed over the axis {axis}, got "
                    f"{mesh or 'no mesh'}; use mesh=Mesh(comm, {axis}=...)"
                )


def axes_of(parameter: Parameter) -> tuple[str, ...]:
    """Return the axes along which ranks have different parts of a parameter."""
    return () if parameter.part is None else parameter.part.axes


def create_parts(mesh: Mesh | None, copies: int = 1) -> PartSums:
    """Return the sums over a mesh with which an optimizer computes norms.

    Parameters
    ----------
    mesh : Mesh or None
    copies : int
        Ranks along "pipeline" that have the same parameters as this one.
    """
    if mesh is None:
        return PartSums()
    own = mesh

    def add(value: Number, axes: tuple[str, ...]) -> Number:
        array = np.array([float(value) / (copies if PIPELINE in axes else 1)])
        for axis in axes:
            own.group(axis).allreduce(array)
        return float(array[0])

    def same(value: Number, axes: tuple[str, ...]) -> Number:
        array = np.array([float(value)])
        for axis in axes:
            own.group(axis).broadcast(array)
        return float(array[0])

    stages = tuple(axis for axis in mesh.model_axes if axis == PIPELINE)
    return PartSums(mesh.model_axes, stages, add, same, mesh) if mesh.model_axes else PartSums()


def group_of_copies(model: Model, mesh: Mesh | None) -> Communicator | None:
    """Return the group of the ranks with this rank's stages, if a pipeline has such groups.

    Collective at the first call: all ranks call it.
    """
    if mesh is None or model.pipeline is None or len(model.pipeline.owners.paths) == 1:
        return None
    return mesh.subgroup(PIPELINE, model.pipeline.copies)


def share_loaded(mesh: Mesh | None, model: Model) -> None:
    """Send the weights that rank 0 has loaded to ranks that have loaded none.

    Collective: all ranks call it. Without parts, the scheme sends rank 0's parameters.
    """
    if mesh is None or not mesh.model_axes:
        return
    comm = mesh.comm
    present = comm.gather_object(model.loaded is not None)
    if present[0] and not all(present):
        about = [(name, np.shape(a), np.asarray(a).dtype.str) for name, a in model.given.items()]
        about = comm.gather_object(about if comm.rank == 0 else None)[0]
        state = {}
        for name, shape, dtype in about:
            state[name] = np.empty(shape, dtype)
            if comm.rank == 0:
                state[name][...] = model.given[name]
            comm.broadcast(state[name].reshape(-1))
        if model.loaded is None:
            model.load(state, strict=False)


def share_replicas(mesh: Mesh | None, model: Model) -> None:
    """Copy parameters and running statistics along the axes that do not cut them.

    Collective: all ranks call it; the values are those of the first rank along each axis.
    """
    if mesh is None:
        return
    for axis in (axis for axis in mesh.model_axes if axis != PIPELINE):
        for p in model.parameters.values():
            if axis not in axes_of(p):
                mesh.group(axis).broadcast(p.master.reshape(-1))
        for s in model.statistics.statistics:
            for array in (s.mean, s.variance) if s.part is None or axis not in s.part.axes else ():
                mesh.group(axis).broadcast(array)
