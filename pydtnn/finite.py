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


class NotFiniteError(AgreedError):
    """The loss became NaN or infinite; raised on all ranks before the parameters are touched."""


def not_finite(trainer: Trainer, batch: Batch, *, epoch: int, seed: int) -> NotFiniteError:
    """Make the error that names the step and the first layer whose output is not finite.

    Collective: all ranks call it. Each runs its part of the batch again and looks at every node.
    """
    found: list[str] = []

    def look(node: Node, y: Array) -> None:
        if not found and not np.isfinite(trainer.model.backend.to_numpy(y)).all():
            found.append(f"the output of {node.name} ({type(node.layer).__name__})")

    context = StepContext(training=True, seed=seed, epoch=epoch, samples=batch.samples)
    x = trainer.model.backend.asarray(batch.x)
    if not np.isfinite(batch.x).all():
        found.append("the input")
    trainer.model.forward(x, context, keep=False, after_node=look)
    reports = trainer.comm.gather_object(found[0] if found else None)
    rank = next((r for r, report in enumerate(reports) if report), None)
    first = "the loss itself" if rank is None else f"{reports[rank]} on rank {rank}"
    return NotFiniteError(
        f"the loss is not finite at epoch {epoch + 1}, step {batch.index + 1}: first in {first}; "
        "use a lower learning rate, warm-up or --clip-norm"
    )
