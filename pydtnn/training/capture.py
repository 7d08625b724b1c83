"""Training steps as replays of one CUDA graph: forward, loss, backward, exchange and update.

The host copies the input and a few numbers of a step (`Feed`), launches the graph and continues
with the next batch; it reads losses one step late. A loss that is not finite is therefore detected
late, but a flag on the device prevents changes of the parameters from that step on, so that the
batch can be run again, kernel by kernel, to find the layer.

Steps that cannot be captured run kernel by kernel, and `graph` contains the reason: schemes with
varying steps; messages through the host. So does the last batch of an epoch, if it is shorter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from pydtnn.comm.traffic import Traffic
from pydtnn.data import Batch
from pydtnn.kernels.cuda.feed import Feed, LateValues
from pydtnn.kernels.cuda.graph import Graphs
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.parallel.exchange import abandon
from pydtnn.training.capabilities import why_not
from pydtnn.training.metric_sums import Totals
from pydtnn.training.nonfinite import not_finite_at
from pydtnn.training.setup import Setup
from pydtnn.training.step import Passes
from pydtnn.training.steps import Eager, Result, TrainingSteps
from pydtnn.utils.device import Device

if TYPE_CHECKING:
    from pydtnn.kernels.cuda.backend import CudaBackend

WORDS = np.empty((0, 0), "uint32")


@dataclass
class Fed:
    """Device arrays for all batches of one shape.

    Attributes
    ----------
    feed : Feed
    batch : Batch
        Batch with the arrays on the device.
    numbers : mapping of str to Array
        The epoch and the optimizer's terms, each one float64 on the device.
    traffic : Traffic
        Messages of a step: when it is replayed, they are not counted.
    """

    feed: Feed
    batch: Batch
    numbers: Mapping[str, Number]
    traffic: Traffic = field(default_factory=Traffic)


class Captured:
    """Steps as replays.

    Parameters
    ----------
    setup : Setup
        A setup that can have a CUDA graph, see `why_not`.
    """

    late = 1

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._backend = backend = cast("CudaBackend", setup.model.backend)
        self._device = Device(backend.xp)
        self._graphs = Graphs(self._device, memory=backend.memory.apart)
        self._fed: dict[Hashable, Fed] = {}

    @property
    def graph(self) -> str:
        """Whether steps are replays, or the reason why the capture failed."""
        reason = self._graphs.why_not
        return f"no CUDA graph: {reason}" if reason else "one CUDA graph"

    def __call__(self, batch: Batch, epoch: int, seed: int) -> Result:
        """Launch a step."""
        setup = self._setup
        setup.objective.check([(len(batch), *setup.model.output_shape)], [batch.y])
        made, statistics = setup.optimizer.iterations, setup.model.statistics
        numbers = {"epoch": float(epoch), **setup.optimizer.next_terms()}
        key, arrays = _key(batch, seed), _arrays(batch, numbers)
        if key not in self._fed:
            self._fed[key] = self._make(batch, arrays, list(numbers))
        fed = self._fed[key]
        fed.feed.send(*arrays)
        fed.feed.take()
        totals = self._graphs.run(key, partial(self._work, fed, seed))
        setup.comm.traffic.repeat(fed.traffic)
        statistics.samples += len(batch)
        setup.exchange.samples += len(batch)
        return partial(self._result, LateValues(self._device, totals), batch, epoch, seed, made)

    def _make(self, batch: Batch, arrays: list[np.ndarray], names: list[str]) -> Fed:
        feed = Feed(self._device, arrays)
        x, y, samples, words, numbers = feed.arrays
        on_device = replace(
            batch, x=x, y=y, samples=samples, words=None if batch.words is None else words
        )
        return Fed(feed, on_device, {name: numbers[i : i + 1] for i, name in enumerate(names)})

    def _work(self, fed: Fed, seed: int) -> Array:
        """Run a step on the copied input, without changes or synchronisation on the host."""
        setup, backend = self._setup, self._backend
        terms = {name: number for name, number in fed.numbers.items() if name != "epoch"}
        try:
            with setup.comm.traffic.apart() as fed.traffic:
                passes = Passes(setup, fed.batch, fed.numbers["epoch"], seed)
                passes.run()
                totals: Array = passes.totals.values
                backend.update.watch(totals, backend.alive, backend.go)
                with setup.optimizer.given(terms):
                    setup.update()
                setup.model.statistics.fold()
        except Exception:
            with contextlib.suppress(Exception):
                abandon(setup.exchange)
            raise
        return totals

    def _result(self, late: LateValues, batch: Batch, epoch: int, seed: int, made: int) -> Totals:
        setup, backend = self._setup, self._backend
        totals = setup.new_totals()
        totals.values[:] = late.values()
        if np.isfinite(totals.values).all():
            return totals
        backend.synchronize()
        setup.optimizer.iterations = made  # later steps have not changed anything either
        backend.alive[...] = backend.go[...] = 1
        raise not_finite_at(setup, batch, epoch, seed, totals)


def _key(batch: Batch, seed: int) -> Hashable:
    """Key of the kernels of a step and of their arguments passed by value."""
    shapes = [(a.shape, a.dtype) for a in (batch.x, batch.y)]
    shards = [(number, rows.start, rows.stop) for number, rows in batch.shards]
    return seed, batch.total, batch.prepare, *shapes, *shards


def _arrays(batch: Batch, numbers: Mapping[str, float]) -> list[np.ndarray]:
    words = WORDS if batch.words is None else batch.words
    return [batch.x, batch.y, batch.samples, words, np.array([*numbers.values()], "float64")]


def create_steps(setup: Setup, graph: bool) -> TrainingSteps:
    """Create a trainer's steps, captured if possible and if `graph` is true."""
    reason = why_not("CUDA graph", setup) if graph else "not asked for"
    return Eager(setup, f"no CUDA graph: {reason}") if reason else Captured(setup)
