"""Losses and metrics of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pydtnn.data import Batch, Dataset
from pydtnn.layers import StepContext
from pydtnn.training.metric_sums import Totals
from pydtnn.training.nonfinite import not_finite
from pydtnn.training.setup import Setup
from pydtnn.training.tuning import autotune
from pydtnn.utils.split import even_cut

CONTEXT = StepContext(training=False)


@np.errstate(all="ignore")  # overflow is reported by `not_finite`
def evaluate(setup: Setup, dataset: Dataset, batch_size: int) -> dict[str, float]:
    """Compute loss and metrics of a data set. Collective; see `Trainer.evaluate`."""
    model, data, sums = setup.model, setup.data, setup.exchange.sums
    at_least = sums.shards or data.size
    if not model.backend.autotuner.frozen:
        largest = -(-min(batch_size, len(dataset)) // at_least)
        autotune(model, setup.comm, largest, training=False)
    with setup.loader(
        dataset, max(batch_size, at_least), at_least, shuffle=False, lanes="evaluation loader"
    ) as loader:
        cuts = [even_cut(at_least, data.size, rank) for rank in (data.rank, data.rank + 1)]
        present = min(at_least, len(dataset))  # shards that have a sample; the others come last
        own = range(cuts[0], min(cuts[1], present))
        parts = _new_parts(setup, own)
        for batch in loader.epoch(0):
            _add_batch(setup, batch, parts)
        totals = setup.new_totals(model.backend.xp)
        sums.begin(present)
        own_sums = [(number, part.values) for number, part in parts.items()]
        totals.values, request = sums.add_up(own_sums or [(None, totals.values)])
        request.wait()
        result = setup.to_host(totals)
        if not np.isfinite(result.values).all():
            broken = _first_broken(setup, loader.epoch(0), own)
            raise not_finite(setup, broken, CONTEXT, result, "in the evaluation")
    return result.means()


def _new_parts(setup: Setup, shards: range) -> dict[int, Totals]:
    return {number: setup.new_totals(setup.model.backend.xp) for number in shards}


def _add_batch(setup: Setup, batch: Batch, parts: Mapping[int, Totals]) -> None:
    """Add the contributions of the shards of a batch."""
    model = setup.model
    for number, rows in batch.shards:
        assert number is not None
        setup.report_samples(rows.stop - rows.start)
        y, _ = model.forward(batch.inputs(model.backend, rows), CONTEXT, keep=False)
        setup.objective.compute(y, batch.targets(rows), 1.0, parts[number], training=False)


def _first_broken(setup: Setup, batches: Iterator[Batch], shards: range) -> Batch:
    """Find this rank's first batch with a loss or metric that is not finite, or its last batch."""
    for batch in batches:
        parts = _new_parts(setup, shards)
        _add_batch(setup, batch, parts)
        if not all(np.isfinite(setup.to_host(t).values).all() for t in parts.values()):
            break
    return batch
