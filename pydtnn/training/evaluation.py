"""Losses and metrics of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pydtnn.data import Batch, Dataset
from pydtnn.layers import StepContext
from pydtnn.training.metric_sums import Totals
from pydtnn.training.nonfinite import not_finite
from pydtnn.training.tuning import settle_choices
from pydtnn.utils.split import even_cut

if TYPE_CHECKING:
    from pydtnn.training.trainer import Trainer

CONTEXT = StepContext(training=False)


@np.errstate(all="ignore")  # what overflows is told in one sentence, by `not_finite`
def evaluate(trainer: Trainer, dataset: Dataset, batch_size: int) -> dict[str, float]:
    """Compute loss and metrics of a data set. Collective; see `Trainer.evaluate`."""
    model, comm, sums = trainer.model, trainer.comm, trainer.exchange.sums
    at_least = sums.shards or comm.size
    if not model.backend.choices.frozen:
        largest = -(-min(batch_size, len(dataset)) // at_least)
        settle_choices(model, comm, largest, training=False)
    with trainer.loader(dataset, max(batch_size, at_least), at_least, shuffle=False) as loader:
        cuts = [even_cut(at_least, comm.size, rank) for rank in (comm.rank, comm.rank + 1)]
        present = min(at_least, len(dataset))  # shards that have a sample; the others come last
        own = range(cuts[0], min(cuts[1], present))
        parts = _new_parts(trainer, own)
        for batch in loader.epoch(0):
            _judge(trainer, batch, parts)
        totals = trainer.new_totals(model.backend.xp)
        sums.begin(present)
        own_sums = [(number, part.values) for number, part in parts.items()]
        totals.values, request = sums.add_up(own_sums or [(None, totals.values)])
        request.wait()
        result = trainer.to_host(totals)
        if not np.isfinite(result.values).all():
            broken = _first_broken(trainer, loader.epoch(0), own)
            raise not_finite(trainer, broken, CONTEXT, result, "in the evaluation")
    return result.means()


def _new_parts(trainer: Trainer, shards: range) -> dict[int, Totals]:
    return {number: trainer.new_totals(trainer.model.backend.xp) for number in shards}


def _judge(trainer: Trainer, batch: Batch, parts: Mapping[int, Totals]) -> None:
    """Add what each shard of a batch contributes."""
    model = trainer.model
    for number, rows in batch.shards:
        assert number is not None
        y, _ = model.forward(batch.inputs(model.backend, rows), CONTEXT, keep=False)
        trainer.objective.compute(y, batch.targets(rows), 1.0, parts[number])


def _first_broken(trainer: Trainer, batches: Iterator[Batch], shards: range) -> Batch:
    """Find this rank's first batch whose loss or metric is not finite; else its last."""
    for batch in batches:
        parts = _new_parts(trainer, shards)
        _judge(trainer, batch, parts)
        if not all(np.isfinite(trainer.to_host(t).values).all() for t in parts.values()):
            break
    return batch
