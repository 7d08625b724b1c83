"""Common choice of algorithms by all ranks, before the first step.

One rank of each kind of machine (CPU, build, instruction set, threads) runs a step on generated
data, in which its backend measures every key that is not in its cache file. The table is then sent
to all ranks of that kind, and nothing is measured afterwards: all ranks use the same algorithms,
also for the last smaller batch and evaluations, and checkpoints contain the choices.
"""

from __future__ import annotations

import contextlib
import logging
import time

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.layers import StepContext
from pydtnn.model import Model

_log = logging.getLogger("pydtnn.training")


def autotune(model: Model, comm: Communicator, batch: int, *, training: bool) -> None:
    """Select the same algorithms on all ranks. Collective: all ranks call it.

    Parameters
    ----------
    model : Model
        Gradients and the statistics of a step are overwritten.
    comm : Communicator
    batch : int
        Samples of the largest pass of any rank.
    training : bool
        Whether backward is used.
    """
    autotuner, begin = model.backend.autotuner, time.perf_counter()
    kinds = comm.gather_object(autotuner.kind)
    if not any(kinds):
        return
    table = autotuner.open()
    first = autotuner.kind is not None and kinds.index(autotuner.kind) == comm.rank
    if first:
        with contextlib.suppress(Exception):  # raised again by the first step
            _rehearse(model, batch, training)
        model.backend.trim()  # memory of candidates that were not selected
    tables = comm.gather_object((autotuner.kind, table) if first else None)
    autotuner.freeze(dict(entry for entry in tables if entry))
    _log.debug("choice of algorithms: %.2f s", time.perf_counter() - begin)
    for key, choice in autotuner.report().items():
        _log.debug("%s: %s", key, choice)


@np.errstate(all="ignore")
def _rehearse(model: Model, batch: int, training: bool) -> None:
    """Run one step of the model, without loss and update."""
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
