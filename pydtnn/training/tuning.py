"""Ranks choose their algorithms together, before the first step.

One rank of each kind of machine (CPU, build, instruction set, threads) carries out a step on
made-up data, in which its backend meets every key and measures what its cache file does not know.
The table then goes to all ranks of that kind, and from there on nothing is measured: all ranks
compute alike, the last uneven batch and evaluations too, and checkpoints hold what they agreed on.
"""

from __future__ import annotations

import contextlib

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.layers import StepContext
from pydtnn.model import Model


def autotune(model: Model, comm: Communicator, batch: int, *, training: bool) -> None:
    """Make all ranks take the same algorithms from now on. Collective: all ranks call it.

    Parameters
    ----------
    model : Model
        Gradients and the statistics of a step are overwritten.
    comm : Communicator
    batch : int
        Samples that the largest pass of any rank will have.
    training : bool
        Whether backward will be needed.
    """
    autotuner = model.backend.autotuner
    kinds = comm.gather_object(autotuner.kind)
    if not any(kinds):
        return
    table = autotuner.open()
    first = autotuner.kind is not None and kinds.index(autotuner.kind) == comm.rank
    if first:
        with contextlib.suppress(Exception):  # the first step meets it again, and tells it better
            _rehearse(model, batch, training)
        model.backend.trim()  # what candidates needed that were not chosen
    tables = comm.gather_object((autotuner.kind, table) if first else None)
    autotuner.freeze(dict(entry for entry in tables if entry))


@np.errstate(all="ignore")
def _rehearse(model: Model, batch: int, training: bool) -> None:
    """Carry out one step of the model, without a loss and an update."""
    rng = np.random.default_rng(0)
    backend, dtype = model.backend, model.dtype
    xs = tuple(
        backend.asarray(rng.standard_normal((batch, *shape), np.float32), dtype)
        for shape in model.input_shapes
    )
    context = StepContext(training=training, samples=np.arange(batch))
    y, residuals = model.forward(xs, context, keep=training)
    if training:
        outputs = y if isinstance(y, tuple) else (y,)
        model.backward(tuple(backend.asarray(np.ones(a.shape, dtype)) for a in outputs), residuals)
    model.statistics.begin_step()
