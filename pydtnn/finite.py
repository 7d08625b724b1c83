"""What to say when a loss is no longer a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pydtnn.errors import AgreedError
from pydtnn.graph import Node
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import StepContext

if TYPE_CHECKING:
    from pydtnn.data import Batch
    from pydtnn.trainer import Trainer


INPUT = "the input"
ADVICE = "use a lower learning rate, a warm-up or clipping (--lr, --warmup-epochs, --clip-norm)"


class NotFiniteError(AgreedError):
    """The loss became NaN or infinite; raised on all ranks before the parameters are touched."""


def not_finite(trainer: Trainer, batch: Batch, context: StepContext, when: str) -> NotFiniteError:
    """Make the error that names the step and the first layer whose output is not finite.

    Collective: all ranks call it. Each runs its part of the batch again and looks at every node.

    Parameters
    ----------
    trainer : Trainer
    batch : Batch
        On which the loss is not finite, on one rank at least.
    context : StepContext
        In which it was computed.
    when : str
        "at epoch 1, step 2".
    """
    model = trainer.model
    found: list[str] = []

    def look(node: Node, y: Array) -> None:
        if not found and not np.isfinite(model.backend.to_numpy(y)).all():
            found.append(f"the output of {node.name} ({type(node.layer).__name__})")

    if not np.isfinite(batch.x).all():
        found.append(INPUT)
    model.forward(batch.inputs(model.backend), context, keep=False, after_node=look)
    reports = trainer.comm.gather_object(found[0] if found else None)
    rank = next((r for r, report in enumerate(reports) if report), None)
    where = "the loss itself" if rank is None else str(reports[rank])
    advice = "clean the data" if where == INPUT else ADVICE
    if rank is not None and trainer.comm.size > 1:
        where += f" on rank {rank}"
    return NotFiniteError(f"the loss is not finite {when}: first in {where}; {advice}")


def not_finite_at(trainer: Trainer, batch: Batch, epoch: int, seed: int) -> NotFiniteError:
    """Make the error for a training step. Collective: all ranks call it."""
    context = StepContext(training=True, seed=seed, epoch=epoch, samples=batch.samples)
    return not_finite(trainer, batch, context, f"at epoch {epoch + 1}, step {batch.index + 1}")
