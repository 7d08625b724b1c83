"""The choice of what a model recomputes in backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pydtnn.model.memory import Forecast
from pydtnn.model.recompute import Cuts, named_cuts
from pydtnn.model.stage import ModelLike
from pydtnn.utils.units import quantity
from pydtnn.utils.validate import check_int

AUTO = "auto"

USUAL_BATCH = 32
"""Samples for which memory is compared before the batch size is known."""

MAX_PEAK_RATIO = 1.02
"""Largest ratio of peaks of which the one with less computation is chosen."""

Recompute = int | str | Sequence[str] | None
"""A number of parts, names of layers, or "auto"."""


def find_cuts(
    model: ModelLike,
    recompute: int | tuple[str, ...] | None,
    memory_limit: int | None,
    parts: Sequence[str],
    batch: int | None,
    slots: int,
    in_flight: int,
) -> tuple[int, ...]:
    """Return the cuts of a model for a batch size: see `Model.find_cuts`.

    Parameters
    ----------
    model : Network
    recompute, memory_limit
        See `check_recompute`.
    parts : sequence of str
        Names of the layers as they were constructed, before fusion.
    batch, slots, in_flight
        See `Model.find_cuts`.
    """
    nodes, trained = model.graph.nodes, model.graph.trained
    if recompute is None or not trained:
        return ()
    if recompute != (AUTO,) and not isinstance(recompute, int):
        return named_cuts(nodes, trained, recompute, parts)
    limit = None if batch is None else memory_limit
    batch = batch or USUAL_BATCH
    forecast = Forecast(model, batch, slots, in_flight)
    end = (len(nodes),) if in_flight > 1 else ()
    whole_step = forecast.memory(())
    itemsize = model.dtype.itemsize
    sizes = [batch * prod(node.shape) * itemsize for node in nodes]
    cuts = Cuts(nodes, trained, whole_step.kept, sizes)
    if isinstance(recompute, int):
        if recompute > len(cuts.places) and model.pipeline is None:
            raise ValueError(
                f"Model: recompute must be at most {len(cuts.places)}, the parts into which "
                f"this network can be cut, got {recompute}"
            )
        return (*cuts.even(min(recompute, len(cuts.places))), *end)
    tried = cuts.trials()
    if in_flight > 1:
        tried += [(*(own or (cuts.first,)), *end) for own in tried]
    trials = {own: forecast.memory(own) for own in tried}
    if limit is None:
        peak = MAX_PEAK_RATIO * min(memory.peak for memory in trials.values())
        fitting = [own for own in trials if trials[own].peak <= peak]
    else:
        fitting = [own for own in trials if trials[own].resident <= limit]
    if fitting:
        return min(fitting, key=lambda own: (own[-1:], len(own)))
    least = min(memory.resident for memory in trials.values())
    raise ValueError(
        f"Model: memory_limit must be at least {least:,} B ({quantity(least, 1024, 'B')}) for "
        f"{batch} samples per pass, got {limit:,} B; use smaller batches or "
        "accumulation"
    )


def check_recompute(
    recompute: Recompute, memory_limit: int | None
) -> tuple[int | tuple[str, ...] | None, int | None]:
    """Return a model's `recompute` and `memory_limit`, checked: names of layers as a tuple."""
    if memory_limit is not None:
        memory_limit = check_int("Model", "memory_limit", memory_limit, at_least=1)
        if recompute != AUTO:
            raise ValueError(
                f'Model: memory_limit requires recompute="auto", got recompute={recompute!r}'
            )
    if isinstance(recompute, int):
        return check_int("Model", "recompute", recompute, at_least=2), memory_limit
    return None if recompute is None else _names(recompute), memory_limit


def _names(recompute: str | Sequence[str]) -> tuple[str, ...]:
    names = (recompute,) if isinstance(recompute, str) else recompute
    if isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise TypeError(
        f'Model: recompute must be a number of parts, names of layers or "auto", got {recompute!r}'
    )
