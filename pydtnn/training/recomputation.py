"""Common choice by all ranks of what backward recomputes, before the first step."""

from __future__ import annotations

from pydtnn.comm import agree
from pydtnn.data import Loader
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.pipeline import actions_of
from pydtnn.parallel.pipeline.check import most_in_flight
from pydtnn.training.setup import Setup


def choose_segments(setup: Setup, loader: Loader, largest: int) -> None:
    """Choose the segments for the size of the batches. Collective: all ranks call it.

    Layers that exchange arrays do so again when they are recomputed. Ranks with the same layers
    therefore use the segments of the first of them, although their parts may differ in size.

    Parameters
    ----------
    setup : Setup
    loader : Loader
        Of the training set.
    largest : int
        Samples of the largest shard of any rank.

    Raises
    ------
    AgreedError
        On all ranks, if `memory_limit` is not possible on one of them.
    """
    model = setup.model
    if model.recompute is None:
        return
    comm = model.mesh.comm if isinstance(model.mesh, Mesh) else setup.comm
    shards = -(-loader.shards // setup.data.size)
    together = shards if setup.sync_batch_norm else 1
    if (stage := model.stage) is not None:
        actions = actions_of(setup.schedule, stage.number, stage.count, shards)
        together = most_in_flight(actions)
    error: Exception | None = None
    try:
        model.choose_segments(largest * together, slots=len(setup.optimizer.slots))
    except ValueError as reason:
        error = reason
    agree(comm, error)
    names = [layer.name for layer in model.layers]
    chosen = comm.gather_object((names, model.cuts))
    model.cut(next(cuts for others, cuts in chosen if others == names))
