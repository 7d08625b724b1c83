"""The best weights of a run, in a file."""

from __future__ import annotations

from pathlib import Path

from pydtnn.callbacks.monitor import Monitor
from pydtnn.comm.rank0 import on_rank_0
from pydtnn.saving.weights import write_weights
from pydtnn.training.callback import Training, evaluated


class BestWeights(Monitor):
    """Save the weights whenever a value is the best so far.

    Parameters
    ----------
    path : str or Path
        A safetensors file, replaced atomically.
    monitor : str
        "loss" or a metric's name, with the prefix "val_" for validation.
    mode : {"min", "max"}, optional
        Whether smaller or larger is better; by default that of the metric.
    """

    def __init__(
        self, path: str | Path, monitor: str = "val_accuracy", mode: str | None = None
    ) -> None:
        super().__init__(monitor, mode)
        self.path = Path(path)

    def on_value(self, trainer: Training, value: float, improved: bool) -> None:
        """Save. Collective: all ranks call it.

        Raises
        ------
        AgreedError
            On all ranks, if the file cannot be written.
        """
        if improved:
            with evaluated(trainer):
                state = trainer.model.state()
                on_rank_0(trainer.comm, write_weights, state, self.path)
