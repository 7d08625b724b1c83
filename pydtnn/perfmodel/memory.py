"""Predicted memory of a rank."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from pydtnn.model.memory import PROCESS_BYTES, Forecast
from pydtnn.perfmodel.workload import Rank


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the peak of a step.

    Attributes
    ----------
    parameters, gradients, slots : int
        The flat arrays; slots are those of the optimizer that this rank stores.
    activations : int
        All other arrays of forward and backward, the batch included, and gaps between arrays.
    scratch : int
        Of kernels.
    messages : int
        Buffers of the exchange of gradients: received chunks, residuals and other state of
        compression, and those of the MPI library for pending sums.
    process : int
        Code and small objects of a training process, about.
    """

    parameters: int
    gradients: int
    slots: int
    activations: int
    scratch: int
    messages: int
    process: int

    @property
    def total(self) -> int:
        """Sum of all, in B."""
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, Any]:
        """Return all attributes and the total."""
        return asdict(self) | {"total": self.total}


def rank_memory(rank: Rank, library: int = 0) -> RankMemory:
    """Predict the memory of a rank by running its passes without computation.

    Parameters
    ----------
    rank : Rank
        After its first steps, which have created the buffers of its exchange. It may have a dry
        backend.
    library : int
        Memory of the communicator's library for messages, and of temporary arrays of compression,
        in B.
    """
    trainer = rank.trainer
    model, optimizer = trainer.model, trainer.optimizer
    forecast = Forecast(model, rank.largest, 0, rank.in_flight).memory(model.cuts)
    process = PROCESS_BYTES if model.backend.name == "cpu" else 0
    held = forecast.resident - forecast.scratch - process
    flat = forecast.parameters + forecast.copies + forecast.gradients
    batch = sum(np.asarray(part).nbytes for part in (rank.batch.x, rank.batch.y))
    passed = sum(prod(node.shape) for node in model.graph.inputs) * rank.largest
    passed *= model.dtype.itemsize  # the forecast has the samples of one pass
    return RankMemory(
        parameters=forecast.parameters + forecast.copies,
        gradients=forecast.gradients,
        slots=sum(part.nbytes for _, _, _, part in optimizer.stored()),
        activations=max(held - flat - passed, 0) + batch,
        scratch=forecast.scratch,
        messages=_own_arrays(trainer.exchange, [model, optimizer, *model.buckets]) + library,
        process=process,
    )


def _own_arrays(root: object, others: Sequence[object]) -> int:
    """Return the bytes of all arrays that an object refers to, without those of other objects."""
    known = {id(one) for one in others}
    pending, total = [root], 0
    while pending:
        one = pending.pop()
        if id(one) in known or isinstance(one, STOPS) or _simulated(one):
            continue
        known.add(id(one))
        if isinstance(one, np.ndarray):
            total += one.nbytes if one.base is None else 0
        else:
            pending += gc.get_referents(one)
    return total


STOPS = (type, ModuleType, FunctionType, str, bytes, int, float)
"""Objects without arrays of their own."""


def _simulated(one: object) -> bool:
    """Return whether an object belongs to the simulation, and not to the run."""
    return type(one).__module__.startswith("pydtnn.perfmodel")
