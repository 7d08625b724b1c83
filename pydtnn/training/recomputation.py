"""Common choice by all ranks of what backward recomputes, before the first step."""

from __future__ import annotations

from pydtnn.comm import agree
from pydtnn.data import Loader
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
    shards = -(-loader.shards // setup.data.size)
    together, in_flight = (shards if setup.sync_batch_norm else 1), 1
    if (stage := model.stage) is not None:
        actions = actions_of(setup.schedule, stage.number, stage.count, shards)
        in_flight = most_in_flight(actions)
    error: Exception | None = None
    try:
        slots = len(setup.optimizer.slots)
        model.choose_segments(largest * together, slots=slots, in_flight=in_flight)
    except ValueError as reason:
        error = reason
    agree(setup.comm, error)
    names = [layer.name for layer in model.layers]
    chosen = setup.comm.gather_object((names, model.cuts))
    model.cut(next(cuts for others, cuts in chosen if others == names))
