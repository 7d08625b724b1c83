"""Common choice of algorithms by all ranks, before the first step.

One rank of each kind of machine (CPU, build, instruction set, threads), or one group of ranks that
have the network together, runs a step on generated data, in which its backend measures every key
that is not in its cache file. The table is then sent to all ranks of that kind, and nothing is
measured afterwards: all ranks use the same algorithms, also for the last smaller batch and
evaluations, and checkpoints contain the choices.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.kernels.autotuner_file import Table
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.model.model import example_inputs

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
    first = _is_first(model, comm, kinds)
    if first:
        alone = model.mesh is None or not model.mesh.model_axes
        with contextlib.suppress(*([Exception] if alone else [])):  # raised again by the first step
            _rehearse(model, batch, training)
        model.backend.trim()  # memory of candidates that were not selected
    tables: dict[str, Table] = {}
    for kind, own in comm.gather_object((autotuner.kind, table if first else {})):
        merged = tables.setdefault(kind, {}) if kind else {}
        for what, batches in own.items():  # ranks with other parts have measured other keys
            merged[what] = {**batches, **merged.get(what, {})}
    autotuner.freeze(tables)
    _log.debug("choice of algorithms: %.2f s", time.perf_counter() - begin)
    for key, choice in autotuner.report().items():
        _log.debug("%s: %s", key, choice)


def _is_first(model: Model, comm: Communicator, kinds: Sequence[str | None]) -> bool:
    """Return whether this rank measures: the first of its kind.

    If the network is distributed, the first ranks that have it together do, of each combination of
    kinds: their layers exchange arrays.
    """
    mesh, own = model.mesh, kinds[comm.rank]
    if mesh is None or not mesh.model_axes:
        return own is not None and kinds.index(own) == comm.rank
    places = comm.gather_object(mesh.position)
    groups: dict[int, list[str | None]] = {}
    for kind, place in zip(kinds, places, strict=True):
        groups.setdefault(place["data"], []).append(kind)
    mine = mesh.position["data"]
    return mine == min(place for place, group in groups.items() if group == groups[mine])


@np.errstate(all="ignore")
def _rehearse(model: Model, batch: int, training: bool) -> None:
    """Run one step of the model, without loss and update."""
    rng = np.random.default_rng(0)
    backend, dtype = model.backend, model.dtype
    reads = model.stage.reads if model.stage else None
    inputs = example_inputs(model.graph, model.input_shapes, batch, rng, reads)
    xs = tuple(backend.asarray(x, dtype) for x in inputs)
    context = StepContext(training=training, samples=np.arange(batch))
    y, residuals = model.forward(xs, context, keep=training)
    if training:
        outputs = y if isinstance(y, tuple) else (y,)
        model.backward(tuple(backend.asarray(np.ones(a.shape, dtype)) for a in outputs), residuals)
    model.statistics.begin_step()
