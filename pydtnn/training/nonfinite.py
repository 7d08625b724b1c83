"""The error for a loss or a metric that is not finite."""

from __future__ import annotations

import numpy as np

from pydtnn.data import Batch
from pydtnn.data.batch import parts
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import StepContext
from pydtnn.model.graph import Node
from pydtnn.training.metric_sums import Totals
from pydtnn.training.setup import Setup
from pydtnn.utils.errors import AgreedError

INPUT, TARGET = "the input", "the target"
OVERFLOW = "the input, which exceeds 65504, the largest number of float16"
ADVICE = "use a lower learning rate, a warm-up or clipping (--lr, --warmup-epochs, --clip-norm)"


class NotFiniteError(AgreedError):
    """A loss or metric became NaN or infinite; raised on all ranks before the parameters change."""


class LocalNotFiniteError(ValueError):
    """The same on one rank of a scheme that does not sum losses; its error ends all ranks."""


def not_finite(
    setup: Setup,
    batch: Batch,
    context: StepContext,
    totals: Totals,
    when: str,
    *,
    local: bool = False,
) -> NotFiniteError | LocalNotFiniteError:
    """Return the error with the step and the first layer with an output that is not finite.

    Collective unless it is `local`: all ranks call it. Each runs its part of the batch again and
    checks every node.

    Parameters
    ----------
    setup : Setup
    batch : Batch
        The batch with a loss that is not finite on at least one rank.
    context : StepContext
        Context in which it was computed.
    totals : Totals
        Sums over all ranks, on the host; if the loss is finite, a metric is reported.
    when : str
        "at epoch 1, step 2".
    local : bool
        Whether the sums are those of this rank, and of the ranks with other parts of the network.
    """
    model = setup.model
    found: list[str] = []

    def look(node: Node, y: Array) -> None:
        if not found and not np.isfinite(model.backend.to_numpy(y)).all():
            found.append(f"the output of {node.name} ({type(node.layer).__name__})")

    for what, arrays in ((INPUT, parts(batch.x)), (TARGET, parts(batch.y))):
        for values in map(np.asarray, arrays):
            if found or np.isfinite(values).all():
                continue
            half = values.dtype == np.float16 and not np.isnan(values).any()
            found.append(OVERFLOW if half else what + _place(values, batch.samples))
    model.forward(batch.inputs(model.backend), context, keep=False, after_node=look)
    own = found[0] if found else None
    reports = [own] if local else setup.comm.gather_object(own)
    rank = next((r for r, report in enumerate(reports) if report), None)
    what = _names(totals)
    where = f"the {what} itself" if rank is None else str(reports[rank])
    advice = ADVICE
    if where.startswith((INPUT + " of", TARGET)):
        advice = "clean the data"
    elif where == OVERFLOW:
        advice = "scale the input, or use bfloat16 or float32"
    elif rank is None and what != "loss":
        advice = "remove it, or return a finite number from it"
    if local:
        message = f"the {what} of this rank's samples is not finite {when}: first in {where}"
        return LocalNotFiniteError(f"{message}; {advice}")
    if rank is not None and setup.comm.size > 1:
        where += f" on rank {rank}"
    return NotFiniteError(f"the {what} is not finite {when}: first in {where}; {advice}")


def _place(values: Array, samples: Array) -> str:
    """Return where the first value is that is not finite: " of sample 3, column 1"."""
    row, *at = (int(place) for place in np.argwhere(~np.isfinite(values))[0])
    where = f", column {at[0]}" if len(at) == 1 else f", position {tuple(at)}" if at else ""
    return f" of sample {samples[row]}{where}"


def _names(totals: Totals) -> str:
    """Return the name of the value that is not finite: the loss, or otherwise a metric."""
    wrong = totals.not_finite()
    losses = [name for name in wrong if name.endswith(".loss")]
    metrics = [name for name in wrong if name not in ("loss", *losses)]
    if "loss" in wrong or losses or not metrics:
        return losses[0] if len(losses) == 1 else "loss"
    return f"metric {metrics[0]}"


def not_finite_at(
    setup: Setup, batch: Batch, epoch: int, seed: int, totals: Totals
) -> NotFiniteError | LocalNotFiniteError:
    """Return the error for a training step. Collective if the scheme sums losses."""
    context = StepContext(training=True, seed=seed, epoch=epoch, samples=batch.samples)
    when = f"at epoch {epoch + 1}, step {batch.index + 1}"
    return not_finite(setup, batch, context, totals, when, local=setup.own_losses)
