"""The results of every epoch, in files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Callback, Throughput, Training, write_if_possible
from pydtnn.utils.files import write_file
from pydtnn.utils.tables import csv_of

Logs = dict[str, float]


class HistoryWriter(Callback):
    """Write ``history.csv`` and ``history.json`` after every epoch.

    Both contain all of ``trainer.history``, which checkpoints save, so they continue after
    resuming, and of sequences "tokens_per_second" in training, without padding.

    Parameters
    ----------
    directory : str or Path
        Created if necessary.
    """

    reads_gradients = False

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._throughput, self._tokens = Throughput(), dict[str, Logs]()  # by epoch

    def state(self) -> dict[str, Any]:
        """Return the tokens per second of each epoch, if any."""
        return {"tokens": dict(self._tokens)} if self._tokens else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`."""
        self._tokens = dict(state.get("tokens", {}))

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Write the existing history, so that an error of the folder is raised before any work."""
        on_rank_0(trainer.comm, self._write_files, trainer.history)

    def on_epoch_start(self, trainer: Training) -> None:
        """Start the clock."""
        self._throughput.begin(trainer)

    def on_step_end(self, trainer: Training) -> None:
        """Count tokens."""
        self._throughput.step(trainer)

    def on_epoch_end(self, trainer: Training) -> None:
        """Write. Collective: all ranks call it; rank 0 writes, or warns if it cannot."""
        rates = trainer.comm.gather_object(self._throughput.rates(trainer))[0]
        if "tokens" in rates:
            self._tokens[str(trainer.epoch)] = {"tokens_per_second": rates["tokens"]}
        write_if_possible(trainer.comm, self._write_files, trainer.history)

    def _write_files(self, logs: Sequence[Logs]) -> None:
        history = [one | self._tokens.get(str(epoch), {}) for epoch, one in enumerate(logs, 1)]
        write_file("HistoryWriter", self.directory / "history.csv", to_csv(history).encode())
        write_file("HistoryWriter", self.directory / "history.json", to_json(history).encode())


def to_csv(history: Sequence[Logs]) -> str:
    """Return a table with a line per epoch; missing values are empty.

    >>> to_csv([{"loss": 0.5}, {"loss": 0.25, "accuracy": 1.0}]).splitlines()
    ['epoch,loss,accuracy', '1,0.5,', '2,0.25,1.0']
    """
    return csv_of([{"epoch": i, **logs} for i, logs in enumerate(history, 1)], ["epoch"])


def to_json(history: Sequence[Logs]) -> str:
    """Return a list with an object per epoch; NaN and infinities become null."""
    epochs: list[dict[str, Any]] = [
        {"epoch": i}
        | {name: value if math.isfinite(value) else None for name, value in logs.items()}
        for i, logs in enumerate(history, 1)
    ]
    return json.dumps(epochs, indent=1) + "\n"
